"""Paired intervals: how sure a difference between two arms is, over seeds that both finished."""

from __future__ import annotations

import math
from statistics import fmean, stdev


def paired_interval(differences: list[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of paired differences: mean +- t s / sqrt(n), Student's t with n - 1 degrees of freedom."""
    n = len(differences)
    mean = fmean(differences)
    half = student_t(0.5 + confidence / 2, n - 1) * stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def student_t(p: float, df: int) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit  # half a second that only those pay who ask for an interval

    return float(stdtrit(df, p))
