"""Forms of scaling laws. All are powers of sums of powers, so that log L is a log-sum-exp of terms linear in the fitted
parameters, and one fitter with one gradient serves them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.laboratory.points import Numbers, Points

Values = Mapping[str, Numbers]
FIXED = ""
"""Key of a term's constant, next to those of its fitted exponents."""


LEAST_SHARE = 0.01
VANISHED = 1e-6
"""Share of the loss below which, at every point, a term counts as zero: no run can show it."""
LARGEST = float(np.finfo(float).max)
"""Value of a parameter that overflows, such as Kaplan's N_c if N hardly matters."""


@dataclass(frozen=True)
class Form:
    """Form of a scaling law: log L = power * log sum over terms k of exp(a_k + sum over exponents j of x_j F_kj +
    F_k)."""

    formula: str
    source: str
    amplitudes: tuple[str, ...]
    """Names of the amplitudes e^a_k, one for each term."""
    exponents: tuple[str, ...]
    terms: Callable[[Points], tuple[Mapping[str, Numbers], ...]]
    """Function from points to the features F of each term, by exponent."""
    reads: Mapping[str, int]
    """Quantity that has to vary among the points -> number of different values needed to identify the terms."""
    power: str | None = None
    derived: Callable[[Values], Values] = lambda values: {}
    """Function from the fitted values to further ones derived from them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.amplitudes, *self.exponents, *((self.power,) if self.power else ()))

    def lacks(self, **distinct: int) -> str:
        """Returns a sentence on the quantities with too few `distinct` values in the data to fit this form; empty if
        all suffice."""
        for what, least in self.reads.items():
            if distinct.get(what, least) < 2:
                return f"all runs have an equal number of {what}, so no law of {what} can be seen in them; vary {what}"
            if distinct.get(what, least) < least:
                return f"the runs have {distinct[what]} values of {what}, and {self.formula} takes {least}; add one"
        return ""

    def features(self, points: Points) -> tuple[Numbers, Numbers]:
        """Returns the features F of the points, linear in the fitted parameters: (k, j, n) of the exponents, and (k, n)
        of the constants."""
        terms, none = self.terms(points), np.zeros(len(points))
        of_exponents = np.array([[term.get(name, none) for name in self.exponents] for term in terms])
        return of_exponents.reshape(len(terms), len(self.exponents), len(points)), np.array(
            [term.get(FIXED, none) for term in terms]
        )

    def shares(self, theta: Numbers, features: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        """Returns each term's share of the law's sum at each point, (k, n), and the logarithm of the sum, (n,)."""
        slopes, fixed = features
        k, j = len(self.amplitudes), len(self.exponents)
        terms = theta[:k, None] + np.einsum("kjn,j->kn", slopes, theta[k : k + j]) + fixed
        most = terms.max(0)
        shares = np.exp(terms - most)
        total = shares.sum(0)
        return shares / total, most + np.log(total)

    def lifted(self, theta: Numbers, features: tuple[Numbers, Numbers]) -> Numbers:
        """Returns the parameters theta with raised amplitudes, so that every term has at least `LEAST_SHARE` of the sum
        at one data point or more, because a vanished term has no gradient and could not recover."""
        most = self.shares(theta, features)[0].max(1)
        lifted = theta.copy()
        lifted[: len(most)] += np.log(np.maximum(LEAST_SHARE / np.maximum(most, 1e-300), 1.0))
        return lifted

    def vanished(self, theta: Numbers, features: tuple[Numbers, Numbers]) -> NDArray[np.bool_]:
        """Returns a mask (k,), True for each term whose fitted amplitude is zero, its lower bound, as far as the points
        show."""
        return np.asarray(self.shares(theta, features)[0].max(1) < VANISHED)

    def log_loss(self, theta: Numbers, features: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        """Returns the logarithm of the law's loss at each point, (n,), and its gradient by theta, (p, n). theta: log
        amplitudes, exponents, and the power if there is one."""
        slopes = features[0]
        shares, summed = self.shares(theta, features)
        power = theta[-1] if self.power else 1.0
        gradient = [power * shares, power * np.einsum("kn,kjn->jn", shares, slopes)]
        if self.power:
            gradient.append(summed[None])
        return power * summed, np.concatenate(gradient)

    def values(self, theta: Numbers) -> dict[str, Numbers]:
        """Returns {name: fitted parameter} for theta (..., p), with amplitudes themselves instead of their
        logarithms."""
        k = len(self.amplitudes)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            plain = np.concatenate([np.exp(theta[..., :k]), theta[..., k:]], -1)
            found = dict(zip(self.names, np.moveaxis(plain, -1, 0), strict=True))
            every = {**found, **self.derived(found)}
        return {name: np.nan_to_num(value, posinf=LARGEST) for name, value in every.items()}


def _chinchilla(points: Points) -> tuple[Mapping[str, Numbers], ...]:
    return {}, {"alpha": -np.log(points.params)}, {"beta": -np.log(points.tokens)}


def _kaplan(points: Points) -> tuple[Mapping[str, Numbers], ...]:
    return {"ratio": -np.log(points.params)}, {FIXED: -np.log(points.tokens)}


def _kaplan_params(points: Points) -> tuple[Mapping[str, Numbers], ...]:
    return ({"alpha_N": -np.log(points.params)},)


def _overtraining(points: Points) -> tuple[Mapping[str, Numbers], ...]:
    ratio, flops = np.log(points.tokens / points.params), np.log(points.flops)
    return {}, {"eta": ratio - flops}, {"eta": -ratio - flops}


def _of_one(what: str, exponent: str) -> Callable[[Points], tuple[Mapping[str, Numbers], ...]]:
    return lambda points: ({}, {exponent: -np.log(getattr(points, what))})


FORMS = {
    "chinchilla": Form(
        "L = E + A N^-alpha + B D^-beta", "Hoffmann et al. 2022, 2203.15556", ("E", "A", "B"), ("alpha", "beta"),
        _chinchilla, {"params": 3, "tokens": 3}, derived=lambda v: {"a": v["beta"] / (v["alpha"] + v["beta"])},
    ),
    "kaplan": Form(
        "L = ((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D", "Kaplan et al. 2020, 2001.08361", ("Nc_to_ratio", "Dc"),
        ("ratio",), _kaplan, {"params": 2, "tokens": 2}, power="alpha_D",
        derived=lambda v: {"alpha_N": v["ratio"] * v["alpha_D"], "Nc": v["Nc_to_ratio"] ** (1 / v["ratio"])},
    ),
    "kaplan_params": Form(
        "L = (Nc / N)^alpha_N", "Kaplan et al. 2020, 2001.08361, equation 1.1", ("Nc_to_alpha_N",), ("alpha_N",),
        _kaplan_params, {"params": 2}, derived=lambda v: {"Nc": v["Nc_to_alpha_N"] ** (1 / v["alpha_N"])},
    ),
    "overtraining": Form(
        "L = E + (a M^eta + b M^-eta) C^-eta with M = D / N, C = 6 N D", "Gadre et al. 2024, 2403.08540",
        ("E", "a", "b"), ("eta",), _overtraining, {"params": 2, "tokens": 2},
    ),
    "params": Form("L = E + A N^-alpha", "", ("E", "A"), ("alpha",), _of_one("params", "alpha"), {"params": 3}),
    "tokens": Form("L = E + B D^-beta", "", ("E", "B"), ("beta",), _of_one("tokens", "beta"), {"tokens": 3}),
    "compute": Form("L = E + A C^-gamma with C = 6 N D", "", ("E", "A"), ("gamma",), _of_one("flops", "gamma"),
                    {"flops": 3}),
}  # fmt: skip
