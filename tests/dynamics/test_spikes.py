"""Spikes against a hand-written fit, the published rule's blind spots, and what may not change across a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.dynamics.spikes import STAYS, Spikes, forecast
from glassformer.laboratory.evidence.bench import Bench, Text
from glassformer.laboratory.evidence.figure import HOLDS, verdict
from glassformer.laboratory.evidence.found import spikes_found
from glassformer.naming import preset
from glassformer.text import prepare
from glassformer.training import Recipe, train
from tests.refused import refused


def noise(n: int = 400, seed: int = 0) -> np.ndarray:
    return 3 + 0.1 * np.random.default_rng(seed).normal(size=n)


@pytest.mark.slow
def test_spikes_of_eight_sigma_are_found_on_series_of_one_seed(tmp_path: Path):
    outcome = spikes_found(Bench(tmp_path, Text(), seeds=1))
    assert verdict("measured", outcome.figures) == HOLDS, outcome.figures


def test_the_forecast_is_numpys_line_and_a_regression_of_its_residuals():
    values = np.cumsum(np.random.default_rng(0).normal(size=100))
    times = np.arange(100)
    slope, level = np.polyfit(times, values, 1)
    residual = values - level - slope * times
    phi = np.linalg.lstsq(residual[:-1, None], residual[1:], rcond=None)[0][0]
    assert 0.3 < phi < 1
    expected, sigma = forecast(values)
    assert expected == pytest.approx(level + slope * 100 + phi * residual[-1], rel=1e-9)
    assert sigma == pytest.approx(np.sqrt(((residual[1:] - phi * residual[:-1]) ** 2).sum() / 97), rel=1e-9)


def test_a_curve_without_noise_never_spikes():
    spikes = Spikes()
    assert not any(spikes.see(2 + 4 * math.exp(-t / 50)) for t in range(1000))
    assert not any(spikes.see(2.0) for t in range(500))
    assert spikes.see(2.0 * (1 + 1e-6)) is None  # rounding


def test_sigmas_are_those_above_the_expected():
    spikes, values = Spikes(), noise(128)
    for value in values:
        spikes.see(float(value))
    expected, sigma = forecast(values)
    assert spikes.see(expected + 4.9 * sigma) is None
    spikes = Spikes()
    for value in values:
        spikes.see(float(value))
    assert spikes.see(expected + 8 * sigma) == pytest.approx(8)
    assert spikes.see(expected + 50 * sigma) == pytest.approx(50), "the first does not hide the second"
    assert spikes.see(expected - 50 * sigma) is None, "a drop does not count"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_a_spike_at_once(bad: float):
    spikes = Spikes()
    assert spikes.see(bad) == math.inf
    assert spikes.state() == Spikes().state()


def test_nothing_else_is_judged_before_enough_is_known():
    spikes = Spikes(window=20, least=10)
    assert all(spikes.see(value) is None for value in noise(9))
    assert spikes.see(1e6) is None  # the tenth
    spikes = Spikes(window=20, least=10)
    assert all(spikes.see(value) is None for value in noise(10))
    assert spikes.see(1e6) is not None


def test_a_skewed_series_is_judged_by_its_logarithm():
    """Gradient norms: noise that multiplies."""
    random = np.random.default_rng(0)
    series = np.exp(0.5 * random.normal(size=2000))
    series[1000] *= np.exp(0.5 * 10)
    found = {}
    for log in (True, False):
        spikes = Spikes(log=log)
        found[log] = [t for t, value in enumerate(series) if spikes.see(float(value))]
    assert found[True] == [1000]
    assert len(found[False]) > 3, "else this test shows nothing"
    assert Spikes(log=True).see(0.0) is None


def test_spike_of_a_gradient_norm_exceeds_sigma_and_multiple():
    """Both sigma and the multiple must be exceeded; one is not enough."""
    quiet, loud = (np.exp(size * np.random.default_rng(0).normal(size=300)) for size in (0.05, 0.6))
    for series, last, spikes in ((quiet, 8, False), (quiet, 12, True), (loud, 12, False), (loud, 300, True)):
        detector = Spikes(sigma=6.0, log=True, times=10)
        assert not any(detector.see(float(value)) for value in series)
        assert (detector.see(float(last)) is not None) == spikes, (last, spikes)
    linear = Spikes(times=3)
    assert not any(linear.see(float(value)) for value in noise())
    assert linear.see(8.0) is None, "fifty sigma, and less than three times"
    assert linear.see(10.0) is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 31])
def test_no_healthy_batch_of_real_text_is_left_out(tmp_path: Path, seed: int):
    recipe = Recipe.of(
        tokens=2500 * 512, context=64, batch_size=8, learning_rate=3e-3, seed=seed, on_spike="skip", compile=False,
        dtype="float32", threads=1, device="cpu",
    )  # fmt: skip
    text = prepare("python-docs", "char", context=64, cache_dir=tmp_path / "text")
    run = train(preset("llama@1m+layers=4+d_model=64+heads=4"), text, recipe)
    assert run.steps == 2500
    assert not [row for row in run.metrics if "skipped" in row]


def test_a_new_level_ends_the_alarm():
    spikes = Spikes()
    for value in noise():
        spikes.see(float(value))
    found = [spikes.see(float(value) + 5) is not None for value in noise(300, seed=1)]
    assert found == [True] * STAYS + [False] * (300 - STAYS)


@settings(max_examples=20)
@given(st.integers(0, 399), st.integers(0, 2**32 - 1))
def test_a_round_trip_changes_no_decision(cut: int, seed: int):
    random = np.random.default_rng(seed)
    series = noise(400, seed) + (random.random(400) < 0.1) * random.exponential(3, 400)
    series[random.integers(400)] = np.nan
    whole, resumed = Spikes(window=64, least=32), Spikes(window=64, least=32)
    for t, value in enumerate(series):
        if t == cut:
            kept = json.loads(json.dumps(resumed.state(), allow_nan=False))
            resumed = Spikes(window=64, least=32)
            resumed.restore(kept)
        assert whole.see(float(value)) == resumed.see(float(value))


@pytest.mark.parametrize(
    ("state", "field"),
    [
        (None, "state"),
        ([], "state"),
        ({}, "state"),
        ({"calm": []}, "state"),
        ({"calm": [], "raised": [], "more": 1}, "state"),
        ({"calm": {}, "raised": []}, "state.calm"),
        ({"calm": [1.0, "2"], "raised": []}, "state.calm"),
        ({"calm": [True], "raised": []}, "state.calm"),
        ({"calm": [math.nan], "raised": []}, "state.calm"),
        ({"calm": [10**400], "raised": []}, "state.calm"),
        ({"calm": [1.0] * 129, "raised": []}, "state.calm"),
        ({"calm": [1.0], "raised": [1.0] * STAYS}, "state.raised"),
    ],
    ids=lambda state: str(state)[:30],
)
def test_a_damaged_state_is_refused(state: object, field: str):
    spikes = Spikes()
    spikes.see(1.0)
    with refused(code="damaged", field=field):
        spikes.restore(state)
    assert spikes.state() == {"calm": [1.0], "raised": []}, "and changes nothing"


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"least": 7}, "least"), ({"window": 32}, "least"), ({"sigma": 0}, "sigma"), ({"sigma": math.nan}, "sigma"),
     ({"times": 0.5}, "times")],
)  # fmt: skip
def test_a_senseless_detector_is_refused(fields: dict[str, float], field: str):
    with refused(code="range", field=field):
        Spikes(**fields)  # type: ignore[arg-type]
