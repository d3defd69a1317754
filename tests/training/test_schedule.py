from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.training import ConstantConfig, CosineConfig, NoamConfig, ScheduleConfig, WsdConfig

W, N = 10, 110


@pytest.mark.parametrize("t", [0, 1, W - 1])
def test_warm_up_rises_as_nanogpt(t: int) -> None:
    for schedule in (CosineConfig(warmup=W), ConstantConfig(warmup=W), WsdConfig(warmup=W)):
        assert schedule.factor(t, N) == pytest.approx((t + 1) / (W + 1), abs=1e-12)


@pytest.mark.parametrize(("t", "u"), [(W, 0.0), (W + 1, 0.01), (60, 0.5), (N - 1, 0.99), (N, 1.0), (10 * N, 1.0)])
def test_cosine_after_the_warm_up(t: int, u: float) -> None:
    wanted = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * u))
    assert CosineConfig(warmup=W, floor=0.1).factor(t, N) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("t", "wanted"), [(W, 1.0), (89, 1.0), (90, 1.0), (100, 1 - math.sqrt(0.5)), (N, 0.0), (10 * N, 0.0)]
)
def test_wsd_is_stable_then_decays(t: int, wanted: float) -> None:
    assert WsdConfig(warmup=W, decay=0.2, shape="sqrt").factor(t, N) == pytest.approx(wanted, abs=1e-12)


def test_noam_peak_equals_the_papers() -> None:
    """lr = d^-0.5 min(t^-0.5, t w^-1.5): 6.9877e-4 at d = 512, w = 4000, t = w; the factor is 1 there."""
    d, w = 512, 4000
    schedule = NoamConfig(warmup=w)
    peak = (d * w) ** -0.5
    assert peak == pytest.approx(6.9877e-4, rel=1e-4)
    for t in (1, 100, w - 1, w, w + 1, 10 * w):
        paper = d**-0.5 * min(t**-0.5, t * w**-1.5)
        assert peak * schedule.factor(t - 1, 1e9) == pytest.approx(paper, rel=1e-12)


@given(
    st.sampled_from([CosineConfig, ConstantConfig, WsdConfig]),
    st.one_of(st.floats(0, 0.99), st.integers(1, 500)),
    st.integers(1, 300),
    st.floats(0, 3000),
)
def test_every_factor_is_a_share_of_the_peak(kind: type[ScheduleConfig], warmup: float, n: int, t: float) -> None:
    """No warm-up, one longer than the run, and a run of one step included."""
    assert 0.0 <= kind(warmup=warmup).factor(t, n) <= 1.0


def test_no_jump_at_the_seams() -> None:
    for schedule in (
        CosineConfig(warmup=W),
        WsdConfig(warmup=W, shape="linear"),
        WsdConfig(warmup=W, shape="cosine"),
    ):
        values = [schedule.factor(t / 10, N) for t in range(10 * W + 1, 12 * N)]
        assert max(abs(a - b) for a, b in itertools.pairwise(values)) < 0.02
