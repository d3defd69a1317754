"""Paired intervals over seeds, and the verdicts that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from glassformer.runs.results import RunResult, Verdict


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


def verdicts(runs: Sequence[RunResult], confidence: float = 0.95) -> list[Verdict]:
    """Every other arm against the first that finished two seeds, by validation loss, over the seeds both finished.

    difference = loss(b) - loss(a): positive favours a. One seed gives no verdict. The two runs of a pair have initial
    weights drawn by the same rule, and so do all pairs of a verdict: the rule with the most pairs is taken, of several
    the latest."""
    names = list(dict.fromkeys(run.name for run in runs))
    losses: dict[str, dict[int, dict[int, float]]] = {name: {} for name in names}
    """name -> rule of the weights -> seed -> loss"""
    for run in runs:
        if run.status == "ok" and run.validation is not None:
            losses[run.name].setdefault(run.weights, {})[run.seed] = run.validation.loss
    a = next((name for name in names if any(len(seeds) > 1 for seeds in losses[name].values())), None)
    if a is None:
        return []
    found = []
    for b in (name for name in names if name != a):
        pairs = {rule: losses[a][rule].keys() & losses[b][rule].keys() for rule in losses[a].keys() & losses[b].keys()}
        rule = max(pairs, key=lambda rule: (len(pairs[rule]), rule), default=None)
        if rule is not None and len(pairs[rule]) > 1:
            gaps = [losses[b][rule][seed] - losses[a][rule][seed] for seed in sorted(pairs[rule])]
            found.append(_verdict(a, b, gaps, confidence))
    return found


def _verdict(a: str, b: str, differences: list[float], confidence: float) -> Verdict:
    mean, low, high = paired_interval(differences, confidence)
    return Verdict(
        a=a, b=b, metric="validation.loss", difference=mean, low=low, high=high, confidence=confidence,
        seeds=len(differences),
        verdict="a better" if low > 0 else "b better" if high < 0 else "no difference shown",
    )  # fmt: skip


def stand_in(runs: Sequence[RunResult], found: Sequence[Verdict]) -> list[str]:
    """A note if the verdicts `found` are not against the first arm."""
    if not found or (a := found[0].a) == (first := runs[0].name):
        return []
    return [f"{first} has not finished two seeds: the verdicts are against {a}, the first arm that has."]
