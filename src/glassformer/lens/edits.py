"""Edits for `gf.edit`, each a dict {site: f}. They compose: give several, or nest `with`s.

>>> with gf.edit(model, gf.lens.ablate_heads(2, [0, 3]), gf.lens.scale("layers.4.ffn.out", 0.5)):
...     gf.generate(model, tokens)

Heads, units, experts and positions may be negative, counting from the end. Positions are those of the present pass:
with a decode state the prompt is one pass (of at most 1,024 tokens, a longer one takes several) and every new token
another, whose only position is 0, or -1. A pass that lacks a position is refused; to change only the prompt, prefill a
state inside the `with` and continue outside. Likewise "mean" is over the tokens of the present pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from glassformer.errors import RequestError, did_you_mean
from glassformer.introspection import head_axis, within
from glassformer.parts.core.running import Edit

Indices = int | Sequence[int]

AXES = {"q": "bsnh", "k": "bsgh", "v": "bsgh", "z": "bsnh", "scores": "bnst", "pattern": "bnst"}
"""Last step of a site's name -> the axes of its value, for sites with heads; the values of all other sites are (b, s,
...)."""


def ablate_heads(layer: int, heads: Indices, by: Literal["zero", "mean"] = "zero") -> dict[str, Edit]:
    """Returns an edit that removes these heads of a layer: z (b, s, n, h) becomes 0, or the head's mean over batch and
    tokens.

    Zero equals zeroing the head's rows of W_O. The mean keeps the head's constant output (a bias that later layers may
    count on) and removes the dependence on the text. Raises RequestError, when the model runs, for a head out of range,
    and for the mean of a single token, which would change nothing."""
    if by not in ("zero", "mean"):
        raise RequestError(f"by={by!r}: use 'zero' or 'mean'", code="unknown", field="by", value=by)
    site = f"{_layer(layer)}.mixer.z"
    return {site: _edit(site, torch.zeros_like if by == "zero" else mean_over_tokens, heads=heads)}


def mean_over_tokens(z: Tensor) -> Tensor:
    """Returns z (b, s, n, h) with each head's vectors replaced by their mean over batch and tokens."""
    if z.shape[0] * z.shape[1] == 1:
        raise RequestError(
            "by='mean': this pass has one token, whose mean it is; use by='zero', or gf.lens.replace",
            code="conflict", field="by", value="mean",
        )  # fmt: skip
    return z.mean((0, 1), keepdim=True).expand_as(z)


def ablate_neurons(layer: int, units: Indices) -> dict[str, Edit]:
    """Returns an edit that sets the hidden units `units` of a layer's FFN to 0 (`ffn.hidden`, after activation and
    gate). Experts have no common units, and are refused when the model runs."""
    site = f"{_layer(layer)}.ffn.hidden"

    def silence(hidden: Tensor) -> Tensor:
        if hidden.dim() > 3:  # (b, s, k, f): a unit's meaning depends on the chosen expert
            raise RequestError(
                f"layer {layer} has experts, each with separate units; use gf.lens.ablate_experts({layer}, ...)",
                code="unsupported", field="layer", value=layer,
            )  # fmt: skip
        return hidden.index_fill(-1, _tensor(units, hidden.shape[-1], "unit", site, hidden), 0)

    return {site: silence}


def ablate_experts(layer: int, experts: Indices) -> dict[str, Edit]:
    """Returns an edit that routes no token of a layer to these experts: `ffn.router` is 0 for them, and others are
    chosen instead.

    If fewer than k experts are left, a token has only these. Shared experts (`ffn.shared`) are not included; `scale`
    silences them at `layers.N.ffn.shared.out`."""
    site = f"{_layer(layer)}.ffn.router"

    def close(p: Tensor) -> Tensor:
        return p.index_fill(-1, _tensor(experts, p.shape[-1], "expert", site, p), 0)

    return {site: close}


def ablate_mixer(layer: int) -> dict[str, Edit]:
    """Returns an edit that sets the output of a layer's mixer to 0."""
    return {f"{_layer(layer)}.mixer.out": torch.zeros_like}


def ablate_ffn(layer: int) -> dict[str, Edit]:
    """Returns an edit that sets the output of a layer's FFN to 0."""
    return {f"{_layer(layer)}.ffn.out": torch.zeros_like}


def ablate_layer(layer: int) -> dict[str, Edit]:
    """Returns an edit that sets the outputs of both branches of a layer to 0: the stream passes unchanged, except for
    the norms after the branches of a post-norm or sandwich wiring."""
    return {f"{_layer(layer)}.*.out": torch.zeros_like}  # a block may have no FFN


def replace(
    site: str, value: Tensor | float, positions: Indices | None = None, heads: Indices | None = None
) -> dict[str, Edit]:
    """Returns an edit that replaces the value of a site by `value`, at these positions and heads; None for all.

    A tensor must broadcast to the replaced part: (b, positions, heads, h) of q, k, v and z, (b, heads, positions, t) of
    scores and pattern, (b, positions, ...) of other sites."""

    def put(part: Tensor) -> Tensor:
        given = torch.as_tensor(value).to(part)
        try:
            return given.expand_as(part)
        except RuntimeError:
            raise RequestError(
                f"value has shape {tuple(given.shape)}, which does not broadcast to the {tuple(part.shape)} it would "
                f"replace at {site}",
                code="conflict", field="value", value=tuple(given.shape),
            ) from None  # fmt: skip

    return {site: _edit(site, put, positions, heads)}


def scale(site: str, factor: float, heads: Indices | None = None) -> dict[str, Edit]:
    """Returns an edit that multiplies the value of a site by `factor`, for these heads; None for all."""
    return {site: _edit(site, lambda part: part * factor, heads=heads)}


def add_direction(
    site: str, direction: Tensor, strength: float = 1.0, positions: Indices | None = None
) -> dict[str, Edit]:
    """Returns an edit that adds strength * direction to the value of a site, at these positions; None for all.
    `direction` is as wide as the value's last axis, and not normalised.

    At `layers.N.resid_post`, with the difference of two mean activations, this is activation steering (Turner et al.
    2023, 2308.10248)."""

    def add(part: Tensor) -> Tensor:
        if direction.shape != part.shape[-1:]:
            raise RequestError(
                f"direction has shape {tuple(direction.shape)}; the values at {site} are {part.shape[-1]} wide",
                code="conflict", field="direction", value=tuple(direction.shape),
            )  # fmt: skip
        return part + strength * direction.to(part)

    return {site: _edit(site, add, positions)}


def patch(
    run: Mapping[str, Tensor], site: str, positions: Indices | None = None, heads: Indices | None = None
) -> dict[str, Edit]:
    """Returns an edit that puts values of another run, as `gf.capture` returned them, at every site of `run` whose name
    matches the pattern `site`.

    `positions` and `heads` are the same in both runs. A run of one row serves every row. Raises RequestError if the
    pattern names no captured site, and, when the model runs, if the shapes differ."""
    names = [name for name in run if fnmatchcase(name, site)]
    if not names:
        raise RequestError(
            f"this run has nothing of {site!r}{did_you_mean(site, run)}", code="unknown", field="site", value=site
        )
    return {name: _patch(name, run[name], positions, heads) for name in names}


def _patch(name: str, stored: Tensor, positions: Indices | None, heads: Indices | None) -> Edit:
    choose = _chosen(name, positions, heads)

    def put(x: Tensor) -> Tensor:
        if stored.shape[1:] != x.shape[1:] or len(stored) not in (1, len(x)):
            raise RequestError(
                f"the run to patch from has shape {tuple(stored.shape)} at {name}; this one has {tuple(x.shape)}",
                code="conflict", field="run", value=tuple(stored.shape),
            )  # fmt: skip
        at, patched = choose(x), x.clone()
        patched[at] = stored.to(x).expand_as(x)[at]
        return patched

    return put


def _edit(
    site: str, change: Callable[[Tensor], Tensor], positions: Indices | None = None, heads: Indices | None = None
) -> Edit:
    """Returns an edit that applies `change` to a part of a site's value: at these positions and heads (None for
    all)."""
    choose = _chosen(site, positions, heads)

    def edited(x: Tensor) -> Tensor:
        at, changed = choose(x), x.clone()
        changed[at] = change(x[at])
        return changed

    return edited


def _chosen(site: str, positions: Indices | None, heads: Indices | None) -> Callable[[Tensor], tuple[Any, ...]]:
    """Returns a function from a site's value to the index that selects these positions and heads in it. Raises
    RequestError for heads at a site without heads."""
    axes = AXES.get(site.rpartition(".")[2], "bs")
    along_heads = head_axis(axes)
    if heads is not None and along_heads is None:
        raise RequestError(
            f"heads={heads}: {site} has no heads; {', '.join(AXES)} of a mixer have",
            code="conflict", field="heads", value=heads,
        )  # fmt: skip

    def choose(x: Tensor) -> tuple[Any, ...]:
        at: list[Any] = [slice(None)] * x.dim()
        if positions is not None:
            along = axes.index("s")
            at[along] = _tensor(positions, x.shape[along], "position", "this pass", x)
        if heads is not None and along_heads is not None:
            at[along_heads] = _tensor(heads, x.shape[along_heads], "head", site, x)
        if positions is not None and heads is not None:  # every pair of a position and a head
            first = min(axes.index("s"), axes.index("n" if "n" in axes else "g"))
            at[first] = at[first][:, None]
        return tuple(at)

    return choose


def _tensor(given: Indices, count: int, what: str, owner: str, like: Tensor) -> Tensor:
    return torch.tensor(within(given, count, what, owner), device=like.device)


def _layer(layer: int) -> str:
    if layer < 0:
        raise RequestError(
            f"layer={layer} must be 0 or more: an edit does not know how many layers the model has",
            code="range", field="layer", value=layer,
        )  # fmt: skip
    return f"layers.{layer}"
