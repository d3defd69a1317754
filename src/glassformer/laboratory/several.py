"""Laws of several models that were trained on one grid, and their differences, as typed values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.errors import RequestError, WorkError
from glassformer.figures.plain import plain
from glassformer.files import SCHEMAS
from glassformer.laboratory.cells import CellRun
from glassformer.laboratory.grid import Grid
from glassformer.laboratory.law import FURTHEST, Law, difference, fit_scaling_law, held_out, optimal_difference
from glassformer.laboratory.points import points
from glassformer.laboratory.summary import HeldOut, LawFigure, LawRecord, Unfitted, figures_of, or_why
from glassformer.runs.contrasts import excludes_zero

OTHER_FORM = {"chinchilla": "kaplan", "kaplan": "chinchilla"}
"""Form -> the form fitted in addition: without E, small runs extrapolate differently."""
COMPARED = ("alpha", "beta", "a", "alpha_N", "alpha_D", "eta", "gamma")
"""Parameters that are compared between models: exponents only, since amplitudes move with them."""


@dataclass(frozen=True)
class OtherLaw:
    """Scaling law of another form, fitted to the same runs."""

    form: str
    formula: str
    figures: tuple[LawFigure, ...]
    held_out: HeldOut | Unfitted


@dataclass(frozen=True, kw_only=True)
class ModelLaw(LawRecord):
    """Scaling law of one model among several."""

    model: str
    lost: int
    """Number of runs that diverged or failed, which are left out."""
    not_carried: int
    """Number of requested predictions that are out of reach."""
    beside: OtherLaw | Unfitted | None
    """Law of the form `OTHER_FORM`; None if the form has no other."""


@dataclass(frozen=True)
class NoLaw:
    """Model whose runs do not support a scaling law, with the reason."""

    model: str
    why: str
    lost: int


@dataclass(frozen=True)
class FigureGap:
    """Difference of a law's parameter between two models; `shown` if its interval excludes zero."""

    name: str
    difference: float
    low: float
    high: float
    shown: bool


@dataclass(frozen=True)
class LossGap:
    """Difference between two models of the lowest loss at a budget."""

    flops: float
    difference: float
    low: float
    high: float
    shown: bool


@dataclass(frozen=True)
class LawDifference:
    """Differences between the laws of two models, b minus a."""

    a: str
    b: str
    figures: tuple[FigureGap, ...]
    losses: tuple[LossGap, ...]


@dataclass(frozen=True, kw_only=True)
class LawsRecord:
    """Content of scaling.json.

    Attributes
    ----------
    command
        Command that repeats the runs.
    data, recipe
        Text and recipe that all runs share, as plain values.
    form, grid, notes
        Form of the laws; sizes and budgets; remarks.
    status
        "complete", or the number of finished runs.
    runs : tuple of CellRun
        All runs, with those that diverged.
    laws : tuple of ModelLaw or NoLaw
        A law for each model.
    differences : tuple of LawDifference
        Differences between every two models whose laws describe their runs.
    """

    command: str
    data: dict[str, Any]
    recipe: dict[str, Any]
    form: str
    grid: Grid
    notes: tuple[str, ...]
    status: str
    runs: tuple[CellRun, ...] = ()
    laws: tuple[ModelLaw | NoLaw, ...] = ()
    differences: tuple[LawDifference, ...] = ()

    @property
    def fitted(self) -> list[ModelLaw]:
        """Scaling laws of the models for which one could be fitted."""
        return [law for law in self.laws if isinstance(law, ModelLaw)]

    def check(self) -> None:
        """Raises WorkError if runs failed, or no law could be fitted."""
        if failed := [run for run in self.runs if run.status == "failed"]:
            first = failed[0]
            raise WorkError(
                f"{len(failed)} of {len(self.runs)} runs failed: {first.model}@{first.size}: {first.error}",
                code="failed",
            )  # fmt: skip
        if (unfitted := [law for law in self.laws if isinstance(law, NoLaw)]) and not self.fitted:
            raise WorkError(f"no law could be fitted: {unfitted[0].why}", code="failed")

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of scaling.json."""
        told = {name: plain(getattr(self, name)) for name in LawsRecord.__dataclass_fields__}
        return {"schema": SCHEMAS["scaling"], **told}


def laws(
    runs: Sequence[CellRun], form: str, predict: Sequence[tuple[float, float]] = (), flops: Sequence[float] = (),
    far: bool = False, level: float = 0.95,
) -> tuple[tuple[ModelLaw | NoLaw, ...], tuple[LawDifference, ...]]:  # fmt: skip
    """Fits a scaling law to the runs of each model. Returns the laws, with the reason in place of a law that a model
    has not, and the differences between every two models whose laws describe their runs."""
    names = list(dict.fromkeys(run.model for run in runs))
    fitted, without = dict[str, Law](), dict[str, str]()
    for name in names:
        try:
            own = [run.row for run in runs if run.model == name and run.params and run.tokens]
            fitted[name] = fit_scaling_law(points(own), form)
        except RequestError as why:
            without[name] = str(why)
    most = min((float(law.points.flops.max()) for law in fitted.values()), default=0.0)
    told: list[ModelLaw | NoLaw] = []
    for name in names:
        lost = sum(run.model == name and run.status != "ok" for run in runs)
        if name in without:
            told.append(NoLaw(name, without[name], lost))
            continue
        law, other = fitted[name], OTHER_FORM.get(form)
        carried = [(n, d) for n, d in predict if far or 6 * n * d <= FURTHEST * most]
        told.append(ModelLaw.of(
            law, form, carried, budgets_of(law, flops, most, far), far, level, model=name, lost=lost,
            not_carried=len(predict) - len(carried), beside=_beside(law, other, level) if other else None,
        ))  # fmt: skip
    described = [name for name, law in fitted.items() if law.describes]
    return tuple(told), tuple(
        _pair(a, b, fitted, budgets_of(fitted[a], flops, most, far), level)
        for a, b in itertools.combinations(described, 2)
    )


def budgets_of(law: Law, asked: Sequence[float], most: float, far: bool) -> list[float]:
    """Returns the budgets of compute for compute-optimal predictions: those in `asked` within `FURTHEST` times `most`;
    by default `most` and `FURTHEST` times `most`."""
    if len(law.form.reads) < 2 or not (asked or law.describes):
        return []
    return [one for one in asked if far or one <= FURTHEST * most] if asked else [most, FURTHEST * most]


def _beside(law: Law, form: str, level: float) -> OtherLaw | Unfitted:
    """Fits a scaling law of another form to the runs of `law`; returns it, or the reason why it cannot be fitted."""

    def found() -> OtherLaw:
        other = fit_scaling_law(law.points, form)
        out = or_why(lambda: HeldOut(**held_out(law.points, form)))  # type: ignore[arg-type]
        return OtherLaw(form, other.form.formula, figures_of(other, level), out)

    return or_why(found)


def _pair(a: str, b: str, fitted: dict[str, Law], budgets: list[float], level: float) -> LawDifference:
    first, second = fitted[a], fitted[b]
    gaps = {name: difference(first, second, name, level) for name in COMPARED if name in first.values}
    lowest = {budget: optimal_difference(first, second, budget, level, far=True) for budget in budgets}
    return LawDifference(
        a, b,
        tuple(FigureGap(name, *gap, excludes_zero(*gap[1:])) for name, gap in gaps.items()),
        tuple(LossGap(budget, *gap, excludes_zero(*gap[1:])) for budget, gap in lowest.items()),
    )  # fmt: skip
