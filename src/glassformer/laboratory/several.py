"""The laws of several models that were trained on one grid, beside each other, as plain data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from glassformer.errors import RequestError
from glassformer.laboratory.law import FURTHEST, Law, difference, fit_scaling_law, held_out, optimal_difference
from glassformer.laboratory.points import points
from glassformer.laboratory.summary import figures_of, or_why, summary
from glassformer.runs.contrasts import excludes_zero

OTHER_FORM = {"chinchilla": "kaplan", "kaplan": "chinchilla"}
"""Fitted beside the form that was asked for: without E, small runs extrapolate otherwise."""
COMPARED = ("alpha", "beta", "a", "alpha_N", "alpha_D", "eta", "gamma")
"""Figures that two models are compared by: exponents, and no amplitudes, which these move."""


def laws(
    rows: Sequence[dict[str, Any]],
    form: str,
    predict: list[tuple[float, float]],
    flops: list[float],
    far: bool = False,
    level: float = 0.95,
) -> dict[str, Any]:
    """`runs`, with those that diverged; the law of each model, or why there is none; and how every two models differ
    whose laws describe their runs.
    `rows` are those of `cells.rows_of`."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    fitted, without, told = dict[str, Law](), dict[str, str](), []
    for name in names:
        try:
            own = [row for row in rows if row["model"] == name and row["params"] and row["tokens"]]
            fitted[name] = fit_scaling_law(points(own), form)
        except RequestError as why:
            without[name] = str(why)
    most = min((float(law.points.flops.max()) for law in fitted.values()), default=0.0)
    for name in names:
        lost = [row for row in rows if row["model"] == name and row["status"] != "ok"]
        if name in without:
            told.append({"model": name, "why": without[name], "lost": len(lost)})
            continue
        law = fitted[name]
        carried = [(n, d) for n, d in predict if far or 6 * n * d <= FURTHEST * most]
        found = summary(law, form, carried, budgets_of(law, flops, most, far), far, level)
        other = OTHER_FORM.get(form)
        told.append({
            "model": name, "lost": len(lost), "not_carried": len(predict) - len(carried), **found,
            "beside": _beside(law, other, level) if other else None,
        })  # fmt: skip
    described = [name for name, law in fitted.items() if law.describes]
    pairs = [
        _pair(a, b, fitted, budgets_of(fitted[a], flops, most, far), level)
        for a, b in itertools.combinations(described, 2)
    ]
    return {"runs": [_plain(row) for row in rows], "laws": told, "differences": pairs}


def budgets_of(law: Law, asked: list[float], most: float, far: bool) -> list[float]:
    """The budgets of compute to share out best: those asked for that runs of up to `most` carry, or `most` and as much
    as they carry."""
    if len(law.form.reads) < 2 or not (asked or law.describes):
        return []
    return [one for one in asked if far or one <= FURTHEST * most] if asked else [most, FURTHEST * most]


def _beside(law: Law, form: str, level: float) -> dict[str, Any]:
    """The same runs in another form."""

    def found() -> dict[str, Any]:
        other = fit_scaling_law(law.points, form)
        return {
            "form": form, "formula": other.form.formula, "figures": figures_of(other, level),
            "held_out": or_why(lambda: held_out(law.points, form)),
        }  # fmt: skip

    return or_why(found)


def _pair(a: str, b: str, fitted: dict[str, Law], budgets: list[float], level: float) -> dict[str, Any]:
    first, second = fitted[a], fitted[b]
    figures = []
    for name in (name for name in COMPARED if name in first.values):
        value, low, high = difference(first, second, name, level)
        figures.append({"name": name, **_gap(value, low, high)})
    losses = []
    for budget in budgets:
        value, low, high = optimal_difference(first, second, budget, level, far=True)
        losses.append({"flops": budget, **_gap(value, low, high)})
    return {"a": a, "b": b, "figures": figures, "losses": losses}


def _gap(value: float, low: float, high: float) -> dict[str, Any]:
    return {"difference": value, "low": low, "high": high, "shown": excludes_zero(low, high)}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {**row, "loss": row["loss"] if math.isfinite(row["loss"]) else None}
