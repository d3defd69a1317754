"""A fitted law as plain data: for the terminal, a page, and programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from glassformer.errors import RequestError
from glassformer.laboratory.isoflop import LEAST, Allocation, each_parabola, lowest, on_budgets, parabolas
from glassformer.laboratory.law import Law, held_out, middle
from glassformer.laboratory.points import Points

CURVES = 8
"""Sizes of which a page draws the losses: the smallest, the largest, and some between."""
FURTHEST_LEFT_OUT = 5
"""Points left out to see what hangs on few of them."""


def summary(
    law: Law,
    form: str,
    predict: list[tuple[float, float]] | None = None,
    flops: list[float] | None = None,
    far: bool = False,
    level: float = 0.95,
) -> dict[str, Any]:
    """Figures with their intervals, what was asked to be predicted, the largest run predicted from the others, the
    other ways to find the compute-optimal size, what hangs on few points, and the fit itself."""
    data = law.points
    without = law.without_furthest(FURTHEST_LEFT_OUT) if len(data) > 3 * len(law.form.names) else {}
    figures = [{**one, "without_furthest": without.get(one["name"])} for one in figures_of(law, level)]
    predicted = []
    for params, tokens in predict or []:
        loss = law.predict(params, tokens, far)
        low, high = law.predict_interval(params, tokens, level, far=True)
        predicted.append({"params": params, "tokens": tokens, "loss": loss, "low": low, "high": high})
    optimal = []
    for budget in flops or []:
        params, tokens = law.optimal(budget, far)
        loss = law.predict(params, tokens, far=True)
        low, high = middle(law.optimal_losses(budget, far=True), level)
        optimal.append({"flops": budget, "params": params, "tokens": tokens, "ratio": tokens / params, "loss": loss,
                        "low": low, "high": high})  # fmt: skip
    budgets = on_budgets(data)
    return {
        "form": form, "formula": law.form.formula, "source": law.form.source, "points": len(data),
        "runs": len(np.unique(data.run)), "left_out": data.left_out, "largest_flops": float(data.flops.max()),
        "level": level, "error": law.error, "worst_error": float(np.abs(law.residuals).max()),
        "describes": law.describes,
        "starts_that_agree": law.reached, "figures": figures, "predicted": predicted, "optimal": optimal,
        "held_out": or_why(lambda: held_out(data, form, delta=law.delta)),
        "allocation": {
            "parabolas": _allocated(parabolas, budgets), "lowest": _allocated(lowest, budgets),
            "read_between": budgets is not data,
        },
        "curves": curves(law), "sizes": sizes(law), "budgets": slices(budgets),
    }  # fmt: skip


def figures_of(law: Law, level: float = 0.95) -> list[dict[str, Any]]:
    """Every figure of the law with its interval, and a `remark` if it is at its bound or outside its interval."""
    return [
        {"name": name, "value": value, "low": low, "high": high, "remark": law.remark(name, level)}
        for name, value in law.values.items()
        for low, high in [law.interval(name, level)]
    ]


def curves(law: Law) -> list[dict[str, Any]]:
    """Measured and fitted loss against tokens, for some of the sizes."""
    return _curves(law, "params", "tokens")


def sizes(law: Law) -> list[dict[str, Any]]:
    """Measured and fitted loss against parameters, for some of the budgets of tokens that several sizes had."""
    return [one for one in _curves(law, "tokens", "params") if len({n for n, _ in one["measured"]}) >= LEAST]


def _curves(law: Law, of: str, along: str) -> list[dict[str, Any]]:
    """The loss along one of N and D at some values of the other: the smallest, the largest, and some between."""
    data = law.points
    values = np.round(np.log(getattr(data, of)), 2)
    there = np.unique(values)
    shown = there[np.unique(np.linspace(0, len(there) - 1, CURVES).round().astype(int))]
    found = []
    for value in shown:
        own = data.take(values == value)
        fixed, moving = float(np.median(getattr(own, of))), getattr(own, along)
        line = np.geomspace(moving.min() / 1.5, moving.max() * 1.5, 25)
        fitted = law.predict(**{of: np.full(len(line), fixed), along: line}, far=True)
        order = np.argsort(moving, kind="stable")
        found.append({
            of: fixed, "measured": np.stack([moving, own.loss], 1)[order].tolist(),
            "fitted": np.stack([line, fitted], 1).tolist(),
        })  # fmt: skip
    return found


def slices(data: Points) -> list[dict[str, Any]]:
    """Of every budget of compute: losses by size, the parabola through them, and its lowest place."""
    found = []
    for one in each_parabola(data):
        line = np.geomspace(one.points.params.min() / 1.2, one.points.params.max() * 1.2, 25)
        found.append({
            "flops": one.optimum.flops, "params": one.optimum.params, "inside": one.optimum.inside, "loss": one.height,
            "measured": np.stack([one.points.params, one.points.loss], 1).tolist(),
            "fitted": np.stack([line, one.at(line)], 1).tolist(),
        })  # fmt: skip
    return found


def _allocated(read: Callable[[Points], Allocation], data: Points) -> dict[str, Any]:
    def found() -> dict[str, Any]:
        allocation = read(data)
        return {"a": allocation.a, "b": allocation.b, "optima": sum(one.inside for one in allocation.optima)}

    return or_why(found)


def or_why(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was found, or `why` it was not."""
    try:
        return find()
    except RequestError as why:
        return {"why": str(why)}
