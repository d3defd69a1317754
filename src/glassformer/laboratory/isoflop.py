"""How compute-optimal size grows with compute, read off runs without a law of loss (2203.15556, approaches 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glassformer.errors import RequestError
from glassformer.laboratory.points import Points

NEAR = 0.05
"""Budgets that differ by less than this share are one."""
LEAST = 4
"""Points of a budget that a parabola is put through."""


@dataclass(frozen=True)
class Optimum:
    flops: float
    params: float
    tokens: float
    inside: bool
    """Whether smaller and larger models than this one were measured."""


@dataclass(frozen=True)
class Allocation:
    """N_opt ~ C^a and D_opt ~ C^b over these optima."""

    a: float
    b: float
    optima: tuple[Optimum, ...]


def budgets(points: Points, near: float = NEAR) -> list[Points]:
    """The points of each budget of compute, from the smallest on."""
    order = np.argsort(points.flops, kind="stable")
    steps = np.diff(np.log(points.flops[order])) > np.log1p(near)
    return [points.take(rows) for rows in np.split(order, np.flatnonzero(steps) + 1)]


def parabolas(points: Points) -> Allocation:
    """Approach 2: a parabola in log N through the losses of each budget. Where the optimum is not in the middle of the
    sizes it is biased, even without noise: a picture beside a fitted law, not instead of one."""
    found = []
    for group in budgets(points):
        if len(np.unique(group.params)) < LEAST:
            continue
        at = np.log(group.params)
        bend, slope, _ = np.polyfit(at - at.mean(), group.loss, 2)
        if bend <= 0:
            continue
        best = at.mean() - slope / (2 * bend)
        found.append(_optimum(float(np.exp(best)), group, at.min() < best < at.max()))
    return _allocation(found, f"fewer than two budgets have {LEAST} sizes on both sides of a lowest loss")


def lowest(points: Points) -> Allocation:
    """Approach 1: of each budget the run with the lowest loss."""
    found = []
    for group in budgets(points):
        if len(np.unique(group.params)) < 2:
            continue
        best = group.params[group.loss.argmin()]
        found.append(_optimum(float(best), group, bool(group.params.min() < best < group.params.max())))
    return _allocation(found, "fewer than two budgets were spent on two sizes")


def _optimum(params: float, group: Points, inside: bool) -> Optimum:
    flops = float(np.exp(np.log(group.flops).mean()))
    return Optimum(flops, params, flops / (6 * params), bool(inside))


def _allocation(found: list[Optimum], too_few: str) -> Allocation:
    inside = [one for one in found if one.inside]
    if len(inside) < 2:
        raise RequestError(f"{too_few}, so no optimum can be followed", code="range", field="points")
    a = np.polyfit(np.log([one.flops for one in inside]), np.log([one.params for one in inside]), 1)[0]
    return Allocation(float(a), float(1 - a), tuple(found))
