"""Section on training dynamics: curves of statistics, heat maps of layer by step, and events."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..figures import (
    Axis,
    HeatColumn,
    Mark,
    Markup,
    Series,
    finite,
    fixed,
    heat_legend,
    heat_map,
    heat_scale,
    is_not_finite,
    join,
    legend,
    line_chart,
    si,
    tag,
)
from ..runs.arms import Arm, Points, RecordedDynamics, training_curve, watched
from ..thresholds import ALIKE_COSINE, ALIKE_RANK, COLLAPSED_ENTROPY, COLLAPSED_LOGIT
from .curves import extremes, mean_curve, switch, top
from .experts import experts_figure
from .html import Absent, arm_label, arm_name, caption, scroll, section

CELLS = 24_000  # largest number of cells of all maps together; above it, adjacent columns are merged
ROWS = 30  # rows of the table of events
SMALL = {"width": 340, "height": 236, "end_labels": False}


@dataclass(frozen=True)
class Statistic:
    """Statistic of training dynamics that the page plots, with its labels and axis; `merge` combines the values of
    adjacent windows."""

    name: str
    words: str
    label: str
    kind: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None
    merge: Callable[[Sequence[float]], float] = statistics.fmean


_ENTROPY = "Attention entropy, 1 for an even spread"
MAPS = (
    Statistic("attention_entropy", "entropy", f"{_ENTROPY}; mean over heads", low=0, high=1),
    Statistic("attention_entropy_worst", "worst head", f"{_ENTROPY}; lowest head", low=0, high=1, merge=min),
    Statistic("activation_effective_rank", "rank of activations", "Effective rank of the residual stream", low=1),
    Statistic("qk_effective_rank", "rank of W_Q W_Kᵀ", "Effective rank of W_Q W_Kᵀ, mean over heads", low=1),
    Statistic("gradient_norm", "gradient", "Gradient norm of a layer's matrices, before clipping", "log"),
    Statistic("max_violation", "busiest expert", "Load of the busiest expert over its share, less 1; 0: level", low=0),
    Statistic("router_dropped", "dropped", "Share of the experts' assignments beyond their capacity", low=0, high=1),
    Statistic("router_entropy", "router", "Entropy of the router, nats; log e: it does not decide", low=0),
)  # fmt: skip
CURVES = (
    Statistic("loss", "", "Training loss, nats per token"),
    Statistic("max_attention_logit", "", "Largest attention logit", "log"),
    Statistic("attention_entropy_worst", "", "Attention entropy, 0 to 1, lowest head", low=0, high=1),
    Statistic("log_z", "", "log Z of the output, nats"),
    Statistic("update_ratio", "", "‖ΔW‖ / ‖W‖ of a step, median of matrices", "log"),
    Statistic("token_cosine", "", "Cosine between tokens, last layer", high=1),
)


@dataclass(frozen=True)
class Happening:
    """Kind of event during training, such as a loss spike: its mark in charts (a shape of `style.marker`) and in text,
    and its name in singular and plural."""

    shape: int
    sign: str
    one: str
    many: str


EVENTS = {
    "spike": Happening(4, "▼", "spike", "spikes"),
    "skipped": Happening(3, "◆", "step skipped", "steps skipped"),
    "rolled back": Happening(1, "■", "return to a checkpoint", "returns to a checkpoint"),
    "not finite": Happening(5, "✚", "number that is not finite", "numbers that are not finite"),
    "diverged": Happening(2, "▲", "divergence", "divergences"),
}
_HOW = join(["With ", tag("code", "--watch"), " a run records entropy, rank and gradients of its layers as it trains."])
_OTHER = Happening(0, "●", "other event", "other events")


def dynamics_section(arms: Sequence[Arm], command: str = "") -> Markup | Absent:
    """Returns the section on training dynamics; if no run was watched, Absent with the `command` that watches one."""
    seen = {arm.index: [w for run in arm.runs if (w := watched(run))] for arm in arms}
    if not any(seen.values()):
        return Absent("Dynamics", "entropy, rank and gradients of the layers were not recorded.", command)
    known = [arm for arm in arms if seen[arm.index]]
    end = max((w.steps[-1] for found in seen.values() for w in found if w.steps), default=1.0)
    return section(
        "dynamics", "Dynamics",
        tag("p", join(_findings(arms, seen), " "), class_="seen"),
        _curve_figure(known, seen, end),
        _map_figure(known, seen, end),
        experts_figure([(arm, _drawn(seen[arm.index])) for arm in known]),
        _event_table(known, seen),
    )  # fmt: skip


# --- Curves ---


def _curve_figure(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]], end: float) -> Markup | None:
    """Returns the figure of a small chart for each recorded statistic, the loss first; None if none but the loss was
    recorded."""
    charts = [chart for one in CURVES if (chart := _chart(one, arms, seen, end))]
    if not any(w.curves for found in seen.values() for w in found) or not charts:
        return None
    names = legend([Series(arm.name, [], arm.index, note=arm.trouble) for arm in arms])
    several = any(len(arm.runs) > 1 for arm in arms)
    lines = "Thick: the mean over seeds that finished; thin: each seed. " if several else ""
    marked = any(w.events for found in seen.values() for w in found if len(found) == 1)
    marks = "Markers show where something happened (see the table below). " if marked else ""
    cross = "A cross ends an arm that did not finish." if any(not arm.finished for arm in arms) else ""
    words = caption(f"{lines}{marks}{cross}") if lines or marks or cross else None
    return tag("figure", names, tag("div", *charts, class_="smalls"), words, class_="watched")


def _chart(one: Statistic, arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]], end: float) -> Markup | None:
    """Returns the chart of one statistic against steps, with a line for each arm; None if no arm recorded it."""
    series = [_series(one, arm, seen[arm.index]) for arm in arms]
    if not any(line.points or any(line.thin) for line in series):
        return None
    x = Axis("Step", unit="steps", low=0.0, high=end)
    counted = [arm for arm in arms if arm.finished] or list(arms)
    losses = [_curve("loss", w) for arm in counted for w in seen[arm.index] if w.run in arm.counted]
    high = top(losses) if one.name == "loss" else one.high
    y = Axis(one.label, one.kind, low=one.low, high=high, decimals=4 if one.name == "update_ratio" else 2)
    title = f"{one.label}, against steps. " + "; ".join(_range_in_words(arm, line) for arm, line in zip(
        arms, series, strict=True) if line.points) + "."  # fmt: skip
    return tag("div", line_chart(series, x, y, title, **SMALL))  # type: ignore[arg-type]


def _series(one: Statistic, arm: Arm, seen: Sequence[RecordedDynamics]) -> Series:
    """Returns the values of one statistic in one arm as a chart's series: its seeds as thin lines, the mean over seeds
    whose results count as a thick line, and for a single seed a marker at every event."""
    curves = {id(w.run): _curve(one.name, w) for w in seen}
    mean = mean_curve([curve for run in arm.counted if (curve := curves.get(id(run)))], "linear")
    thin = [extremes(curve, "linear") for curve in curves.values() if curve] if len(curves) > 1 else []
    steps = {event["step"] for w in seen for event in w.events}
    markers = [(step, min(mean, key=lambda p: abs(p[0] - step))[1]) for step in sorted(steps)] if mean else []
    unbounded = one.kind == "linear" and one.low is None and one.high is None
    return Series(arm.name, mean, arm.index, thin, markers if len(seen) == 1 else (),
                  ended="" if arm.finished else arm.trouble, stray=unbounded and not arm.finished)  # fmt: skip


def _curve(name: str, seen: RecordedDynamics) -> Points:
    """Returns a statistic's recorded curve against steps; for the loss, which is recorded against tokens, x is
    converted to steps."""
    if name != "loss":
        return seen.curves.get(name, [])
    train = seen.run.train
    if train is None or not train.tokens:
        return []
    return [(x * (train.steps / train.tokens), y) for x, y in training_curve(seen.run)]


def _range_in_words(arm: Arm, line: Series) -> str:
    ys = [p[1] for p in line.points]
    return f"{arm.name} from {si(ys[0])} to {si(ys[-1])}, between {si(min(ys))} and {si(max(ys))}"


# --- Maps ---


def _map_figure(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]], end: float) -> Markup | None:
    """Returns the figure of heat maps, layer by step, one for each arm: a panel of each statistic, and a switch between
    the panels; None if no statistic of layers was recorded."""
    drawn, there = _mapped(arms, seen)
    if not there:
        return None
    panels = [_panel(one, drawn, end, _merging(drawn, len(there))) for one in there]
    several = any(len(arm.runs) > 1 for arm in arms)
    seeds = " Of several seeds one is drawn: the first, or the first that did not finish." if several else ""
    words = (
        "The first layer is at the bottom. All arms share one scale of colours; point at a cell for its value. A cell "
        f"covers the steps since the measurement before.{seeds}{_mark_words(drawn)}"
    )
    return tag("figure", tag("div", switch("heat", "Layer by step", [(one.name, one.words) for one in there]),
                             class_="switches"), *panels, caption(words), class_="heats")  # fmt: skip


def _mapped(
    arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]
) -> tuple[list[tuple[Arm, RecordedDynamics]], list[Statistic]]:
    """Returns (arm, dynamics) of the run that the maps show for each arm, and the statistics by layer that at least one
    of these runs has."""
    drawn = [(arm, w) for arm in arms if (w := _drawn(seen[arm.index])).rows]
    return drawn, [one for one in MAPS if any(w.layers.get(one.name) for _, w in drawn)]


def _merging(drawn: Sequence[tuple[Arm, RecordedDynamics]], maps: int) -> int:
    """Returns the number of adjacent windows that a column of a map merges, so that `maps` maps for each arm have at
    most `CELLS` cells together."""
    fitting = max(1, CELLS // (maps * sum(w.rows for _, w in drawn)))
    return math.ceil(max(len(w.steps) for _, w in drawn) / fitting)


@dataclass(frozen=True)
class LiveDynamics:
    """Record of the section on dynamics with the maps of one statistic (`statistic`): curves, maps and findings, made
    again for each statistic that a page asks for, also while runs are trained."""

    statistics: dict[str, str]
    """Name -> label on a button, for each recorded statistic of layers."""
    statistic: str
    """Name of the statistic in `layers`; empty if no statistic of layers was recorded."""
    curves: Markup | None
    layers: Markup | None
    """Maps of `statistic`, layer by step; None if no statistic of layers was recorded."""
    words: Markup | None
    """Findings on the arms, in sentences."""


def live_dynamics(arms: Sequence[Arm], statistic: str = "") -> LiveDynamics:
    """Returns the curves and findings on the runs' dynamics, and the heat maps of the statistic with this name, or of
    the first recorded one if it was not recorded."""
    seen = {arm.index: [w for run in arm.runs if (w := watched(run))] for arm in arms}
    known = [arm for arm in arms if seen[arm.index]]
    if not known:
        return LiveDynamics({}, "", None, None, None)
    end = max((w.steps[-1] for found in seen.values() for w in found if w.steps), default=1.0)
    drawn, there = _mapped(known, seen)
    one = next((one for one in there if one.name == statistic), there[0] if there else None)
    return LiveDynamics(
        {each.name: each.words for each in there}, "" if one is None else one.name, _curve_figure(known, seen, end),
        None if one is None else _panel(one, drawn, end, _merging(drawn, 1)),
        tag("p", join(_findings(known, seen), " ")),
    )  # fmt: skip


def _drawn(seen: Sequence[RecordedDynamics]) -> RecordedDynamics:
    return next((w for w in seen if w.run.status != "ok"), seen[0])


def _mark_words(drawn: Sequence[tuple[Arm, RecordedDynamics]]) -> str:
    """Returns the text that explains the marks of events above the maps, for the kinds of event that occur; empty
    without events."""
    kinds = {_kind(event) for _, w in drawn for event in w.events}
    known = [f"{event.sign} {event.one}" for kind, event in EVENTS.items() if kind in kinds]
    return f" Above them: {', '.join(known)}." if known else ""


def _panel(one: Statistic, drawn: Sequence[tuple[Arm, RecordedDynamics]], end: float, merge: int) -> Markup:
    """Returns the maps of one statistic, one for each arm, under one colour scale. Finished runs set the scale, so that
    a diverged run does not use up the colours."""
    maps = [(arm, w, _columns(one, w, merge)) for arm, w in drawn if w.layers.get(one.name)]
    every = [value for _, _, columns in maps for column in columns for value in column.values]
    ended = [columns for _, w, columns in maps if w.run.status == "ok"]
    steady = [value for columns in ended for column in columns for value in column.values]
    scale = heat_scale(one.label, steady or every, one.kind, one.low, one.high, every)
    pieces = []
    for arm, w, columns in maps:
        title = f"{one.label}, layer by step, {arm.name}. {_extremes_in_words(columns, w)}"
        picture = heat_map(columns, _names(w), scale, Axis("Step", low=0.0, high=end), title, "Layer", _marks(w))
        pieces.append(tag("figure", tag("figcaption", arm_label(arm), _which(arm, w)), picture))
    known = heat_legend(scale, any(finite(v) is None and not is_not_finite(v) for v in every),
                        any(map(is_not_finite, every)))  # fmt: skip
    return tag("div", known, tag("div", *pieces, class_="maps"), class_=f"panel panel-{one.name}")


def _which(arm: Arm, seen: RecordedDynamics) -> Markup | None:
    """Returns a note that identifies the run whose map is shown for an arm: its seed if the arm has several, its status
    if not ok; None if both are omitted."""
    seed = f"seed {seen.run.seed}" if len(arm.runs) > 1 else ""
    status = seen.run.status
    words = ", ".join(filter(None, [seed, "" if status == "ok" else status]))
    return tag("span", words, class_="gf-note") if words else None


def _names(seen: RecordedDynamics) -> list[str]:
    """Returns the labels of a map's rows: the number of a layer, or first and last of several adjacent ones."""
    edges = [math.ceil(row * seen.depth / max(1, seen.rows)) for row in range(seen.rows + 1)]
    return [f"{a}" if b - a < 2 else f"{a}–{b - 1}" for a, b in itertools.pairwise(edges)]


def _columns(one: Statistic, seen: RecordedDynamics, merge: int) -> list[HeatColumn]:
    """Returns the columns of the heat map of one statistic in one run, each of `merge` windows of steps. If the
    statistic is measured less often, a column also covers the windows without a value before it, up to the usual
    gap."""
    grid = [_merged(seen.layers[one.name][i : i + merge], one.merge) for i in range(0, len(seen.steps), merge)]
    edges = [0.0, *seen.steps[merge - 1 :: merge]][: len(grid)]
    edges.append(seen.steps[-1])
    there = [i for i, column in enumerate(grid) if any(_is_value(v) for v in column)]
    usual = int(statistics.median(b - a for a, b in itertools.pairwise(there))) if len(there) > 1 else 1
    columns = []
    after = 0  # windows before this index are drawn
    for i in there:
        start = max(after, i + 1 - usual)
        if start > after:
            columns.append(_column(edges[after], edges[start], [None] * seen.rows))
        columns.append(_column(edges[start], edges[i + 1], grid[i]))
        after = i + 1
    if there and after < len(grid):
        columns.append(_column(edges[after], edges[-1], [None] * seen.rows))
    return columns


def _column(start: float, end: float, values: Sequence[object]) -> HeatColumn:
    return HeatColumn(start, end, values, f"steps {start + 1:.0f}–{end:.0f}")


def _is_value(value: object) -> bool:
    return finite(value) is not None or is_not_finite(value)


def _merged(columns: Sequence[Sequence[Any]], merge: Callable[[Sequence[float]], float]) -> list[Any]:
    """Merges several columns of a map into one: each row's values by `merge`, or to the first value that is not finite
    if there is one."""
    if len(columns) == 1:
        return list(columns[0])
    made: list[Any] = []
    for row in range(max(map(len, columns), default=0)):
        values = [column[row] for column in columns if row < len(column)]
        known = [v for value in values if (v := finite(value)) is not None]
        made.append(next(filter(is_not_finite, values), None) or (merge(known) if known else None))
    return made


def _marks(seen: RecordedDynamics) -> list[Mark]:
    return [Mark(event["step"], EVENTS.get(_kind(event), _OTHER).shape, _event_words(event))
            for event in seen.events]  # fmt: skip


def _extremes_in_words(columns: Sequence[HeatColumn], seen: RecordedDynamics) -> str:
    """Returns a description of a map for screen readers: the layers and steps of its lowest and highest values."""
    names = _names(seen)
    cells = [(v, name, column.name) for column in columns for value, name in zip(column.values, names, strict=False)
             if (v := finite(value)) is not None]  # fmt: skip
    if not cells:
        return "No finite value."
    ends = [f"{word} {si(v)} in layer {name} at {steps}" for word, (v, name, steps) in
            (("Lowest", min(cells)), ("highest", max(cells)))]  # fmt: skip
    return "; ".join(ends) + "."


# --- Events ---


def _event_words(event: dict[str, Any]) -> str:
    """Returns an event as text: `spike of loss at step 61, 9.13, 7.2 sigma`."""
    what, value, sigmas = event.get("what"), event.get("value"), finite(event.get("sigmas"))
    shown = finite(value)
    pieces = [
        f"{_kind(event)}{f' of {_plain(what)}' if what else ''} at step {event['step']:.0f}",
        si(shown, 4) if shown is not None else str(value) if is_not_finite(value) else "",
        f"{fixed(sigmas, 1)} sigma" if sigmas is not None else "",
    ]
    return ", ".join(filter(None, pieces))


def _kind(event: dict[str, Any]) -> str:
    return _plain(event.get("event"))


def _plain(word: object) -> str:
    return str(word)[:80].replace("_", " ")


def _event_table(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> Markup | None:
    """Returns the table of the first `ROWS` events, arm by arm in order of steps; None without any."""
    found = [(arm, w, event) for arm in arms for w in seen[arm.index] for event in w.events]
    if not found:
        return None
    heads = [tag("th", words, scope="col") for words in ("Arm", "Step", "Event", "Of", "Value", "Sigma", "Where")]
    rows = [_event_row(*one) for one in found[:ROWS]]
    more = len(found) - len(rows) + sum(w.left_out for ws in seen.values() for w in ws)
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="events")
    words = "Sigma: how many standard deviations above what the steps before led one to expect."
    rest = f" {more} more are in the runs' dynamics.jsonl." if more else ""
    return join([tag("h3", "What happened"), scroll("Events", table), caption(words + rest)])


def _event_row(arm: Arm, seen: RecordedDynamics, event: dict[str, Any]) -> Markup:
    value, sigmas, site = finite(event.get("value")), finite(event.get("sigmas")), event.get("site")
    lost = event.get("value") if is_not_finite(event.get("value")) else "–"
    cells = [
        f"{event['step']:.0f}", _kind(event), _plain(event.get("what") or "–"),
        str(lost) if value is None else si(value, 4), "–" if sigmas is None else fixed(sigmas, 1),
        tag("code", str(site)[:80]) if site else "–",
    ]  # fmt: skip
    seed = tag("small", f"seed {seen.run.seed}") if len(arm.runs) > 1 else None
    return tag("tr", tag("th", arm_label(arm), seed, scope="row"), *(tag("td", cell) for cell in cells))


# --- Findings in words ---


@dataclass(frozen=True)
class TimedValue:
    """Value of a statistic in one cell of a map: the layer or layers, and the last step of the window."""

    value: float
    layer: str
    step: float


def _cells(name: str, seen: RecordedDynamics) -> Iterator[TimedValue]:
    """Yields the finite values of a statistic in a run, each with its layers and step, in order of steps."""
    names = _names(seen)
    for step, column in zip(seen.steps, seen.layers.get(name, ()), strict=False):
        for layer, value in zip(names, column, strict=False):
            if (known := finite(value)) is not None:
                yield TimedValue(known, layer, step)


@dataclass(frozen=True)
class Sign:
    """Sign of a collapse (of attention entropy or rank) in one run: two statistics were out of bounds in the same layer
    and window. `places` has the two values for each such layer and window; `passed` is True if later windows of the
    run have no such pair."""

    places: list[tuple[TimedValue, TimedValue]]
    passed: bool


def _together(first: tuple[str, Callable[[float], bool]], second: tuple[str, Callable[[float], bool]],
              seen: RecordedDynamics) -> Sign | None:  # fmt: skip
    """Returns the `Sign` of a collapse in a run, with the layers and windows in which both statistics are out of
    bounds, in order of steps; None if no place has both. `first`, `second`: (name of a statistic, function that is
    True for values out of bounds)."""
    cells = list(_cells(first[0], seen))
    others = {(cell.step, cell.layer): cell for cell in _cells(second[0], seen) if second[1](cell.value)}
    both = [
        (cell, others[place]) for cell in cells if first[1](cell.value) and (place := (cell.step, cell.layer)) in others
    ]
    return Sign(both, both[-1][0].step < cells[-1].step) if both else None


def _findings(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> list[Markup]:
    """Returns sentences on the findings of training dynamics; a collapse is reported only if two statistics show it in
    the same layer and window of steps."""
    if not any(w.layers or w.curves for found in seen.values() for w in found):
        return [join(["Only spikes were looked for. ", _HOW]), _happened(arms, seen)]
    alarms = _collapses(arms, seen)
    return [*_not_watched(arms, seen), *(alarms or _calm(arms, seen)), _happened(arms, seen)]


def _not_watched(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> list[Markup]:
    names = [arm_name(arm) for arm in arms if not seen[arm.index]]
    return [join(["Not watched: ", join(names, ", "), "."])] if names else []


def _collapses(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> list[Markup]:
    """Returns a sentence for each arm with a collapse of attention entropy or of rank, which two statistics show in the
    same layer and window of steps; [] without a collapse."""
    told = []
    for arm in arms:
        peaked = (
            ("max_attention_logit", lambda v: v > COLLAPSED_LOGIT),
            ("attention_entropy_worst", lambda v: v < COLLAPSED_ENTROPY),
        )
        if signs := [sign for w in seen[arm.index] if (sign := _together(*peaked, w))]:
            logit, entropy = _values(signs)
            words = f"logits reach {si(max(logit))} while a head's entropy falls to {si(min(entropy), 2)}"
            told.append(join(["In ", arm_name(arm), " attention entropy collapsed", _since(signs, arm), words, "."]))
        most = _most_rank(arm)
        alike = (
            ("token_cosine", lambda v: v > ALIKE_COSINE),
            ("activation_effective_rank", lambda v, most=most: v < ALIKE_RANK * most),
        )
        if signs := [sign for w in seen[arm.index] if (sign := _together(*alike, w))]:
            cosine, rank = _values(signs)
            words = (f"their mean cosine reaches {fixed(max(cosine))} and their effective rank {si(min(rank))} of at "
                     f"most {si(most)}")  # fmt: skip
            told.append(join(["In ", arm_name(arm), " the tokens became alike", _since(signs, arm), words, "."]))
    return told


def _values(signs: Sequence[Sign]) -> tuple[list[float], list[float]]:
    """Returns (values of the first statistic, values of the second one) at all places of the signs of a collapse."""
    both = [place for sign in signs for place in sign.places]
    return [first.value for first, _ in both], [second.value for _, second in both]


def _since(signs: Sequence[Sign], arm: Arm) -> str:
    """Returns a clause on a collapse in one arm: the number of seeds that show it, the first layer and step, and a word
    if the collapse did not last."""
    first = min((sign.places[0][0] for sign in signs), key=lambda cell: cell.step)
    seeds = f" in {len(signs)} of {len(arm.runs)} seeds" if len(arm.runs) > 1 else ""
    passed = ", but not to the end" if all(sign.passed for sign in signs) else ""
    return f"{seeds} by step {first.step:.0f}, first in layer {first.layer}{passed}: "


def _most_rank(arm: Arm) -> float:
    """Returns the largest possible rank of the residual stream, min(context, width); 0 if neither is known."""
    sizes = [finite(arm.config.get(name)) for name in ("context", "d_model")]
    return min((size for size in sizes if size), default=0.0)


def _calm(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> list[Markup]:
    """Returns [sentence that no run shows a collapse], with the most extreme value of each of three statistics; [] if
    none of the three was recorded."""
    ends = []
    for name, words, pick, decimals in (
        ("max_attention_logit", "the largest attention logit", max, None),
        ("attention_entropy_worst", "the lowest entropy of a head", min, 3),
        ("token_cosine", "the largest mean cosine between tokens", max, 3),
    ):
        cells = [(cell, arm) for arm in arms for w in seen[arm.index] for cell in _cells(name, w)]
        if cells:
            cell, arm = pick(cells, key=lambda one: one[0].value)
            value = si(cell.value) if decimals is None else fixed(cell.value, decimals)
            place = f", layer {cell.layer}, step {cell.step:.0f})"
            ends.append(join([f"{words} is {value} (", arm_name(arm), place]))
    if not ends:
        return []
    opening = "No layer shows two signs of collapse at once: "
    return [join([opening, join(ends, "; "), ". A single one is not an alarm: all move in healthy training, too."])]


def _happened(arms: Sequence[Arm], seen: dict[int, list[RecordedDynamics]]) -> Markup:
    """Returns a sentence with the numbers of events (such as loss spikes) of each kind, arm by arm."""
    told = []
    for arm in arms:
        kinds = Counter(EVENTS.get(_kind(event), _OTHER) for w in seen[arm.index] for event in w.events)
        if kinds:
            counts = [f"{n} {kind.one if n == 1 else kind.many}" for kind, n in kinds.items()]
            told.append(join([arm_name(arm), ": ", ", ".join(counts)]))
    if not told:
        return join(["No spike and no number that is not finite was seen."])
    return join([join(told, "; "), ". ", tag("code", "glassformer why RUN"), " ranks what moved first."])
