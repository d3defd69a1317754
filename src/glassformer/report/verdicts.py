"""Which differences are shown: each pair with its interval around zero, on one scale per metric."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Markup, fixed, interval_axis, interval_domain, interval_row, join, tag
from ..figures.intervals import Domain
from ..runs.arms import BITS_PER_BYTE, LOSS, TRAINING_SPEED, Arm
from ..runs.wording import p_value
from .finding import Comparison, confidence_words
from .html import Absent, arm_name, caption, none, scroll, section

_UNITS = {
    LOSS.name: "nats per token",
    BITS_PER_BYTE.name: "bits per byte",
    TRAINING_SPEED.name: "tokens/s",
}


def verdict_section(
    verdicts: Sequence[Comparison], arms: Sequence[Arm], command: str = "", pending: str = ""
) -> Markup | Absent:
    """The section, or why there is none to show: `pending`, or one seed, where `command` would train more."""
    if not verdicts:
        if pending:
            return Absent("Verdicts", pending)
        if not arms or any(len(arm.runs) > 1 for arm in arms):
            return Absent("Verdicts", "none were recorded.")
        return Absent("Verdicts", "with one seed per arm, nothing measures chance, so there are no intervals.", command)
    metrics = dict.fromkeys(v.metric for v in verdicts)
    names = {arm.name: arm for arm in arms}
    tables = [_table(metric, [v for v in verdicts if v.metric == metric], names) for metric in metrics]
    return section(
        "verdicts",
        "Verdicts",
        *tables,
        caption(_reading(verdicts)),
    )


def _reading(verdicts: Sequence[Comparison]) -> str:
    """How to read the tables, as far as they show it."""
    words = (
        "Each bar is the interval of a difference between two arms over the seeds of both. It points towards the "
        "arm that did better. Where the whole bar lies on one side of zero, the pair is decided and its dot filled."
    )
    if any(pair.margin is not None for pair in verdicts):
        words += (
            " The intervals of all pairs hold together. p is that of the difference, adjusted by Holm's method. The "
            "grey band is the margin within which two arms count as equivalent; no difference shown means that neither "
            "a difference nor equivalence is."
        )
    if len(terms := {pair.terms for pair in verdicts}) == 1 and "" not in terms:
        words += f" All of this holds {terms.pop()}."
    return words


def _table(metric: str, verdicts: Sequence[Comparison], arms: dict[str, Arm]) -> Markup:
    """All pairs of one metric under one axis."""
    domain = interval_domain(v for pair in verdicts for v in (pair.low, pair.high, pair.difference, pair.margin))
    decimals = 3 if domain[1] < 100 else 0
    order = "left minus right" if verdicts[0].lower_is_better else "right minus left"
    heads = [
        tag("th", "← better", scope="col", class_="side-left"),
        tag("th", *_metric_words(metric), scope="col", class_="plot"),
        tag("th", "better →", scope="col", class_="side-right"),
        tag("th", "Difference", tag("small", order), scope="col", class_="figures"),
        tag("th", "Interval", scope="col", class_="figures"),
        tag("th", "p", scope="col", class_="figures"),
        tag("th", "Seeds", scope="col", class_="figures"),
        tag("th", "Verdict", scope="col"),
    ]
    alike = len({pair.terms for pair in verdicts}) == 1
    rows = [_row(pair, domain, decimals, arms, "" if alike else pair.terms) for pair in verdicts]
    foot = tag("tr", tag("td"), tag("td", interval_axis(domain), class_="plot"), *(tag("td") for _ in range(6)))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), tag("tfoot", foot), class_="verdicts")
    return scroll(f"Verdicts on {metric}", table)


def _metric_words(metric: str) -> list[object]:
    """What is compared, and its unit in small type."""
    words = metric.rsplit(".", maxsplit=1)[-1].replace("_", " ") if metric != LOSS.name else "validation loss"
    return [f"Difference in {words}", tag("small", _UNITS[metric]) if metric in _UNITS else None]


def _row(pair: Comparison, domain: Domain, decimals: int, arms: dict[str, Arm], terms: str) -> Markup:
    """One pair: each arm stands on the side of zero on which it is the better one; `terms` are its own."""
    left, right = (pair.b, pair.a) if pair.lower_is_better else (pair.a, pair.b)
    difference = _difference(pair, decimals)
    decided = pair.winner is not None
    verdict = join([_name(pair.winner, arms), " better"]) if pair.winner else pair.verdict
    words = f"{pair.b} minus {pair.a}: {difference}; {pair.winner or pair.verdict}{' better' * decided}"
    picture = none("no difference recorded") if pair.difference is None else interval_row(
        pair.difference, pair.low, pair.high, domain, words, decided, margin=pair.margin,
    )  # fmt: skip
    return tag(
        "tr",
        tag("th", _name(left, arms), scope="row", class_="side-left"),
        tag("td", picture, class_="plot"),
        tag("td", _name(right, arms), class_="side-right"),
        tag("td", difference, class_="figures"),
        tag("td", _interval(pair, decimals), class_="figures"),
        tag("td", "–" if pair.p is None else p_value(pair.p).removeprefix("p = "), class_="figures"),
        tag("td", "–" if pair.seeds is None else pair.seeds, class_="figures"),
        tag(
            "td",
            verdict,
            *(tag("small", words) for words in (pair.diverged, terms) if words),
            class_="decided" if decided else "undecided",
        ),
    )


def _name(name: str | None, arms: dict[str, Arm]) -> Markup:
    arm = arms.get(name or "")
    return arm_name(arm) if arm else arm_name(Arm(0, name or "?", ()), plain=True)


def _difference(pair: Comparison, decimals: int) -> str:
    return "–" if pair.difference is None else fixed(pair.difference, decimals, signed=True)


def _interval(pair: Comparison, decimals: int) -> Markup:
    if pair.low is None or pair.high is None:
        return none("no interval")
    ends = f"{fixed(pair.low, decimals, signed=True)} to {fixed(pair.high, decimals, signed=True)}"
    return join([ends, tag("small", confidence_words(pair.confidence))])
