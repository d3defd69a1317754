"""Section, and separate page, on a tuning: learning rates chosen for each arm by trials, with the curves of loss
against rate, the chosen rates, and the verdicts at chosen and at default rates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ..figures import (
    Axis,
    Markup,
    Series,
    copyable,
    fixed,
    join,
    legend,
    line_chart,
    tag,
    write_document,
)
from ..runs.arms import Arm
from ..runs.results import Results, TunedArm, Tuning, Verdict
from ..runs.wording import outcome
from .facts import plain
from .html import Absent, arm_name, caption, cell, figure, framed, scroll, section, two_sizes

_TITLE = "Learning rates"
_TUNED = re.compile(r" --tune( |$)|gf\.tune\(")
STEEP = 1.25
"""Multiple of the lowest loss at which the chart ends; higher losses are cut off"""


def tuning_section(results: Results, arms: Sequence[Arm], command: str) -> Markup | Absent:
    """Returns the section on the arms' learning rates; if the results have no trials of rates, Absent with the reason,
    and the `command` that would try several rates."""
    if results.tuning is None and _TUNED.search(results.command):
        return Absent(_TITLE, "this is part of a tuned comparison, whose tuning.html has the curves and both verdicts.")
    if results.tuning is None:
        suits = ", which may suit one of them more than another" if len(arms) > 1 else ""
        return Absent(_TITLE, f"every arm was trained at one rate{suits}.", command)
    return section("tuning", _TITLE, *_parts(results.tuning))


def write_tuning(tuning: Tuning, command: str, path: str | os.PathLike[str]) -> Path:
    """Writes the page of a tuning to `path` atomically."""
    return write_document(render_tuning(tuning, command), path)


def render_tuning(tuning: Tuning, command: str) -> str:
    """Returns the page of a tuning as HTML text."""
    names = [arm.name for arm in tuning.arms]
    title = f"Learning rates of {' and '.join(names) if len(names) < 3 else f'{len(names)} models'}"
    header = tag(
        "header", tag("p", "Glassformer tuning", class_="kicker"), tag("h1", title), copyable(command)
    )  # fmt: skip
    contents = {"tuning": (_TITLE, section("tuning", _TITLE, *_parts(tuning)))}
    return framed(title, header, contents, plain(tuning.to_dict()), "tuning", "results")


def finding(tuning: Tuning) -> str:
    """Returns the finding of a tuning: if verdicts differ between chosen and usual rates, and each pair's two
    verdicts."""
    if not tuning.tuned:
        return "No verdict is measured yet." if len(tuning.arms) > 1 else ""
    told = []
    for one in tuning.tuned:
        other = _same_pair(one, tuning.usual)
        told.append(f"At the chosen rates: {outcome(one)}. At the usual rates: {outcome(other) if other else 'none'}.")
    changed = any(_changed(one, _same_pair(one, tuning.usual)) for one in tuning.tuned)
    flipped = any(_flipped(one, _same_pair(one, tuning.usual)) for one in tuning.tuned)
    opening = (
        "The learning rate decided."
        if flipped
        else "The verdicts differ; that the rate made the difference is not shown."
        if changed
        else "Tuning changed no verdict."
    )
    budget = f" ({tuning.budget} a run, {len(tuning.fresh)} fresh seeds.)" if tuning.budget else ""
    return " ".join([opening, *told]) + budget


def _same_pair(one: Verdict, among: Sequence[Verdict]) -> Verdict | None:
    return next((other for other in among if (other.a, other.b) == (one.a, one.b)), None)


def _changed(one: Verdict, other: Verdict | None) -> bool:
    return other is None or other.verdict != one.verdict


def _flipped(one: Verdict, other: Verdict | None) -> bool:
    """Returns True if two verdicts on a pair, at chosen and at default rates, name different winners."""
    return other is not None and None not in (one.winner, other.winner) and one.winner != other.winner


def _parts(tuning: Tuning) -> list[object]:
    told = finding(tuning)
    unsettled = [arm.name for arm in tuning.arms if arm.settled is False]
    notice = None
    if unsettled:
        notice = tag(
            "p", tag("strong", "Lowest at an edge. "),
            f"{', '.join(unsettled)} had the lowest loss at the edge of the grid, so the rate that suits is not known.",
            class_="notice", role="note",
        )  # fmt: skip
    return [
        tag("p", told) if told else None, notice, _curves(tuning), _rates(tuning), _side_by_side(tuning),
        caption(_terms(tuning)),
    ]  # fmt: skip


def _curves(tuning: Tuning) -> Markup:
    """Returns the chart of loss against learning rate: the mean over the seeds as a line, every run as a marker."""
    series = [_series(index, arm) for index, arm in enumerate(tuning.arms)]
    levels = [y for one in series for _, y in one.markers]
    high = STEEP * min(levels) if levels and max(levels) > STEEP * min(levels) > 0 else None
    x, y = Axis("Peak learning rate", "log"), Axis("Validation loss, nats", high=high, decimals=3)
    title = "Validation loss against learning rate"
    wide = line_chart(series, x, y, title)
    narrow = line_chart(series, x, y, title, width=372, height=300, end_labels=False)
    words = "A marker is a run; lines join the means over the seeds. They end where a run diverged."
    return figure(two_sizes(wide, narrow), legend(series), caption(words))


def _series(index: int, arm: TunedArm) -> Series:
    runs: dict[float, list[float | None]] = {}
    for trial in arm.trials:
        runs.setdefault(trial.rate, []).append(trial.loss)
    line = [(rate, fmean(losses)) for rate, found in runs.items() if (losses := _all(found))]
    markers = [(rate, loss) for rate, found in runs.items() for loss in found if loss is not None]
    lost = [(rate, found.count(None), len(found)) for rate, found in runs.items() if None in found]
    note = "; ".join(f"{n} of {all_} diverged at {rate:.3g}" for rate, n, all_ in lost)
    return Series(arm.name, line, style=index, markers=markers, note=note, ended="diverged above" * bool(lost))


def _all(losses: Sequence[float | None]) -> list[float]:
    """Returns the losses of all seeds at a learning rate; [] if one seed's loss is missing."""
    known = [loss for loss in losses if loss is not None]
    return known if len(known) == len(losses) else []


def _rates(tuning: Tuning) -> Markup:
    heads = ("arm", "usual rate", "chosen rate", "loss at usual", "loss at chosen", "sensitivity")
    rows = [_rates_row(Arm(index, arm.name, ()), arm) for index, arm in enumerate(tuning.arms)]
    words = (
        "Losses are means over the fresh seeds. Sensitivity: what a rate of this grid costs on average above the "
        "lowest loss, E[min(l, l0) - l*], in nats (2309.14322)."
    )
    return figure(_table("Learning rates of the arms", heads, rows), caption(words))


def _rates_row(head: Arm, arm: TunedArm) -> Markup:
    how = "at the edge" if arm.settled is False else "between two" if arm.between else "one of the grid"
    return tag(
        "tr", tag("th", arm_name(head), scope="row"), cell(f"{arm.usual:.3g}"),
        cell(f"{arm.chosen:.3g}", tag("small", how)), cell(_level(arm.loss_usual)), cell(_level(arm.loss_chosen)),
        cell(_level(arm.sensitivity)),
    )  # fmt: skip


def _side_by_side(tuning: Tuning) -> Markup | None:
    if not tuning.tuned:
        return None
    rows = [_pair_row(one, _same_pair(one, tuning.usual)) for one in tuning.tuned]
    heads = ("pair", "each at its chosen rate", "at the usual rates", "verdicts")
    words = "Both columns are of the same fresh seeds; an undecided difference is loss of the second minus the first."
    return figure(_table("Tuned and untuned verdicts", heads, rows), caption(words))


def _pair_row(one: Verdict, other: Verdict | None) -> Markup:
    differ = tag("b", "they differ", class_="bad") if _changed(one, other) else "the same"
    return tag(
        "tr", tag("th", f"{one.a} against {one.b}", scope="row"), cell(outcome(one)),
        cell(outcome(other) if other else "none"), cell(differ),
    )  # fmt: skip


def _terms(tuning: Tuning) -> str:
    """Returns a text with the numbers of rates and runs, their cost, and the seeds of trials and verdicts."""
    names = {"choosing": "to choose the rates", "tuned": "at the chosen rates", "usual": "at the usual ones"}
    cost = ", ".join(
        f"{tuning.runs[key]} runs {words} ({tuning.minutes.get(key, 0.0):.3g} minutes of training)"
        for key, words in names.items()
        if tuning.runs.get(key)
    )
    rates = len({trial.rate for trial in tuning.arms[0].trials}) if tuning.arms else 0
    added = f", {tuning.extended} of them added because the lowest loss of an arm was at an edge"
    extended = added if tuning.extended else ""
    seeds = ", ".join(map(str, tuning.seeds))
    fresh = ", ".join(map(str, tuning.fresh))
    return (
        f"Every arm was tried at {rates} rates, each twice the one before{extended}, on seeds {seeds}; verdicts are on "
        f"seeds {fresh}, which no rate was chosen on. Cost: {cost}."
    )


def _level(loss: float | None) -> str:
    return "–" if loss is None else fixed(loss, 4)


def _table(label: str, heads: Sequence[str], rows: Sequence[Markup]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in heads)))
    return scroll(label, tag("table", head, tag("tbody", join(rows))))
