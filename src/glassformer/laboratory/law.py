"""Scaling laws, fitted to runs: robust, from many starts, with bootstrap intervals over runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar, nnls

from glassformer.errors import RequestError, check_whole
from glassformer.laboratory.forms import FORMS, LARGEST, Form
from glassformer.laboratory.points import Numbers, Points, Source, points
from glassformer.typed import typed

DELTA = 1e-3
"""Error of log loss at which Huber's loss turns from squares to absolute values (2203.15556, D.3)."""
EXPONENTS = (0.03, 0.06, 0.12, 0.2, 0.3, 0.45, 0.7, 1.0)
POWERS = (0.03, 0.06, 0.12, 0.25, 0.5)
STEEPEST = 10.0
"""Largest exponent: without a bound, bootstrap draws with only two sizes have their optimum at infinity."""
STARTS = 8
"""Number of starts of the optimiser: the best combinations of initial values."""
FURTHEST = 10.0
"""Largest ratio of predicted compute to that of the largest run, unless `far` is asked for. Ladders of published models
missed by 4 % at 200 times (2412.04403)."""
LOOSE = 0.02
"""Mean error of log loss above which a form does not describe the runs: a grid of one seed that followed its law was
off by one per cent, and one that did not by five (docs/scaling.md)."""
DRAWS = 1000
AT_BOUND = "at its bound"
"""Remark on an amplitude of zero, and on an exponent at `STEEPEST`."""
IDLE = "without effect: its term is zero"
"""Remark on an exponent whose term has vanished, so that no loss depends on it."""
SHIFTED = "outside its interval: runs drawn again put it elsewhere"
"""Remark on a parameter outside its bootstrap interval, which depends on single runs."""
SEARCHED = 7.0
"""Half-width, in log N around the optimum of all runs, of the grid on which a bootstrap draw's optimum is searched."""


class Law:
    """Scaling law fitted to the points of runs; `law.alpha` is a fitted parameter, `law.values` has all of them by
    name.

    >>> law = gf.fit_scaling_law("runs.csv")
    >>> law.alpha, law.interval("alpha"), law.remark("alpha"), law.predict(7e9, 1.4e11)
    """

    def __init__(self, form: Form, data: Points, theta: Numbers, delta: float | None, objective: float, reached: float):
        self.form, self.points, self.theta, self.delta = form, data, theta, delta
        self.objective = objective
        """Minimised sum: Huber's losses of log loss, or half the squares of the loss."""
        self.reached = reached
        """Share of the starts that ended in this fit."""
        self.values = {name: float(value) for name, value in self.figures(theta).items()}

    def __getattr__(self, name: str) -> float:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"a law of this form has no {name!r}; it has {', '.join(values)}")

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        return f"{self.form.formula}: {figures}; fitted to {len(self.points)} runs"

    def predict(self, params: Any, tokens: Any, far: bool = False) -> Any:
        """Returns the loss in nats at `params` parameters and `tokens` tokens, numbers or arrays. Raises RequestError
        beyond `FURTHEST` times the largest compute among the points, unless `far`."""
        asked = self._asked(params, tokens, far)
        found = np.exp(self.form.log_loss(self.theta, self.form.features(asked))[0])
        return float(found[0]) if np.ndim(params) == np.ndim(tokens) == 0 else found

    def predict_interval(
        self, params: float, tokens: float, level: float = 0.95, far: bool = False, run: bool = False
    ) -> tuple[float, float]:
        """Returns the bootstrap interval of the loss that `predict` returns: that of the law, without the noise of a
        run; with `run`, widened by the spread of single runs around the law, the interval in which one run is
        expected."""
        features = self.form.features(self._asked(params, tokens, far))
        drawn = np.array([self.form.log_loss(theta, features)[0][0] for theta in self.draws])
        if run:
            free = len(self.points) / max(len(self.points) - len(self.form.names), 1)
            drawn = drawn + np.random.default_rng(0).choice(self.residuals * free**0.5, size=len(drawn))
        return middle(np.exp(drawn), level)

    def optimal_losses(self, flops: float, far: bool = False) -> Numbers:
        """Returns the lowest loss at a budget of `flops` by each bootstrap fit of the law, (DRAWS,)."""
        best = np.log(self.optimal(flops, far)[0])
        params = np.exp(best + np.linspace(-SEARCHED, SEARCHED, 401))
        features = self.form.features(self._asked(params, flops / 6 / params, far=True))
        return np.array([np.exp(self.form.log_loss(theta, features)[0].min()) for theta in self.draws])

    def _asked(self, params: Any, tokens: Any, far: bool) -> Points:
        n, d = np.broadcast_arrays(np.atleast_1d(np.asarray(params, float)), np.atleast_1d(np.asarray(tokens, float)))
        if not ((n > 0) & (d > 0)).all():
            raise RequestError("params and tokens must be above 0", code="range", field="params")
        asked, most = Points(n, d, np.ones(n.shape), np.array([""] * len(n))), self.points.flops.max()
        if not far:
            refuse_far(float(asked.flops.max()), float(most))
        return asked

    def optimal(self, flops: float, far: bool = False) -> tuple[float, float]:
        """Returns the compute-optimal (parameters N, tokens D), with the lowest loss at a budget of `flops` = 6 N D."""
        if len(self.form.reads) < 2:
            raise RequestError(
                f"{self.form.formula} says nothing of how to share compute; fit a law of N and D",
                code="unsupported", field="form",
            )  # fmt: skip
        self._asked(1.0, flops / 6, far)
        found = minimize_scalar(
            lambda log_n: self.predict(np.exp(log_n), flops / 6 / np.exp(log_n), far=True),
            bounds=(0.0, np.log(flops / 6)), method="bounded", options={"xatol": 1e-9},
        )  # fmt: skip
        params = float(np.exp(found.x))
        return params, flops / 6 / params

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Returns the bootstrap interval of a fitted parameter, over `DRAWS` draws of the runs; `remark` explains a
        value outside the interval."""
        if name not in self.values:
            raise RequestError(code="unknown", field="name", value=name, expected=f"one of {', '.join(self.values)}")
        return middle(self.figures(self.draws)[name], level)

    def remark(self, name: str, level: float = 0.95) -> str | None:
        """Returns the reason why a parameter or its interval is not meaningful: AT_BOUND, IDLE or SHIFTED; None if it
        is."""
        low, high = self.interval(name, level)
        return self._limits.get(name, None if low <= self.values[name] <= high else SHIFTED)

    def figures(self, theta: Numbers) -> dict[str, Numbers]:
        """Returns {name: parameter} of fits theta (..., p); the amplitude of a term that has vanished is zero."""
        gone = np.array([self.form.vanished(row, self._features) for row in np.atleast_2d(theta)])
        settled = theta.copy()
        settled[..., : gone.shape[-1]][gone.reshape(*theta.shape[:-1], -1)] = -np.inf
        return self.form.values(settled)

    @cached_property
    def _features(self) -> tuple[Numbers, Numbers]:
        return self.form.features(self.points)

    @cached_property
    def _limits(self) -> dict[str, str]:
        """Parameter -> remark: AT_BOUND if its fit ends at a bound, IDLE if it is an exponent whose term has vanished;
        a parameter derived from such a one has the same remark."""
        gone = self.form.vanished(self.theta, self._features)
        found = {name: AT_BOUND for name, zero in zip(self.form.amplitudes, gone, strict=True) if zero}
        for name, slopes in zip(self.form.exponents, self._features[0].swapaxes(0, 1), strict=True):
            if gone[slopes.any(1)].all():
                found[name] = IDLE
            elif abs(self.values[name]) > STEEPEST * (1 - 1e-6):
                found[name] = AT_BOUND
        fitted = {name: np.array(self.values[name]) for name in self.form.names}
        with np.errstate(all="ignore"):
            as_fitted = self.form.derived(fitted)
            moved = {name: self.form.derived({**fitted, name: fitted[name] + 1}) for name in found}
        of = {made: name for name, figures in moved.items() for made in figures if figures[made] != as_fitted[made]}
        too_large = {name: AT_BOUND for name, value in self.values.items() if value >= LARGEST}
        return too_large | {made: found[name] for made, name in of.items()} | found

    @cached_property
    def draws(self) -> Numbers:
        """Bootstrap fits (DRAWS, p): runs are drawn with replacement, all points of a run together."""
        return self.refits(DRAWS)

    def refits(self, count: int, seed: int = 0) -> Numbers:
        check_whole("count", count)
        draw = np.random.default_rng(seed)
        names, places = np.unique(self.points.run, return_inverse=True)
        rows = [np.flatnonzero(places == i) for i in range(len(names))]
        return np.array([
            self.refit(np.concatenate([rows[i] for i in draw.integers(len(names), size=len(names))]))
            for _ in range(count)
        ])  # fmt: skip

    def refit(self, rows: Sequence[int] | np.ndarray) -> Numbers:
        """Returns the parameters theta fitted to only the points with indices `rows`, starting from the fit to all."""
        drawn = self.points.take(np.asarray(rows))
        features = self.form.features(drawn)
        start = self.form.lifted(self.theta, features)
        return _descend(self.form, features, np.log(drawn.loss), start, self.delta, ftol=1e-12)[0]

    @property
    def residuals(self) -> Numbers:
        """Relative errors of the fit at each point: the logarithm of measured over fitted loss."""
        return np.log(self.points.loss) - self.form.log_loss(self.theta, self.form.features(self.points))[0]

    @property
    def error(self) -> float:
        """Mean relative error of the fit over the points."""
        return float(np.abs(self.residuals).mean())

    @property
    def describes(self) -> bool:
        """True if the runs follow the form of this law; otherwise its parameters are not meaningful."""
        return self.error < LOOSE

    def without_furthest(self, count: int) -> dict[str, float]:
        """Returns the parameters fitted without the `count` points of largest residual, to show a dependence on few
        points."""
        kept = np.argsort(np.abs(self.residuals), kind="stable")[: len(self.points) - count]
        return {name: float(value) for name, value in self.figures(self.refit(np.sort(kept))).items()}


@typed
def fit_scaling_law(
    source: Source,
    form: str = "chinchilla",
    delta: float | None = DELTA,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> Law:
    """Fits a scaling law to runs.

    The sum over points of Huber(log L - log fitted) is minimised by L-BFGS from the `STARTS` best of a grid of
    exponents, to which the amplitudes are solved by non-negative least squares. The objective is divided by its own
    scale: with the tolerances that optimisers have by default, and errors of a thousandth, they stop after a few
    steps, at estimates that depend on the start (Besiroglu et al. 2024, 2404.10102).

    Parameters
    ----------
    source
        Rows with the columns N (parameters), D (tokens) and loss: mappings, a table, or the path of a .csv file.
    form
        Form of the law: "chinchilla" is loss = E + A / N^alpha + B / D^beta; an unknown name lists the others.
    delta
        Error at which Huber's loss turns from squares to absolute values. If None, the law minimises squares of the
        loss itself, in nats, as some published laws do.
    columns
        Other names of the columns: {"N": "parameters"}.
    where
        Rows to keep: {"model": "llama"}.

    Returns
    -------
    Law
        `.E`, `.A`, `.B`, `.alpha`, `.beta`, `.predict(N, D)`, `.interval("alpha", 0.95)`.

    Raises
    ------
    RequestError
        For too few points, and for points that do not vary in what the form reads.

    Examples
    --------
    >>> rows = [
    ...     {"N": n, "D": d, "loss": 1.7 + 400 / n**0.34 + 410 / d**0.28}
    ...     for n in (1e6, 4e6, 2e7, 1e8) for d in (1e8, 1e9, 1e10)
    ... ]
    >>> law = gf.fit_scaling_law(rows)
    >>> round(law.E, 2), round(law.alpha, 2)
    (1.7, 0.34)
    """
    if form not in FORMS:
        raise RequestError(code="unknown", field="form", value=form, expected=f"one of {', '.join(FORMS)}")
    if delta is not None and not 0 < delta < float("inf"):
        raise RequestError(code="range", field="delta", value=delta, expected="a number above 0")
    chosen, data = FORMS[form], points(source, columns, where)
    if len(data) <= len(chosen.names):
        raise RequestError(
            f"{len(data)} points cannot fit the {len(chosen.names)} figures of {chosen.formula}; give at least "
            f"{len(chosen.names) + 1}, better three times that",
            code="range", field="points", value=len(data), expected=f"at least {len(chosen.names) + 1}",
        )  # fmt: skip
    if missing := chosen.lacks(**{what: different(getattr(data, what)) for what in chosen.reads}):
        raise RequestError(missing, code="conflict", field=next(iter(chosen.reads)))
    features, y = chosen.features(data), np.log(data.loss)
    starts = sorted(
        _starts(chosen, features, data.loss), key=lambda one: _objective(one, chosen, features, y, delta)[0]
    )
    ends = sorted((_descend(chosen, features, y, one, delta) for one in starts[:STARTS]), key=lambda end: end[1])
    theta, objective = ends[0]
    reached = sum(value <= objective * (1 + 1e-4) + 1e-15 for _, value in ends) / len(ends)
    return Law(chosen, data, theta, delta, objective, reached)


def refuse_far(flops: float, most: float) -> None:
    """Raises RequestError for a prediction beyond `FURTHEST` times the compute of the largest run, `most`."""
    if flops > FURTHEST * most * (1 + 1e-9):
        raise RequestError(
            f"{flops:.3g} FLOPs are {flops / most:,.0f} times the largest run's; no data carries a prediction beyond "
            f"{FURTHEST:g} times (give far to override)",
            code="range", field="far", value=flops, expected=f"up to {FURTHEST * most:.3g}",
        )  # fmt: skip


def different(values: Numbers) -> int:
    """Returns the number of distinct values; values within a relative difference of a thousandth count as equal."""
    return len(np.unique(np.round(np.log(values), 3)))


def held_out(source: Source, form: str = "chinchilla", **how: Any) -> dict[str, float]:
    """Tests a law by predicting the runs of most compute from all others. Returns `predicted`, with the interval in
    which one run is expected, `measured`, their mean, and the relative `error` with its interval."""
    data = points(source)
    largest = data.largest()
    law = fit_scaling_law(data.take(~largest), form, **how)
    worst = max(np.flatnonzero(largest), key=lambda i: data.flops[i])
    params, tokens = float(data.params[worst]), float(data.tokens[worst])
    alike = largest & (data.params == params) & (data.tokens == tokens)
    measured = float(data.loss[alike].mean())
    predicted = law.predict(params, tokens, far=True)
    low, high = law.predict_interval(params, tokens, far=True, run=True)
    return {
        "params": params, "tokens": tokens, "predicted": predicted, "low": low, "high": high, "measured": measured,
        "runs": int(alike.sum()), "error": predicted / measured - 1, "error_low": low / measured - 1,
        "error_high": high / measured - 1, "reach": float(data.flops.max() / law.points.flops.max()),
    }  # fmt: skip


def difference(first: Law, second: Law, name: str, level: float = 0.95) -> tuple[float, float, float]:
    """Returns the difference of a parameter between two laws of one form, (second - first, low, high). Bootstrap draws
    take runs of equal names together, so that the choice of sizes and budgets cancels; others independently."""
    drawn = second.figures(_beside(first, second, second.draws))[name] - first.figures(first.draws)[name]
    return second.values[name] - first.values[name], *middle(drawn, level)


def optimal_difference(
    first: Law, second: Law, flops: float, level: float = 0.95, far: bool = False
) -> tuple[float, float, float]:
    """Returns the difference of two laws' lowest losses at a budget of `flops`, (second - first, low, high)."""
    drawn = _beside(first, second, second.optimal_losses(flops, far)) - first.optimal_losses(flops, far)
    losses = [law.predict(*law.optimal(flops, far), far=True) for law in (first, second)]
    return losses[1] - losses[0], *middle(drawn, level)


def _beside(first: Law, second: Law, drawn: Numbers) -> Numbers:
    """Returns the second law's bootstrap values `drawn` in the order that pairs them with the first law's. Runs of
    equal names were drawn together and keep their order; others are shifted by one, because equal indices would be
    correlated."""
    together = np.array_equal(np.unique(first.points.run), np.unique(second.points.run))
    return drawn if together else np.roll(drawn, 1, axis=0)


def _starts(form: Form, features: tuple[Numbers, Numbers], loss: Numbers) -> Iterable[Numbers]:
    """Yields initial parameters for the fit: exponents on a grid, with the amplitudes that fit best; L^(1 / power) is
    linear in amplitudes."""
    slopes, fixed = features
    grid = itertools.product(*[EXPONENTS] * len(form.exponents), POWERS if form.power else (1.0,))
    for *exponents, power in grid:
        terms = np.exp(np.einsum("kjn,j->kn", slopes, np.array(exponents)) + fixed) / loss ** (1 / power)
        heights = terms.max(1)
        amplitudes, _ = nnls((terms / heights[:, None]).T, np.ones(len(loss)))
        amplitudes = np.maximum(amplitudes, 1e-6) / heights
        yield np.concatenate([np.log(amplitudes), exponents, [power] if form.power else []])


def _objective(
    theta: Numbers, form: Form, features: tuple[Numbers, Numbers], y: Numbers, delta: float | None
) -> tuple[float, Numbers]:
    fitted, gradient = form.log_loss(theta, features)
    if delta is None:
        nats = np.exp(fitted)
        error = nats - np.exp(y)
        return float((error**2).sum() / 2), gradient @ (error * nats)
    error = fitted - y
    size = np.abs(error)
    value = np.where(size <= delta, error**2 / 2, delta * (size - delta / 2)).sum()
    return float(value), gradient @ np.clip(error, -delta, delta)


def _descend(
    form: Form, features: tuple[Numbers, Numbers], y: Numbers, theta: Numbers, delta: float | None, ftol: float = 1e-15
) -> tuple[Numbers, float]:
    scale, axes = 10 / (delta or DELTA), _axes(form, features)

    def scaled(at: Numbers) -> tuple[float, Numbers]:
        value, gradient = _objective(axes @ at, form, features, y, delta)
        return scale * value, scale * (gradient @ axes)

    k, j = len(form.amplitudes), len(form.exponents)
    steepest = STEEPEST / np.diag(axes)[k : k + j]
    bounds = [(None, None)] * k + [(-most, most) for most in steepest] + [(None, None)] * bool(form.power)
    with np.errstate(over="ignore", invalid="ignore"):
        end = minimize(scaled, np.linalg.solve(axes, theta), jac=True, method="L-BFGS-B", bounds=bounds,
                       options={"maxiter": 5000, "maxfun": 20000, "ftol": ftol, "gtol": 1e-9})  # fmt: skip
    return axes @ end.x, float(end.fun) / scale


def _axes(form: Form, features: tuple[Numbers, Numbers]) -> Numbers:
    """Returns (p, p) axes with theta = axes @ z, where z has the terms' heights at the mean of the points instead of at
    N = D = 1, and exponents in units of the points' spread. Heights and exponents are then hardly correlated: a fit
    takes half of the steps, and ends nearer to the optimum."""
    slopes = features[0]
    k, j = len(form.amplitudes), len(form.exponents)
    axes = np.eye(len(form.names))
    if j:
        reach = np.maximum(slopes.std(2).max(0), 1e-9)
        axes[k : k + j, k : k + j] = np.diag(1 / reach)
        axes[:k, k : k + j] = -slopes.mean(2) / reach
    return axes


def middle(values: Numbers, level: float) -> tuple[float, float]:
    """Returns the (low, high) quantiles that enclose the central share `level` of the values."""
    if not 0 < level < 1:
        raise RequestError(code="range", field="level", value=level, expected="between 0 and 1")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
