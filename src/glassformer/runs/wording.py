"""Sentences about verdicts, shared by the command line and the report."""

from __future__ import annotations

import re
from collections.abc import Iterator

from glassformer.figures import fixed, with_sign
from glassformer.runs.results import Results, Verdict

UNITS = {"validation.loss": "nats per token"}
BEST = "best"
"""Mark of `Results.best`."""


def verdict_sentence(verdict: Verdict) -> str:
    """Returns a verdict in words: finding, difference with interval and p, divergences, and the terms of the
    verdict."""
    parts = [finding(verdict), *filter(None, (_difference(verdict), _missed(verdict), divergences(verdict)))]
    terms = f", {verdict.terms}" if verdict.terms else ""
    return f"{verdict.b} against {verdict.a}: {'; '.join(parts)}{terms}"


def finding(verdict: Verdict) -> str:
    """Returns the finding: `llama@1m better`, `equivalent within 0.5 %`, `no difference shown` or `no verdict`."""
    if verdict.winner is not None and not verdict.slight:
        return f"{verdict.winner} better"
    if verdict.slight or verdict.verdict == "equivalent":
        lower = f", {verdict.winner} lower by more than chance explains" if verdict.winner is not None else ""
        return f"equivalent within {percent(verdict.margin_share)}{lower}"
    return verdict.verdict


def best_words(results: Results) -> str:
    """Returns the meaning of the mark of the best model, or the reason why no model has it."""
    if results.best is not None:
        return f"● {BEST}: better than every other arm by the verdicts, and equivalent to none."
    return f"No arm has a verdict of better against every other arm, so no arm is marked {BEST}."


def outcome(verdict: Verdict) -> str:
    """Returns a verdict as a clause: the better arm by its lead with interval; if neither is better, the finding with
    the interval of loss(b) - loss(a)."""
    known = verdict.difference is not None and verdict.low is not None and verdict.high is not None
    ends = (verdict.difference or 0.0, verdict.low or 0.0, verdict.high or 0.0)
    if verdict.winner is None:
        words = f" ({fixed(ends[1], 4, signed=True)} to {fixed(ends[2], 4, signed=True)})" if known else ""
        return f"{verdict.a} against {verdict.b}, {verdict.verdict}{words}"
    told = f"{verdict.winner} is better than {verdict.loser}"
    if verdict.decided_by == "divergence" or not known:
        return f"{told}, which diverged more often"
    lead, low, high = ends if verdict.winner == verdict.a else (-ends[0], -ends[2], -ends[1])
    return f"{told} by {fixed(lead, 4)} ({fixed(low, 4)} to {fixed(high, 4)})"


def divergences(verdict: Verdict) -> str:
    """Returns a clause with the numbers of diverged runs of each arm, and their effect on the verdict; empty without
    any."""
    if not any(verdict.diverged) or not verdict.ended:
        return ""
    (of_a, of_b), (a, b) = verdict.diverged, verdict.ended
    told = f"{verdict.b} diverged in {of_b} of {b} seeds, {verdict.a} in {of_a} of {a}"
    test = f" (Fisher's exact {p_value(verdict.p_diverged)})" if verdict.p_diverged is not None else ""
    if verdict.difference is None:
        return told + test
    if verdict.decided_by == "divergence":
        return f"{told}{test}, which decides; the difference is that of the {verdict.seeds} seeds both finished"
    if (leader := verdict.unrewarded) is not None:
        return (
            f"{told}{test}; over the {verdict.seeds} seeds both finished {leader} has the lower loss, which does not "
            "make better what diverged more often"
        )
    return f"{told}{test}, and the difference is that of the {verdict.seeds} seeds both finished"


def without_length(reason: str) -> str:
    """Returns the reason why a model takes no context of some length, without that length."""
    return re.sub(r" and \d+ were asked for", "", reason)


def failures(results: Results) -> Iterator[str]:
    """Yields a sentence on each arm with failures: number, reasons, and a missing verdict."""
    for name in dict.fromkeys(run.name for run in results.runs):
        ended = [run for run in results.runs if run.name == name]
        errors = dict.fromkeys(run.error or "unknown" for run in ended if run.status == "failed")
        if errors:
            lost = sum(run.status == "failed" for run in ended)
            judged = any(name in (verdict.a, verdict.b) for verdict in results.verdicts)
            verdict = "" if judged or len(results.names) < 2 else ", so it has no verdict"
            yield f"{name} failed in {lost} of {len(ended)} seeds{verdict}: {'; '.join(errors)}"


def percent(share: float | None) -> str:
    """Returns a share in per cent: `0.5 %` for 0.005; `the margin` for None."""
    return f"{100 * share:.3g} %" if share is not None else "the margin"


def p_value(p: float) -> str:
    """Returns a p value in words: `p = 0.013`, or `p < 0.001`."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def _difference(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.low is None or verdict.high is None:
        return ""
    unit = UNITS.get(verdict.metric, "") if verdict.unit is None else verdict.unit
    p = verdict.adjusted_p
    holm = " after Holm" if p != verdict.p else ""
    seeds = f"{verdict.seeds} seeds" + (f", {p_value(p)}{holm}" if p is not None else "")
    return (
        f"loss differs by {with_sign(verdict.difference)}{f' {unit}' if unit else ''}, {verdict.confidence:.0%} "
        f"interval {with_sign(verdict.low)} to {with_sign(verdict.high)} ({seeds})"
    )


def _missed(verdict: Verdict) -> str:
    if verdict.verdict != "no difference shown" or verdict.detectable is None or verdict.unrewarded is not None:
        return ""
    return f"a difference of {verdict.detectable:.4f} would have been shown 80 % of the time"
