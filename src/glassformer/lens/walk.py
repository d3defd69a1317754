"""A forward pass step by step: the values of one layer with the arithmetic that gives each number.

>>> steps = walk(model, tokens, layer=0)
>>> [step.key for step in steps][:6]
['embedding', 'position', 'embed', 'mixer_norm', 'q', 'k']
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, eager, looking, rows_of, sites, within
from glassformer.lens.arithmetic import (
    Arithmetic,
    Sources,
    explained,
    given,
    lookup,
    masked,
    position_of,
    probabilities,
    projected,
    sizes_of,
)
from glassformer.parts.core.site import Site
from glassformer.parts.linear import Linear

MOST = 24
"""Tokens of a text that is walked through."""
COLUMNS = 8
"""Tokens whose logits are shown if the vocabulary is larger."""


@dataclass(frozen=True)
class WalkStep:
    """Value of one step of a pass, for one text."""

    key: str
    """Kind of step: the name of its site or module, without the names of its parents."""
    place: str
    """Path of the site or module."""
    axes: str
    """Axes of `value`, in the alphabet of shapes, without the batch."""
    value: Tensor
    arithmetic: Arithmetic | None = None
    """Formula and arithmetic of each number, checked against the value; None if no known formula gives it."""
    part: str = ""
    """Name of the value among several of a module, such as q."""
    columns: tuple[int, ...] = ()
    """Ids of the tokens that the columns are for; empty for other columns."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded value of a pass, still without its arithmetic: the result of `module` for `inputs`, or without a
    module the value of a site."""

    key: str
    place: str
    axes: str
    value: Tensor
    part: str
    module: nn.Module | None = None
    inputs: tuple[Tensor, ...] = ()


@dataclass
class Recorder:
    """Recorder of the values that a forward pass computes, in order; a value that equals an earlier one is not
    repeated."""

    steps: list[RecordedStep] = field(default_factory=list)
    _blocks: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(
        self,
        key: str,
        place: str,
        axes: str,
        value: Tensor,
        part: str = "",
        module: nn.Module | None = None,
        inputs: tuple[Tensor, ...] = (),
    ) -> None:
        """Records a value (b, ...) of a batch of one, unless the same one was recorded."""
        x = value.detach()
        if x.dim() == len(axes) + 1:
            x = x[0]
        for step in self.steps:
            if step.value.shape == x.shape and torch.equal(step.value, x):
                return
        self.steps.append(RecordedStep(key, place, axes, x.float().clone(), part, module, inputs))

    def look(self, name: str, axes: str, x: Tensor, first: int, total: int) -> None:
        """Records the value of a site, which may be observed in blocks of queries."""
        along = axes.index("s")
        blocks = self._blocks.setdefault(name, [])
        blocks.append(x.detach())
        if sum(block.shape[along] for block in blocks) >= total:
            self.add(name.rpartition(".")[2], name, axes[1:], torch.cat(self._blocks.pop(name), along))

    def called(self, place: str, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        """Records the tensors that a module without sites reads and returns."""
        names = list(inspect.signature(module.forward).parameters)
        key = place.rpartition(".")[2]
        for name, x in zip(names, given, strict=False):
            if torch.is_tensor(x) and x.is_floating_point():
                self.add(name, f"{place}.{name}", _axes(x), x)
        inputs = tuple(one.detach()[0].float() for one in given if torch.is_tensor(one))
        if not inputs and not place.startswith("embedding."):
            return  # a kernel, whose result is a site
        several = isinstance(result, tuple)
        for name, x in zip(names, result if several else (result,), strict=False):
            if torch.is_tensor(x) and x.is_floating_point():
                self.add(key, place, _axes(x), x, name if several else "", module, inputs)


def _axes(x: Tensor) -> str:
    return "snh" if x.dim() == 4 else "sd"


def walk(model: Any, tokens: Any, layer: int = 0) -> list[WalkStep]:
    """Returns the steps of a pass over one text: the embedding, one layer, the stream after every layer, and the
    prediction.

    Raises RequestError for more than 24 tokens, a layer out of range, and a model that reads something other than one
    text."""
    whole: Any = eager(model)
    if whole.encoder is not None or whole.embedding.reader is not None:
        raise RequestError(
            "this model reads a source, images or vectors; a walk is over one text",
            code="unsupported", field="model", expected="a model of one text",
        )  # fmt: skip
    tokens = rows_of(whole, tokens)[:1]
    if (length := tokens.shape[1]) > MOST:
        raise RequestError(
            f"the text has {length:,} tokens; a walk shows at most {MOST}",
            code="range", field="text", value=length, expected=f"at most {MOST} tokens",
        )  # fmt: skip
    (layer,) = within(layer, len(whole.layers), "layer")
    own = twin(whole, layer)
    recorder, known = Recorder(), sites(own)
    wanted = [name for name in known if name == "embed" or name.startswith(f"layers.{layer}.")]
    stream: dict[str, Tensor] = {}
    ends = [f"layers.{at}.resid_post" for at in range(len(whole.layers))]
    with ExitStack() as stack:
        for place, module in plain_modules(own, layer):
            handle = module.register_forward_hook(partial(recorder.called, place))
            stack.callback(handle.remove)
        stack.enter_context(at_rest(own))
        stack.enter_context(looking(own, {name: partial(recorder.look, name, known[name].axes) for name in wanted}))
        stack.enter_context(looking(own, {name: partial(_keep, stream, name) for name in ends}))
        stack.enter_context(torch.no_grad())
        recorder.add("embedding", "embedding", "sd", whole.embedding.look_up(tokens))
        final = own.hidden_states(tokens)[0].float()
        return [*_explained(whole, layer, recorder.steps, tokens[0]), *_ending(whole, stream, final)]


def walk_part(part: nn.Module, x: Tensor, **arguments: Any) -> list[WalkStep]:
    """Returns the steps of a mixer by itself over x (1, s, d): first x, then the values of its sites, each without the
    batch. `arguments` are those of its forward pass, whose errors pass through."""
    recorder, known = Recorder(), sites(part)
    recorder.add("x", "x", "sd", x)
    looks = {name: partial(recorder.look, name, site.axes) for name, site in known.items()}
    with looking(part, looks), torch.no_grad():
        part(x, **arguments)
    first, *rest = _with_arithmetic(recorder.steps, {"": part})
    return [replace(first, arithmetic=given(first.value)), *rest]


def twin(model: Any, layer: int) -> Any:
    """Returns a model with the same tensors, in which the embedding and layer `layer` are separate modules, so that no
    other caller triggers hooks on these. It reads and returns the shapes of `model`.

    Raises IndexError for a layer out of range."""
    tensors = {id(one): one for one in [*model.parameters(), *model.buffers()]}
    own = copy.copy(model)
    own.__dict__ = {**model.__dict__, "_modules": dict(model._modules)}
    layers = list(model.layers)
    layers[layer] = copy.deepcopy(layers[layer], dict(tensors))
    own.layers = nn.ModuleList(layers)
    own.embedding = copy.deepcopy(model.embedding, dict(tensors))
    return own


def plain_modules(model: Any, layer: int) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for the outermost modules without sites in the embedding and in a layer, in the order of
    their definition, except linear layers, whose results are sites. Raises IndexError for a layer out of range."""

    def within_(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            through = getattr(child, "transparent", False)
            if any(isinstance(one, Site) for one in child.modules()):
                if not isinstance(child, Site):
                    yield from within_(child, prefix if through else f"{prefix}{name}.")
            elif not isinstance(child, Linear):
                yield f"{prefix}{name}", child

    yield from within_(model.embedding, "embedding.")
    yield from within_(model.layers[layer], f"layers.{layer}.")


def _keep(into: dict[str, Tensor], name: str, x: Tensor, first: int, total: int) -> None:
    into[name] = x.detach()[0].float()


def _explained(model: Any, layer: int, steps: list[RecordedStep], tokens: Tensor) -> Iterator[WalkStep]:
    """Yields the steps of a model with the arithmetic of each."""
    block = model.layers[layer]
    parts = {f"layers.{layer}.mixer.": block.mixer, f"layers.{layer}.ffn.": block.ffn}
    found = list(_with_arithmetic(steps, {name: part for name, part in parts.items() if part is not None}))
    first = found[0]
    yield replace(first, arithmetic=lookup(tokens, model.embedding.weight.detach(), first.value))
    yield from found[1:]


def _with_arithmetic(steps: list[RecordedStep], parts: Mapping[str, Any]) -> Iterator[WalkStep]:
    """Yields the recorded steps with their arithmetic; masked scores are two steps, before the mask and after it."""
    seen: list[tuple[str, str, Tensor]] = []
    for step in steps:
        part = next((one for name, one in parts.items() if step.place.startswith(name)), None)
        found = explained(Sources(seen, part, step.module, step.inputs), step.key, step.axes, step.value)
        if step.place == "embedding.position":
            found = position_of(step.module, step.value)
        before = None if found is None else found.before
        yield WalkStep(step.key, step.place, step.axes, step.value if before is None else before, found, step.part)
        if before is not None:
            yield WalkStep("mask", step.place, step.axes, step.value, masked(before, step.value))
        seen.append((f"{step.key}:{step.part}" if step.part else step.key, step.axes, step.value))


def _ending(model: Any, stream: dict[str, Tensor], final: Tensor) -> Iterator[WalkStep]:
    """Yields the last steps of a pass: the root mean square of the stream after every layer, the final norm, logits and
    probabilities."""
    layers = list(stream.values())
    if len(layers) > 1:
        yield WalkStep("layers", "layers", "sl", *sizes_of(layers))
    last = layers[-1] if layers else final
    source = Sources([("resid_post", "sd", last)], None, model.final_norm, [last])
    if model.final_norm is not None:
        yield WalkStep("final_norm", "final_norm", "sd", final, explained(source, "final_norm", "sd", final))
    if model.config is not None and not model.config.head.predicts_tokens:
        return
    logits = model.unembed(final.to(model.dtype)[None])[0].float()
    best = logits[-1].topk(min(COLUMNS, logits.shape[-1])).indices.sort().values
    if logits.shape[-1] <= 2 * COLUMNS:
        best = torch.arange(logits.shape[-1])
    chosen = logits[:, best]
    ids = tuple(best.tolist())
    weights = model.head.applied(model.embedding)[best].float()
    yield WalkStep("logits", "logits", "sv", chosen, projected(final, weights, chosen), columns=ids)
    shares = logits.softmax(-1)[:, best]
    yield WalkStep("probabilities", "logits", "sv", shares, probabilities(logits, best), columns=ids)
