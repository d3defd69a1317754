"""Sections on the loss during training, the learning rate, and the loss at contexts longer than the trained one."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..figures import Axis, Markup, Series, count, fixed, join, legend, line_chart, si, tag
from ..runs import results as written
from ..runs.arms import Arm, Points, held_out_tokens, points, training_curve, validation_curve
from ..runs.results import Results, RunResult
from ..runs.wording import without_length
from .html import Absent, arm_label, caption, none, scroll, section, two_sizes

WINDOWS = 60
LONG = 90  # number of points of a curve above which it is averaged in windows
MARKERS = 6
SPIKE = 0.25  # least height of a spike above its neighbours, in nats
MOST = 0.75  # share of the arms that makes a spike a shared one
NAMED = 4  # number of shared spikes that are described; the others are counted
NARROW = {"width": 372, "height": 300, "end_labels": False}
Kind = Literal["linear", "log"]


@dataclass(frozen=True)
class CurveView:
    """View of the loss curves: the x axis, and the function from a run to its points (x, loss)."""

    key: str
    curve: Callable[[RunResult], Points]
    label: str
    unit: str


VIEWS = (
    CurveView("tokens", training_curve, "Training tokens seen", "tokens"),
    CurveView("seconds", lambda run: points(run.train.curve_seconds) if run.train else [], "Seconds of training", "s"),
)
SCALES = (("linear", "linear"), ("log", "logarithmic"), ("end", "second half"))


def windows(kind: Kind, low: float, high: float, count: int) -> list[float]:
    """Returns the count + 1 edges of windows from `low` to `high` that are equally wide on a linear or log axis."""
    if kind == "log":
        ratio = math.log(high / low)
        return [low * math.exp(ratio * i / count) for i in range(count + 1)]
    return [low + (high - low) * i / count for i in range(count + 1)]


def at(curve: Points, x: float) -> float | None:
    """Returns the value of a curve at x, linearly interpolated; None outside the curve."""
    if not curve or x < curve[0][0] or x > curve[-1][0]:
        return None
    i = bisect_left(curve, (x, -math.inf))
    if curve[i][0] == x or i == 0:
        return curve[i][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def mean_curve(curves: Sequence[Points], kind: Kind) -> Points:
    """Returns the mean of the curves of several seeds, over the range that every seed covers.

    Short curves are averaged at all recorded points, long ones in windows of equal width: within a window each seed
    counts once, with the mean of its points.
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
    """Returns the point (mean x, mean over seeds) of the window [a, b), or [a, b] if `last`; None without any points.

    A seed without points in the window counts with its interpolated value, if it has one."""
    end = (b, math.inf if last else -math.inf)
    inside = [curve[bisect_left(curve, (a, -math.inf)) : bisect_left(curve, end)] for curve in curves]
    xs = [p[0] for seed in inside for p in seed]
    if not xs:
        return None
    x = math.fsum(xs) / len(xs)
    levels = [math.fsum(p[1] for p in seed) / len(seed) if seed else at(curve, x)
              for seed, curve in zip(inside, curves, strict=True)]  # fmt: skip
    known = [y for y in levels if y is not None]
    return x, math.fsum(known) / len(known)


def extremes(curve: Points, kind: Kind, count: int = 90) -> Points:
    """Thins a long curve without hiding a spike: keeps the lowest and the highest point of every window."""
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


@dataclass(frozen=True)
class CurveSpike:
    """A point (x, level) of a curve, `height` nats above the medians of the points before and after the point."""

    x: float
    level: float
    height: float


def spikes(curve: Points) -> list[CurveSpike]:
    """Returns the points of a curve that exceed the medians of the points before and after by more than SPIKE nats and
    by more than six times the noise of the curve."""
    levels = [y for _, y in curve]
    reach = max(5, len(curve) // 20)
    steps = [b - a for a, b in itertools.pairwise(levels)]
    if len(steps) < 4:
        return []
    usual = statistics.median(steps)
    noise = 1.4826 * statistics.median(abs(step - usual) for step in steps) / math.sqrt(2)
    found = []
    for i in range(2, len(levels) - 2):
        before, after = levels[max(0, i - reach) : i], levels[i + 1 : i + 1 + reach]
        height = levels[i] - max(statistics.median(before), statistics.median(after))
        if height > max(6 * noise, SPIKE):
            found.append(CurveSpike(curve[i][0], levels[i], height))
    return found


def top(curves: Sequence[Points], low: float | None = None) -> float | None:
    """Returns an upper end of the y axis that cuts off the spikes of the curves, a little above all other points with
    x >= `low`; None if no spike is high enough to be cut off."""
    curves = [[p for p in curve if low is None or p[0] >= low] for curve in curves]
    out = [{spike.x for spike in spikes(curve)} for curve in curves]
    calm = [y for curve, beyond in zip(curves, out, strict=True) for x, y in curve if x not in beyond]
    every = [y for curve in curves for _, y in curve]
    if not calm or max(every) <= max(calm) + 0.1 * (max(calm) - min(calm)):
        return None
    return max(calm) + 0.05 * (max(calm) - min(calm))


@dataclass(frozen=True)
class Shared:
    """A loss spike that most arms of a seed have at `x` tokens. `reached`: number of arms that were trained up to x;
    `who`: number of these that have the spike; `height`: largest height, in nats."""

    x: float
    seed: int
    who: int
    reached: int
    height: float


def shared_spikes(arms: Sequence[Arm]) -> list[Shared]:
    """Returns the loss spikes that at least a share `MOST` of the arms of a seed have at about equal x (same
    batches)."""
    found = []
    for seed in dict.fromkeys(run.seed for arm in arms for run in arm.runs):
        runs = [run for arm in arms for run in arm.runs if run.seed == seed and len(training_curve(run)) > 1]
        batches = {str([run.recipe.get(key) for key in ("batch_size", "context")]) for run in runs}
        if len(runs) < 2 or len(batches) > 1:
            continue
        curves = [training_curve(run) for run in runs]
        width = max(statistics.median(b[0] - a[0] for a, b in itertools.pairwise(curve)) for curve in curves)
        for group in _neighbours([(s.x, i, s.height) for i, c in enumerate(curves) for s in spikes(c)], 1.5 * width):
            x, _, height = max(group, key=lambda one: one[2])
            who, reached = len({i for _, i, _ in group}), sum(curve[-1][0] >= group[0][0] for curve in curves)
            if who >= max(2, MOST * reached):
                found.append(Shared(x, seed, who, reached, height))
    return found


def _neighbours(places: Sequence[tuple[float, int, float]], width: float) -> list[list[tuple[float, int, float]]]:
    """Groups places (x, index of the curve, height): within a group, successive x differ by at most `width`."""
    groups: list[list[tuple[float, int, float]]] = []
    for one in sorted(places):
        if groups and one[0] - groups[-1][-1][0] <= width:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def few(markers: Points) -> Points:
    """Returns at most `MARKERS` points of a curve, for markers: evenly chosen, the last point included."""
    stride = -(-len(markers) // MARKERS)
    return markers[::-1][:: max(stride, 1)][::-1]


def curve_section(arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with the loss curves and switches of axis and scale; Absent if no curve was recorded."""
    recorded = [v for v in VIEWS if any(v.curve(run) for arm in arms for run in arm.runs)]
    if not recorded:
        return Absent("Loss while training", "no curve was recorded.")
    panels = [_panel(arms, view, scale) for view in recorded for scale, _ in SCALES]
    switches = tag(
        "div", switch("against", "Against", [(v.key, v.key) for v in recorded]),
        switch("scale", "Axis", SCALES), class_="switches",
    )  # fmt: skip
    names = legend([_series(arm, recorded[0], "linear") for arm in arms])
    return section("curves", "Loss while training", tag(
        "figure", switches, names, *panels, _shared_words(arms), caption(_curve_words(arms)), class_="curves",
    ))  # fmt: skip


def switch(name: str, title: str, options: Sequence[tuple[str, str]]) -> Markup:
    """Returns radio buttons for `options` (key, label); the style sheet shows the selected panel without a script."""
    choices = []
    for i, (key, words) in enumerate(options):
        button = tag("input", type="radio", name=name, id=f"{name}-{key}", checked=i == 0)
        choices.append(tag("label", button, tag("span", words)))
    return tag("fieldset", tag("legend", title), *choices)


def _panel(arms: Sequence[Arm], view: CurveView, scale: str) -> Markup:
    """Returns the chart of the loss curves in one view on one scale, for wide and for narrow screens."""
    kind: Kind = "log" if scale == "log" else "linear"
    series = [_series(arm, view, kind) for arm in arms]
    ends = [line[-1][0] for one in series for line in (one.points, *one.thin) if line]
    low = {"linear": 0.0, "end": max(ends, default=0.0) / 2}.get(scale)
    x = Axis(view.label, kind, unit=view.unit, low=low)
    y = Axis("Loss, nats per token", high=_top(arms, view, low))
    title = f"Training loss against {view.key}, {dict(SCALES)[scale]} axis. {_ends_in_words(arms)}"
    narrow = [replace(one, thin=[line[:: 1 + len(line) // 120] for line in one.thin]) for one in series]
    wide = line_chart(series, x, y, title)
    return tag("div", two_sizes(wide, line_chart(narrow, x, y, title, **NARROW)),  # type: ignore[arg-type]
               class_=f"panel panel-{view.key}-{scale}")  # fmt: skip


def _top(arms: Sequence[Arm], view: CurveView, low: float | None) -> float | None:
    """Returns the upper end of the loss axis by `top`, for the finished arms, or for all if no arm finished."""
    counted = [arm for arm in arms if arm.finished] or list(arms)
    return top([view.curve(run) for arm in counted for run in arm.counted], low)


def _series(arm: Arm, view: CurveView, kind: Kind) -> Series:
    """Returns the loss curves of one arm as a chart's series: its seeds as thin lines, their mean thick, its validation
    losses as markers."""
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
    """Returns the caption of the loss chart: the meaning of its lines and marks, and the averaging of long records."""
    several = any(len(arm.runs) > 1 for arm in arms)
    words = [
        "Thick lines are means over the seeds that finished; thin lines are single seeds."
        if several
        else "Thick lines are the training loss; where a record is long, thin lines show its extremes."
    ]
    if any(_has_validation(arm) for arm in arms):
        words.append(_markers_words(arms))
    if any(not arm.finished for arm in arms):
        words.append("A cross ends an arm that did not finish; such an arm does not set the range of the axis.")
    if any(_top(arms, view, None) is not None for view in VIEWS):
        words.append("A triangle at the upper edge marks a spike that goes beyond the axis, with its height.")
    words.append(
        f"Records of more than {LONG} points are averaged in {WINDOWS} windows of equal width. "
        "Point at the chart, or use the arrow keys, to read values."
    )
    return " ".join(words)


def _shared_words(arms: Sequence[Arm]) -> Markup | None:
    """Returns a note on the loss spikes that most arms have on the same batch of text; None without such spikes."""
    found = shared_spikes(arms)
    if not found:
        return None
    several = any(len(arm.runs) > 1 for arm in arms)
    told = []
    for x in dict.fromkeys(one.x for one in found):
        here = [one for one in found if one.x == x]
        who, reached = min(one.who for one in here), max(one.reached for one in here)
        names = f"all {who} arms" if who == reached else f"{who} of {reached} arms"
        seeds = f" with seed {', '.join(str(one.seed) for one in here)}" if several else ""
        told.append(f"{names} at {si(x)} tokens{seeds}, by up to {fixed(max(one.height for one in here), 1)} nats")
    more = f"; and {len(told) - NAMED} times more" if len(told) > NAMED else ""
    return tag(
        "p",
        tag("strong", "Spikes of many arms at once: "),
        f"{'; '.join(told[:NAMED])}{more}. Arms of one seed read the same batches in the same order, so what makes "
        "them jump together is the text of that batch, not an architecture.",
        class_="remark",
    )


def _markers_words(arms: Sequence[Arm]) -> str:
    """Returns a sentence that explains the markers of the loss chart as validation losses; if the summary's loss is on
    another number of held-out tokens, the sentence gives both numbers."""
    final, while_training = held_out_tokens([run for arm in arms for run in arm.runs])
    if not while_training or final == while_training:
        return "Markers are validation losses."
    other = f", and the summary's loss is that of the trained model on {final}" if final else ""
    return f"Markers are losses on {while_training} held-out tokens while training{other}."


def _has_validation(arm: Arm) -> bool:
    return any(validation_curve(run) for run in arm.runs)


def _ends_in_words(arms: Sequence[Arm]) -> str:
    """Returns a description of the loss chart for screen readers: the last mean loss of each arm."""
    ends = []
    for arm in arms:
        curve = mean_curve([training_curve(run) for run in arm.counted], "linear")
        if curve:
            ends.append(f"{arm.name} ends at {fixed(curve[-1][1], 2)}")
    return "; ".join(ends) + "." if ends else ""


# --- Learning rate ---


def rate_section(arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with a chart of learning rate against tokens, a line for each arm; Absent if none was
    recorded."""
    found = {arm.index: _rates(arm) for arm in arms}
    if not any(found.values()):
        return Absent("Learning rate", "no learning rates were recorded.")
    series = [Series(arm.name, found[arm.index], arm.index) for arm in arms if found[arm.index]]
    x, y = Axis("Training tokens seen", unit="tokens"), Axis("Learning rate", low=0.0)
    peaks = ", ".join(f"{one.label} {max(rate for _, rate in one.points):.3g}" for one in series)
    title = f"Learning rate against tokens. Largest: {peaks}."
    wide, narrow = line_chart(series, x, y, title, height=300), line_chart(series, x, y, title, **NARROW)  # type: ignore[arg-type]
    words = f"Learning rate of each step by the schedule of the recipe. Largest: {peaks}."
    picture = tag("figure", legend(series), two_sizes(wide, narrow), caption(words))
    return section("rates", "Learning rate", picture)


def _rates(arm: Arm) -> Points:
    """Returns the learning rates of the arm's first run that recorded them; [] without any."""
    return next((curve for run in arm.runs if run.train and (curve := points(run.train.rate_curve))), [])


# --- Longer contexts ---


@dataclass(frozen=True)
class ContextLoss:
    """Loss of one arm at one context, or the reason why it is missing."""

    loss: float | None
    reason: str


def reaches(arm: Arm) -> dict[int, ContextLoss]:
    """Returns {context in tokens: mean loss of the arm over its seeds, or the reason why the loss is missing}."""
    found: dict[int, list[written.Reach]] = {}
    for run in arm.counted:
        for entry in run.extrapolation:
            if entry.context:
                found.setdefault(entry.context, []).append(entry)
    return {context: _reach(found[context]) for context in sorted(found)}


def _reach(entries: Sequence[written.Reach]) -> ContextLoss:
    losses = [entry.loss for entry in entries if entry.loss is not None]
    if losses:
        return ContextLoss(math.fsum(losses) / len(losses), "")
    return ContextLoss(None, next((entry.reason for entry in entries if entry.reason), "not measured"))


def extrapolation_section(results: Results, arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with each arm's loss at multiples of the trained context; Absent if none was measured."""
    known = {arm.index: reaches(arm) for arm in arms}
    contexts = sorted({context for reach in known.values() for context in reach})
    if not contexts:
        return Absent("Longer contexts", "no arm was read at contexts longer than it was trained on.")
    trained = float(results.budget.context or contexts[0])
    series = [_reach_series(arm, known[arm.index], trained) for arm in arms]
    ticks = [(context / trained, f"{si(context / trained)}×") for context in contexts]
    x = Axis(
        f"Context, in multiples of the {count(trained)} tokens trained on",
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
    words = (
        "Loss on validation text at contexts up to eight times as long as in training, on the same stretches of it. "
        "At 1× it can differ a little from the loss of the summary, which is measured on other stretches of the text."
    )
    if any(_cannot(one) for reach in known.values() for one in reach.values()):
        words += " “Cannot” means that a part of the arm has no value for so long a context."
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


def _cannot(reach: ContextLoss) -> bool:
    """Returns True if an arm's loss at a context is missing because the arm cannot read so long a context, False if the
    loss is known, or is missing for another reason."""
    return reach.loss is None and reach.reason.lower().startswith("cannot")


def _reach_series(arm: Arm, reach: dict[int, ContextLoss], trained: float) -> Series:
    line = [(context / trained, one.loss) for context, one in reach.items() if one.loss is not None]
    stop = next(((c, one) for c, one in reach.items() if _cannot(one)), None)
    note = f"cannot go to {si(stop[0] / trained)}×" if stop else _fate_note(arm)
    ended = stop[1].reason if stop else ""
    return Series(arm.name, line, arm.index, dots=True, ended=ended, note=note, stray=not arm.finished)


def _reach_table(
    arms: Sequence[Arm], known: dict[int, dict[int, ContextLoss]], contexts: Sequence[int], trained: float
) -> Markup:
    """Returns the table of losses by arm and context, with the reason for each missing one."""
    heads = [tag("th", "Arm", scope="col")]
    heads += [tag("th", f"{si(c / trained)}×", tag("small", f"{count(c)} tokens"), scope="col") for c in contexts]
    rows = []
    for arm in arms:
        cells = _reach_cells([known[arm.index].get(c) for c in contexts], arm)
        rows.append(tag("tr", tag("th", arm_label(arm), scope="row"), *cells))
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="numbers")


def _reach_cells(row: Sequence[ContextLoss | None], arm: Arm) -> list[Markup]:
    """Returns one cell for each context; adjacent cells with the same reason for a missing loss are merged."""
    cells = []
    for said, same in itertools.groupby(row, key=lambda reach: _refusal(reach, arm) if _lost(reach) else None):
        run = list(same)
        if said is None:
            cells += [tag("td", fixed(reach.loss or 0.0)) for reach in run if reach]
        else:
            cells.append(tag("td", said, class_="refusal", colspan=len(run) if len(run) > 1 else None))
    return cells


def _lost(reach: ContextLoss | None) -> bool:
    return reach is None or reach.loss is None


def _refusal(reach: ContextLoss | None, arm: Arm) -> Markup:
    """Returns the content of a table cell for a missing loss: the reason, without the context, which the column's
    heading gives."""
    if reach is None:
        return none("not measured" if arm.finished else arm.trouble)
    if not _cannot(reach):
        return none(reach.reason)
    rest = without_length(reach.reason)[len("cannot") :].strip(" :;,.–-")
    return join([tag("b", "not supported"), tag("small", rest, class_="why") if rest else None])
