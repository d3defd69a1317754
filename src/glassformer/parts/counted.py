"""Checks of a built module against the costs of its config: parameters, FLOPs by torch's counter, state bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from glassformer.errors import RequestError, shown
from glassformer.parts.core.cost import Cost, Number, Shape
from glassformer.parts.core.outside import is_outside
from glassformer.parts.kernel.naive import Naive
from glassformer.parts.mixer.attend import change_kernels

TOKENS = 16
"""Number of tokens of the sequence with which FLOPs and state are counted, unless the context is shorter."""
MOST_ALLOCATED = 1 << 25
"""Largest number of parameters of a model that is allocated, with weights, to count FLOPs; larger models run on the
meta device."""


@dataclass(frozen=True)
class Counting:
    """Checks of the costs of one model. Fields: functions that return its outline (the model on the meta device) and
    its costs, and those of a copy with at most two layers of each kind, which can also be built with weights."""

    outline: Callable[[], Any]
    costs: Callable[[Shape], Cost]
    short_outline: Callable[[], Any]
    short_costs: Callable[[Shape], Cost]
    short_build: Callable[[], Any]
    context: int

    def check_tensors(self) -> None:
        """Raises RequestError, with both numbers, if the config's costs differ from the built module in the number of
        parameters or in the bytes of decode state."""
        model = self.outline()
        self.check_parameters(model)
        self.check_state(model)

    def check_parameters(self, model: Any) -> None:
        def has(path: str) -> Number:
            return sum(weight.numel() for weight in model.get_submodule(path).parameters())

        _agree("parameters", self.costs(Shape()), has, model)

    def check_state(self, model: Any) -> None:
        """Raises RequestError, with both numbers, if the costs count other bytes of decode state than the model has.
        The comparison is in bfloat16, so that tensors that a recurrence keeps in float32 are noticed. A model that
        cannot generate passes."""
        if not model.writes:
            return
        t, dtype = min(TOKENS, self.context), torch.bfloat16
        try:
            state = model.init_state(1, t, dtype, memory_len=t if model.encoder else 0)
        except NotImplementedError:  # it decodes without a state, or not at all
            return
        layers = {f"layers.{i}": 0 if one is None else one.nbytes for i, one in enumerate(state.layers)}
        held = {"": state.nbytes, "layers": state.nbytes, **layers, **{f"{at}.mixer": n for at, n in layers.items()}}
        said = self.costs(Shape(s=1, t=t, phase="decode", state_dtype=dtype))
        _agree("state_bytes", said, lambda path: held.get(path, 0), model)

    def check_flops(self) -> None:
        """Raises RequestError, with both numbers, if the costs count other FLOPs than torch's counter in a forward pass
        of the copy with few layers, or if a parameter of a small copy is never filled.

        A small copy runs on a CPU, because a part may read values; a large one runs on the meta device, which allocates
        nothing."""
        model = self.short_outline()
        given = example(model, self.context)
        t = model.embedding.places(given["tokens"]).shape[1]
        if sum(weight.numel() for weight in model.parameters()) <= MOST_ALLOCATED:
            model = self.short_build()
        given = {name: value.to(model.device) for name, value in given.items()}
        try:
            found = flops_of(model, given)
        except Exception as problem:
            why = f"its forward pass fails on the {model.device} device: {shown(problem)}"
            warnings.warn(f"FLOPs of your part are as its costs() says, unchecked: {why}")
            return
        said = self.short_costs(Shape(s=t, t=t, phase="prefill"))
        _agree("flops", said, lambda path: found.get(path, 0), model)


def example(model: Any, context: int) -> dict[str, Tensor]:
    """Returns the arguments of a forward pass, filled with zeros: `tokens` (token ids, images or vectors of one short
    sequence), and `source` if the model has an encoder."""

    def read_by(embedding: Any) -> Tensor:
        if (patches := embedding.patches) is not None:
            return torch.zeros(1, patches.channels, patches.size, patches.size)
        if (vectors := embedding.vectors) is not None:
            return torch.zeros(1, min(TOKENS, context), vectors.size)
        return torch.zeros(1, min(TOKENS, context), dtype=torch.int64)

    given = {"tokens": read_by(model.embedding)}
    return given if model.encoder is None else {**given, "source": read_by(model.encoder.embedding)}


def flops_of(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Number]:
    """Returns {path of a module: FLOPs of its forward pass}, by torch's counter. Attention is computed by its
    definition, because the counter has no formula for fused kernels on a CPU."""

    def grouped(x: tuple[int, int], maps: tuple[int, int, int], *rest: object, **more: object) -> int:
        return 2 * x[0] * maps[1] * maps[2]  # every row is multiplied by one matrix; torch 2.13 has no formula for it

    change_kernels(model, lambda kernel: kernel if is_outside(type(kernel)) else Naive())
    products = torch.ops.aten._grouped_mm, torch.ops.glassformer.grouped_product
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(products, grouped))
    with torch.no_grad(), counter:
        model.eval()(**given)
    root = f"{type(model).__name__}."
    by_path = {path.removeprefix(root): sum(some.values()) for path, some in counter.get_flop_counts().items()}
    return {**by_path, "": counter.get_total_flops()}


NAMES = {
    "parameters": ("parameters", "Cost.weights(n)"),
    "flops": ("FLOPs", "linear_cost(ctx, shape, inputs, outputs)"),
    "state_bytes": ("bytes of state", "Cost.state(shape, bytes)"),
}
"""Mapping {field of `Cost`: (its unit in messages, an example of a cost that often adds to this field)}."""


def _agree(number: str, said: Cost, found: Callable[[str], Number], model: nn.Module) -> None:
    """Raises RequestError, about the innermost part that differs, if a config's costs deviate from the built model: the
    field `number` of the costs `said` must equal found(path) at each path of the model."""
    if round(getattr(said, number)) == found(""):
        return
    site, path = "", ""
    while inner := next(
        (
            (name, child, at)
            for name, child in said.children.items()
            if (at := _path_of(model, path, name)) and round(getattr(child, number)) != found(at)
        ),
        None,
    ):
        name, said, path = inner
        site = f"{site}.{name}".lstrip(".")
    built, counted = found(path), round(getattr(said, number))
    unit, more = NAMES[number]
    raise RequestError(
        f"{site or 'model'}: {type(model.get_submodule(path)).__name__} has {built:,} {unit} as it is built, and "
        f"costs() of its config counts {counted:,}; have it count them all, as in super().costs(ctx, shape) + {more}",
        code="conflict", field=site or "model", value=built, expected=f"{counted:,} {unit}",
    )  # fmt: skip


def _path_of(model: nn.Module, path: str, name: str) -> str:
    """Returns the path of the module named `name` among the children of the module at `path`, or among those of its
    children that are `transparent`. Empty if neither exists."""
    module = model.get_submodule(path)
    lent = [f"{held}.{name}" for held, one in module.named_children() if getattr(one, "transparent", False)]
    for inner in (name, *lent):
        whole = f"{path}.{inner}".lstrip(".")
        *way, last = whole.split(".")
        if last in model.get_submodule(".".join(way))._modules:
            return whole
    return ""
