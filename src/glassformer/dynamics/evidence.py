"""Series of a run's records, with the detection of moves, in sigma, and of failures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from glassformer.config import ModelConfig
from glassformer.dynamics.records import LAST_STEP, number
from glassformer.dynamics.spikes import Spikes, forecast
from glassformer.thresholds import DIVERGENCE_NATS, DIVERGENCE_WINDOW

ALARM = 6.0
"""Minimum distance, in robust sigmas, of a statistic that has moved."""
LOOKBACK = 32
"""Number of steps before the onset of a failure that are searched for the first move."""
BASE, BASE_ROWS = 96, 12
"""Number of steps before the look-back whose rows are the base of a move; minimum number of rows of a base, however far
back if rows are rare."""
LEAST = 5
"""Minimum earlier rows for any statement about a move."""
LEAST_KNOWN = 12
"""Minimum residuals of a statistic, over all its places, for an estimate of its spread."""
CALM = 64
"""Minimum values from the steps before the look-back for an estimate of how far a statistic wanders in calm."""
BACK = 10
"""Steps within which the loss must recover for a spike to have passed."""
EARLY = 64
NATS_ABOVE, NATS_BACK = 0.3, 1.0
"""Rises of the loss, in nats, that exceed fluctuation: above the first loss, and above the lowest loss so far within
the first EARLY steps."""
COLUMNS = ("step", "loss", "learning_rate", "grad_norm")
LOGARITHMIC = {
    "weight_norm", "gradient_norm", "gradient_rms", "update_ratio", "residual_rms", "massive", "spectral_norm",
    "effective_rank", "stable_rank", "activation_effective_rank", "activation_stable_rank",
}  # fmt: skip
FLOOR = 0.02
"""Minimum sigma: 0.02, which is two per cent for a statistic measured by its logarithm."""


@dataclass(frozen=True)
class Track:
    """Series of one statistic at one place: steps (r,), values (r, n), n heads or 1."""

    statistic: str
    where: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def layer(self) -> int | None:
        return layer_of(self.where)

    def since(self, step: float) -> np.ndarray:
        """Returns the values after `step`."""
        return self.values[self.steps > step]

    def late(self) -> np.ndarray:
        """Returns the values of the last third of the run, at least the last three rows; empty with fewer rows."""
        if len(self.steps) < 3:
            return self.values[:0]
        return self.values[min(len(self.steps) - 3, int((self.steps <= self.steps[-1] * 2 / 3).sum())) :]

    def sigmas(self, at: int, head: int = 0) -> float | None:
        """Returns the distance of a head's value in row `at` from its values in up to BASE earlier rows, in robust
        sigmas (median and MAD; of logarithms for a size or a ratio). None with fewer than LEAST earlier rows."""
        if at < LEAST:
            return None
        return float(self._away(np.arange(max(0, at - BASE), at), np.array([at]))[0, head])

    def base(self, onset: int) -> np.ndarray:
        """Returns the indices of the rows, at least LOOKBACK steps before the onset, against which a move is measured;
        empty if there are fewer than LEAST."""
        early = np.flatnonzero(self.steps <= onset - LOOKBACK)
        within = int((self.steps[early] > onset - LOOKBACK - BASE).sum())
        rows = early[len(early) - min(len(early), max(within, BASE_ROWS)) :]
        return rows if len(rows) >= LEAST else rows[:0]

    def line(self, base: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (slope, level, spread) of each head over the rows `base`, (n,) each: the line of Theil and Sen (the
        median of the slopes of all pairs, the median of the residuals), and the MAD around the line, as a standard
        deviation, corrected for two parameters."""
        times, values = self.steps[base].astype(float), self._scaled(self.values[base])
        early, late = np.triu_indices(len(base), 1)
        slope = np.median((values[late] - values[early]) / (times[late] - times[early])[:, None], axis=0)
        left = values - slope * times[:, None]
        level = np.median(left, axis=0)
        spread = 1.4826 * np.median(np.abs(left - level), axis=0) * math.sqrt(len(base) / (len(base) - 2))
        return slope, level, np.nan_to_num(spread, nan=math.inf)

    def strayed(self, onset: int, usual: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows, sigmas (rows, n)): indices of the rows in the LOOKBACK steps up to the onset and of the first
        row after it, and the distance of each of the n heads in these rows from its earlier values, the rows
        `base(onset)`, in multiples of their spread; both empty if there are too few earlier rows.

        The distance is from the line through the base or from its median, whichever is nearer, 0 between the two: a
        series that drifts leaves the median, one whose drift slows down leaves the line, and neither has moved. The
        spread is that around the line, at least `usual`, the spread of the statistic at all its places, because one of
        hundreds of series always has a spread that is small by chance. It grows with the distance from the base as the
        error of a line does."""
        base = self.base(onset)
        rows = np.flatnonzero((self.steps > onset - LOOKBACK) & (self.steps <= onset))
        if not len(base) or not len(rows):
            return rows[:0], np.zeros((0, self.values.shape[1]))
        slope, level, spread = self.line(base)
        rows = np.append(rows, np.flatnonzero(self.steps > onset)[:1])
        times, middle = self.steps[rows].astype(float), self.steps[base].mean()
        reach = np.sqrt(1 + 1 / len(base) + (times - middle) ** 2 / np.square(self.steps[base] - middle).sum())
        now = self._scaled(self.values[rows])
        flat, sloped = now - np.median(self._scaled(self.values[base]), axis=0), now - level - slope * times[:, None]
        away = np.where(flat * sloped > 0, np.sign(flat) * np.minimum(np.abs(flat), np.abs(sloped)), 0.0)
        away = np.where(np.isfinite(now), away, math.inf)
        away /= np.maximum(np.maximum(spread, usual), FLOOR) * reach[:, None]
        return rows, np.where(np.isfinite(spread), away, 0.0)

    def first_moved(self, onset: int, usual: float = 0.0, alarm: float = ALARM) -> tuple[int, int, float] | None:
        """Returns (first row, head, largest distance in sigma) of the longest move of at least `alarm` sigma, in one
        direction, that lasted until the onset and, if there is a later row, beyond; None without such a move."""
        rows, away = self.strayed(onset, usual)
        before = int((self.steps[rows] <= onset).sum())
        away, after = away[:before][::-1], away[before:]  # backwards from the onset
        if not before:
            return None
        lasting = np.cumprod((np.abs(away) >= alarm) & (np.sign(away) == np.sign(away[0])), axis=0)
        length = lasting.sum(0) * (np.abs(after) >= alarm).all(0)
        if not length.any():
            return None
        largest = np.where(length > 0, np.abs(np.where(lasting, away, 0.0)).max(0), 0.0)
        head = int(np.lexsort((-largest, -length))[0])
        return int(rows[before - length[head]]), head, float(largest[head] * np.sign(away[0, head]))

    def _away(self, base: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns robust sigmas (rows, n) of each of `rows` from the rows `base`; inf for values that are not
        finite."""
        before = self._scaled(self.values[base])
        middle = np.median(before, axis=0)
        spread = 1.4826 * np.median(np.abs(before - middle), axis=0)
        away = (self._scaled(self.values[rows]) - middle) / np.maximum(spread, FLOOR)
        return np.where(np.isfinite(away), away, math.inf)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        if self.statistic in LOGARITHMIC:
            return np.log(np.maximum(np.abs(values), 1e-30))
        return np.arcsinh(values) if self.statistic == "max_attention_logit" else values


@dataclass(frozen=True)
class Mover:
    """Statistic that moved before a failure showed, with its row and head."""

    track: Track
    row: int
    head: int
    sigmas: float

    @property
    def step(self) -> int:
        return int(self.track.steps[self.row])

    @property
    def named_head(self) -> int | None:
        """Head, if the place has several; otherwise None."""
        return self.head if self.track.values.shape[1] > 1 else None


@dataclass(frozen=True)
class Spike:
    step: int
    sigmas: float
    before: float
    """Loss expected at the step of the spike."""
    loss: float
    passed: bool
    """True if the loss recovered within BACK steps."""


@dataclass(eq=False)
class Evidence:
    """Metrics and records of a run, with the failures and series found in them. `metrics` holds one row a step; rows
    with a missing value, or one that is not finite, are left out."""

    metrics: Sequence[Mapping[str, Any]]
    records: Sequence[Mapping[str, Any]]
    config: ModelConfig | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    _answers: dict[Rule, list[Any]] = field(default_factory=dict, repr=False)

    # What every step leaves

    @property
    def steps(self) -> np.ndarray:
        return self._columns["step"]

    @property
    def losses(self) -> np.ndarray:
        return self._columns["loss"]

    @property
    def rates(self) -> np.ndarray:
        return self._columns["learning_rate"]

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        """{name: column (r,)} of the rows with finite values in all of COLUMNS, sorted by step; the later of two rows
        of a step."""
        rows: dict[float, list[float]] = {}
        for row in self.metrics:
            try:
                found = [number(row[name]) for name in COLUMNS]
            except (KeyError, ValueError):
                continue
            if all(map(math.isfinite, found)) and 0 <= found[0] < LAST_STEP:
                rows[found[0]] = found
        table = np.array([rows[step] for step in sorted(rows)]).reshape(-1, len(COLUMNS)).T
        columns = dict(zip(COLUMNS, table, strict=True))
        return columns | {"step": columns["step"].astype(np.int64)}

    def at(self, steps: np.ndarray, name: str) -> np.ndarray:
        """Returns `learning_rate` or `grad_norm` at each of `steps`; nan for a step without a row."""
        if not len(self.steps):
            return np.full(len(steps), math.nan)
        found = np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)
        return np.where(self.steps[found] == steps, self._columns[name][found], math.nan)

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        return [row for row in self.records if "event" in row]

    def event(self, kind: str) -> Mapping[str, Any] | None:
        """Returns the last event of a kind, or None."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def batch(self, step: int) -> tuple[str, ...]:
        """Returns the texts that a watch recorded for the batch of a step; empty if it recorded none."""
        return next((tuple(x["batch"]) for x in self.events if x["step"] == step and x.get("batch")), ())

    # What went wrong, if anything did

    @cached_property
    def not_finite(self) -> Mapping[str, Any] | None:
        """Last event at which loss or gradients were not finite; None without such an event, or if the run continued
        after it."""
        event = self.event("not_finite")
        return None if event is None or (len(self.steps) and self.steps[-1] > event["step"] + 1) else event

    @cached_property
    def diverged(self) -> int | None:
        """Step at which the loss rose for good; None if it did not, or ended in a value that is not finite."""
        if len(self.losses) < DIVERGENCE_WINDOW or self.not_finite:
            return None
        means = np.convolve(self.losses, np.ones(DIVERGENCE_WINDOW) / DIVERGENCE_WINDOW, "valid")
        best = np.minimum.accumulate(np.minimum(means, self.losses[0]))
        if not means[-1] > best[-1] + DIVERGENCE_NATS:
            return None
        calm = np.flatnonzero(self.losses <= best[-1] + DIVERGENCE_NATS / 2)
        return int(self.steps[min(calm[-1] + 1, len(self.steps) - 1)]) if len(calm) else int(self.steps[0])

    @cached_property
    def hump(self) -> float:
        """Largest mean loss of five consecutive steps minus the first loss, in nats; a run of fewer than ten steps is
        averaged over half its number of steps."""
        if len(self.losses) < 2:
            return 0.0
        n = min(5, len(self.losses) // 2)
        return float(np.convolve(self.losses, np.ones(n) / n, "valid").max() - self.losses[0])

    @cached_property
    def blind(self) -> float:
        """Loss of a uniform guess of the next token, log V in nats; nan without a config, or for another objective."""
        kind = (self.recipe.get("objective") or {}).get("kind", "next_token")
        return math.log(max(2, self.config.vocab_size)) if self.config and kind == "next_token" else math.nan

    @cached_property
    def rose(self) -> bool:
        """True if the loss rose above its first value, above its lowest in the first steps, in a late spike that did
        not pass, or at the end above its minimum."""
        step = self.steps[-1] if len(self.steps) else 0
        lasting = any(spike.step > step - DIVERGENCE_WINDOW and not spike.passed for spike in self.spikes)
        end = float(np.mean(self.losses[-5:])) if len(self.losses) else 0.0
        climbed = end > self.losses.min(initial=math.inf) + 2 * DIVERGENCE_NATS
        return self.hump > NATS_ABOVE or self.relapse > NATS_BACK or lasting or climbed

    @cached_property
    def relapse(self) -> float:
        """Largest rise of the loss above its lowest value so far, in nats, within the first EARLY steps, which the
        detector of spikes does not judge."""
        early = self.losses[:EARLY]
        return float((early - np.minimum.accumulate(early)).max(initial=0.0))

    @cached_property
    def spikes(self) -> list[Spike]:
        """Spikes of the loss, detected in the metrics, in order of time."""
        detector, found = Spikes(), []
        for i, loss in enumerate(self.losses.tolist()):
            if (sigmas := detector.see(loss)) is not None and math.isfinite(loss):
                expected = forecast(np.array(detector.calm))[0]
                after = self.losses[i + 1 : i + 1 + BACK]
                passed = len(after) > 0 and bool(np.median(after[-3:]) < expected + 0.25 * (loss - expected))
                found.append(Spike(int(self.steps[i]), sigmas, expected, loss, passed))
        return found

    @property
    def worst(self) -> Spike | None:
        """Spike of the loss with the most sigmas; None without a spike."""
        return max(self.spikes, key=lambda spike: spike.sigmas, default=None)

    @cached_property
    def gradient_spikes(self) -> dict[int, float]:
        """{step: sigmas} of the spikes of the gradient norm that the watch recorded."""
        return {
            event.get("from", event["step"]): event.get("sigmas", math.inf)
            for event in self.events
            if event["event"] == "spike" and event.get("what") == "grad_norm"
        }

    @cached_property
    def followed(self) -> list[int]:
        """Steps of the gradient spikes that were followed, within BACK steps, by a spike of the loss or by the onset of
        the failure."""
        showed = [*(spike.step for spike in self.spikes), *([] if self.onset is None else [self.onset])]
        return [step for step in self.gradient_spikes if any(0 <= later - step <= BACK for later in showed)]

    def spiked(self, since: int) -> bool:
        """Returns True if loss or gradient norm spiked at a step or within DIVERGENCE_WINDOW steps after it; without a
        spike, `on_spike` cannot have acted."""
        steps = [*(spike.step for spike in self.spikes), *self.gradient_spikes]
        return any(0 <= step - since <= DIVERGENCE_WINDOW for step in steps)

    @cached_property
    def onset(self) -> int | None:
        """Step at which the loss or gradients were not finite, or the loss diverged; None if neither happened."""
        if self.not_finite:
            return int(self.not_finite["step"])
        lasting = [spike.step for spike in self.spikes if not spike.passed]
        if self.diverged is not None:
            return min([self.diverged, *(step for step in lasting if step >= self.diverged - BACK)])
        return None

    # Statistics

    @cached_property
    def tracks(self) -> dict[tuple[str, str], Track]:
        """Series by (statistic, place), without steps that were rolled back."""
        rows: dict[tuple[str, str], dict[int, list[float]]] = {}
        for record in self.records:
            step = record["step"]
            if record.get("event") == "rolled_back":
                for series in rows.values():
                    for later in [known for known in series if known > record.get("to", step)]:
                        del series[later]
            for statistic, places in record.get("statistics", {}).items():
                for where, value in places.items():
                    heads = value if isinstance(value, list) else [value]
                    rows.setdefault((statistic, where), {})[step] = heads
        return {key: track for key, series in rows.items() if (track := _track(*key, series)) is not None}

    @property
    def watched(self) -> bool:
        return bool(self.tracks)

    def of(self, statistic: str) -> list[Track]:
        """Returns the series of a statistic at all its places."""
        return self._by_statistic.get(statistic, [])

    @cached_property
    def _by_statistic(self) -> dict[str, list[Track]]:
        found: dict[str, list[Track]] = {}
        for track in self.tracks.values():
            found.setdefault(track.statistic, []).append(track)
        return found

    def get(self, statistic: str, where: str) -> Track | None:
        return self.tracks.get((statistic, where))

    @cached_property
    def layers(self) -> list[int]:
        return sorted({track.layer for track in self.tracks.values() if track.layer is not None})

    @cached_property
    def last_step(self) -> int:
        return max([int(self.steps[-1]) if len(self.steps) else 0, *(row["step"] for row in self.records)])

    @cached_property
    def full(self) -> np.ndarray:
        """Steps at which all statistics were recorded, not only norms."""
        return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(one.steps for one in self.of("update_ratio"))]))

    def together(self, statistic: str, layer: int | None, *names: str) -> Track | None:
        """Returns the series of the joint norm of a layer's matrices (root of the sum of squares): of all, or of
        `names` (`mixer.q`). None if no such matrix was recorded, or not all at the same steps."""
        prefix = f"layers.{layer}."
        found = [
            track for track in self.of(statistic)
            if track.where.startswith(prefix) and (not names or track.where.removeprefix(prefix) in names)
        ]  # fmt: skip
        if not found or any(not np.array_equal(track.steps, found[0].steps) for track in found):
            return None
        total = np.sqrt(np.sum([np.square(track.values).sum(1) for track in found], axis=0))
        return Track(statistic, f"layers.{layer}", found[0].steps, total[:, None])

    def gradient(self, layer: int | None, *names: str) -> Track | None:
        """Returns the series of ||dL/dW|| of a layer's matrices, as one norm; arguments and None as in `together`."""
        return self.together("gradient_norm", layer, *names)

    def ask(self, rule: Rule) -> list[Any]:
        """Returns the findings of a rule, which runs at the first call only."""
        if rule not in self._answers:
            self._answers[rule] = list(rule(self))
        return self._answers[rule]

    def movers(self, onset: int) -> list[Mover]:
        """Returns the statistics that moved before the onset and stayed moved, in order of time.

        A move is at least ALARM sigma (1.5 ALARM if fewer than CALM values are known from the LOOKBACK steps before the
        steps searched), and at least twice the largest distance of the statistic in those LOOKBACK steps, when nothing
        had happened yet. There are hundreds of series, and those of a healthy run wander further than noise would."""
        found = []
        for tracks in self._by_statistic.values():
            bases = [(track, base) for track in tracks if len(base := track.base(onset))]
            spreads = [track.line(base)[2] for track, base in bases]
            known = sum(track.values.shape[1] * (len(base) - 2) for track, base in bases)
            if known < LEAST_KNOWN or not math.isfinite(usual := median(np.concatenate(spreads))):
                continue
            calm = [np.abs(track.strayed(onset - LOOKBACK, usual)[1][:-1]).ravel() for track in tracks]
            wandered = np.concatenate(calm)
            least = ALARM if len(wandered) >= CALM else 1.5 * ALARM
            alarm = max(least, 2 * wandered[np.isfinite(wandered)].max(initial=0.0))
            moved = ((track, track.first_moved(onset, usual, alarm)) for track in tracks)
            found += [Mover(track, *move) for track, move in moved if move]
        return sorted(found, key=lambda mover: (mover.step, -abs(mover.sigmas)))


Rule = Callable[[Evidence], Iterator[Any]]


def _track(statistic: str, where: str, series: Mapping[int, Sequence[float]]) -> Track | None:
    """Returns the series of a statistic at a place, without rows whose number of heads differs from that of the last
    row; None without a value."""
    steps = sorted(series)
    heads = len(series[steps[-1]]) if steps else 0
    steps = [step for step in steps if len(series[step]) == heads]
    if not heads or not steps:
        return None
    return Track(statistic, where, np.array(steps, dtype=np.int64), np.array([series[step] for step in steps]))


def layer_of(where: str) -> int | None:
    """Returns the number of the layer in a site's name: 3 for layers.3.mixer.q; None for a site outside the layers."""
    found = re.match(r"layers\.(\d{1,6})(\.|$)", where)
    return int(found[1]) if found else None


def share(holds: np.ndarray) -> float:
    """Returns the share of rows where a condition holds; 0 without a row."""
    return float(np.mean(holds)) if np.size(holds) else 0.0


def median(values: Iterable[float]) -> float:
    """Returns the median of the finite values; nan without any."""
    kept = [value for value in values if math.isfinite(value)]
    return float(np.median(kept)) if kept else math.nan
