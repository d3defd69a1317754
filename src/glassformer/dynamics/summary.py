"""Summary of a watched run for a report, of bounded size for a run of any length."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from glassformer.dynamics import records
from glassformer.errors import RequestError

WINDOWS = 60
"""Maximum number of windows of steps."""
BANDS = 48
"""Maximum number of rows of a map of layers by step; in a deeper model, neighbouring layers share a row."""
EVENTS = 60
EXPERTS = 512
"""Maximum number of experts of a layer whose load is kept."""
LATE = 4
"""Number of equal parts of the run; the load of experts is the mean over the last part."""
PULSE = frozenset({"weight_norm", "gradient_norm", "gradient_rms"})
"""Statistics recorded at every step; the others come once in an interval."""
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)", re.DOTALL)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_QK = "mixer.qk"  # product of two matrices: it has no gradient

Row = tuple[int, dict[str, Any]]
Reduce = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def _norm(values: Sequence[float]) -> float:
    return math.hypot(*values)


def _last(values: Sequence[float]) -> float:
    return values[-1]


@dataclass(frozen=True)
class SummarizedStatistic:
    """Statistic of the summary: `statistic` of dynamics.jsonl at one site, or at all. `places` reduces the numbers of
    all heads and sites to one; `rows` reduces the numbers of all steps in a window to one.

    `site`: site within a layer, such as mixer, or the full site for a statistic outside the layers, such as logits;
    None for all sites but mixer.qk.
    """

    name: str
    statistic: str
    site: str | None
    places: Reduce
    rows: Reduce


LAYERS = (
    SummarizedStatistic("attention_entropy", "attention_entropy", "mixer", _mean, _mean),
    SummarizedStatistic("attention_entropy_worst", "attention_entropy", "mixer", min, min),
    SummarizedStatistic("max_attention_logit", "max_attention_logit", "mixer", max, max),
    SummarizedStatistic("activation_effective_rank", "activation_effective_rank", "resid_post", _mean, _mean),
    SummarizedStatistic("qk_effective_rank", "effective_rank", _QK, _mean, _mean),
    SummarizedStatistic("gradient_norm", "gradient_norm", None, _norm, _mean),
    SummarizedStatistic("token_cosine", "token_cosine", "resid_post", _mean, _mean),
    SummarizedStatistic("max_violation", "max_violation", "ffn.router", max, _mean),
    SummarizedStatistic("router_entropy", "router_entropy", "ffn.router", _mean, _mean),
    SummarizedStatistic("router_dropped", "router_dropped", "ffn.router", max, _mean),
)
"""Statistics with one number for each row of layers and each window of steps."""

CURVES = (
    SummarizedStatistic("max_attention_logit", "max_attention_logit", None, max, max),
    SummarizedStatistic("log_z", "log_z", "logits", _mean, _mean),
    SummarizedStatistic("attention_entropy_worst", "attention_entropy", None, min, min),
    SummarizedStatistic("update_ratio", "update_ratio", None, statistics.median, _mean),
    SummarizedStatistic("token_cosine", "token_cosine", None, _last, _mean),
)
"""Statistics with one number for each window of steps; the token cosine is that of the last layer."""
_LOAD = "router_load"
READ = frozenset(kept.statistic for kept in (*LAYERS, *CURVES)) | {_LOAD}


def summary_of(run: Path) -> dict[str, Any]:
    """Returns the summary (`summarise`) of the records in a run's folder; empty if the run was not watched, or the
    records cannot be read."""
    try:
        return summarise(records.read_records(run / records.NAME))
    except RequestError:
        return {}


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the short form of dynamics.jsonl, of at most WINDOWS windows of steps, BANDS rows of layers and EVENTS
    events.

    {"steps": [last step of each window], "depth": layers, "layers": {STAT: [[value per row of layers] per window]},
    "curves": {STAT: [[step, value], ...]}, "experts": [{"layer": 0, "load": [share of each expert]}], "events": [...],
    "events_left_out": 0}; without records, {}.

    Windows are equal numbers of steps, at least the interval of watching. Their values are means; for the worst head
    and the largest logit, extremes. None marks a value that was not recorded, and "nan", "inf" or "-inf" a window or a
    place that holds one: values that are not finite are never averaged away.
    """
    records = [record for record in records if _step(record) is not None]
    rows: list[Row] = [(record["step"], record["statistics"]) for record in records if _is_row(record)]
    events = [_event(record) for record in records if isinstance(record.get("event"), str)]
    if not rows and not events:
        return {}
    edges = _edges(rows)
    rows = [(step, {name: _by_place(stats[name]) for name in READ & stats.keys()}) for step, stats in rows]
    depth = max((layer + 1 for _, stats in rows for found in stats.values() for layer, _, _ in found), default=0)
    return {
        "steps": edges,
        "depth": depth,
        "layers": {kept.name: grid for kept in LAYERS if (grid := _grid(kept, rows, edges, depth))},
        "curves": {kept.name: curve for kept in CURVES if (curve := _curve(kept, rows, edges))},
        "experts": _loads(rows),
        "events": _ends(events),
        "events_left_out": max(0, len(events) - EVENTS),
    }


def event_words(record: dict[str, Any]) -> str:
    """Returns an event in a line: `step 61: spike of loss, 9.13, 7.2 sigma at layers.2.ffn.hidden`."""
    kind, what = str(record.get("event")).replace("_", " "), record.get("what")
    words = f"step {record.get('step')}: {kind}" + (f" of {what}" if what else "")
    value, sigmas = number(record.get("value")), number(record.get("sigmas"))
    words += f", {value:.4g}" if value is not None else ""
    words += f", {sigmas:.1f} sigma" if sigmas is not None else ""
    words += f" to step {record['to']}" if record.get("to") is not None else ""
    return words + (f" at {record['site']}" if record.get("site") else "")


def number(value: object) -> float | None:
    """Returns a recorded number as a float, also one that is written as "nan", "inf" or "-inf"; None for anything
    else."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return _WORDS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _step(record: object) -> int | None:
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53 else None


def _is_row(record: dict[str, Any]) -> bool:
    return isinstance(record.get("statistics"), dict)


def _by_place(found: object) -> list[tuple[int, str, list[float]]]:
    """Returns (layer, site, values) of every place in {place: number or list}, sorted by layer; -1 outside the
    layers."""
    places = []
    for where, value in (found if isinstance(found, dict) else {}).items():
        values = [v for one in (value if isinstance(value, list) else [value]) if (v := number(one)) is not None]
        if values:
            places.append((*_place(str(where)), values))
    return sorted(places, key=lambda place: place[0])


@lru_cache(1 << 16)
def _place(where: str) -> tuple[int, str]:
    inside = _LAYER.fullmatch(where)
    return (int(inside[1]), inside[2]) if inside else (-1, where)


def _edges(rows: Sequence[Row]) -> list[int]:
    """Returns the last step of every window.

    A window is at least as long as the usual gap between two full rows: the median over steps of the gap that holds a
    step, because the rows around a spike are many but cover few steps.
    """
    if not rows:
        return []
    last = max(step for step, _ in rows)
    full = sorted({step for step, stats in rows if stats.keys() - PULSE} or {step for step, _ in rows})
    gaps = sorted(b - a for a, b in itertools.pairwise([0, *full]))
    covered = itertools.accumulate(gaps)
    usual = next((gap for gap, steps in zip(gaps, covered, strict=True) if 2 * steps > full[-1]), 1)
    count = max(1, min(WINDOWS, last // usual))
    return [last * (i + 1) // count for i in range(count)]


def _read(kept: SummarizedStatistic, site: str) -> bool:
    return site == kept.site or (kept.site is None and site != _QK)


def _grid(kept: SummarizedStatistic, rows: Sequence[Row], edges: Sequence[int], depth: int) -> list[list[Any]]:
    """Returns [[value per band of layers] per window]; empty if the statistic was not recorded."""
    bands = min(depth, BANDS)
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step, stats in rows:
        by_layer: dict[int, list[float]] = defaultdict(list)
        for layer, site, values in stats.get(kept.statistic, ()):
            if layer >= 0 and _read(kept, site):
                by_layer[layer] += values
        for layer, values in by_layer.items():
            cells[bisect_left(edges, step), layer * bands // depth].append(_reduced(kept.places, values))
    if not cells:
        return []
    return [
        [_plain(_reduced(kept.rows, cells[window, band])) if (window, band) in cells else None for band in range(bands)]
        for window in range(len(edges))
    ]


def _curve(kept: SummarizedStatistic, rows: Sequence[Row], edges: Sequence[int]) -> list[list[Any]]:
    """Returns [[step, value], ...], each at the last recorded step of its window."""
    windows: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for step, stats in rows:
        values = [v for _, site, found in stats.get(kept.statistic, ()) if _read(kept, site) for v in found]
        if values:
            windows[bisect_left(edges, step)].append((step, _reduced(kept.places, values)))
    return [[max(found)[0], _plain(_reduced(kept.rows, [v for _, v in found]))] for _, found in sorted(windows.items())]


def _loads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns {"layer", "load"} of at most BANDS layers: each expert's mean share of the assignments in the last part
    of the run."""
    last = max((step for step, stats in rows if _LOAD in stats), default=0)
    by_layer: dict[int, list[list[float]]] = defaultdict(list)
    for step, stats in rows:
        for layer, _, load in stats.get(_LOAD, ()) if step * LATE >= last * (LATE - 1) else ():
            if layer >= 0 and len(load) <= EXPERTS and all(map(math.isfinite, load)):
                by_layer[layer].append(load)
    found = [(layer, loads) for layer, loads in sorted(by_layer.items()) if len({len(load) for load in loads}) == 1]
    kept = [found[i * len(found) // BANDS] for i in range(BANDS)] if len(found) > BANDS else found
    return [{"layer": layer, "load": [_plain(_mean(of)) for of in zip(*loads, strict=True)]} for layer, loads in kept]


def _reduced(reduce: Reduce, values: Sequence[float]) -> float:
    """Returns `reduce` of the values, or the first value that is not finite."""
    lost = [value for value in values if not math.isfinite(value)]
    return lost[0] if lost else reduce(values)


def _plain(value: float) -> float | str:
    """Returns a number to five significant figures; a string ("nan", "inf" or "-inf") if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


def _event(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields step, event, what, site, value and sigmas of an event, None for missing ones; its batch and
    all other fields are left out."""
    words = {key: str(record[key])[:200] if record.get(key) is not None else None for key in ("event", "what", "site")}
    numbers = {key: _plain(v) if (v := number(record.get(key))) is not None else None for key in ("value", "sigmas")}
    return {"step": record["step"], **words, **numbers}


def _ends(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the events; if there are more than EVENTS, only the first and the last EVENTS / 2."""
    return events if len(events) <= EVENTS else events[: EVENTS // 2] + events[-EVENTS // 2 :]
