"""A fitted law as typed values: for the terminal, a page, and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np

from glassformer.errors import RequestError
from glassformer.figures.plain import plain
from glassformer.laboratory.isoflop import LEAST, Allocation, each_parabola, lowest, on_budgets, parabolas
from glassformer.laboratory.law import Law, held_out, middle
from glassformer.laboratory.points import Numbers, Points

CURVES = 8
"""Most sizes whose losses a page draws: the smallest, the largest, and some between."""
FURTHEST_LEFT_OUT = 5
"""Number of points left out of a second fit, which shows a dependence on few points."""

Line = tuple[tuple[float, float], ...]
"""Points of a curve."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Unfitted:
    """Quantity that the runs do not determine, with the reason, in place of its value."""

    why: str


@dataclass(frozen=True)
class LawFigure:
    """A fitted parameter of a law with its bootstrap interval."""

    name: str
    value: float
    low: float
    high: float
    remark: str | None
    """Warning if the value is at its bound or outside its interval; None otherwise."""
    without_furthest: float | None = None
    """Value fitted without the points of largest residual; None if there are too few points."""


@dataclass(frozen=True)
class Prediction:
    """Predicted loss of a model of `params` parameters trained on `tokens` tokens, with the interval of the law."""

    params: float
    tokens: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class BestUse:
    """Compute-optimal use of a budget: size, tokens, and their loss."""

    flops: float
    params: float
    tokens: float
    ratio: float
    """Tokens per parameter."""
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Test of a law: the largest runs predicted from all others; `error` is relative."""

    params: float
    tokens: float
    predicted: float
    low: float
    high: float
    measured: float
    runs: int
    error: float
    error_low: float
    error_high: float
    reach: float
    """Ratio of the largest run's compute to that of the largest other run."""


@dataclass(frozen=True)
class Exponents:
    """Exponents of compute-optimal growth, N_opt ~ C^a and D_opt ~ C^b, over `optima` budgets."""

    a: float
    b: float
    optima: int


@dataclass(frozen=True)
class Allocations:
    """Compute-optimal growth estimated without a law: by a parabola through each budget, and by the lowest loss of
    each."""

    parabolas: Exponents | Unfitted
    lowest: Exponents | Unfitted
    read_between: bool
    """True if budgets of compute were interpolated between the runs."""


@dataclass(frozen=True)
class SizeCurve:
    """Measured and fitted loss against tokens, at one size."""

    params: float
    measured: Line
    fitted: Line


@dataclass(frozen=True)
class TokensCurve:
    """Measured and fitted loss against parameters, at one number of tokens."""

    tokens: float
    measured: Line
    fitted: Line


@dataclass(frozen=True)
class BudgetCurve:
    """Losses at one budget of compute against parameters, and the parabola through them."""

    flops: float
    params: float
    """Size at the minimum of the parabola."""
    inside: bool
    """True if smaller and larger models were measured."""
    loss: float
    measured: Line
    fitted: Line


@dataclass(frozen=True, kw_only=True)
class LawRecord:
    """A law of one model: parameters with intervals, predictions, and the points that it was fitted to.

    Attributes
    ----------
    form, formula, source
        Name, formula and paper of the form.
    points, runs, left_out
        Points that were fitted, the runs that they are of, and rows without a finite loss.
    largest_flops
        6 N D of the largest run.
    level
        Level of all intervals.
    error, worst_error
        Mean and largest error of the logarithm of the loss.
    describes
        True if the form describes the runs.
    starts_that_agree
        Share of the starts of the optimiser that ended in this fit.
    figures : tuple of LawFigure
        Fitted parameters with their intervals.
    predicted : tuple of Prediction
        Requested predictions.
    optimal : tuple of BestUse
        Compute-optimal size and tokens of each requested budget.
    held_out : HeldOut or Unfitted
        The largest runs predicted from the others.
    allocation : Allocations
        Compute-optimal exponents estimated without the law.
    curves, sizes, budgets
        Curves that pages draw.
    """

    form: str
    formula: str
    source: str
    points: int
    runs: int
    left_out: int
    largest_flops: float
    level: float
    error: float
    worst_error: float
    describes: bool
    starts_that_agree: float
    figures: tuple[LawFigure, ...]
    predicted: tuple[Prediction, ...]
    optimal: tuple[BestUse, ...]
    held_out: HeldOut | Unfitted
    allocation: Allocations
    curves: tuple[SizeCurve, ...]
    sizes: tuple[TokensCurve, ...]
    budgets: tuple[BudgetCurve, ...]

    @classmethod
    def of(
        cls, law: Law, form: str, predict: Sequence[tuple[float, float]] = (), flops: Sequence[float] = (),
        far: bool = False, level: float = 0.95, **more: Any,
    ) -> Self:  # fmt: skip
        """Makes the record of a fitted law: `predict` are sizes and tokens, `flops` budgets of compute. Raises
        RequestError for a prediction that is out of reach, unless `far`."""
        data = law.points
        without = law.without_furthest(FURTHEST_LEFT_OUT) if len(data) > 3 * len(law.form.names) else {}
        budgets = on_budgets(data)
        return cls(
            form=form, formula=law.form.formula, source=law.form.source, points=len(data),
            runs=len(np.unique(data.run)), left_out=data.left_out, largest_flops=float(data.flops.max()), level=level,
            error=law.error, worst_error=float(np.abs(law.residuals).max()), describes=law.describes,
            starts_that_agree=law.reached,
            figures=tuple(replace(one, without_furthest=without.get(one.name)) for one in figures_of(law, level)),
            predicted=tuple(
                Prediction(n, d, law.predict(n, d, far), *law.predict_interval(n, d, level, far=True))
                for n, d in predict
            ),
            optimal=tuple(_best_use(law, budget, far, level) for budget in flops),
            held_out=or_why(lambda: HeldOut(**held_out(data, form, delta=law.delta))),  # type: ignore[arg-type]
            allocation=Allocations(
                parabolas=_allocated(parabolas, budgets), lowest=_allocated(lowest, budgets),
                read_between=budgets is not data,
            ),
            curves=curves(law), sizes=sizes(law), budgets=slices(budgets), **more,
        )  # fmt: skip

    @property
    def values(self) -> dict[str, float]:
        """Fitted parameters of the law, by name."""
        return {one.name: one.value for one in self.figures}

    def to_dict(self) -> dict[str, Any]:
        """Returns the law as plain values."""
        return plain(self)


def _best_use(law: Law, budget: float, far: bool, level: float) -> BestUse:
    params, tokens = law.optimal(budget, far)
    loss = law.predict(params, tokens, far=True)
    return BestUse(
        budget, params, tokens, tokens / params, loss, *middle(law.optimal_losses(budget, far=True), level)
    )  # fmt: skip


def figures_of(law: Law, level: float = 0.95) -> tuple[LawFigure, ...]:
    """Returns every parameter of the law with its interval, and a remark if it is at its bound or outside its
    interval."""
    return tuple(
        LawFigure(name, value, *law.interval(name, level), law.remark(name, level))
        for name, value in law.values.items()
    )


def curves(law: Law) -> tuple[SizeCurve, ...]:
    """Returns measured and fitted loss against tokens, for some of the sizes."""
    return tuple(SizeCurve(*curve) for curve in _curves(law, "params", "tokens"))


def sizes(law: Law) -> tuple[TokensCurve, ...]:
    """Returns measured and fitted loss against parameters, for some of the numbers of tokens that several sizes
    share."""
    found = (TokensCurve(*curve) for curve in _curves(law, "tokens", "params"))
    return tuple(one for one in found if len({n for n, _ in one.measured}) >= LEAST)


def _curves(law: Law, of: str, along: str) -> Iterator[tuple[float, Line, Line]]:
    """Yields curves of the loss along one variable, N or D, at some values of the other: the smallest, the largest, and
    some between. Each is (value, measured points, fitted points)."""
    data = law.points
    values = np.round(np.log(getattr(data, of)), 2)
    there = np.unique(values)
    for value in there[np.unique(np.linspace(0, len(there) - 1, CURVES).round().astype(int))]:
        own = data.take(values == value)
        fixed, moving = float(np.median(getattr(own, of))), getattr(own, along)
        line = np.geomspace(moving.min() / 1.5, moving.max() * 1.5, 25)
        fitted = law.predict(**{of: np.full(len(line), fixed), along: line}, far=True)
        order = np.argsort(moving, kind="stable")
        yield fixed, _line(moving[order], own.loss[order]), _line(line, fitted)


def slices(data: Points) -> tuple[BudgetCurve, ...]:
    """Returns, for every budget of compute, the losses by size and the parabola through them with its minimum."""
    found = []
    for one in each_parabola(data):
        line = np.geomspace(one.points.params.min() / 1.2, one.points.params.max() * 1.2, 25)
        measured, fitted = _line(one.points.params, one.points.loss), _line(line, one.at(line))
        best = one.optimum
        found.append(BudgetCurve(best.flops, best.params, best.inside, one.height, measured, fitted))
    return tuple(found)


def _line(x: Numbers, y: Numbers) -> Line:
    return tuple(zip(x.tolist(), y.tolist(), strict=True))


def _allocated(read: Callable[[Points], Allocation], data: Points) -> Exponents | Unfitted:
    def found() -> Exponents:
        allocation = read(data)
        return Exponents(allocation.a, allocation.b, sum(one.inside for one in allocation.optima))

    return or_why(found)


def or_why(find: Callable[[], Found]) -> Found | Unfitted:
    """Calls `find` and returns its result; if it raises RequestError, returns `Unfitted` with the reason."""
    try:
        return find()
    except RequestError as why:
        return Unfitted(str(why))
