"""Growth of the compute-optimal size with compute, estimated from runs without a law of the loss (2203.15556,
approaches 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from glassformer.errors import RequestError
from glassformer.laboratory.points import Points

NEAR = 0.05
"""Relative difference below which budgets count as equal."""
LEAST = 4
"""Fewest sizes of a budget that a parabola is fitted to."""


@dataclass(frozen=True)
class Optimum:
    flops: float
    params: float
    tokens: float
    inside: bool
    """True if the optimum is between two measured sizes."""


@dataclass(frozen=True)
class Allocation:
    """Compute-optimal growth of model and data with compute: exponents N_opt ~ C^a and D_opt ~ C^b, fitted to the
    `optima` of several budgets."""

    a: float
    b: float
    optima: tuple[Optimum, ...]


def budgets(points: Points, near: float = NEAR) -> list[Points]:
    """Returns the runs' points grouped by their budget of compute, smallest first."""
    order = np.argsort(points.spent, kind="stable")
    steps = np.diff(np.log(points.spent[order])) > np.log1p(near)
    return [points.take(rows) for rows in np.split(order, np.flatnonzero(steps) + 1)]


def on_budgets(points: Points) -> Points:
    """Returns points at common budgets of compute, interpolated between the budgets of each size (monotone cubic in
    logarithms) without extrapolation, for runs on a grid of sizes and tokens. Returns the points unchanged if two
    budgets have `LEAST` sizes already, or if interpolation is impossible."""
    if sum(len(np.unique(group.params)) >= LEAST for group in budgets(points)) >= 2:
        return points
    sizes = []
    for params in np.unique(points.params):
        own = points.take(points.params == params)
        tokens = np.unique(own.tokens)
        if len(tokens) >= 3:
            losses = np.array([own.loss[own.tokens == d].mean() for d in tokens])
            sizes.append((params, (own.spent / own.tokens).mean(), np.log(tokens), np.log(losses)))
    if len(sizes) < LEAST:
        return points
    ends = [each * np.exp(tokens[[0, -1]]) for _, each, tokens, _ in sizes]
    low, high = (np.log2(pick(ends)) for pick in (np.min, np.max))
    read = []
    for flops in 2 ** np.linspace(low, high, 2 * max(round(high - low), 1) + 1):
        at = [(n, np.log(flops / own), tokens, losses) for n, own, tokens, losses in sizes]
        inside = [one for one in at if one[2][0] - 1e-9 <= one[1] <= one[2][-1] + 1e-9]
        if len(inside) >= LEAST:
            read += [(n, np.exp(d), np.exp(PchipInterpolator(t, y)(d)), flops) for n, d, t, y in inside]
    if not read:
        return points
    n, d, loss, flops = np.array(read, dtype=float).T
    return Points(n, d, loss, np.arange(len(n)).astype(str), counted=flops)


@dataclass(frozen=True)
class Parabola:
    """Parabola fitted to the losses at one budget: loss = height + bend (log N - log best)^2."""

    optimum: Optimum
    bend: float
    height: float
    points: Points

    def at(self, params: Any) -> Any:
        return self.height + self.bend * np.log(params / self.optimum.params) ** 2


def parabolas(points: Points) -> Allocation:
    """Estimates compute-optimal growth by approach 2: a parabola in log N through the losses of each budget. If the
    optimum is not in the middle of the sizes it is biased, even without noise: a complement of a fitted law, not a
    substitute."""
    found = [one.optimum for one in each_parabola(points)]
    return _allocation(found, f"fewer than two budgets have {LEAST} sizes on both sides of a lowest loss")


def each_parabola(points: Points) -> list[Parabola]:
    """Returns the parabola of each budget that has enough sizes and bends upwards."""
    found = []
    for group in budgets(points):
        if len(np.unique(group.params)) < LEAST:
            continue
        at = np.log(group.params)
        bend, slope, height = np.polyfit(at - at.mean(), group.loss, 2)
        if bend <= 0:
            continue
        middle = -slope / (2 * bend)
        best, inside = at.mean() + middle, at.min() < at.mean() + middle < at.max()
        optimum = _optimum(float(np.exp(best)), group, inside)
        found.append(Parabola(optimum, float(bend), float(height - bend * middle**2), group))
    return found


def lowest(points: Points) -> Allocation:
    """Estimates compute-optimal growth by approach 1: the run with the lowest loss of each budget."""
    found = []
    for group in budgets(points):
        if len(np.unique(group.params)) < 2:
            continue
        best = group.params[group.loss.argmin()]
        found.append(_optimum(float(best), group, bool(group.params.min() < best < group.params.max())))
    return _allocation(found, "fewer than two budgets were spent on two sizes")


def _optimum(params: float, group: Points, inside: bool) -> Optimum:
    """Returns the optimum of a budget at `params` parameters, with tokens interpolated between the neighbouring
    sizes."""
    order = np.argsort(group.params)
    tokens = np.exp(np.interp(np.log(params), np.log(group.params[order]), np.log(group.tokens[order])))
    return Optimum(float(np.exp(np.log(group.spent).mean())), params, float(tokens), bool(inside))


def _allocation(found: list[Optimum], too_few: str) -> Allocation:
    inside = [one for one in found if one.inside]
    if len(inside) < 2:
        raise RequestError(f"{too_few}, so no optimum can be followed", code="range", field="points")
    flops = np.log([one.flops for one in inside])
    a, b = (np.polyfit(flops, np.log([getattr(one, what) for one in inside]), 1)[0] for what in ("params", "tokens"))
    return Allocation(float(a), float(b), tuple(found))
