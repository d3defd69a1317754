"""Costs of parts, which add up along the tree of parts: computed from configs, without building the model.

Conventions. The activations that a part keeps for the backward pass include its input and exclude its output, so that a
chain of parts adds up: a tensor is counted by the part that reads it. With selective recomputation a part counts the
results of its matmuls and of its fused attention kernel, as `torch.utils.checkpoint` keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from glassformer.errors import RequestError

Phase = Literal["train", "prefill", "decode"]
RECOMPUTE = ("none", "selective", "full")
Number = int | float


@dataclass(frozen=True)
class Shape:
    """Workload of a model: b sequences with s new tokens each.

    t               tokens of a sequence, including those read before
    phase           "train": forward and backward pass; "prefill", "decode": forward pass with a decode state
    dtype           dtype of the weights and of the residual stream
    product_dtype   dtype of matmuls, if autocast changes it; None for `dtype`
    state_dtype     dtype of the decode state; None for `dtype`
    input_dtype     dtype of a part's input; None for `dtype`. The residual wiring of a block sets it
    device          type of the device, on which the choice of a kernel depends
    every_key       True to count FLOPs of every query against all t keys, as 6 N + 12 L d t and FLOP counters do; False
                    for only the keys that the query attends to
    """

    b: int = 1
    s: int = 1
    t: int = 1
    phase: Phase = "train"
    dtype: torch.dtype = torch.float32
    product_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    device: str = "cpu"
    every_key: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.s <= self.t:
            raise RequestError(
                f"s={self.s} new tokens of t={self.t}; use 1 to {self.t}", code="range", field="s", value=self.s
            )

    @classmethod
    def training(cls, b: int, s: int, dtype: torch.dtype = torch.float32, products: torch.dtype | None = None) -> Shape:
        """Returns the workload of a training step on b sequences of s tokens; `products` is the dtype of matmuls under
        autocast, None for `dtype`."""
        return cls(b, s, s, "train", dtype, products)

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def passes(self) -> int:
        """Number of matmuls executed for each matmul of the forward pass: 3 in training, because the backward pass has
        one for the gradient of each operand, else 1."""
        return 3 if self.phase == "train" else 1

    @property
    def products(self) -> torch.dtype:
        return self.product_dtype or self.dtype

    @property
    def inputs(self) -> torch.dtype:
        return self.input_dtype or self.dtype

    @property
    def state(self) -> torch.dtype:
        return self.state_dtype or self.dtype

    def reading(self, dtype: torch.dtype) -> Shape:
        """Returns a copy of this workload for a part whose input has another dtype, `dtype`."""
        return replace(self, input_dtype=dtype)

    def keeps(self, values: Number, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes that keeping `values` elements per token for the backward pass takes, in `dtype`, None for
        that of matmuls; 0 outside training."""
        return self.keeps_once(self.tokens * values, dtype)

    def keeps_mask(self, values: Number, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes that keeping a dropout mask of `values` elements per token takes: on CPUs a factor in
        `dtype` for each element, on other devices a bool; 0 outside training."""
        return self.keeps(values, dtype if self.device == "cpu" else torch.bool)

    def keeps_once(self, values: Number, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes that keeping `values` elements in all, whatever the number of tokens, takes in `dtype`; 0
        outside training."""
        return round(values * (dtype or self.products).itemsize) if self.phase == "train" else 0

    def reads(self, weights: int) -> int:
        """Returns the bytes moved for `weights` weights: one read in the forward pass; in training two reads, and a
        write of the gradient."""
        return self.passes * weights * self.products.itemsize


@dataclass(frozen=True)
class Cost:
    """Cost of a part, or a whole model, for one `Shape`. Costs add; `n * cost` is n equal parts.

    parameters          trainable values, shared ones once
    active_parameters   those that one token uses: only the chosen experts
    flops               of matmuls (a multiply and an add are two), in training forward and backward
    state_bytes         decode state of the b sequences
    kept                bytes kept for the backward pass without recomputation
    kept_selective      bytes kept if elementwise parts and attention patterns are recomputed
    kept_full           bytes kept if blocks are recomputed from their inputs
    moved_bytes         lower bound of bytes read and written: weights, decode state, operands and results of matmuls;
                        elementwise operations count as fused with their neighbours
    children            costs by site name; equal parts are one object
    shared              costs that several parts share, by key; contained in the numbers above and added once
    """

    parameters: int = 0
    active_parameters: int = 0
    flops: Number = 0
    state_bytes: int = 0
    kept: int = 0
    kept_selective: int = 0
    kept_full: int = 0
    moved_bytes: int = 0
    children: Mapping[str, Cost] = field(default_factory=dict)
    shared: Mapping[Hashable, Cost] = field(default_factory=dict, repr=False)

    @classmethod
    def weights(cls, values: int, **others: Any) -> Cost:
        """Returns the cost of `values` parameters that every token uses; `others` are further fields of the cost, by
        name."""
        return cls(values, values, **others)

    @classmethod
    def state(cls, shape: Shape, held: int, moved: int | None = None) -> Cost:
        """Returns the cost of a decode state of `held` bytes per sequence. `moved`: bytes read and written per
        sequence; None if all of the state is read and written. Zero in training."""
        if shape.phase == "train":
            return cls()
        return cls(state_bytes=shape.b * held, moved_bytes=shape.b * (2 * held if moved is None else moved))

    @classmethod
    def of(cls, children: Mapping[str, Cost]) -> Cost:
        """Returns the sum of the costs of named parts, with them as its children."""
        return _total(Counter(map(id, children.values())), children.values(), children)

    @classmethod
    def once(cls, key: Hashable, cost: Cost) -> Cost:
        """Returns `cost` under a key, so that sums count it once even if several parts contain it: for a tensor or mask
        that parts share."""
        return replace(cost, shared={key: cost})

    def activation_bytes(self, recompute: str = "none") -> int:
        """Returns the bytes kept for the backward pass under a policy of recomputation: "none", "selective" or "full".
        Raises RequestError for an unknown policy."""
        kept = {"none": self.kept, "selective": self.kept_selective, "full": self.kept_full}
        if recompute not in kept:
            options = ", ".join(kept)
            raise RequestError(
                f"recompute={recompute!r}: use one of {options}", code="unknown", field="recompute", value=recompute
            )
        return kept[recompute]

    def outside_blocks(self) -> Cost:
        """Returns this cost for a part outside the blocks: no recomputation policy reduces the bytes that it keeps."""
        return replace(self, kept_selective=self.kept, kept_full=self.kept)

    def without(self, *numbers: str) -> Cost:
        """Returns a copy of this cost and its children with the fields named in `numbers` set to 0: for a tower that
        runs without a decode state, or not at all."""
        made: dict[int, Cost] = {}

        def zero(cost: Cost) -> Cost:
            if id(cost) not in made:
                children = {name: zero(child) for name, child in cost.children.items()}
                shared = {key: zero(one) for key, one in cost.shared.items()}
                made[id(cost)] = replace(cost, **dict.fromkeys(numbers, 0), children=children, shared=shared)
            return made[id(cost)]

        return zero(self)

    def __add__(self, other: Cost) -> Cost:
        names = dict.fromkeys((*self.children, *other.children))
        children = {
            name: sum((one.children[name] for one in (self, other) if name in one.children), Cost()) for name in names
        }
        return _total(Counter((id(self), id(other))), (self, other), children)

    def __mul__(self, n: int) -> Cost:
        return _total({id(self): n}, (self,), {name: n * child for name, child in self.children.items()})

    __rmul__ = __mul__

    def __getitem__(self, site: str) -> Cost:
        """Returns the cost at a site, as in cost["layers.3.mixer"]. Raises KeyError for an unknown name."""
        cost = self
        for name in site.split("."):
            cost = cost.children[name]
        return cost

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers and children as plain values; siblings that are one object appear once, under a range of
        names such as "0-31", with their number as `times`."""
        numbers = {name: getattr(self, name) for name in NUMBERS if not name.startswith("kept")}
        numbers["activation_bytes"] = {policy: self.activation_bytes(policy) for policy in RECOMPUTE}
        children = {name: (n, child) for name, n, child in self.grouped()}
        if not children:
            return numbers
        return {**numbers, "children": {name: {"times": n, **child.to_dict()} for name, (n, child) in children.items()}}

    def grouped(self) -> list[tuple[str, int, Cost]]:
        """Returns the distinct children as (names, number of children, their cost): ("0-31", 32, cost)."""
        names: dict[int, list[str]] = {}
        for name, child in self.children.items():
            names.setdefault(id(child), []).append(name)
        first = {id(child): child for child in self.children.values()}
        return [(_spans(some), len(some), first[key]) for key, some in names.items()]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("", "parameters", "FLOPs", "kept", "selective", "full", "moved", "state")]

        def show(name: str, cost: Cost, depth: int) -> None:
            bytes_ = (cost.kept, cost.kept_selective, cost.kept_full, cost.moved_bytes, cost.state_bytes)
            numbers = (f"{cost.parameters:,}", f"{cost.flops:.4g}", *(f"{value:,}" for value in bytes_))
            lines.append(("  " * depth + name, *numbers))
            for names, n, child in cost.grouped():
                show(f"{names}, each" if n > 1 else names, child, depth + 1)

        show("all", self, 0)
        wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join([line[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True))])
            for line in lines
        )


NUMBERS = (
    "parameters", "active_parameters", "flops", "state_bytes", "kept", "kept_selective", "kept_full", "moved_bytes",
)  # fmt: skip

OF_WORK = tuple(name for name in NUMBERS if not name.endswith("parameters"))
"""Names of the fields of `Cost` that depend on the workload: all NUMBERS but the parameter counts."""


def _total(times: Mapping[int, int], costs: Iterable[Cost], children: Mapping[str, Cost]) -> Cost:
    """Returns the sum of costs, with `children` as its children. Each cost is multiplied by its count in `times`, keyed
    by the `id` of the cost; shared costs (`Cost.once`) are added once."""
    distinct = {id(cost): cost for cost in costs}
    terms = [(times[key], cost) for key, cost in distinct.items()]
    shared = {key: one for cost in distinct.values() for key, one in cost.shared.items()}
    for key, one in shared.items():
        terms.append((1 - sum(n for n, cost in terms if key in cost.shared), replace(one, shared={})))
    numbers = {name: sum(n * getattr(cost, name) for n, cost in terms) for name in NUMBERS}
    return Cost(**numbers, children=children, shared=shared)


def _spans(names: list[str]) -> str:
    """Returns sorted names as text, numbers as ranges: ["0", "1", "2", "5"] -> "0-2,5"."""
    if not all(name.isdecimal() for name in names):
        return ",".join(names)
    runs: list[list[int]] = []
    for i in map(int, names):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
