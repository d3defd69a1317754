"""Loss while training, against tokens and against seconds; loss at contexts longer than the trained one."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..figures import Axis, Markup, Series, finite, fixed, join, legend, line_chart, si, tag
from ..runs import results as written
from ..runs.results import Results, RunResult
from .html import arm_label, caption, none, scroll, section, two_sizes
from .read import Arm, Points, points, training_curve, validation_curve, why_not

WINDOWS = 60
LONG = 90  # curves with more points than this are averaged in windows
MARKERS = 6
NARROW = {"width": 372, "height": 300, "end_labels": False}
Kind = Literal["linear", "log"]


@dataclass(frozen=True)
class View:
    """One way to look at the curves: against what, and over which part of it."""

    key: str
    curve: Callable[[RunResult], Points]
    label: str
    unit: str


VIEWS = (
    View("tokens", training_curve, "Training tokens seen", "tokens"),
    View("seconds", lambda run: points(run.train.curve_seconds) if run.train else [], "Seconds of training", "s"),
)
SCALES = (("linear", "linear"), ("log", "logarithmic"), ("end", "second half"))


def windows(kind: Kind, low: float, high: float, count: int) -> list[float]:
    """The edges of `count` windows of equal width on the axis."""
    if kind == "log":
        ratio = math.log(high / low)
        return [low * math.exp(ratio * i / count) for i in range(count + 1)]
    return [low + (high - low) * i / count for i in range(count + 1)]


def at(curve: Points, x: float) -> float | None:
    """The value of a curve at x, on the straight line between its neighbours; None outside of the curve."""
    if not curve or x < curve[0][0] or x > curve[-1][0]:
        return None
    i = bisect_left(curve, (x, -math.inf))
    if curve[i][0] == x or i == 0:
        return curve[i][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def mean_curve(curves: Sequence[Points], kind: Kind) -> Points:
    """The mean over seeds, as far as every seed reaches.

    Short curves are averaged at the points where any seed recorded one, long ones in windows of equal width:
    within a window each seed counts once, with the mean of its own points there.
    """
    curves = [[p for p in curve if kind == "linear" or p[0] > 0] for curve in curves]
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    xs = sorted({p[0] for curve in curves for p in curve if low <= p[0] <= high})
    if len(xs) <= LONG or high <= low:
        levels = [[y for curve in curves if (y := at(curve, x)) is not None] for x in xs]
        return [(x, math.fsum(ys) / len(ys)) for x, ys in zip(xs, levels, strict=True) if ys]
    edges = windows(kind, low, high, WINDOWS)
    edges[0], edges[-1] = low, high
    return [p for a, b in itertools.pairwise(edges) if (p := _window(curves, a, b, b == high))]


def _window(curves: Sequence[Points], a: float, b: float, last: bool) -> tuple[float, float] | None:
    """The mean over seeds of the means within [a, b), or None where nobody recorded anything."""
    inside = [[p for p in curve if a <= p[0] < b or (last and p[0] == b)] for curve in curves]
    xs = [p[0] for seed in inside for p in seed]
    if not xs:
        return None
    x = math.fsum(xs) / len(xs)
    levels = [math.fsum(p[1] for p in seed) / len(seed) if seed else at(curve, x)
              for seed, curve in zip(inside, curves, strict=True)]  # fmt: skip
    known = [y for y in levels if y is not None]
    return x, math.fsum(known) / len(known)


def extremes(curve: Points, kind: Kind, count: int = 90) -> Points:
    """A long curve thinned without hiding a spike: the lowest and the highest point of every window."""
    curve = [p for p in curve if kind == "linear" or p[0] > 0]
    if len(curve) <= 2 * count:
        return curve
    edges = windows(kind, curve[0][0], curve[-1][0], count)
    kept: Points = []
    start = 0
    for edge in [*edges[1:-1], math.inf]:
        end = bisect_left(curve, (edge, -math.inf))
        piece = curve[start:end]
        if piece:
            kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
        start = end
    return kept


def few(markers: Points) -> Points:
    """At most so many markers, evenly chosen, the last among them."""
    stride = -(-len(markers) // MARKERS)
    return markers[::-1][:: max(stride, 1)][::-1]


def curve_section(arms: Sequence[Arm]) -> Markup:
    """The section with the loss curves and the switches between the ways of looking at them."""
    recorded = [v for v in VIEWS if any(v.curve(run) for arm in arms for run in arm.runs)]
    if not recorded:
        return section("curves", "Loss while training", tag("p", "No curve was recorded.", class_="gf-empty"))
    panels = [_panel(arms, view, scale) for view in recorded for scale, _ in SCALES]
    switches = tag(
        "div", switch("against", "Against", [(v.key, v.key) for v in recorded]),
        switch("scale", "Axis", SCALES), class_="switches",
    )  # fmt: skip
    names = legend([_series(arm, recorded[0], "linear") for arm in arms])
    return section("curves", "Loss while training", tag(
        "figure", switches, names, *panels, caption(_curve_words(arms)), class_="curves",
    ))  # fmt: skip


def switch(name: str, title: str, options: Sequence[tuple[str, str]]) -> Markup:
    """Radio buttons; the style sheet shows the panel they choose, so no script is needed."""
    choices = []
    for i, (key, words) in enumerate(options):
        button = tag("input", type="radio", name=name, id=f"{name}-{key}", checked=i == 0)
        choices.append(tag("label", button, tag("span", words)))
    return tag("fieldset", tag("legend", title), *choices)


def _panel(arms: Sequence[Arm], view: View, scale: str) -> Markup:
    """The curves in one view on one scale, wide and narrow."""
    kind: Kind = "log" if scale == "log" else "linear"
    series = [_series(arm, view, kind) for arm in arms]
    ends = [line[-1][0] for one in series for line in (one.points, *one.thin) if line]
    low = {"linear": 0.0, "end": max(ends, default=0.0) / 2}.get(scale)
    x = Axis(view.label, kind, unit=view.unit, low=low)
    y = Axis("Loss, nats per token")
    title = f"Training loss against {view.key}, {dict(SCALES)[scale]} axis. {_ends_in_words(arms)}"
    narrow = [replace(one, thin=[line[:: 1 + len(line) // 120] for line in one.thin]) for one in series]
    wide = line_chart(series, x, y, title)
    return tag("div", two_sizes(wide, line_chart(narrow, x, y, title, **NARROW)),  # type: ignore[arg-type]
               class_=f"panel panel-{view.key}-{scale}")  # fmt: skip


def _series(arm: Arm, view: View, kind: Kind) -> Series:
    """One arm as a line: its seeds thin, their mean thick, its validation losses as markers."""
    curves = {id(run): view.curve(run) for run in arm.runs}
    mean = mean_curve([curves[id(run)] for run in arm.counted], kind)
    recorded = [extremes(curve, kind) for curve in curves.values() if curve]
    alone = len(recorded) == 1 and len(recorded[0]) <= LONG
    validation = [validation_curve(run) for run in arm.counted] if view.key == "tokens" else []
    return Series(
        arm.name, mean, arm.index, thin=() if alone else recorded, markers=few(mean_curve(validation, kind)),
        ended="" if arm.finished else arm.trouble, note=_fate_note(arm), stray=not arm.finished,
    )  # fmt: skip


def _fate_note(arm: Arm) -> str:
    if arm.complete:
        return ""
    lost = len(arm.runs) - len(arm.finished)
    return arm.trouble if lost == len(arm.runs) else f"{arm.trouble} in {lost} of {len(arm.runs)} seeds"


def _curve_words(arms: Sequence[Arm]) -> str:
    """What is drawn, and what was done to it."""
    several = any(len(arm.runs) > 1 for arm in arms)
    lines = (
        "Thick: the mean over seeds that finished, as far as all reach; thin: each seed."
        if several
        else ("Thick: the training loss; thin, where the record is long: its extremes as recorded.")
    )
    marks = " Markers: validation loss." if any(_has_validation(arm) for arm in arms) else ""
    cross = " A cross ends an arm that did not finish; it does not stretch the axis." if any(
        not arm.finished for arm in arms) else ""  # fmt: skip
    return (
        f"{lines}{marks}{cross} Records longer than {LONG} points are averaged in {WINDOWS} equal windows. "
        "Point at the figure, or use the arrow keys on it, to read values."
    )


def _has_validation(arm: Arm) -> bool:
    return any(validation_curve(run) for run in arm.runs)


def _ends_in_words(arms: Sequence[Arm]) -> str:
    """The picture for those who cannot see it: where each curve ends."""
    ends = []
    for arm in arms:
        curve = mean_curve([training_curve(run) for run in arm.counted], "linear")
        if curve:
            ends.append(f"{arm.name} ends at {fixed(curve[-1][1], 2)}")
    return "; ".join(ends) + "." if ends else ""


# --- Longer contexts ---


@dataclass(frozen=True)
class Reach:
    """What one arm did at one context: its loss, or the reason why there is none."""

    loss: float | None
    reason: str


def reaches(arm: Arm) -> dict[int, Reach]:
    """The arm's results by context, each the mean over seeds."""
    found: dict[int, list[written.Reach]] = {}
    for run in arm.counted:
        for entry in run.extrapolation:
            context = finite(entry.context)
            if context is not None and 1 <= context < 1e15:
                found.setdefault(int(context), []).append(entry)
    return {context: _reach(found[context]) for context in sorted(found)}


def _reach(entries: Sequence[written.Reach]) -> Reach:
    losses = [loss for entry in entries if (loss := finite(entry.loss)) is not None]
    if losses:
        return Reach(math.fsum(losses) / len(losses), "")
    said = next((str(entry.reason) for entry in entries if entry.reason), "")
    return Reach(None, said or why_not(entries[0].loss))


def extrapolation_section(results: Results, arms: Sequence[Arm]) -> Markup:
    """The section with the loss at multiples of the trained context."""
    known = {arm.index: reaches(arm) for arm in arms}
    contexts = sorted({context for reach in known.values() for context in reach})
    if not contexts:
        return section("contexts", "Longer contexts", tag("p", "Not measured.", class_="gf-empty"))
    trained = finite(results.budget.context) or float(contexts[0])
    series = [_reach_series(arm, known[arm.index], trained) for arm in arms]
    ticks = [(context / trained, f"{si(context / trained)}×") for context in contexts]
    x = Axis(
        f"Context, in multiples of the {si(trained)} tokens trained on",
        "log",
        ticks=ticks,
        unit="× the context",
        low=ticks[0][0] / 1.04,
        high=ticks[-1][0] * 1.04,
    )
    y = Axis("Loss, nats per token")
    title = "Loss at contexts longer than the one trained on; the table below holds the values."
    picture = two_sizes(
        line_chart(series, x, y, title, height=340),
        line_chart(series, x, y, title, **NARROW),  # type: ignore[arg-type]
    )
    table = _reach_table(arms, known, contexts, trained)
    words = "Each arm read validation text at contexts it was not trained on. “Cannot”: its parts end there."
    return section(
        "contexts",
        "Longer contexts",
        tag(
            "figure",
            legend(series),
            picture,
            scroll("Loss by context", table),
            caption(words),
        ),
    )


def _cannot(reach: Reach) -> bool:
    """Whether the arm is unable, as opposed to merely not measured."""
    return reach.loss is None and reach.reason.lower().startswith("cannot")


def _reach_series(arm: Arm, reach: dict[int, Reach], trained: float) -> Series:
    line = [(context / trained, one.loss) for context, one in reach.items() if one.loss is not None]
    stop = next(((c, one) for c, one in reach.items() if _cannot(one)), None)
    note = f"cannot go to {si(stop[0] / trained)}×" if stop else _fate_note(arm)
    ended = stop[1].reason if stop else ""
    return Series(arm.name, line, arm.index, dots=True, ended=ended, note=note, stray=not arm.finished)


def _reach_table(
    arms: Sequence[Arm], known: dict[int, dict[int, Reach]], contexts: Sequence[int], trained: float
) -> Markup:
    """The values, with the reason wherever there is none."""
    heads = [tag("th", "Arm", scope="col")]
    heads += [
        tag("th", f"{si(c / trained)}×", tag("small", f"{c if c < 100_000 else si(c)} tokens"), scope="col")
        for c in contexts
    ]
    rows = []
    for arm in arms:
        cells = [_reach_cell(known[arm.index].get(c), arm) for c in contexts]
        rows.append(tag("tr", tag("th", arm_label(arm), scope="row"), *cells))
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="numbers")


def _reach_cell(reach: Reach | None, arm: Arm) -> Markup:
    if reach is None:
        return tag("td", none("not measured" if arm.finished else arm.trouble))
    if reach.loss is not None:
        return tag("td", fixed(reach.loss))
    if not _cannot(reach):
        return tag("td", none(reach.reason))
    rest = reach.reason[len("cannot") :].strip(" :;,.–-")
    return tag("td", join([tag("b", "cannot"), tag("small", rest, class_="why") if rest else None]))
