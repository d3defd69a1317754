"""Page of a ladder: every rung's loss, the effect of its change, and its costs; or the effects of a factorial
design."""

from __future__ import annotations

from collections.abc import Sequence

from glassformer.figures import (
    Markup,
    copyable,
    count,
    fixed,
    interval_axis,
    interval_domain,
    interval_row,
    join,
    level_axis,
    level_domain,
    level_row,
    si,
    tag,
)
from glassformer.figures.intervals import Domain
from glassformer.laboratory.rungs import LadderArm, LadderPair, LadderRecord
from glassformer.report.html import caption, cell, framed, none, scroll, section
from glassformer.runs.effects import Effect
from glassformer.runs.results import Verdict

_WIDE = 220
_BASE = "against the base"


def render_ladder(found: LadderRecord) -> str:
    """Returns the page of a ladder as HTML text."""
    parts = {
        "ladder": ("From the base", _ladder), "last": ("From the target", _last), "effects": ("Effects", _effects),
        "arms": ("Arms and costs", _arms),
    }  # fmt: skip
    made = {key: (title, section(key, title, part)) for key, (title, draw) in parts.items() if (part := draw(found))}
    title = f"{found.base} to {found.target}"
    notes = [tag("li", note) for note in found.notes]
    header = tag(
        "header", tag("p", "Glassformer ladder", class_="kicker"), tag("h1", title),
        tag("p", " ".join(findings(found)), class_="finding"), copyable(found.command),
        caption(_terms(found)), tag("ul", *notes) if notes else None,
    )  # fmt: skip
    return framed(title, header, made, found.to_dict(), "ladder", "rungs")


def findings(found: LadderRecord) -> list[str]:
    """Returns sentences on the effect of each change of a ladder."""
    if found.design == "factorial":
        return _effect_findings(found)
    told = []
    for at, step in enumerate(found.changes):
        added, last = (_words(found.pairs[key][at].verdict) for key in ("before", "last"))
        if added == last:
            told.append(f"{step}: added in its place or as the last change, it {added}.")
        else:
            told.append(f"{step}: added in its place, it {added}; as the last change, it {last}.")
    whole = _words(found.pairs["base"][-1].verdict)
    return [f"All changes together: {whole}.", *told]


def _effect_findings(found: LadderRecord) -> list[str]:
    if not found.effects:
        return [f"Only {found.whole_seeds} of the seeds were finished by every arm: no effect has an interval."]
    assert found.by_chance is not None  # set together with the effects
    told = [f"{_of(found, one)}: {_effect_words(one)}." for one in found.effects if len(one.of) == 1]
    pairs = [one for one in found.effects if len(one.of) == 2]
    noticed = [one for one in pairs if one.noticed]
    names = "; ".join(f"{_of(found, one)} {fixed(one.effect, 4, signed=True)}" for one in noticed)
    told.append(
        f"{len(noticed)} of {len(pairs)} interactions {'is' if len(noticed) == 1 else 'are'} beyond two standard errors"
        f"{': ' + names if names else ''}; chance gives {found.by_chance:.1%} of them."
    )
    return told


def _of(found: LadderRecord, one: Effect) -> str:
    return " x ".join(found.changes[at] for at in one.of)


def _effect_words(one: Effect) -> str:
    ends = f"{fixed(one.low, 4, signed=True)} to {fixed(one.high, 4, signed=True)}"
    kind = ("lowers the loss" if one.effect < 0 else "raises the loss") if one.shown else "no effect shown"
    return f"{kind} ({fixed(one.effect, 4, signed=True)}; {ends})"


def _words(verdict: Verdict | None) -> str:
    """Returns the effect of a change as text, from the verdict between the arms without and with it."""
    if verdict is None:
        return "has too few finished seeds"
    helps = verdict.winner == verdict.b
    if verdict.winner is not None and verdict.decided_by == "divergence":
        kind = "diverges less often" if helps else "diverges more often"
    elif verdict.winner is not None:
        kind = "lowers the loss" if helps else "raises the loss"
    else:
        alike = verdict.verdict == "equivalent"
        kind = "is shown to make no difference that counts" if alike else "shows no difference"
    if verdict.difference is None or verdict.low is None or verdict.high is None:
        return kind
    ends = f"{fixed(verdict.low, 4, signed=True)} to {fixed(verdict.high, 4, signed=True)}"
    return f"{kind} ({fixed(verdict.difference, 4, signed=True)}; {ends})"


def _terms(found: LadderRecord) -> str:
    rate = "each at its own tuned rate" if found.tuned else "at the rates of the rule by size"
    family = (
        "The intervals of the main effects hold together, and so do those of the interactions"
        if found.design == "factorial"
        else "The intervals of all differences on this page hold together"
    )
    return f"{found.seeds} seeds, {rate}; {found.terms}. {family}, with {found.confidence:.0%} confidence."


def _ladder(found: LadderRecord) -> Markup | None:
    """Returns the figure of the ladder upwards, with the changes added one after the other; None for another design."""
    if not found.pairs:
        return None
    base, before = found.pairs["base"], found.pairs["before"]
    rungs = [before[0].a, *(pair.b for pair in before)]
    levels = level_domain(
        value for at in rungs for arm in [found.arms[at]] for value in (arm.low, arm.high, *arm.losses)
    )
    gaps = _domain([*base, *before])
    heads = ("rung", "validation loss, nats", _BASE, "against the one before")
    first = _row("base", _level(found.arms[rungs[0]], levels), None, None)
    rows = [
        _row(f"+{step}", _level(found.arms[one.b], levels), _gap(one, gaps), _gap(other, gaps))
        for step, one, other in zip(found.changes, base, before, strict=True)
    ]
    axes = ("", level_axis(levels), interval_axis(gaps, _WIDE), interval_axis(gaps, _WIDE))
    words = (
        "Each row adds one change. The dot is the mean over the seeds with the interval of the mean, short "
        "lines are runs; runs of one seed read the same text, so differences are surer than levels. Differences are "
        "loss with the change minus loss without: left of zero the change helps. Filled: significant."
    )
    return join([_table("Rungs", heads, [first, *rows], axes), caption(words)])


def _last(found: LadderRecord) -> Markup | None:
    """Returns the figure that compares the target with the target without each change; None without verdicts."""
    if not found.pairs:
        return None
    pairs, added = found.pairs["last"], found.pairs["before"]
    gaps = _domain([*pairs, *added])
    heads = ("change", "as the last of all", "in its place on the ladder")
    rows = [
        _row(step, _gap(one, gaps), _gap(other, gaps))
        for step, one, other in zip(found.changes, pairs, added, strict=True)
    ]
    axes = ("", interval_axis(gaps, _WIDE), interval_axis(gaps, _WIDE))
    words = (
        "The loss of the target minus that of the target without this change, next to the effect of the "
        "change on the ladder. If the two disagree, the change interacts with others: --design factorial shows how."
    )
    return join([_table("Changes left out", heads, rows, axes), caption(words)])


def _effects(found: LadderRecord) -> Markup | None:
    if not found.effects:
        return None
    gaps = interval_domain(value for one in found.effects for value in (one.low, one.high))
    rows = [_row(_of(found, one), _effect(found, one, gaps), *_effect_figures(one)) for one in found.effects]
    heads = ("change, or two together", "effect on the loss, nats", "effect", "interval", "standard error", "")
    axes = ("", interval_axis(gaps, _WIDE), "", "", "", "")
    words = (
        "An effect is the mean loss of all arms with a change minus that of all without; that of two together is half "
        "of what the effect of one differs by between arms with and without the other."
    )
    return join([_table("Effects", heads, rows, axes), caption(words)])


def _effect(found: LadderRecord, one: Effect, gaps: Domain) -> Markup:
    clear = one.noticed if len(one.of) == 2 else one.shown
    title = f"{_of(found, one)}: {_effect_words(one)}"
    return interval_row(one.effect, one.low, one.high, gaps, title, clear, width=_WIDE)


def _effect_figures(one: Effect) -> tuple[str, str, str, str]:
    ends = f"{fixed(one.low, 4, signed=True)} to {fixed(one.high, 4, signed=True)}"
    noticed = "beyond 2 standard errors" if one.noticed else ""
    return fixed(one.effect, 4, signed=True), ends, fixed(one.error, 4), noticed


def _arms(found: LadderRecord) -> Markup:
    """Returns the HTML table of a ladder's arms: loss and costs, a row each."""
    heads = ("arm", "loss", "parameters", "tokens/s", "peak memory", "state a token", "learning rate")
    rows = [
        _row(
            arm.name, "–" if arm.loss is None else fixed(arm.loss, 4), _si(arm.parameters),
            _count(arm.tokens_per_second), _bytes(arm.peak_memory_bytes),
            _bytes(arm.state_bytes_per_token), _rate(arm.learning_rate) + arm.trouble,
        )
        for arm in found.arms
    ]  # fmt: skip
    words = "Means over the finished seeds. Speed is of training, state what a token adds to the cache of generation."
    return join([_table("Arms", heads, rows), caption(words)])


def _domain(pairs: Sequence[LadderPair]) -> Domain:
    told = [pair.verdict for pair in pairs if pair.verdict is not None]
    return interval_domain(value for one in told for value in (one.low, one.high, one.difference))


def _level(arm: LadderArm, domain: Domain) -> Markup:
    if arm.loss is None:
        return none(arm.trouble or "not measured")
    title = f"{arm.name}: {fixed(arm.loss, 4)} nats"
    picture = level_row(arm.loss, arm.low, arm.high, arm.losses, domain, title)
    return join([picture, tag("small", fixed(arm.loss, 4), f" {arm.trouble}" if arm.trouble else "")])


def _gap(pair: LadderPair, domain: Domain) -> Markup:
    verdict = pair.verdict
    words = _words(verdict)
    if verdict is None or verdict.difference is None:
        return none(words)
    picture = interval_row(
        verdict.difference, verdict.low, verdict.high, domain, words, verdict.winner is not None, width=_WIDE,
        margin=verdict.margin,
    )  # fmt: skip
    return join([picture, tag("small", words)])


def _row(name: str, *cells: object) -> Markup:
    return tag("tr", tag("th", name, scope="row"), *(cell(one) for one in cells))


def _table(label: str, heads: Sequence[str], rows: Sequence[Markup], axes: Sequence[object] = ()) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in heads)))
    foot = tag("tfoot", tag("tr", *(cell(one) for one in axes))) if axes else None
    return scroll(label, tag("table", head, tag("tbody", join(rows)), foot))


def _si(value: float | None) -> str:
    return "–" if value is None else si(value)


def _count(value: float | None) -> str:
    return "–" if value is None else count(value)


def _bytes(value: float | None) -> str:
    return "–" if value is None else f"{si(value)}B"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} "
