"""Differences between arms over seeds: randomized blocks, in which every seed is a block that all arms share.

    loss[seed, arm] = mean + effect of the seed + effect of the arm + noise

If all arms have equal variance of the noise, it is estimated from all of them, with (arms - 1)(seeds - 1) degrees of
freedom in place of seeds - 1. If Levene's test rejects that, and for two arms, each difference has the variance of its
pairs, which is the paired t test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.runs.simultaneous import quantile, student_quantile

HOMOGENEOUS = 0.1
"""Smallest p of Levene's test at which variances are pooled."""
SEPARATE = 0.8
"""Share of the level for intervals with separate variances, because a test chose them: with all of it four arms are
wrong up to 5.5 % of the time, with this at most 5.2 %."""
TESTABLE = 3
"""Minimum seeds for a comparison of the variances of arms."""

Array = NDArray[Any]
Pairs = Sequence[tuple[int, int]]
"""Sequence of (a, b): indices of two arms whose difference is b minus a."""


@dataclass(frozen=True)
class Contrasts:
    """Differences b - a of several pairs of arms, with the statistics to judge them together. Arrays are (..., pairs);
    the leading axes are those of independent tables."""

    pairs: tuple[tuple[int, int], ...]
    seeds: Array
    """Number of seeds that both arms have, (pairs,)."""
    difference: Array
    error: Array
    """Standard error of the difference."""
    df: Array
    """Degrees of freedom of the standard error."""
    pooled: Array
    """True if the variance is that of all arms."""
    homogeneity: Array
    """Levene's p, (...,); nan if the test does not apply."""

    @property
    def t(self) -> Array:
        """T statistic of each pair: difference / standard error; infinite if only the error is zero, 0 for no
        difference."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.difference == 0, 0.0, self.difference / self.error)

    @property
    def p(self) -> Array:
        """Two-sided p value of each pair by itself, (..., pairs), not adjusted for the other pairs."""
        from scipy.special import stdtr

        return 2 * stdtr(self.df, -np.abs(self.t))

    def critical(self, level: float) -> Array:
        """Returns the half width of the interval of each difference in standard errors, (..., pairs), so that all
        intervals of a table hold together with probability 1 - level."""
        balanced = len(set(self.seeds.tolist())) == 1
        tested = np.broadcast_to(np.isfinite(self.homogeneity)[..., None], self.df.shape)
        found = np.empty(self.df.shape)
        for pooled, share in ((True, 1.0), (False, SEPARATE), (False, 1.0)):
            kind = (self.pooled == pooled) & (pooled | (tested == (share < 1)))
            for df in np.unique(self.df[kind]).tolist():
                found[kind & (self.df == df)] = quantile(share * level, self.pairs, df, balanced and pooled)
        return found

    def intervals(self, level: float) -> tuple[Array, Array]:
        """Returns the ends (low, high) of the differences' intervals, arrays (..., pairs), as wide as
        `critical(level)`."""
        half = self.critical(level) * self.error
        return self.difference - half, self.difference + half


def contrasts(losses: Array, pairs: Pairs) -> Contrasts:
    """Returns the contrasts of `pairs`. `losses` is (..., seeds, arms), nan for missing runs; every pair needs two
    seeds that both arms have.

    The common variance comes from the seeds that all arms have. A pair with further seeds uses all its seeds for its
    difference; the estimate of the variance is independent of the differences in those seeds as well."""
    gaps = losses[..., [b for _, b in pairs]] - losses[..., [a for a, _ in pairs]]
    there = np.isfinite(gaps).reshape(-1, *gaps.shape[-2:]).all(0)
    seeds = there.sum(0)
    difference = np.where(there, gaps, 0.0).sum(-2) / seeds
    own = (np.where(there, gaps - difference[..., None, :], 0.0) ** 2).sum(-2) / (seeds - 1)
    whole = np.isfinite(losses).reshape(-1, *losses.shape[-2:]).all((0, 2))
    common, df, p = residual_variance(losses[..., whole, :])
    pooled = (p >= HOMOGENEOUS)[..., None] & (df > seeds - 1)
    variance = np.where(pooled, 2 * common[..., None], own)
    return Contrasts(
        pairs=tuple((int(a), int(b)) for a, b in pairs),
        seeds=seeds,
        difference=difference,
        error=np.sqrt(variance / seeds),
        df=np.where(pooled, df, seeds - 1),
        pooled=pooled,
        homogeneity=p,
    )


def residual_variance(table: Array) -> tuple[Array, int, Array]:
    """Returns (variance of the noise (...,), its degrees of freedom, Levene's p (...,)) of whole blocks (..., seeds,
    arms).

    Residuals are losses without the means of their seed and their arm. Levene's test (1960) is an analysis of variance
    of their absolute values; the later form with medians finds nothing in three seeds, because one of three is the
    median. p is nan for two arms, whose residuals mirror each other, and for fewer than TESTABLE seeds."""
    from scipy.special import fdtrc  # `scipy.stats` takes half a second more

    seeds, arms = table.shape[-2:]
    df = (seeds - 1) * (arms - 1)
    if arms < 3 or seeds < TESTABLE:
        missing = np.full(table.shape[:-2], np.nan)
        return missing, df, missing
    residuals = table - table.mean(-1, keepdims=True) - table.mean(-2, keepdims=True)
    residuals += table.mean((-2, -1), keepdims=True)
    sizes = np.abs(residuals)
    of_arms = sizes.mean(-2, keepdims=True)
    between = seeds * ((of_arms - sizes.mean((-2, -1), keepdims=True)) ** 2).sum((-2, -1)) / (arms - 1)
    within = ((sizes - of_arms) ** 2).sum((-2, -1)) / (arms * (seeds - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = fdtrc(arms - 1, arms * (seeds - 1), between / within)
    return (residuals**2).sum((-2, -1)) / df, df, np.asarray(p)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Returns (mean, low, high) of independent values: mean ± t s / sqrt(n), Student's t with n - 1 degrees of
    freedom."""
    n, mean = len(values), fmean(values)
    half = student_quantile(1 - confidence, n - 1) * stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def excludes_zero(low: float, high: float) -> bool:
    """Returns True if the interval of a difference excludes zero."""
    return low > 0 or high < 0
