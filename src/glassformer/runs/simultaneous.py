"""Several contrasts judged together: quantiles of Dunnett, Tukey and Šidák, Holm's p values, power of a t test.

`scipy` is imported inside the functions, because the import takes half a second, which pages without intervals save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

NORMAL_NODES, CHI_NODES, POWER_NODES = 128, 256, 512
"""Nodes of the quadratures: over a normal density, over a chi density, and of the power."""
TAIL = 1e-14
"""Probability of the chi density beyond each end of its quadrature."""
NORMAL_REACH = 9.0
"""Standard deviations beyond which a normal density counts as zero."""
POWER = 0.8
"""Share of the experiments in which a difference of the planned size should be shown."""


def student_quantile(level: float, df: float) -> float:
    """Returns c with P(|T| > c) = level for Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - level / 2))


def sidak_quantile(level: float, contrasts: int, df: float) -> float:
    """Returns c with P(any |T_j| > c) <= level for `contrasts` t statistics, with any dependence through a common
    estimate of the variance (Šidák 1967): Student's quantile at 1 - (1 - level)^(1/contrasts)."""
    return student_quantile(-math.expm1(math.log1p(-level) / contrasts), df)


def dunnett_probability(c: float, contrasts: int, df: float) -> float:
    """Returns P(all |T_j| <= c) for the differences between `contrasts` arms and one common arm, which correlate 1/2;
    their common variance is estimated with `df` degrees of freedom (Dunnett 1955):

        P = ∫ f(s) ∫ φ(z) [Φ(z + √2 c s) - Φ(z - √2 c s)]^contrasts dz ds

    with f the density of the square root of chi²(df)/df."""
    from scipy.special import ndtr

    z, z_weights = _normal_nodes()
    s, s_weights = _chi_nodes(df)
    reach = math.sqrt(2) * c * s[:, None]
    inside = (ndtr(z + reach) - ndtr(z - reach)) ** contrasts
    return float(s_weights @ (inside @ z_weights))


@lru_cache
def dunnett_quantile(level: float, contrasts: int, df: float) -> float:
    """Returns c with P(any |T_j| > c) = level; see `dunnett_probability`."""
    from scipy.optimize import brentq

    if contrasts == 1:
        return student_quantile(level, df)
    ends = student_quantile(level, df), sidak_quantile(level, contrasts, df)
    return float(brentq(lambda c: dunnett_probability(c, contrasts, df) - (1 - level), *ends, xtol=1e-12))


@lru_cache
def tukey_quantile(level: float, arms: int, df: float) -> float:
    """Returns c with P(any |T_ij| > c) = level for the differences of all pairs of `arms` arms (Tukey's studentized
    range)."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - level, arms, df)) / math.sqrt(2)


def quantile(level: float, pairs: Sequence[tuple[int, int]], df: float, balanced: bool = True) -> float:
    """Returns c for which the intervals difference ± c standard errors cover all `pairs` together with probability at
    least 1 - level: Student's for one pair, Dunnett's if all share an arm, otherwise the smaller of Tukey's for all
    pairs of these arms and Šidák's. Without `balanced`, pairs have unequal numbers of seeds, and only Šidák's is
    valid."""
    if len(pairs) == 1 or not balanced:
        return sidak_quantile(level, len(pairs), df)
    if set.intersection(*map(set, pairs)):
        return dunnett_quantile(level, len(pairs), df)
    arms = {arm for pair in pairs for arm in pair}
    return min(tukey_quantile(level, len(arms), df), sidak_quantile(level, len(pairs), df))


@lru_cache
def _normal_nodes() -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights with Σ w g(z) = ∫ φ(z) g(z) dz."""
    z, weights = np.polynomial.hermite_e.hermegauss(NORMAL_NODES)
    return z, weights / math.sqrt(2 * math.pi)


@lru_cache
def _legendre_nodes(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights with Σ w g(x) = ∫ g(x) dx over [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(number)
    return nodes, weights


@lru_cache
def _chi_nodes(df: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights with Σ w g(s) = ∫ f(s) g(s) ds for the density f of sqrt(chi²(df) / df)."""
    from scipy.special import chdtri, gammaincinv, gammaln

    low, high = np.sqrt([2 * gammaincinv(df / 2, TAIL) / df, chdtri(df, TAIL) / df])
    x, weights = _legendre_nodes(CHI_NODES)
    s = low + (high - low) * (x + 1) / 2
    log_density = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + (df - 1) * np.log(s) - df * s**2 / 2
    return s, weights * (high - low) / 2 * np.exp(log_density)


def holm(p: Sequence[float]) -> list[float]:
    """Returns the p values adjusted by Holm's method (1979), in the given order: the i-th smallest of m, i from 0, is
    multiplied by m - i, then raised to the one before if that is larger, and at most 1."""
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def power(noncentrality: float, critical: float, df: float) -> float:
    """Returns P(|T| > critical) for a noncentral t: the chance to show a difference of `noncentrality` standard errors.

        P = ∫ [φ(x - noncentrality) + φ(x + noncentrality)] P(chi²(df)/df <= (x/critical)²) dx   over x > 0

    `scipy.stats.nct` is nan for some of these arguments."""
    from scipy.special import chdtr

    low, high = max(0.0, noncentrality - NORMAL_REACH), noncentrality + NORMAL_REACH
    nodes, weights = _legendre_nodes(POWER_NODES)
    x = low + (high - low) * (nodes + 1) / 2
    density = np.exp(-((x - noncentrality) ** 2) / 2) + np.exp(-((x + noncentrality) ** 2) / 2)
    shown = density * chdtr(df, df * (x / critical) ** 2)
    return float(weights @ shown * (high - low) / 2 / math.sqrt(2 * math.pi))


@lru_cache
def detectable(critical: float, df: float, wanted: float = POWER) -> float:
    """Returns the true difference, in standard errors, that a t test with this critical value shows in a share `wanted`
    of experiments."""
    from scipy.optimize import brentq

    high = 2 * critical + 2
    while power(high, critical, df) < wanted:
        high *= 2
    return float(brentq(lambda d: power(d, critical, df) - wanted, 0.0, high, xtol=1e-10))
