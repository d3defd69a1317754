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
    """The quantile of Student's t, p in (0.5, 1): the cumulative distribution by Simpson's rule, inverted by
    bisection, to about 1e-6."""
    density = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def below(x: float, parts: int = 2000) -> float:
        # x = tan(a) keeps heavy tails in reach: integrate density(tan a) / cos^2 a
        end = math.atan(x)
        width = end / parts
        total = 0.0
        for i in range(parts + 1):
            c = math.cos(i * width)
            value = (1 + (math.tan(i * width) ** 2) / df) ** (-(df + 1) / 2) / c**2
            total += value * (1 if i in (0, parts) else 4 if i % 2 else 2)
        return 0.5 + density * total * width / 3

    low, high = 0.0, 1.0
    while below(high) < p:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return (low + high) / 2
