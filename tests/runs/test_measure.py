"""What is measured on a trained model."""

from __future__ import annotations

from statistics import stdev

import pytest

from glassformer.runs.measure import scatter


def test_the_scatter_of_timings_is_that_of_stretches_and_not_of_single_ones():
    steady = [1.0, 3.0, 2.0] * 16  # every stretch of six has the median 2
    assert scatter(steady) == 0
    drifting = [1.0 + i // 10 for i in range(80)]
    assert scatter(drifting) == pytest.approx(stdev(range(8)))
    assert scatter([1.0] * 15) is None and scatter([]) is None
    assert scatter([*drifting[:79], 1e9]) == scatter(drifting)  # one pause of the machine says nothing
