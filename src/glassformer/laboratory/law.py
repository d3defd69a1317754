"""Scaling laws, fitted to runs: robust, from many starts, with intervals from drawing the runs again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar, nnls

from glassformer.errors import RequestError, check_whole
from glassformer.laboratory.forms import FORMS, Form
from glassformer.laboratory.points import Numbers, Points, points

DELTA = 1e-3
"""Errors of log loss from which on they count by their size and no longer by its square (2203.15556, D.3)."""
EXPONENTS = (0.03, 0.06, 0.12, 0.2, 0.3, 0.45, 0.7, 1.0)
POWERS = (0.03, 0.06, 0.12, 0.25, 0.5)
STARTS = 8
"""Of all combinations of these, the best so many are followed to their end."""
FURTHEST = 10.0
"""Times the largest compute among the points: what lies beyond is not predicted unless asked for. Ladders of published
models missed by 4 % at 200 times (2412.04403)."""
DRAWS = 1000


class Law:
    """A form fitted to points; `law.alpha` is a fitted figure, `law.values` has all of them by name.

    >>> law = gf.fit_scaling_law("runs.csv")
    >>> law.alpha, law.interval("alpha"), law.predict(7e9, 1.4e11)
    """

    def __init__(self, form: Form, data: Points, theta: Numbers, delta: float | None, objective: float, reached: float):
        self.form, self.points, self.theta, self.delta = form, data, theta, delta
        self.objective = objective
        """The sum that was minimised: Huber's losses of log loss, or half the squares of the loss."""
        self.reached = reached
        """Share of the starts followed that ended here."""
        self.values = {name: float(value) for name, value in form.values(theta).items()}

    def __getattr__(self, name: str) -> float:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"a law of this form has no {name!r}; it has {', '.join(values)}")

    def predict(self, params: Any, tokens: Any, far: bool = False) -> Any:
        """The loss in nats of so many parameters and tokens, numbers or arrays. RequestError more than `FURTHEST` times
        beyond the largest compute among the points, but with `far`."""
        asked = self._asked(params, tokens, far)
        found = np.exp(self.form.log_loss(self.theta, self.form.features(asked))[0])
        return float(found[0]) if np.ndim(params) == np.ndim(tokens) == 0 else found

    def predict_interval(
        self, params: float, tokens: float, level: float = 0.95, far: bool = False
    ) -> tuple[float, float]:
        """Where runs drawn again put that prediction: of the law, without the noise of the run itself."""
        features = self.form.features(self._asked(params, tokens, far))
        drawn = [float(np.exp(self.form.log_loss(theta, features)[0][0])) for theta in self.draws]
        return _middle(np.array(drawn), level)

    def _asked(self, params: Any, tokens: Any, far: bool) -> Points:
        n, d = np.broadcast_arrays(np.atleast_1d(np.asarray(params, float)), np.atleast_1d(np.asarray(tokens, float)))
        if not ((n > 0) & (d > 0)).all():
            raise RequestError("params and tokens must be above 0", code="range", field="params")
        asked, most = Points(n, d, np.ones(n.shape), np.array([""] * len(n))), self.points.flops.max()
        if not far and asked.flops.max() > FURTHEST * most * (1 + 1e-9):
            raise RequestError(
                f"{asked.flops.max():.3g} FLOPs are {asked.flops.max() / most:,.0f} times the largest run's; no data "
                f"carries a prediction beyond {FURTHEST:g} times (say far to have it all the same)",
                code="range", field="far", value=float(asked.flops.max()), expected=f"up to {FURTHEST * most:.3g}",
            )  # fmt: skip
        return asked

    def optimal(self, flops: float, far: bool = False) -> tuple[float, float]:
        """(N, D) of the lowest loss with so much compute, 6 N D = flops."""
        if len(self.form.reads) < 2:
            raise RequestError(f"{self.form.formula} says nothing of how to share compute; fit a law of N and D")
        self._asked(1.0, flops / 6, far)
        found = minimize_scalar(
            lambda log_n: self.predict(np.exp(log_n), flops / 6 / np.exp(log_n), far=True),
            bounds=(0.0, np.log(flops / 6)), method="bounded", options={"xatol": 1e-9},
        )  # fmt: skip
        params = float(np.exp(found.x))
        return params, flops / 6 / params

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Where the figure lies when the runs are drawn again, `DRAWS` times with replacement."""
        if name not in self.values:
            raise RequestError(code="unknown", field="name", value=name, expected=f"one of {', '.join(self.values)}")
        return _middle(self.form.values(self.draws)[name], level)

    @cached_property
    def draws(self) -> Numbers:
        """(DRAWS, p): fits to runs drawn with replacement, all points of a run together."""
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
        """Fitted to these rows alone, from here on."""
        drawn = self.points.take(np.asarray(rows))
        features = self.form.features(drawn)
        start = self.form.lifted(self.theta, features)
        return _descend(self.form, features, np.log(drawn.loss), start, self.delta)[0]

    @property
    def residuals(self) -> Numbers:
        """log of measured over fitted loss: relative errors."""
        return np.log(self.points.loss) - self.form.log_loss(self.theta, self.form.features(self.points))[0]

    def without_furthest(self, count: int) -> dict[str, float]:
        """The figures when the `count` points that lie furthest off are left out: what hangs on few points."""
        kept = np.argsort(np.abs(self.residuals), kind="stable")[: len(self.points) - count]
        return {name: float(value) for name, value in self.form.values(self.refit(np.sort(kept))).items()}


def fit_scaling_law(
    source: Points | str | Path | Mapping[str, Sequence[float]] | Iterable[Mapping[str, Any]],
    form: str = "chinchilla",
    delta: float | None = DELTA,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> Law:
    """Fits a scaling law to runs: rows of parameters N, tokens D and loss (see `points` for tables and files).

    The sum over points of Huber(log L - log fitted) is minimised by L-BFGS from the `STARTS` best of a grid of
    exponents, to which the amplitudes are solved by non-negative least squares. The objective is divided by its own
    scale: with the tolerances that optimisers have by default, and errors of a thousandth, they stop after a few
    steps, at estimates that depend on the start (Besiroglu et al. 2024, 2404.10102).

    form    one of FORMS
    delta   where Huber's loss turns from squares to absolute values; 0 < delta, and towards 0 least absolute values.
            None: squares of the loss itself, in nats, which is what some published laws were fitted by

    RequestError: fewer points than the form has figures and one more, or nothing varies that it reads."""
    if form not in FORMS:
        raise RequestError(code="unknown", field="form", value=form, expected=f"one of {', '.join(FORMS)}")
    if delta is not None and not 0 < delta < float("inf"):
        raise RequestError(code="range", field="delta", value=delta, expected="a number above 0")
    chosen, data = FORMS[form], points(source, columns, where)
    if len(data) <= len(chosen.names):
        raise RequestError(
            f"{len(data)} points cannot fit the {len(chosen.names)} figures of {chosen.formula}; give at least "
            f"{len(chosen.names) + 1}, better three times as many",
            code="range", field="points", value=len(data), expected=f"at least {len(chosen.names) + 1}",
        )  # fmt: skip
    for what in chosen.reads:
        different = len(np.unique(np.round(np.log(getattr(data, what)), 3)))
        if different < 2:
            raise RequestError(
                f"all runs have as many {what}, so no law of {what} can be seen in them; vary {what}",
                code="conflict", field=what,
            )  # fmt: skip
    features, y = chosen.features(data), np.log(data.loss)
    starts = sorted(
        _starts(chosen, features, data.loss), key=lambda one: _objective(one, chosen, features, y, delta)[0]
    )
    ends = sorted((_descend(chosen, features, y, one, delta) for one in starts[:STARTS]), key=lambda end: end[1])
    theta, objective = ends[0]
    reached = sum(value <= objective * (1 + 1e-4) + 1e-15 for _, value in ends) / len(ends)
    return Law(chosen, data, theta, delta, objective, reached)


def held_out(source: Any, form: str = "chinchilla", **how: Any) -> dict[str, float]:
    """The run that took the most compute, predicted from all others: `predicted`, `measured` and `error`, relative."""
    data = points(source)
    largest = data.largest()
    law = fit_scaling_law(data.take(~largest), form, **how)
    worst = max(np.flatnonzero(largest), key=lambda i: data.flops[i])
    predicted = law.predict(data.params[worst], data.tokens[worst], far=True)
    return {"params": float(data.params[worst]), "tokens": float(data.tokens[worst]), "predicted": predicted,
            "measured": float(data.loss[worst]), "error": predicted / float(data.loss[worst]) - 1}  # fmt: skip


def difference(first: Law, second: Law, name: str, level: float = 0.95) -> tuple[float, float, float]:
    """(second - first, low, high) of one figure of two laws of a form, their runs drawn apart."""
    drawn = second.form.values(second.draws)[name] - first.form.values(first.draws)[name]
    return second.values[name] - first.values[name], *_middle(drawn, level)


def _starts(form: Form, features: tuple[Numbers, Numbers], loss: Numbers) -> Iterable[Numbers]:
    """Exponents on a grid, with the amplitudes that serve them best: L^(1 / power) is linear in these."""
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
    form: Form, features: tuple[Numbers, Numbers], y: Numbers, theta: Numbers, delta: float | None
) -> tuple[Numbers, float]:
    scale = 10 / (delta or DELTA)

    def scaled(at: Numbers) -> tuple[float, Numbers]:
        value, gradient = _objective(at, form, features, y, delta)
        return scale * value, scale * gradient

    with np.errstate(over="ignore", invalid="ignore"):
        end = minimize(scaled, theta, jac=True, method="L-BFGS-B",
                       options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-9})  # fmt: skip
    return end.x, float(end.fun) / scale


def _middle(values: Numbers, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise RequestError(code="range", field="level", value=level, expected="between 0 and 1")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
