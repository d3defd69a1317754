"""What several seeds allow to say."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any


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


def verdicts(runs: list[dict[str, Any]], confidence: float = 0.95) -> list[dict[str, Any]]:
    """Every other arm against the first that finished two seeds, by validation loss, over the seeds both finished.

    difference = loss(b) - loss(a), so a positive one favours a. One seed gives none: nothing can be said."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    losses = {
        (run["name"], run["seed"]): run["validation"]["loss"]
        for run in runs
        if run["status"] == "ok" and run.get("validation")
    }
    found = []
    a = next((name for name in names if sum(name == other for other, _ in losses) > 1), None)
    for b in (name for name in names if a is not None and name != a):
        seeds = sorted(seed for name, seed in losses if name == a and (b, seed) in losses)
        if len(seeds) < 2:
            continue
        mean, low, high = paired_interval([losses[b, seed] - losses[a, seed] for seed in seeds], confidence)
        verdict = "a better" if low > 0 else "b better" if high < 0 else "no difference shown"
        found.append(
            {"a": a, "b": b, "metric": "validation.loss", "difference": mean, "low": low, "high": high,
             "confidence": confidence, "seeds": len(seeds), "verdict": verdict}
        )  # fmt: skip
    return found


def stand_in(runs: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """A note where the verdicts `found` are not against the first arm."""
    if not found or (a := found[0]["a"]) == (first := runs[0]["name"]):
        return []
    return [f"{first} has not finished two seeds: the verdicts are against {a}, the first arm that has."]
