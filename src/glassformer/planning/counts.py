"""Counts of a model's weights: parameters by component with their formula, FLOPs by purpose."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from glassformer.config import ModelConfig
from glassformer.figures.terminal import unruled
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.shard import Cut, Shard, shards_of
from glassformer.parts.linear import Matrix

COMPONENTS = (
    "embedding", "positions", "mixer", "ffn", "experts", "shared experts", "router", "norms", "wiring", "head",
)  # fmt: skip
"""Components in the order of the table. `mixer`: projections of attention, or all parameters of another mixer."""
ENCODER = "encoder "
"""Prefix of the names of an encoder's rows in the tables; the rest of a name is as in the decoder."""


@dataclass(frozen=True)
class Weight:
    """One matrix or vector within a parameter; a fused parameter holds several."""

    name: str
    layer: int | None
    """Index of the layer; None outside the layers."""
    tower: str
    """`ENCODER` for a weight of the encoder, otherwise ""."""
    component: str
    cut: Cut
    values: int
    dims: tuple[tuple[str, int], ...]
    """(symbol, size) of each axis; the symbol is a letter such as d, or the size as text if no letter denotes it."""
    first: int = 0
    """First row of the matrix within its parameter."""


@dataclass(frozen=True)
class Component:
    """One row of the table of components: parameters, their share, and their formula."""

    name: str
    parameters: int
    share: float
    symbols: str
    numbers: str
    """Formula in numbers; evaluates to `parameters`."""


@dataclass(frozen=True)
class LayerRow:
    """One row of a layer: a matrix with its bias, a norm, or the work between tokens, which has no parameters."""

    name: str
    """Name of the matrix's site, such as "mixer.q", or of its module; `BETWEEN` for the work between tokens."""
    parameters: int
    share: float
    """Share of the layer's parameters."""
    flops: float
    """Forward FLOPs per token: 2 for each weight of a matmul that the token passes."""
    symbols: str
    numbers: str
    """Formula in numbers; evaluates to `parameters`."""


@dataclass(frozen=True)
class Layer:
    """A kind of layer and the number of layers equal to it; its rows sum to the layer's parameters and FLOPs."""

    name: str
    """Indices of the equal layers, such as "0-35", after `ENCODER` if they are an encoder's."""
    times: int
    rows: tuple[LayerRow, ...]

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)


BETWEEN = "mixer, between tokens"
"""Name of the row with the FLOPs that belong to no matrix: QK^T and pattern times values, or a recurrence."""


@dataclass(frozen=True)
class Flops:
    """FLOPs per token in training, by purpose; every query counts against all keys, as in 6 N + 12 L d s.

    forward     matmuls of the forward pass
    backward    matmuls of the gradients of both operands, twice `forward`
    recomputed  extra FLOPs of full recomputation of the layers
    scores      share of training that grows with the length: queries against keys, patterns against values
    six_n       6 N, N all parameters
    idle        6 times the parameters of experts that a token is not routed to
    unlike      correction: negative for weights in no matmul (lookups, norms), positive for tied or repeated weights

    six_n - idle + unlike + scores = forward + backward."""

    forward: float
    recomputed: float
    scores: float
    six_n: float
    idle: float

    @property
    def backward(self) -> float:
        return 2 * self.forward

    @property
    def training(self) -> float:
        return 3 * self.forward

    @property
    def unlike(self) -> float:
        return self.training - self.scores - (self.six_n - self.idle)

    @property
    def share_of_scores(self) -> float:
        return self.scores / self.training


@dataclass(frozen=True)
class Counts:
    """The weights of a model, read from its outline on the meta device."""

    config: ModelConfig

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        model = self.config.outline()
        cuts = shards_of(model)
        found: list[Weight] = []
        letters: dict[str, int] = {}

        def one_of(symbol: str, number: int) -> str:
            """Returns the letter `symbol` of the formulas if it denotes `number` in the whole model, otherwise the
            number as text."""
            return symbol if letters.setdefault(symbol, number) == number else str(number)

        for name, values in model.named_parameters():
            tower, own = _tower(name)
            at = int(own.split(".")[1]) if own.startswith("layers.") else None
            shape = tuple(values.shape)
            first = 0
            for cut in cuts[name]:
                rows = cut.rows or shape[0] if shape else 1
                of_map = (rows, *shape[1:])
                component = _component(own, cut.cut)
                dims = self._dims(component, cut, of_map, (tower, at))
                dims = tuple((one_of(symbol, number), number) for symbol, number in dims)
                found.append(Weight(name, at, tower, component, cut.cut, math.prod(of_map), dims, first))
                first += rows
        return tuple(found)

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Returns {letter of the formulas: number that it denotes in this model}."""
        letters = {"L": self.config.n_layers, "d": self.config.d_model, "V": self.config.vocab_size}
        if self.config.encoder is not None:
            letters["L_e"] = self.config.encoder.n_layers
        for weight in self.weights:
            for symbol, number in weight.dims:
                if not symbol.isdecimal():
                    letters.setdefault(symbol, number)
        return letters

    def _dims(
        self, component: str, cut: Shard, shape: tuple[int, ...], layer: tuple[str, int | None]
    ) -> tuple[tuple[str, int], ...]:
        """Returns (symbol, size) of each axis of a matrix: V vocabulary, d width, q width of queries, c width of keys
        or values, f hidden, E experts."""
        config = self.config
        letters = {config.vocab_size: "V"} if component in ("embedding", "head") else {}
        if component == "mixer" and cut.cut == "column" and cut.units and layer[1] is not None and len(shape) == 2:
            widest = self._query_heads.get(layer, cut.units)
            letters[shape[0]] = "q" if cut.units >= widest else "c"
        if component == "mixer" and cut.cut == "row" and len(shape) == 2:
            letters[shape[1]] = "q"
        sides = list(shape)
        dims: list[tuple[str, int]] = []
        if cut.cut == "expert" and cut.units and sides[0] % cut.units == 0:
            dims.append(("E", cut.units))
            sides[0] //= cut.units
        if component in ("ffn", "experts", "shared experts") and len(sides) == 2:
            hidden = sides[0] if sides[1] == config.d_model else sides[1]
            letters[hidden] = {"ffn": "f", "experts": "f_e", "shared experts": "f_s"}[component]
        letters[config.d_model] = "d"
        return (*dims, *((letters.get(side, str(side)), side) for side in sides))

    @cached_property
    def _query_heads(self) -> dict[tuple[str, int | None], int]:
        """{(tower, layer): largest number of heads in a matrix that tensor parallelism divides by columns}."""
        most: dict[tuple[str, int | None], int] = {}
        for name, cuts in shards_of(self.config.outline()).items():
            tower, own = _tower(name)
            if own.startswith("layers."):
                layer = tower, int(own.split(".")[1])
                most[layer] = max([most.get(layer, 1), *(cut.units or 1 for cut in cuts if cut.cut == "column")])
        return most

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Rows of the table of components that have parameters; the rows' parameters sum to the model's."""
        total = sum(weight.values for weight in self.weights)
        rows = []
        for tower in (ENCODER, ""):
            of = self.config.encoder if tower else self.config
            for name in COMPONENTS:
                own = [weight for weight in self.weights if (weight.tower, weight.component) == (tower, name)]
                if own and of is not None:
                    values = sum(weight.values for weight in own)
                    symbols, numbers = _formula([weight.dims for weight in own], of.n_layers, "L_e" if tower else "L")
                    rows.append(Component(tower + name, values, values / total, symbols, numbers))
        return tuple(rows)

    def layers(self, context: int) -> tuple[Layer, ...]:
        """Returns the distinct kinds of layer, each with a row per matrix: parameters, and FLOPs per token of a
        sequence of `context` tokens."""
        model = self.config.outline()
        cost = self.config.costs(Shape(s=context, t=context, phase="prefill"))
        towers: list[tuple[str, Any, Cost]] = [] if model.encoder is None else [
            (ENCODER, model.encoder, cost["encoder"])
        ]  # fmt: skip
        towers.append(("", model, cost))
        return tuple(
            Layer(tower + names, n, self._rows(tower, int(re.split("[-,]", names)[0]), owner, one, context))
            for tower, owner, own in towers
            for names, n, one in own["layers"].grouped()
        )

    def _rows(self, tower: str, at: int, owner: Any, cost: Cost, context: int) -> tuple[LayerRow, ...]:
        """Returns the table's rows for layer `at` of a tower (the encoder or the decoder), in the order of its
        parameters."""
        parts = {"mixer": owner.layers[at].mixer, "ffn": owner.layers[at].ffn}
        parts = {branch: part for branch, part in parts.items() if part is not None}
        called: dict[tuple[int, int], tuple[str, Matrix]] = {
            (id(matrix.parameter), matrix.first): (f"{branch}.{name}", matrix)
            for branch, part in parts.items()
            for name, matrix in part.matrices().items()
        }
        prefix = f"layers.{at}."
        ids = {name: id(values) for name, values in owner.layers[at].named_parameters()}
        found: dict[str, list[Weight]] = {}
        products: dict[str, int] = {}
        for weight in self.weights:
            if (weight.tower, weight.layer) != (tower, at):
                continue
            own = weight.name.removeprefix(tower.strip() + "." if tower else "").removeprefix(prefix)
            of = own.removesuffix("bias") + "weight" if own.endswith(".bias") else own
            name, matrix = called.get((ids.get(of, 0), weight.first), (of.removesuffix(".weight"), None))
            found.setdefault(name.removeprefix("residual."), []).append(weight)
            if of == own and matrix is not None and matrix.linear is not None:
                products[name] = weight.values
        values = {name: sum(weight.values for weight in some) for name, some in found.items()}
        experts = sum(one.values for some in found.values() for one in some if one.component == "experts")
        idle = cost.parameters - cost.active_parameters
        flops = dict.fromkeys(found, 0.0)
        for name, n in products.items():
            met = 1 - idle / experts if found[name][0].component == "experts" else 1.0
            flops[name] = 2 * n * met
        total = sum(values.values())
        rows = [
            LayerRow(name, values[name], values[name] / total, flops[name],
                     *_formula([weight.dims for weight in some], 1, "L"))
            for name, some in found.items()
        ]  # fmt: skip
        left = cost.flops / context - sum(flops.values())
        after = 1 + max((i for i, row in enumerate(rows) if row.name.startswith("mixer.")), default=-1)
        return (*rows[:after], LayerRow(BETWEEN, 0, 0.0, left, "", ""), *rows[after:])

    def flops(self, context: int) -> Flops:
        """Returns the training FLOPs per token of a sequence of `context` tokens, by purpose."""
        config = self.config

        def spent(s: int) -> float:
            return config.costs(Shape(s=s, t=s, phase="prefill")).flops / s

        forward = spent(context)
        cost = config.costs(Shape(s=context, t=context, phase="prefill"))
        n, active = cost.parameters, cost.active_parameters
        return Flops(
            forward=forward,
            recomputed=cost["layers"].flops / context,
            scores=3 * (forward - spent(1)) if context > 1 else 0.0,
            six_n=6.0 * n,
            idle=6.0 * (n - active),
        )


def _tower(name: str) -> tuple[str, str]:
    """Splits a parameter's name into its tower (`ENCODER` or "") and the name within the tower."""
    own = name.removeprefix("encoder.")
    return ("" if own == name else ENCODER), own


def _component(name: str, cut: Cut) -> str:
    """Returns the component, one of `COMPONENTS`, of a parameter, from its name and from `cut`, the way in which ranks
    divide it."""
    steps = name.split(".")
    if any("norm" in step for step in steps):
        return "norms"
    if steps[0] != "layers":
        return "positions" if "position" in steps else "head" if steps[0] == "head" else "embedding"
    if steps[2] == "ffn":
        return (
            "router" if "router" in steps else "shared experts" if "shared" in steps
            else "experts" if cut == "expert" else "ffn"
        )  # fmt: skip
    return "mixer" if steps[2] == "mixer" else "wiring"


def _formula(terms: list[tuple[tuple[str, int], ...]], layers: int, letter: str) -> tuple[str, str]:
    """Returns a sum of products as (formula in symbols, formula in numbers); terms common to all layers are grouped as
    L (...), where L is `letter`, their number."""
    counted = Counter(tuple(sorted(dims, key=lambda dim: -dim[1])) for dims in terms)
    inside = {dims: n // layers for dims, n in counted.items() if n % layers == 0}
    outside = {dims: n for dims, n in counted.items() if n % layers}
    if layers == 1:
        inside, outside = {}, dict(counted)

    def summed(some: dict[tuple[tuple[str, int], ...], int], side: int) -> str:
        return " + ".join(
            " * ".join([str(n)] * (n > 1) + [str(dim[side] if side else dim[0]) for dim in dims])
            for dims, n in some.items()
        )

    def whole(side: int) -> str:
        sums = [f"{layers if side else letter} * ({summed(inside, side)})"] if inside else []
        return " + ".join([*sums, *([summed(outside, side)] if outside else [])])

    return whole(0), whole(1)


def layer_table(layer: Layer) -> Table:
    """Returns a table of a layer by matrix: parameters, share of the layer, FLOPs per token, formula."""
    which = f"one layer ({layer.name})" if layer.times == 1 else f"one of {layer.times} layers ({layer.name})"
    table = unruled()
    for head in (which, "parameters", "share", "FLOPs", "formula"):
        table.add_column(head, justify="left" if head in (which, "formula") else "right", overflow="fold")
    for row in layer.rows:
        has = (f"{row.parameters:,}", f"{row.share:.1%}") if row.parameters else ("", "")
        formula = f"{row.symbols} = {row.numbers}" if row.symbols != row.numbers else row.numbers
        table.add_row(row.name, *has, f"{row.flops:,.0f}", formula)
    table.add_row("all", f"{layer.parameters:,}", "100.0%", f"{layer.flops:,.0f}", "FLOPs: forward, one token")
    return table


def component_table(rows: Iterable[Component], title: str = "") -> Table:
    """Returns a table of parameters by component, with formulas in symbols and in numbers."""
    table = unruled(title)
    for head in ("component", "parameters", "share", "formula"):
        table.add_column(head, justify="right" if head in ("parameters", "share") else "left", overflow="fold")
    for row in rows:
        table.add_row(row.name, f"{row.parameters:,}", f"{row.share:.1%}", f"{row.symbols}\n= {row.numbers}")
    return table
