"""Published memory of training runs beside what is planned, and runs that ran beside what is said to fit."""

from __future__ import annotations

import pytest

from experiments.plan import mpt
from experiments.plan.memory import fit, points

pytestmark = pytest.mark.slow


def test_published_memory_is_planned_within_its_tolerance():
    """torchtitan's llama3_h100_202412: 8B to 405B on 8 to 512 GPUs."""
    held = [point for point in points() if point.tolerance is not None]
    assert {point.number for point in held} == {1, 3, 4, 5}
    for point in held:
        assert abs(point.error) <= point.tolerance, (point.what, point.ours)


def test_more_ranks_leave_each_less():
    for number in (1, 6):
        first, second = (point for point in points() if point.number in (number, number + (number == 1)))
        assert first.ours > second.ours and first.published > second.published


def test_runs_that_ran_fit():
    """All of them, and not because all that is asked for does: some took nearly all there was."""
    shares = [fit(row) for row in mpt.rows()]
    assert len(shares) == 216 and 0.9 < max(shares) <= 1
