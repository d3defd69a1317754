"""What is measured on a trained model."""

from __future__ import annotations

from statistics import stdev

import pytest

from glassformer.runs.arm import company
from glassformer.runs.measure import scatter
from glassformer.runs.results import COMPANY, MachineRecord


def test_the_scatter_of_timings_is_that_of_stretches_and_not_of_single_ones():
    steady = [1.0, 3.0, 2.0] * 16  # every stretch of six has the median 2
    assert scatter(steady) == 0
    drifting = [1.0 + i // 10 for i in range(80)]
    assert scatter(drifting) == pytest.approx(stdev(range(8)))
    assert scatter([1.0] * 15) is None and scatter([]) is None
    assert scatter([*drifting[:79], 1e9]) == scatter(drifting)  # one pause of the machine says nothing


def test_company_is_the_busy_time_of_others_over_the_time_that_passed():
    """3 s of 2 s, then of a count that the system does not keep."""
    assert company((10.0, 5.0), (12.0, 8.0)) == {COMPANY: 1.5}
    assert company((10.0, 5.0), (12.0, 4.9)) == {COMPANY: 0.0}
    assert company(None, (12.0, 8.0)) == company((10.0, 5.0), None) == {}
    assert MachineRecord({COMPANY: 1.5}).company == 1.5 and MachineRecord({}).company == 0.0
