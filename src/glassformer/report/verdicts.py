"""Section of verdicts: the interval of the loss difference of each pair of arms, all on one axis around zero."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Markup, fixed, interval_axis, interval_domain, interval_row, join, tag
from ..figures.intervals import Domain
from ..runs.arms import Arm
from ..runs.results import Verdict
from ..runs.wording import UNITS, finding, p_value
from .finding import confidence_words
from .html import Absent, arm_name, caption, none, scroll, section


def verdict_section(
    verdicts: Sequence[Verdict], arms: Sequence[Arm], command: str = "", pending: str = ""
) -> Markup | Absent:
    """Returns the section with the table of verdicts; without verdicts, Absent with the reason: `pending` if given, or
    single seeds, with the `command` that adds seeds."""
    if not verdicts:
        if pending:
            return Absent("Verdicts", pending)
        if not arms or any(len(arm.runs) > 1 for arm in arms):
            return Absent("Verdicts", "none were recorded.")
        return Absent("Verdicts", "with one seed per arm, nothing measures chance, so intervals are missing.", command)
    table = _table(verdicts, {arm.name: arm for arm in arms})
    return section("verdicts", "Verdicts", table, caption(_reading(verdicts)))


def _reading(verdicts: Sequence[Verdict]) -> str:
    """Returns the caption of the table of verdicts: the meaning of its bars, dots, bands and p values."""
    words = (
        "Each bar is the interval of a difference between two arms over the seeds of both. It points towards the "
        "arm with the lower loss. If the whole bar is on one side of zero, the pair is decided and its dot filled."
    )
    if any(pair.margin is not None for pair in verdicts):
        words += (
            " The intervals of all pairs hold together. p is that of the difference, adjusted by Holm's method. The "
            "grey band is the margin within which two arms count as equivalent; no difference shown means that neither "
            "a difference nor equivalence is."
        )
    if len(terms := {pair.terms for pair in verdicts}) == 1 and (only := terms.pop()):
        words += f" All of this holds {only}."
    return words


def _table(verdicts: Sequence[Verdict], arms: dict[str, Arm]) -> Markup:
    """Returns the table of verdicts, a row for each pair, with the intervals on one axis."""
    domain = interval_domain(v for pair in verdicts for v in (pair.low, pair.high, pair.difference, pair.margin))
    decimals = 3 if domain[1] < 100 else 0
    unit = UNITS[verdicts[0].metric] if verdicts[0].unit is None else verdicts[0].unit
    title = ["Difference in validation loss", tag("small", unit) if unit else None]
    heads = [
        tag("th", "← lower loss", scope="col", class_="side-left"),
        tag("th", *title, scope="col", class_="plot"),
        tag("th", "lower loss →", scope="col", class_="side-right"),
        tag("th", "Difference", tag("small", "left minus right"), scope="col", class_="figures"),
        tag("th", "Interval", scope="col", class_="figures"),
        tag("th", "p", scope="col", class_="figures"),
        tag("th", "Seeds", scope="col", class_="figures"),
        tag("th", "Verdict", scope="col"),
    ]
    alike = len({pair.terms for pair in verdicts}) == 1
    rows = [_row(pair, domain, decimals, arms, None if alike else pair.terms) for pair in verdicts]
    foot = tag("tr", tag("td"), tag("td", interval_axis(domain), class_="plot"), *(tag("td") for _ in range(6)))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), tag("tfoot", foot), class_="verdicts")
    return scroll("Table of verdicts", table)


def _row(pair: Verdict, domain: Domain, decimals: int, arms: dict[str, Arm], terms: str | None) -> Markup:
    """Returns the table's row for one pair of arms, with each arm on the side of zero on which its loss is lower.
    `terms` are conditions of the verdict, shown below it; None if all pairs share them."""
    difference = _difference(pair, decimals)
    decided, told = pair.winner is not None, finding(pair)
    verdict = join([_name(pair.winner, arms), told.removeprefix(pair.winner)]) if pair.winner else told
    words = f"{pair.b} minus {pair.a}: {difference}; {told}"
    picture = none("no difference recorded") if pair.difference is None else interval_row(
        pair.difference, pair.low, pair.high, domain, words, decided, margin=pair.margin,
    )  # fmt: skip
    return tag(
        "tr",
        tag("th", _name(pair.b, arms), scope="row", class_="side-left"),
        tag("td", picture, class_="plot"),
        tag("td", _name(pair.a, arms), class_="side-right"),
        tag("td", difference, class_="figures"),
        tag("td", _interval(pair, decimals), class_="figures"),
        tag("td", "–" if pair.adjusted_p is None else p_value(pair.adjusted_p).removeprefix("p = "), class_="figures"),
        tag("td", pair.seeds, class_="figures"),
        tag(
            "td",
            verdict,
            *(tag("small", words) for words in (_diverged(pair), terms) if words),
            class_="decided" if decided else "undecided",
        ),
    )


def _diverged(pair: Verdict) -> str:
    """Returns the counts of diverged runs of a pair as text: `diverged: llama@1m 2 of 3, gpt2@1m 0 of 3`; empty without
    any."""
    if not any(pair.diverged) or not pair.ended:
        return ""
    (of_a, of_b), (a, b) = pair.diverged, pair.ended
    test = f" (Fisher's exact {p_value(pair.p_diverged)})" if pair.p_diverged is not None else ""
    return f"diverged: {pair.a} {of_a} of {a}, {pair.b} {of_b} of {b}{test}"


def _name(name: str, arms: dict[str, Arm]) -> Markup:
    return arm_name(arms[name]) if name in arms else arm_name(Arm(0, name, ()), plain=True)


def _difference(pair: Verdict, decimals: int) -> str:
    return "–" if pair.difference is None else fixed(pair.difference, decimals, signed=True)


def _interval(pair: Verdict, decimals: int) -> Markup:
    if pair.low is None or pair.high is None:
        return none("no interval")
    ends = f"{fixed(pair.low, decimals, signed=True)} to {fixed(pair.high, decimals, signed=True)}"
    return join([ends, tag("small", confidence_words(pair.confidence))])
