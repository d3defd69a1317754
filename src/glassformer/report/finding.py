"""What the figures say and what they do not: the sentence under the title, differences made sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ..figures import Markup, finite, fixed, join, si
from ..runs.arms import LOSS, QUANTITIES, Arm, last_seen, ranked, seed_of
from ..runs.contrasts import contrasts
from ..runs.readable import sequence
from ..runs.results import Results, Verdict
from ..runs.wording import p_value, percent
from .html import arm_name

CONFIDENCE = 0.95
_HIGHER_IS_BETTER = ("tokens_per_second", "accuracy", "speedup")


@dataclass(frozen=True)
class Comparison:
    """A verdict with its direction made sure: `difference` is b minus a, whatever the file's order was."""

    a: str
    b: str
    metric: str
    difference: float | None
    low: float | None
    high: float | None
    confidence: float | None
    seeds: int | None
    verdict: str
    p: float | None = None
    """Adjusted for all verdicts where the file has that."""
    margin: float | None = None
    """Differences up to this count as none."""
    diverged: str = ""
    """How often each arm diverged, where one did."""
    by_divergence: bool = False
    """Whether that decided."""
    terms: str = ""
    """Size, budget, text and learning rate."""

    @property
    def lower_is_better(self) -> bool:
        return not any(word in self.metric for word in _HIGHER_IS_BETTER)

    @property
    def winner(self) -> str | None:
        return {"a better": self.a, "b better": self.b}.get(self.verdict)

    @property
    def loser(self) -> str | None:
        return {"a better": self.b, "b better": self.a}.get(self.verdict)


def comparisons(results: Results, arms: Sequence[Arm]) -> list[Comparison]:
    """The verdicts that can be read."""
    named = {arm.name: arm for arm in arms}
    return [_comparison(verdict, named) for verdict in results.verdicts if verdict.model_fields_set]


def _comparison(raw: Verdict, arms: dict[str, Arm]) -> Comparison:
    """One verdict, turned round where the file gives a minus b."""
    low, difference, high = finite(raw.low), finite(raw.difference), finite(raw.high)
    seeds = finite(raw.seeds)
    made = Comparison(
        _word(raw.a, "?"),
        _word(raw.b, "?"),
        _word(raw.metric, LOSS.name),
        difference,
        low,
        high,
        finite(raw.confidence),
        int(seeds) if seeds is not None else None,
        _verdict_word(raw),
        finite(raw.p if raw.p_holm is None else raw.p_holm),
        finite(raw.margin),
        _diverged(raw),
        raw.decided_by == "divergence",
        _word(raw.terms, ""),
    )
    if "decided_by" in raw.model_fields_set:  # written by a version that always subtracts a
        return made
    if not _is_a_minus_b(made, arms):
        return made
    return replace(made, difference=_minus(difference), low=_minus(high), high=_minus(low))


def _verdict_word(raw: Verdict) -> str:
    """The verdict; where the arms are equivalent, within what."""
    word, share = _word(raw.verdict, "no verdict"), finite(raw.margin_share)
    return f"equivalent within {percent(share)}" if word == "equivalent" and share is not None else word


def _diverged(raw: Verdict) -> str:
    """`llama@1m in 2 of 3 seeds, gpt2@1m in 0 of 3`, if these are counts."""
    lost, ended = ([finite(n) for n in sequence(counts)] for counts in (raw.diverged, raw.ended))
    counts = [n for n in [*lost, *ended] if n is not None]
    if len(lost) != 2 or len(counts) != 4 or not any(lost):
        return ""
    p = finite(raw.p_diverged)
    test = f" (Fisher's exact {p_value(p)})" if p is not None else ""
    return f"diverged: {raw.a} {counts[0]:.0f} of {counts[2]:.0f}, {raw.b} {counts[1]:.0f} of {counts[3]:.0f}{test}"


def _word(value: object, missing: str) -> str:
    return missing if value is None else str(value)


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


def _is_a_minus_b(made: Comparison, arms: dict[str, Arm]) -> bool:
    """Whether the file subtracts b from a: told by the verdict if it names one, else by the two means."""
    if made.difference is None:
        return False
    if made.winner is not None:
        positive_means_a = made.lower_is_better  # for b minus a
        return (made.difference > 0) != (positive_means_a == (made.winner == made.a))
    quantity = QUANTITIES.get(made.metric)
    a, b = (arms[name].mean(quantity) if quantity and name in arms else None for name in (made.a, made.b))
    return a is not None and b is not None and (b - a) * made.difference < 0


def confidence_words(share: float | None) -> str:
    """0.95 is `95 % interval`."""
    return f"{share * 100:.3g} % interval" if share is not None else "interval"


def sentence(arms: Sequence[Arm], verdicts: Sequence[Comparison], pending: bool = False) -> Markup:
    """The finding, computed from the data and no stronger than it; while runs are `pending`, without a verdict."""
    order = [arm for arm in ranked(arms) if arm.finished and arm.mean(LOSS) is not None]
    if not arms:
        return join(["This file holds no runs, so there is nothing to report."])
    if not order:
        return join(["No arm finished: ", _fates(arms), "."])
    first = order[0]
    opening = join([arm_name(first), " reached ", "a" if len(arms) == 1 else "the lowest", " validation loss"])
    if len(arms) == 1:
        return join([opening, " of ", _loss(first), "."])
    if len(order) == 1:
        others = [arm for arm in arms if arm is not first]
        return join(
            [
                arm_name(first),
                " is the only arm that finished, with a validation loss of ",
                _loss(first),
                "; ",
                _fates(others),
                ".",
            ]
        )
    second = order[1]
    gap = (second.mean(LOSS) or 0.0) - (first.mean(LOSS) or 0.0)
    body = _single(opening, first, second, gap) if _alone(order) else _many(opening, order, gap, verdicts, pending)
    unfinished = [arm for arm in arms if not arm.complete]
    return join([body, " ", _fates(unfinished), "."]) if unfinished else body


def _alone(order: Sequence[Arm]) -> bool:
    """Whether chance cannot be judged because some arm has a single seed."""
    return min(len(arm.finished) for arm in order[:2]) < 2


def _single(opening: Markup, first: Arm, second: Arm, gap: float) -> Markup:
    """One seed: what was seen in this one run, and nothing more."""
    return join(
        [
            opening,
            " of this single trial, ",
            _loss(first),
            ", ",
            fixed(gap),
            " below ",
            arm_name(second),
            "; whether another seed would say the same was not tested.",
        ]
    )


def _many(opening: Markup, order: Sequence[Arm], gap: float, verdicts: Sequence[Comparison], pending: bool) -> Markup:
    """Several seeds: the leader, and whether its lead over the next is shown."""
    first, second = order[:2]
    losses = [v for v in verdicts if v.metric in (LOSS.name, "loss")]
    pair = next((v for v in losses if {v.a, v.b} == {first.name, second.name}), None)
    if pair is None and not pending:
        pair = _computed(first, second, order)
    seeds = f" over {len(first.finished)} seeds"
    gap = abs(pair.difference) if pair and pair.difference is not None else gap
    if pair is None:
        return join([opening, seeds, ", ", _loss(first), ", ", fixed(gap), " below ", arm_name(second),
                     "; no interval was computed for this difference."])  # fmt: skip
    shared = "" if pair.seeds in (None, len(first.finished)) else f" on the {pair.seeds} seeds that both finished"
    if pair.by_divergence:
        winner, loser = (first, second) if pair.winner == first.name else (second, first)
        return join([opening, seeds, ", ", _loss(first), ", and ", arm_name(winner), " diverged less often than ",
                     arm_name(loser), ", which decides between them."])  # fmt: skip
    if pair.verdict.startswith("equivalent"):
        return join([opening, seeds, ", ", _loss(first), "; ", arm_name(second), shared, " is ", pair.verdict,
                     _interval(pair), "."])  # fmt: skip
    if pair.winner is None:
        beaten = [v for v in losses if v.winner == first.name]
        shown = "; it does beat " if beaten else ""
        losers = join((_named(v.loser or "") for v in beaten), ", ")
        return join(
            [
                opening,
                seeds,
                ", ",
                _loss(first),
                ", but its lead of ",
                fixed(gap),
                " over ",
                arm_name(second),
                shared,
                " is not larger than chance allows",
                _interval(pair),
                shown,
                losers,
                ".",
            ]
        )
    if pair.winner == first.name:
        return join([opening, seeds, ", ", _loss(first), ": ", fixed(gap), " below ", arm_name(second),
                     shared, ", more than chance explains", _interval(pair), "."])  # fmt: skip
    return join([opening, seeds, ", ", _loss(first), ", but the paired verdict favours ", arm_name(second),
                 shared, _interval(pair), "."])  # fmt: skip


def _computed(first: Arm, second: Arm, arms: Sequence[Arm]) -> Comparison | None:
    """The verdict on two arms that the file, which compares all with one arm, does not have. As the two were chosen by
    their losses, it is that of all pairs together."""
    losses = [
        {(seed_of(run), run.weights): loss for run in arm.finished if (loss := finite(LOSS.of(run))) is not None}
        for arm in arms
    ]
    pairs = [(i, j) for i, j in combinations(range(len(arms)), 2) if len(losses[i].keys() & losses[j].keys()) > 1]
    wanted = sorted((arms.index(first), arms.index(second)))
    if (wanted[0], wanted[1]) not in pairs:
        return None
    blocks = list(dict.fromkeys(key for of_arm in losses for key in of_arm))
    made = contrasts(np.array([[of_arm.get(block, np.nan) for of_arm in losses] for block in blocks]), pairs)
    index = pairs.index((wanted[0], wanted[1]))
    low, high = (float(ends[index]) for ends in made.intervals(1 - CONFIDENCE))
    word = "a better" if low > 0 else "b better" if high < 0 else "no difference shown"
    a, b = (arms[i].name for i in wanted)
    return Comparison(
        a, b, LOSS.name, float(made.difference[index]), low, high, CONFIDENCE, int(made.seeds[index]), word
    )


def _named(name: str) -> Markup:
    return arm_name(Arm(0, name, ()), plain=True)


def _loss(arm: Arm) -> str:
    return f"{fixed(arm.mean(LOSS) or 0.0)} nats per token"


def _interval(pair: Comparison) -> str:
    if pair.low is None or pair.high is None:
        return ""
    ends = sorted((abs(pair.low), abs(pair.high))) if pair.low * pair.high > 0 else [pair.low, pair.high]
    return f" ({confidence_words(pair.confidence)} {fixed(ends[0])} to {fixed(ends[1])})"


def _fates(arms: Sequence[Arm]) -> Markup:
    """`x diverged after 120k tokens; one of three seeds of y failed`."""
    return join((_fate(arm) for arm in arms if arm.trouble), "; ")


def _fate(arm: Arm) -> Markup:
    lost = [run for run in arm.runs if run not in arm.finished]
    words = {"diverged": "diverged", "failed": "failed"}.get(arm.trouble, f"did not finish ({arm.trouble})")
    share = "" if len(lost) == len(arm.runs) else f" in {len(lost)} of {len(arm.runs)} seeds"
    last = last_seen(lost[0]) if len(lost) == 1 else None
    return join([arm_name(arm), f" {words}", share, f" after {si(last[0])} tokens" if last else ""])
