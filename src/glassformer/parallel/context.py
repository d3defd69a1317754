"""Context parallelism: the ranks share the tokens of each sequence, and gather the keys and values.

>>> context.divide(model, groups.group("cp"))
>>> model.loss(tokens, targets).backward()             # all tokens on every rank; the loss is the same on each
                                                       # a gradient is now partial: the sum over the ranks is the whole

A rank computes one slice of each sequence, as in decoding: instead of a layer's decode state, `Gathered` gives
attention the keys and values of all tokens up to the rank's last, from all ranks. Parts are unaware of it. Lengths of
slices differ by at most one token; later ones attend to more keys, so that the last rank works longest.

Supported are causal models whose mixers use other tokens only through keys and values (`Mixer.reads_gathered`); a
recurrence would have to wait for the previous rank. With a state, as in generation, every rank reads all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parallel.seams import Group, Seams
from glassformer.parts.core import auxiliary
from glassformer.parts.core.owner import reads_gathered
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import LossOf, Pass
from glassformer.parts.loss import IGNORED


def check(config: ModelConfig, cp: int) -> None:
    """Raises RequestError, before anything is allocated, if `cp` ranks cannot share the sequences of a model of
    `config`."""
    if cp > 1:
        check_model(config.outline(), cp)
        if config.context < cp:
            raise _no(cp, f"more than the {config.context} tokens of a sequence", "context", config.context)


def check_model(model: Model, cp: int) -> None:
    """Raises RequestError if a part of the model would need more than the gathered keys and values of another rank."""
    if model.encoder is not None:
        raise _no(cp, "for models without an encoder", "encoder", None)
    if model.head.pool is not None:
        raise _no(cp, "for models that predict a token at each place, and this one pools them", "head.pool", None)
    for number, layer in enumerate(model.layers):
        mixer: Any = layer.mixer
        ffn: Any = layer.ffn
        what = f"layer {number}"
        if not reads_gathered(mixer):
            name = type(mixer).__name__
            raise _no(cp, f"for attention to keys and values, and the mixer of {what} is a {name}", "mixer", name)
        if not mixer.causal:
            raise _no(cp, f"for models whose tokens see no later ones, and those of {what} do", "visibility", None)
        if (position := mixer.attention_position) is not None and position.moves_with_length:
            name = type(position).__name__
            raise _no(cp, f"for positions that stay as a text grows, and those of {what} do not", "position", name)
        if ffn is not None and not ffn.spreads:
            name = type(ffn).__name__
            raise _no(cp, f"for networks that read each token by itself, and that of {what} does not", "ffn", name)
        dropout = max([0.0, *(float(getattr(one, "dropout", 0.0) or 0.0) for one in layer.modules())])
        if dropout:
            raise _no(cp, "without dropout, which would drop the same of each rank's tokens", "dropout", dropout)


def _no(cp: int, why: str, field: str, value: object) -> RequestError:
    return RequestError(f"cp={cp} is {why}; use cp=1", code="conflict", field=field, value=value, expected="cp=1")


def divide(model: Model, group: Any) -> Model:
    """Makes the ranks of a ProcessGroup share the tokens of each sequence; changes the model in place and returns it.
    Raises RequestError if they cannot."""
    across = Group(group)
    check_model(model, across.of)
    model.context = context = Context(Seams(across))
    for layer in model.layers:
        for site in layer.modules():
            if isinstance(site, Site):
                site.joint = Stretches(context, site.axes, site.joint)
    for site in (model.final, model.logits):
        site.joint = Stretches(context, site.axes, site.joint)
    return model


class Context:
    """Division of each sequence into consecutive slices, one per rank; a `parts.forward_pass.Along`."""

    def __init__(self, seams: Seams):
        self.seams, self.size = seams, 0
        self.part: Tensor = torch.ones(())
        """Share of the batch's unpadded tokens that this rank has, a number from 0 to 1."""

    def begin(self, x: Tensor, pass_: Pass, layers: int) -> tuple[Tensor, Pass, Sequence[Any]]:
        if pass_.global_tokens is not None:
            raise _no(self.seams.group.of, "without global_tokens", "global_tokens", None)
        self.size = pass_.tokens
        first, last = self.seams.group.span(self.size)
        if self.size < self.seams.group.of:
            raise _no(self.seams.group.of, f"more than the {self.size} tokens of the sequence", "tokens", self.size)
        documents, given, real = pass_.documents, pass_.given, pass_.real
        own = Pass(
            first, last, x.device, pass_.ids[..., first:last],
            documents=None if documents is None else documents[:, :last],
            given=None if given is None else given[:, :last],
        )  # fmt: skip
        self.part = torch.tensor((last - first) / self.size, dtype=torch.float64)
        if real is not None:
            self.part = real[:, first:last].sum() / real.sum().clamp_min(1).double()
        own.once("real", lambda: None if real is None else real[:, first:last])
        return x[:, first:last], own, [Gathered(self)] * layers

    def own(self, values: Tensor) -> Tensor:
        """Returns this rank's slice of values (b, s, ...)."""
        first, last = self.seams.group.span(values.shape[1])
        return values[:, first:last]

    def loss(self, loss_of: LossOf, x: Tensor, targets: Tensor, reduction: str, added: Sequence[Tensor]) -> Tensor:
        own = self.own(targets)
        if reduction == "none":
            return self.join(loss_of(x, own, reduction))
        mine, all_ = ((some != IGNORED).sum() for some in (own, targets))
        some = own.where(mine > 0, 0)  # the mean of an empty slice would be NaN
        mean = loss_of(x, some, reduction)
        loss = self.seams.leave(mean * (mine.to(mean.dtype) / all_))
        return auxiliary.join(loss, [one * self.part.to(one.dtype) for one in added])

    def join(self, y: Tensor) -> Tensor:
        return self.seams.join(y, 1, self.size)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the slices (b, s', ...) of all ranks as (b, s, ...); gradients from all ranks are summed."""
        return self.seams.gather(x, 1, self.size)


class Gathered:
    """Substitute for attention's decode state, which gives the keys and values of all tokens up to the last of this
    rank."""

    def __init__(self, context: Context):
        self.context = context

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, None]:
        """Returns (keys, values, None) as `KVState.append` does: those of all ranks for the tokens before pass_.end,
        (b, t, g, h); `k` and `v` are this rank's."""
        k, v = (self.context.gather(x)[:, : pass_.end] for x in (k, v))
        return k, v, None


class Stretches:
    """Access to the value of a site that ranks hold in slices of tokens, perhaps divided along another axis too
    (`inner`); a `parts.core.site.Joint`."""

    def __init__(self, context: Context, axes: str, inner: Any):
        self.context, self.axes, self.inner = context, axes, inner

    def gather(self, x: Tensor) -> Tensor:
        if "t" in self.axes:
            cp = self.context.seams.group.of
            raise _no(cp, "not a layout for capturing maps of queries against keys", "sites", self.axes)
        whole = x if self.inner is None else self.inner.gather(x)
        return self.context.seams.gather(whole, self.axes.index("s"), self.context.size)

    def cut(self, x: Tensor) -> Tensor:
        axis = self.axes.index("s")
        first, last = self.context.seams.group.span(x.shape[axis])
        own = x.narrow(axis, first, last - first)
        return own if self.inner is None else self.inner.cut(own)
