"""Paired intervals over seeds, and the verdicts that follow."""

from __future__ import annotations

from collections.abc import Sequence

from glassformer.runs.intervals import paired_interval
from glassformer.runs.results import RunResult, Verdict


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
