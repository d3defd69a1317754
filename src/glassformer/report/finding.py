"""Sentence under the title of a report: the losses, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Markup, fixed, join, si
from ..runs.arms import LOSS, Arm, last_seen, ranked
from ..runs.results import Results, Verdict
from ..runs.wording import finding
from .html import arm_name


def confidence_words(share: float) -> str:
    """Returns the words for a confidence level: 0.95 is `95 % interval`."""
    return f"{share * 100:.3g} % interval"


def sentence(results: Results, arms: Sequence[Arm]) -> Markup:
    """Returns the finding of a comparison as a sentence, no stronger than its verdicts."""
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
        only = " is the only arm that finished, with a validation loss of "
        return join([arm_name(first), only, _loss(first), "; ", _fates(others), "."])
    second = order[1]
    gap = (second.mean(LOSS) or 0.0) - (first.mean(LOSS) or 0.0)
    body = _single(opening, first, second, gap) if _alone(order) else _many(results, opening, first, second, gap)
    unfinished = [arm for arm in arms if not arm.complete]
    return join([body, " ", _fates(unfinished), "."]) if unfinished else body


def _alone(order: Sequence[Arm]) -> bool:
    """Returns True if one of the two best arms has fewer than two finished seeds, so that the effect of chance on the
    finding is unknown."""
    return min(len(arm.finished) for arm in order[:2]) < 2


def _single(opening: Markup, first: Arm, second: Arm, gap: float) -> Markup:
    """Returns the finding if chance was not measured, as a sentence: the losses of this single trial, without a
    verdict."""
    untested = "; whether another seed would say the same was not tested."
    lead = join([fixed(gap), " below ", arm_name(second)])
    return join([opening, " of this single trial, ", _loss(first), ", ", lead, untested])


def _many(results: Results, opening: Markup, first: Arm, second: Arm, gap: float) -> Markup:
    """Returns the finding for several seeds as a sentence: the arm with the lowest loss, and the verdict against the
    next one."""
    opening = join([opening, f" over {len(first.finished)} seeds, ", _loss(first)])
    pair = results.verdict(first.name, second.name)
    better = [verdict for verdict in results.verdicts if verdict.winner == first.name and not verdict.slight]
    beaten = [verdict.loser or "" for verdict in better]
    beats = join(["; it does beat ", join(map(_named, beaten), ", ")]) if beaten else ""
    if pair is None or (pair.difference is None and pair.winner is None):
        missing = "; no verdict compares the two"
        return join([opening, ", ", fixed(gap), " below ", arm_name(second), missing, beats, "."])
    gap = abs(pair.difference) if pair.difference is not None else gap
    shared = "" if pair.seeds == len(first.finished) else f" on the {pair.seeds} seeds that both finished"
    if pair.winner is not None and pair.decided_by == "divergence":
        winner, loser = (first, second) if pair.winner == first.name else (second, first)
        return join([opening, ", and ", arm_name(winner), " diverged less often than ", arm_name(loser),
                     ", which decides between them."])  # fmt: skip
    if pair.slight:
        return join([opening, "; ", arm_name(second), shared, " is ", finding(pair), _interval(pair), beats, "."])
    if pair.winner == first.name:
        return join([opening, ": ", fixed(gap), " below ", arm_name(second), shared, ", more than chance explains",
                     _interval(pair), "."])  # fmt: skip
    if pair.winner is not None:
        return join([opening, ", but the paired verdict favours ", arm_name(second), shared, _interval(pair), "."])
    if pair.verdict == "equivalent":
        return join([opening, "; ", arm_name(second), shared, " is ", finding(pair), _interval(pair), beats, "."])
    return join([opening, ", but its lead of ", fixed(gap), " over ", arm_name(second), shared,
                 " is not larger than chance allows", _interval(pair), beats, "."])  # fmt: skip


def _named(name: str) -> Markup:
    return arm_name(Arm(0, name, ()), plain=True)


def _loss(arm: Arm) -> str:
    return f"{fixed(arm.mean(LOSS) or 0.0)} nats per token"


def _interval(pair: Verdict) -> str:
    if pair.low is None or pair.high is None:
        return ""
    ends = sorted((abs(pair.low), abs(pair.high))) if pair.low * pair.high > 0 else [pair.low, pair.high]
    tiny = max(map(abs, ends)) < 0.0005  # three decimals would all be zero
    low, high = (f"{one:.2g}" if tiny else fixed(one) for one in ends)
    return f" ({confidence_words(pair.confidence)} {low} to {high})"


def _fates(arms: Sequence[Arm]) -> Markup:
    """Returns the fates of arms with unfinished runs: `x diverged after 120k tokens; y failed in 2 of 3 seeds`."""
    return join((_fate(arm) for arm in arms if arm.trouble), "; ")


def _fate(arm: Arm) -> Markup:
    lost = [run for run in arm.runs if run not in arm.finished]
    words = {"diverged": "diverged", "failed": "failed"}.get(arm.trouble, f"did not finish ({arm.trouble})")
    share = "" if len(arm.runs) == 1 else f" in {len(lost)} of {len(arm.runs)} seeds"
    last = last_seen(lost[0]) if len(lost) == 1 else None
    return join([arm_name(arm), f" {words}", share, f" after {si(last[0])} tokens" if last else ""])
