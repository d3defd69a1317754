"""Arithmetic of a step of a forward pass: the formula that gives the step's values from those of earlier steps, and the
computation of each element with numbers. A formula is offered only if it reproduces the values of the model.

explained      arithmetic of any step, or None
Arithmetic     formula, factors of a product, and the computation of one element as text
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassformer.figures import fixed
from glassformer.parts.ffn.base import ACTIVATIONS
from glassformer.parts.linear import Matrix

WRITTEN, TERMS = 8, 4
"""Most terms of a sum that is written out in full, and number of terms written of a longer sum."""
CLOSE = 2e-3
"""Largest difference between a formula and the model's value, as a share of the largest value."""
Cell = Callable[[int, int, int], str]
"""(head, row, column) -> computation of one element as text; the head is 0 for a value without heads."""


@dataclass(frozen=True)
class ProductFactors:
    """Two matrices whose product gives a step's values: left (rows, k) and right (k, columns)."""

    left: Tensor
    right: Tensor
    names: tuple[str, str]
    inner: str
    """Axis of the sum: "t" for tokens, "d" for features."""


@dataclass(frozen=True)
class Arithmetic:
    """Formula of a step's values. `cell` returns the computation of one element as text; `factors` returns, for a head,
    the two matrices whose product the values are, None if the formula is not a product. `before` has scores before
    the mask; None if they are unknown, or not masked."""

    formula: str
    cell: Cell
    factors: Callable[[int], ProductFactors] | None = None
    before: Tensor | None = None


@dataclass(frozen=True)
class Sources:
    """Values that may be the inputs of a step.

    `seen` lists (key, axes, value) of earlier steps, in order, the key as in `WalkStep`;
    `part` is the mixer or feed-forward network of the step;
    `module` is a module without sites that returns the step's value for `inputs`."""

    seen: Sequence[tuple[str, str, Tensor]]
    part: Any
    module: Any
    inputs: Sequence[Tensor]

    def latest(self, key: str) -> Tensor | None:
        """Returns the value recorded last under a key such as "scores"; None if no value has the key."""
        return next((value for name, _, value in reversed(self.seen) if name == key), None)


def say(value: float) -> str:
    """Returns a number as text: with three decimals, with two significant digits if small, with one decimal if
    large."""
    if value == -math.inf:
        return "−∞"
    if value and abs(value) < 0.0095:
        return f"{value:.1e}".replace("-", "−").replace("e−0", "e−")
    return fixed(value, 3 if abs(value) < 100 else 1)


def signed(value: float) -> str:
    """Returns a number as text for use inside a formula, in parentheses if negative."""
    return f"({say(value)})" if value < 0 else say(value)


def close(found: Tensor, value: Tensor) -> bool:
    """Returns True if `found`, the values that a formula gives, equal the model's `value`, up to `CLOSE`."""
    if found.shape != value.shape:
        return False
    return bool((found - value).abs().max() <= CLOSE * value.abs().max().clamp_min(1e-6))


def dot(a: Tensor, b: Tensor, added: float = 0.0) -> str:
    """Returns the computation of a . b + added as text with numbers, such as 0.5·0.2 + (−0.1)·0.4 = 0.06; of many
    terms, only the first are written."""
    shown = TERMS if len(a) > WRITTEN else len(a)
    terms = [f"{signed(x)}·{signed(y)}" for x, y in zip(a[:shown].tolist(), b[:shown].tolist(), strict=True)]
    if shown < len(a):
        terms.append(f"… ({len(a) - shown} more)")
    if added:
        terms.append(signed(added))
    return f"{' + '.join(terms)} = {say(float(a @ b) + added)}"


def flat(x: Tensor) -> Tensor:
    """Returns x (s, ...) reshaped to (s, width)."""
    return x.reshape(len(x), -1)


def explained(sources: Sources, key: str, axes: str, value: Tensor) -> Arithmetic | None:
    """Returns the arithmetic of a step's value (s, d), (s, n, h), (n, s, t) or (s, v), whose `axes` have these letters;
    None if no known formula gives it.

    Raises no error for a value that fits no rule: it has no arithmetic. The cells of the result take head, row and
    column, in which the head of a value without heads is 0."""
    for rule in RULES:
        for found in rule(sources, key, axes, value):
            return found
    return None


# Rules: each yields the arithmetic that it finds


def _scores(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic scores = q k^T scale, plus a position bias if there is one, if it gives the value."""
    if key != "scores" or sources.part is None or sources.part.dot_product is None:
        return
    product, q, k = sources.part.dot_product, _turned(sources, "q"), _turned(sources, "k")
    if q is None or k is None:
        return
    group = q.shape[1] // k.shape[1]
    dots = torch.einsum("snh,tnh->nst", q, k.repeat_interleave(group, 1))
    if dots.shape != value.shape:
        return
    rest = (value - dots * product.scale).where(value > -math.inf, 0.0)
    plain = bool(rest.abs().max() <= CLOSE * max(1.0, float(dots.abs().max() * product.scale)))
    divisor = 1 / product.scale

    def cell(head: int, row: int, column: int) -> str:
        if not plain and value[head, row, column] == -math.inf:
            return "masked: −∞"
        words = dot(q[row, head], k[column, head // group])
        scaled = float(dots[head, row, column] * product.scale)
        words += f";  {say(float(dots[head, row, column]))} / {say(divisor)} = {say(scaled)}"
        return words if plain else f"{words};  with the position {say(float(value[head, row, column]))}"

    def factors(head: int) -> ProductFactors:
        return ProductFactors(q[:, head], k[:, head // group].T, ("q", "kᵀ"), "h")

    before = dots * product.scale if plain and bool((value == -math.inf).any()) else None
    yield Arithmetic(f"scores = q kᵀ / {say(divisor)}" + ("" if plain else " + position"), cell, factors, before)


def _turned(sources: Sources, part: str) -> Tensor | None:
    """Returns the q or k (`part`) that enters the scores: the one recorded last, so after norm and rotation, if the
    mixer has them."""
    return next((value for name, _, value in reversed(sources.seen) if name.rpartition(":")[2] == part), None)


def _softmax(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic of a softmax of the scores, if it gives the value."""
    scores = sources.latest("scores")
    if key != "pattern" or scores is None or not close(scores.softmax(-1), value):
        return
    yield Arithmetic("pattern = softmax(scores)", lambda head, row, column: share(scores[head, row], column))


def share(logits: Tensor, at: int) -> str:
    """Returns the computation of element `at` of a softmax as text with numbers."""
    if logits[at] == -math.inf:
        return "e^−∞ = 0"
    top = logits.max()
    shares = (logits - top).exp()
    written = [f"e^{signed(float(x))}" for x in logits[logits > -math.inf][:TERMS].tolist()]
    more = int((logits > -math.inf).sum()) - len(written)
    below = " + ".join(written) + (f" + … ({more} more)" if more else "")
    return f"e^{signed(float(logits[at]))} / ({below}) = {say(float(shares[at] / shares.sum()))}"


def _weighted(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic z = pattern v, if it gives the value."""
    pattern, v = sources.latest("pattern"), sources.latest("v")
    if key != "z" or pattern is None or v is None or pattern.shape[-1] != len(v):
        return
    group = pattern.shape[0] // v.shape[1]
    wide = v.repeat_interleave(group, 1)
    if not close(torch.einsum("nst,tnh->snh", pattern, wide), value):
        return

    def cell(head: int, row: int, column: int) -> str:
        seen = pattern[head, row] > 0
        return dot(pattern[head, row, seen], wide[seen, head, column])

    yield Arithmetic(
        "z = pattern v", cell, lambda head: ProductFactors(pattern[head], wide[:, head], ("pattern", "v"), "t")
    )


def _product(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic value = x W + b for a matrix of the step's part and an earlier value x, if it gives the
    value."""
    if sources.part is None or axes[0] != "s" or "t" in axes:
        return
    matrices: dict[str, Matrix] = sources.part.matrices()
    wide = flat(value)
    per_head = value.shape[-1]
    for name, matrix in sorted(matrices.items(), key=lambda one: one[0] != key):
        weight = matrix.applied().detach().float()
        weight = weight.reshape(-1, weight.shape[-1])
        bias = matrix.bias
        added = None if bias is None else matrix.within(bias.detach().float()).reshape(-1)
        if len(weight) != wide.shape[1]:
            continue
        for given, _, x in reversed(sources.seen):
            if x.dim() < 2 or len(x) != len(wide) or flat(x).shape[1] != weight.shape[1]:
                continue
            if close(torch.nn.functional.linear(flat(x), weight, added), wide):
                yield _linear(given, name, key, flat(x), weight, added, per_head)
                return


def _linear(
    given: str, name: str, key: str, x: Tensor, weight: Tensor, added: Tensor | None, per_head: int
) -> Arithmetic:
    def cell(head: int, row: int, column: int) -> str:
        at = head * per_head + column
        return dot(x[row], weight[at], 0.0 if added is None else float(added[at]))

    def factors(head: int) -> ProductFactors:
        columns = slice(head * per_head, (head + 1) * per_head)
        return ProductFactors(x, weight[columns].T, (symbol(given), f"W_{name}"), "d")

    bias = "" if added is None or not bool(added.any()) else " + b"
    return Arithmetic(f"{key} = {symbol(given)} W_{name}{bias}", cell, factors)


def symbol(key: str) -> str:
    """Returns the letter that denotes the value `key` in formulas."""
    if key.startswith("resid_") or key in ("embed", "embedding", "x"):
        return "x"
    return "x̂" if key.endswith("norm") else key.rpartition(":")[2]


def _norm(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic of RMSNorm or LayerNorm for a module with one input, if it gives the value."""
    if sources.module is None or len(sources.inputs) != 1 or sources.inputs[0].shape != value.shape:
        return
    (x,) = sources.inputs
    named = {name.rpartition(".")[2]: one.detach().float() for name, one in sources.module.named_parameters()}
    eps = float(vars(sources.module).get("eps", 0.0))
    one, zero = x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1])
    bias = named.get("bias", zero)
    for centred in (False, True):
        mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
        size = ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
        for weight in (named.get("weight", one), 1 + named.get("weight", zero)):
            if weight.shape == one.shape and close((x - mean) / size * weight + bias, value):
                yield _normed(x, mean, size, weight, bias, centred)
                return


def _normed(x: Tensor, mean: Tensor, size: Tensor, weight: Tensor, bias: Tensor, centred: bool) -> Arithmetic:
    def cell(head: int, row: int, column: int) -> str:
        at = (row, column) if x.dim() == 2 else (row, head, column)
        above = say(float(x[at]))
        if centred:
            above = f"({above} − {signed(float(mean[at[:-1]]))})"
        found = (x[at] - mean[at[:-1]][0]) / size[at[:-1]][0] * weight[column] + bias[column]
        words = f"{above} / {say(float(size[at[:-1]]))} · {say(float(weight[column]))}"
        words += f" + {say(float(bias[column]))}" if bool(bias.any()) else ""
        return f"{words} = {say(float(found))}"

    if centred:
        return Arithmetic("x̂ = (x − mean(x)) / √(var(x) + ε) · w" + (" + b" if bool(bias.any()) else ""), cell)
    return Arithmetic("x̂ = x / √(mean(x²) + ε) · w", cell)


def _rotation(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic of a rotation of pairs of features by an angle that depends on position and pair only, if
    it gives the value."""
    if sources.module is None or value.dim() != 3:
        return
    x = next((one for one in sources.inputs if one.shape == value.shape and _same_lengths(one, value)), None)
    if x is None or torch.equal(x, value):
        return
    half = x.shape[-1] // 2
    for first, second in ((slice(0, half), slice(half, 2 * half)), (slice(0, None, 2), slice(1, None, 2))):
        a, b, c, d = x[..., first], x[..., second], value[..., first], value[..., second]
        if a.shape != b.shape:
            continue
        angle = torch.atan2(a * d - b * c, a * c + b * d).mean(1, keepdim=True)
        cos, sin = angle.cos(), angle.sin()
        if close(torch.cat([a * cos - b * sin, b * cos + a * sin], -1), torch.cat([c, d], -1)):
            yield _turn(a, b, cos[:, 0], sin[:, 0], interleaved=second.step == 2)
            return


def _same_lengths(x: Tensor, y: Tensor) -> bool:
    return close(x.norm(dim=-1), y.norm(dim=-1))


def _turn(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Arithmetic:
    half = a.shape[-1]

    def cell(head: int, row: int, column: int) -> str:
        pair, late = (column // 2, column % 2 == 1) if interleaved else (column % half, column >= half)
        one, other = (b, a) if late else (a, b)
        sign = "+" if late else "−"
        x, y = float(one[row, head, pair]), float(other[row, head, pair])
        c, s = float(cos[row, pair]), float(sin[row, pair])
        found = x * c + (y * s if late else -y * s)
        figures = f"{signed(x)}·{signed(c)} {sign} {signed(y)}·{signed(s)}"
        return f"{signed(x)}·cos θ {sign} {signed(y)}·sin θ = {figures} = {say(found)}"

    return Arithmetic("(a, b) → (a cos θ − b sin θ, b cos θ + a sin θ),  θ = position · frequency of the pair", cell)


def _activation(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic of an FFN's activation, hidden = phi(gate) up or phi(up), if it gives the value."""
    gate, up = sources.latest("gate"), sources.latest("up")
    if key != "hidden" or up is None or up.shape != value.shape or value.dim() != 2:
        return
    inner = up if gate is None else gate
    times = 1.0 if gate is None else up
    name, phi = min(ACTIVATIONS.items(), key=lambda one: float((one[1](inner) * times - value).abs().max()))
    if not close(phi(inner) * times, value):
        return

    def cell(head: int, row: int, column: int) -> str:
        x, y = inner[row, column], up[row, column]
        words = f"{name}({say(float(x))}) = {say(float(phi(x)))}"
        if gate is None:
            return words
        return f"{words};  {signed(float(phi(x)))}·{signed(float(y))} = {say(float(phi(x) * y))}"

    yield Arithmetic(f"hidden = {name}(up)" if gate is None else f"hidden = {name}(gate) ⊙ up", cell)


def _sum(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic value = a + r b for two earlier values of equal shape, such as the stream and a branch, if
    it gives the value."""
    if value.dim() != 2:
        return
    alike = [(name, one) for name, _, one in sources.seen if one.shape == value.shape and one.dim() == 2]
    for i in reversed(range(len(alike))):
        for other, a in reversed(alike[:i]):
            name, b = alike[i]
            rate = float(((value - a) * b).sum() / b.square().sum().clamp_min(1e-12))
            if rate == 0 or not close(a + rate * b, value) or not abs(rate) > 0.01:
                continue
            rate = 1.0 if abs(rate - 1) < CLOSE else rate

            def cell(head: int, row: int, column: int, a: Tensor = a, b: Tensor = b, rate: float = rate) -> str:
                x, y = float(a[row, column]), float(b[row, column])
                times = "" if rate == 1 else f"{say(rate)}·"
                return f"{signed(x)} + {times}{signed(y)} = {say(x + rate * y)}"

            yield Arithmetic(f"x = {symbol(other)} + {'' if rate == 1 else f'{say(rate)}·'}{symbol(name)}", cell)
            return


def _scaled(sources: Sources, key: str, axes: str, value: Tensor) -> Iterator[Arithmetic]:
    """Yields the arithmetic value = r x for the latest value x of equal shape, if it gives the value."""
    x = next((one for _, _, one in reversed(sources.seen) if one.shape == value.shape), None)
    if x is None or "t" in axes:
        return
    rate = float((value * x).sum() / x.square().sum().clamp_min(1e-12))
    if close(rate * x, value):

        def cell(head: int, row: int, column: int) -> str:
            at = (row, column) if x.dim() == 2 else (row, head, column)
            return f"{say(rate)}·{say(float(x[at]))} = {say(rate * float(x[at]))}"

        yield Arithmetic(f"{say(rate)} · x", cell)


RULES = (_scores, _softmax, _weighted, _product, _norm, _rotation, _activation, _sum, _scaled)


# Steps without a rule


def lookup(tokens: Tensor, table: Tensor, x: Tensor) -> Arithmetic | None:
    """Returns the arithmetic of the embedding x (s, d) as a lookup of the tokens' rows (s,) in the table (v, d); None
    if x is made otherwise."""
    rows = table[tokens].float()
    if not close(rows, x):
        return None

    def cell(head: int, row: int, column: int) -> str:
        return f"E[{int(tokens[row])}, {column}] = {say(float(rows[row, column]))}"

    return Arithmetic("x = E[token]", cell)


def masked(before: Tensor, scores: Tensor) -> Arithmetic:
    """Returns the arithmetic of masked scores (n, s, t), computed from the scores before the mask."""

    def cell(head: int, row: int, column: int) -> str:
        found = float(scores[head, row, column])
        added = "(−∞)" if found == -math.inf else "0"
        return f"{signed(float(before[head, row, column]))} + {added} = {say(found)}"

    return Arithmetic("scores + mask,  mask = 0 or −∞", cell)


def given(x: Tensor) -> Arithmetic:
    """Returns the arithmetic of an input x (s, d), which is not computed: each element is shown."""
    return Arithmetic("x", lambda head, row, column: f"x[{row}, {column}] = {say(float(x[row, column]))}")


def position_of(module: Any, x: Tensor) -> Arithmetic | None:
    """Returns the arithmetic of the vectors x (s, d) of positions 0 to s - 1 that an encoding adds to the embedding:
    rows of its table, or sines and cosines; None for others."""
    length, width = x.shape
    places = torch.arange(length, device=x.device)
    table = dict(module.named_parameters()).get("weight")
    if table is not None:
        rows = table[places + vars(module).get("offset", 0)].detach().float()
        if close(rows, x):
            return Arithmetic(
                "P[position]", lambda head, row, column: f"P[{row}, {column}] = {say(float(rows[row, column]))}"
            )
    base = float(vars(module).get("base", 0.0))
    if base <= 1 or width % 2:
        return None
    angle = places[:, None] * base ** (-torch.arange(0, width, 2, device=x.device) / width)
    interleaved = torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)
    in_turn = close(interleaved, x)
    if not in_turn and not close(torch.cat((angle.sin(), angle.cos()), -1), x):
        return None

    def cell(head: int, row: int, column: int) -> str:
        pair, late = (column // 2, column % 2 == 1) if in_turn else (column % (width // 2), column >= width // 2)
        name, wave = ("cos", math.cos) if late else ("sin", math.sin)
        return f"{name}({row} / {base:g}^({2 * pair}/{width})) = {say(wave(float(angle[row, pair])))}"

    return Arithmetic(f"P = sin θ and cos θ,  θ = position / {base:g}^(2i/d)", cell)


def projected(x: Tensor, weights: Tensor, logits: Tensor) -> Arithmetic:
    """Returns the arithmetic of logits (s, k) of k tokens, from x (s, d) and their rows (k, d) of the head."""
    plain = close(x @ weights.T, logits)

    def cell(head: int, row: int, column: int) -> str:
        words = dot(x[row], weights[column])
        return words if plain else f"{words};  after the head's scale, bias or cap {say(float(logits[row, column]))}"

    formula = "logits = x̂ W_head" + ("" if plain else ", then scale, bias or cap")
    return Arithmetic(formula, cell, lambda head: ProductFactors(x, weights.T, ("x̂", "W_head"), "d"))


def probabilities(logits: Tensor, columns: Tensor) -> Arithmetic:
    """Returns the arithmetic of the softmax of logits (s, v), for the tokens of the columns."""

    def cell(head: int, row: int, column: int) -> str:
        at = int(columns[column])
        total = float(logits[row].logsumexp(-1))
        return (
            f"e^{signed(float(logits[row, at]))} / Σ e^logit over {logits.shape[1]:,} tokens = "
            f"e^({say(float(logits[row, at]))} − {signed(total)}) = {say(math.exp(float(logits[row, at]) - total))}"
        )

    return Arithmetic("p = softmax(logits)", cell)


def sizes_of(layers: Sequence[Tensor]) -> tuple[Tensor, Arithmetic]:
    """Returns (sizes, their arithmetic): sizes (s, l), the root mean square of each token's residual stream (s, d)
    after each of l layers."""

    def cell(head: int, row: int, column: int) -> str:
        squares = layers[column][row].square()
        more = f" + … ({len(squares) - TERMS} more)" if len(squares) > TERMS else ""
        written = " + ".join(say(float(one)) for one in squares[:TERMS])
        return f"√(({written}{more}) / {len(squares)}) = {say(math.sqrt(float(squares.mean())))}"

    sizes = torch.stack([x.square().mean(-1).sqrt() for x in layers], -1)
    return sizes, Arithmetic("size = √(mean(x²))", cell)
