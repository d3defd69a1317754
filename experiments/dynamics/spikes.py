"""Injected spikes: found on flat noise and on falling loss curves, with hardly a false alarm, also across a resume."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from experiments.dynamics.common import Outcome, canvas
from glassformer.dynamics.spikes import STAYS, Spikes
from glassformer.dynamics.watch import GRADIENT_TIMES

STEPS, SPIKES, HEIGHT, NOISE = 10_000, 20, 8.0, 0.05
CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda t: np.full(len(t), 3.0),
    "line, 7 nats down": lambda t: 10 - 7 * t / STEPS,
    "exponential, 300 steps": lambda t: 2 + 4 * np.exp(-t / 300),
    "power law": lambda t: 1.5 + 6 * (t + 1.0) ** -0.3,
}
PHIS = (0.0, 0.5, 0.9)
WINDOW, SIGMA = 128, 6.0


def ar1(phi: float, seed: int) -> np.ndarray:
    """x_t = phi x_(t-1) + e_t with a standard deviation of NOISE at any phi."""
    drawn = np.random.default_rng(seed).normal(size=STEPS) * NOISE
    noise = drawn * np.sqrt(1 - phi**2)
    noise[0] = drawn[0]
    for t in range(1, STEPS):
        noise[t] += phi * noise[t - 1]
    return noise


def places(seed: int, first: int = 200) -> np.ndarray:
    """SPIKES different steps, none before `first`; two of them side by side, as spikes like to come."""
    chosen = np.sort(np.random.default_rng(1000 + seed).choice(np.arange(first, STEPS), SPIKES, replace=False))
    chosen[-1] = chosen[-2] + 1
    return chosen


def alarms(series: np.ndarray) -> set[int]:
    spikes = Spikes()
    return {t for t, value in enumerate(series) if spikes.see(float(value)) is not None}


def plain_alarms(series: np.ndarray) -> set[int]:
    """More than SIGMA deviations above the mean of the last WINDOW values, whatever these are."""
    windows = np.lib.stride_tricks.sliding_window_view(series, WINDOW)[:-1]
    above = (series[WINDOW:] - windows.mean(1)) / windows.std(1)
    return set((np.flatnonzero(above > SIGMA) + WINDOW).tolist())


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "spikes",
        f"{SPIKES} spikes of {HEIGHT:g} sigma in {STEPS:,} steps of AR(1) noise, on flat and falling curves: all are "
        f"found, with at most one false alarm",
        "window and skipping: OLMo-core train/callbacks/stability_monitor.py; spike score: OLMo 2, arXiv 2501.00656",
    )
    seeds = range(1 if quick else 5)
    time = np.arange(STEPS)
    drawn = None
    for curve, shape in CURVES.items():
        for phi in PHIS:
            found, false, plain_found, plain_false = [], [], [], []
            for seed in seeds:
                where = places(seed)
                series = shape(time) + ar1(phi, seed)
                series[where] += HEIGHT * NOISE
                ours, theirs, planted = alarms(series), plain_alarms(series), set(where.tolist())
                found.append(len(ours & planted))
                false.append(len(ours - planted))
                plain_found.append(len(theirs & planted))
                plain_false.append(len(theirs - planted))
                if curve.startswith("line") and phi == 0.5:
                    drawn = (series, planted, ours, theirs)
            outcome.rows.append(
                {"curve": curve, "phi": phi, "found, each seed": " ".join(map(str, found)), "false alarms": sum(false),
                 "plain rule found": " ".join(map(str, plain_found)), "plain rule false": sum(plain_false)}
            )  # fmt: skip
            outcome.check(min(found) == SPIKES, f"{curve}, phi {phi}: {SPIKES} of {SPIKES}, each of {len(seeds)} seeds")
            outcome.check(max(false) <= 1, f"{curve}, phi {phi}: at most one false alarm in {STEPS:,} steps")
    _steep(outcome, 5 if quick else 50)
    _gradients(outcome, len(seeds))
    _not_numbers(outcome)
    _resumed(outcome)
    _level(outcome)
    if not quick and drawn is not None:
        _draw(outcome, *drawn)
    return outcome


def _steep(outcome: Outcome, seeds: int) -> None:
    """Where training begins: one spike of 8 sigma between steps 70 and 200 of a loss that falls by half in 35 steps."""
    ours = theirs = 0
    for seed in range(seeds):
        series = (2 + 4 * np.exp(-np.arange(STEPS) / 50) + ar1(0.0, seed))[:300]
        where = int(np.random.default_rng(seed).integers(70, 200))
        series[where] += HEIGHT * NOISE
        ours += where in alarms(series)
        theirs += where in plain_alarms(series)
    outcome.note(
        f"in the steep beginning (halving in 35 steps, the spike between steps 70 and 200) {ours} of {seeds} are "
        f"found, and {theirs} by the plain rule; nothing but nan and inf is judged in the first 64 steps"
    )


def _gradients(outcome: Outcome, seeds: int) -> None:
    """Noise that multiplies, and one step in a hundred at twice to eight times its usual norm, as healthy runs on real
    text have them; planted are steps at thirty times."""
    found, false, sigma_alone = [], [], []
    for seed in range(seeds):
        random, where = np.random.default_rng(2000 + seed), places(seed)
        series = np.exp(2 * ar1(0.5, seed)) * np.where(random.random(STEPS) < 0.01, random.uniform(2, 8, STEPS), 1)
        series[where] = 30 * np.exp(2 * NOISE * random.normal(size=SPIKES))
        planted = set(where.tolist())
        ours, theirs = (
            {t for t, norm in enumerate(series) if one.see(float(norm)) is not None}
            for one in (Spikes(sigma=SIGMA, log=True, times=GRADIENT_TIMES), Spikes(sigma=SIGMA, log=True))
        )
        found.append(len(ours & planted))
        false.append(len(ours - planted))
        sigma_alone.append(len(theirs - planted))
    outcome.check(
        min(found) == SPIKES and max(false) <= 1,
        f"gradient norms with tails: {SPIKES} of {SPIKES} at thirty times the usual, each of {seeds} seeds, and at "
        f"most one false alarm in {STEPS:,} steps; by sigma alone {min(sigma_alone)} at least",
    )


def _not_numbers(outcome: Outcome) -> None:
    spikes, clean = Spikes(), Spikes()
    series = 3 + ar1(0.5, 0)[:1000]
    caught, same = 0, True
    for t, value in enumerate(series):
        if t % 100 == 0:  # the very first step too
            caught += sum(spikes.see(bad) == np.inf for bad in (np.nan, np.inf, -np.inf))
        same = same and spikes.see(float(value)) == clean.see(float(value))
    outcome.check(caught == 30, "nan and inf are caught at the same step, 30 of 30, the first step included")
    outcome.check(same, "they leave no trace in the decisions after them")


def _resumed(outcome: Outcome) -> None:
    series = 10 - 7 * np.arange(STEPS) / STEPS + ar1(0.9, 1)
    series[places(1)] += HEIGHT * NOISE
    whole, parts = Spikes(), Spikes()
    cuts = set(np.random.default_rng(0).choice(STEPS, 200, replace=False).tolist()) | set(places(1).tolist())
    same = True
    for t, value in enumerate(series):
        if t in cuts:
            state = json.loads(json.dumps(parts.state()))
            parts = Spikes()
            parts.restore(state)
        same = same and whole.see(float(value)) == parts.see(float(value))
    outcome.check(same, f"resumed {len(cuts)} times through JSON: identical decisions in {STEPS:,} steps")


def _level(outcome: Outcome) -> None:
    series = 3 + ar1(0.5, 2)[:2000]
    series[1000:] += 1.0
    series[1500] += HEIGHT * NOISE
    found = sorted(alarms(series))
    outcome.check(
        found == [*range(1000, 1000 + STAYS), 1500],
        f"a level 20 sigma higher raises {STAYS} alarms and then none, and a spike above it is found",
    )


def _draw(outcome: Outcome, series: np.ndarray, planted: set[int], ours: set[int], theirs: set[int]) -> None:
    figure, axes = canvas(1, 2)
    for axis, found, title in zip(
        axes[0],
        (ours, theirs),
        (f"line and AR(1), {Spikes().sigma:g} sigma", "mean and deviation, 6 sigma"),
        strict=True,
    ):
        hit, missed = sorted(found & planted), sorted(planted - found)
        axis.plot(series, color="#999999", linewidth=0.4)
        axis.plot(hit, series[hit], "o", color="#009E73", markersize=4, label=f"found: {len(hit)}")
        axis.plot(missed, series[missed], "x", color="#D55E00", markersize=6, label=f"missed: {len(missed)}")
        axis.set(title=title, xlabel="step", ylabel="loss, nats")
        axis.legend(loc="upper right")
    outcome.draw(figure)
