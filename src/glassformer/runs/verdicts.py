"""Verdicts: differences between arms that are shown, that are shown to be zero, or that are undecided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from glassformer.runs.contrasts import Array, contrasts
from glassformer.runs.looks import constant_level
from glassformer.runs.results import Finding, RunResult, Verdict
from glassformer.runs.simultaneous import detectable, holm
from glassformer.thresholds import CONFIDENCE, EQUIVALENT

METRIC: Literal["validation.loss"] = "validation.loss"
_BETTER: tuple[Finding, Finding] = ("a better", "b better")

Names = tuple[str, str]


def verdicts(
    runs: Sequence[RunResult],
    pairs: Sequence[Names] | None = None,
    looks: Sequence[int] = (),
    confidence: float = CONFIDENCE,
    margin: float = EQUIVALENT,
) -> list[Verdict]:
    """Returns a verdict for each pair (a, b), by validation loss over the seeds that both finished.

    pairs   names of two arms; by default every other arm against the first that finished two seeds
    looks   numbers of seeds at which verdicts of these runs were seen or are planned to be; see `runs.looks`
    margin  share of a's loss within which two arms count as equivalent

    difference = loss(b) - loss(a): positive favours a. All intervals hold together with the given confidence
    (`runs.contrasts`): Dunnett's for pairs that share an arm, otherwise Tukey's or Šidák's. An arm is better exactly if
    its interval excludes zero. Two arms are equivalent if two one-sided tests put the difference within the margin,
    that is, if the interval of confidence 1 - 2 (1 - confidence) is within it (Schuirmann 1987). One seed gives no
    verdict.

    Runs that diverged are outcomes: arms that diverge unequally often, by Fisher's exact test, are decided by that.
    Otherwise losses are compared over the seeds that both finished, and the arm that diverged more often cannot win.
    With fewer than two such seeds the verdict is `no verdict`."""
    if pairs is None:
        pairs = against_first(runs)
    table = Table.of(runs, pairs)
    family = [pair for pair in pairs if table.shared(pair) > 1]
    losses = _by_loss(table, family, looks, confidence, margin) if family else {}
    found = []
    for pair in pairs:
        ends = _by_divergence(runs, pair)
        if pair in losses or any(ends.diverged):
            # the level of the losses if any, because all tests of one comparison have one level
            level = next(iter(losses.values())).level if losses else _level(looks, pairs, confidence)
            found.append(_verdict(pair, losses.get(pair), ends, confidence, level / len(pairs)))
    return found


def _level(looks: Sequence[int], pairs: Sequence[Names], confidence: float) -> float:
    """Returns the level of significance of each look, equal at all looks, for verdicts on these pairs."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    return constant_level(looks, tuple((names.index(a), names.index(b)) for a, b in pairs), 1 - confidence)


def against_first(runs: Sequence[RunResult]) -> list[Names]:
    """Returns pairs of a reference arm and every other arm: the reference is the first that finished two seeds, else
    the first."""
    names = list(dict.fromkeys(run.name for run in runs))
    finished = [run.name for run in runs if _loss(run) is not None]
    first = next((name for name in names if finished.count(name) > 1), None)
    a = first or next(iter(names), "")
    return [(a, b) for b in names if b != a]


def stand_in(runs: Sequence[RunResult], found: Sequence[Verdict]) -> list[str]:
    """Returns a note if the verdicts `found` are not against the first arm."""
    if not found or (a := found[0].a) == (first := runs[0].name):
        return []
    return [f"{first} has not finished two seeds: the verdicts are against {a}, the first arm that has."]


def _loss(run: RunResult) -> float | None:
    return run.validation.loss if run.status == "ok" and run.validation is not None else None


@dataclass(frozen=True)
class Table:
    """Losses of the arms of some pairs, by seed."""

    names: tuple[str, ...]
    losses: Array
    """Losses (seeds, arms); nan for a run that is missing or did not end."""

    @classmethod
    def of(cls, runs: Sequence[RunResult], pairs: Sequence[Names]) -> Table:
        names = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        losses = {run.key: loss for run in runs if (loss := _loss(run)) is not None and run.name in names}
        seeds = sorted({seed for _, seed in losses})
        rows = [[losses.get((name, seed), np.nan) for name in names] for seed in seeds]
        return cls(names, np.array(rows).reshape(len(seeds), len(names)))

    def shared(self, pair: Names) -> int:
        """Returns the number of seeds that both arms finished."""
        return int(np.isfinite(self.columns(pair)).all(1).sum())

    def columns(self, names: Sequence[str]) -> Array:
        """Returns the losses of the arms with these names, (seeds, names); nan for missing ones."""
        return self.losses[:, [self.names.index(name) for name in names]]


@dataclass(frozen=True)
class _ByLoss:
    """Statistics of a pair from the losses of its finished runs, by the names of Verdict."""

    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    level: float
    degrees_of_freedom: float
    pooled: bool
    margin: float
    margin_share: float
    equivalent: bool
    detectable: float
    seeds: int


def _by_loss(
    table: Table, family: Sequence[Names], looks: Sequence[int], confidence: float, margin: float
) -> dict[Names, _ByLoss]:
    """Returns {pair: statistics of its losses}, with intervals and p values adjusted for all pairs together."""
    names = list(dict.fromkeys(name for pair in family for name in pair))
    losses = table.columns(names)
    pairs = tuple((names.index(a), names.index(b)) for a, b in family)
    level = _level(looks, family, confidence)
    made = contrasts(losses, pairs)
    low, high = made.intervals(level)
    narrow_low, narrow_high = made.intervals(2 * level)
    margins = margin * np.nanmean(losses, axis=0)[[a for a, _ in pairs]]
    within = (narrow_low > -margins) & (narrow_high < margins)
    adjusted, critical = holm(made.p.tolist()), made.critical(level)
    return {
        pair: _ByLoss(
            difference=float(made.difference[i]), low=float(low[i]), high=float(high[i]),
            p=float(made.p[i]), p_holm=adjusted[i], level=level,
            degrees_of_freedom=float(made.df[i]), pooled=bool(made.pooled[i]),
            margin=float(margins[i]), margin_share=margin, equivalent=bool(within[i]),
            detectable=detectable(float(critical[i]), float(made.df[i])) * float(made.error[i]),
            seeds=int(made.seeds[i]),
        )
        for i, pair in enumerate(family)
    }  # fmt: skip


@dataclass(frozen=True)
class _Ends:
    """Numbers of ended and of diverged runs of the arms of a pair, each (of a, of b)."""

    ended: tuple[int, int]
    diverged: tuple[int, int]
    p: float
    """P value of Fisher's exact test that both diverge equally often."""

    @property
    def worse(self) -> int | None:
        """Index, 0 or 1, of the arm that diverged in a larger share of its runs; None for equal shares."""
        first, second = (d / max(n, 1) for d, n in zip(self.diverged, self.ended, strict=True))
        return None if first == second else int(second > first)


def _by_divergence(runs: Sequence[RunResult], pair: Names) -> _Ends:
    ended, diverged = [], []
    for name in pair:
        ends = [run.status for run in runs if run.name == name and run.status != "failed"]
        ended.append(len(ends))
        diverged.append(ends.count("diverged"))
    p = 1.0
    if any(diverged):
        from scipy.stats import fisher_exact

        p = float(fisher_exact([[d, n - d] for d, n in zip(diverged, ended, strict=True)]).pvalue)
    return _Ends((ended[0], ended[1]), (diverged[0], diverged[1]), p)


def _verdict(pair: Names, by_loss: _ByLoss | None, ends: _Ends, confidence: float, level: float) -> Verdict:
    """Returns the verdict on a pair: by divergence if Fisher's exact p is at most `level`, otherwise by the losses."""
    fields: dict[str, Any] = dict.fromkeys(("difference", "low", "high"))
    words: Finding = "no verdict" if by_loss is None else "no difference shown"
    if by_loss is not None:
        fields = asdict(by_loss)
        leader = 0 if by_loss.low > 0 else 1 if by_loss.high < 0 else None
        if leader is not None and leader != ends.worse:
            words = _BETTER[leader]
            fields["decided_by"] = "loss"
        if by_loss.equivalent and leader is None:
            words = "equivalent"
        if ends.worse is not None:
            fields["equivalent"] = False
            words = "no difference shown" if words == "equivalent" else words
    if any(ends.diverged):
        fields |= {"ended": list(ends.ended), "diverged": list(ends.diverged), "p_diverged": ends.p}
        if ends.worse is not None and ends.p <= level:
            words = _BETTER[1 - ends.worse]
            fields["decided_by"] = "divergence"
    a, b = pair
    return Verdict(**{"seeds": 0, **fields}, a=a, b=b, metric=METRIC, confidence=confidence, verdict=words)
