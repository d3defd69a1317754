"""A fitted law as plain data: for the terminal, a page, and programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from glassformer.errors import RequestError
from glassformer.laboratory.isoflop import Allocation, lowest, parabolas
from glassformer.laboratory.law import Law, held_out
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
    figures = [
        {"name": name, "value": value, "low": low, "high": high, "without_furthest": without.get(name)}
        for name, value in law.values.items()
        for low, high in [law.interval(name, level)]
    ]
    predicted = []
    for params, tokens in predict or []:
        loss = law.predict(params, tokens, far)
        low, high = law.predict_interval(params, tokens, level, far=True)
        predicted.append({"params": params, "tokens": tokens, "loss": loss, "low": low, "high": high})
    optimal = []
    for budget in flops or []:
        params, tokens = law.optimal(budget, far)
        loss = law.predict(params, tokens, far=True)
        optimal.append({"flops": budget, "params": params, "tokens": tokens, "ratio": tokens / params, "loss": loss})
    return {
        "form": form, "formula": law.form.formula, "source": law.form.source, "points": len(data),
        "runs": len(np.unique(data.run)), "left_out": data.left_out, "largest_flops": float(data.flops.max()),
        "level": level, "error": float(np.abs(law.residuals).mean()), "worst_error": float(np.abs(law.residuals).max()),
        "starts_that_agree": law.reached, "figures": figures, "predicted": predicted, "optimal": optimal,
        "held_out": _or_why(lambda: held_out(data, form, delta=law.delta)),
        "allocation": {"parabolas": _allocated(parabolas, data), "lowest": _allocated(lowest, data)},
        "curves": curves(law),
    }  # fmt: skip


def curves(law: Law) -> list[dict[str, Any]]:
    """Measured and fitted loss against tokens, for some of the sizes."""
    data = law.points
    sizes = np.unique(np.round(np.log(data.params), 2))
    shown = sizes[np.unique(np.linspace(0, len(sizes) - 1, CURVES).round().astype(int))]
    return [_curve(law, data.take(np.round(np.log(data.params), 2) == size)) for size in shown]


def _curve(law: Law, own: Points) -> dict[str, Any]:
    params = float(np.median(own.params))
    tokens = np.geomspace(own.tokens.min() / 1.5, own.tokens.max() * 1.5, 25)
    fitted = law.predict(np.full(len(tokens), params), tokens, far=True)
    order = np.argsort(own.tokens, kind="stable")
    return {
        "params": params,
        "measured": np.stack([own.tokens, own.loss], 1)[order].tolist(),
        "fitted": np.stack([tokens, fitted], 1).tolist(),
    }


def _allocated(read: Callable[[Points], Allocation], data: Points) -> dict[str, Any]:
    def found() -> dict[str, Any]:
        allocation = read(data)
        return {"a": allocation.a, "b": allocation.b, "optima": sum(one.inside for one in allocation.optima)}

    return _or_why(found)


def _or_why(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return find()
    except RequestError as why:
        return {"why": str(why)}
