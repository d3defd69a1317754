"""A few seconds of what `python -m tests.conversion.storage.fuzz` does for as long as one likes."""

from __future__ import annotations

import pytest

from tests.conversion.storage.fuzz import FORMAT, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMAT)
def test_thousands_of_damaged_files(name: str):
    inputs = FORMAT[name].inputs
    result = run(name, seed=0, inputs=inputs)
    assert not result.findings, next(iter(result.findings.items()))
    assert result.tried == inputs and result.accepted > inputs / 100 and sum(result.refused.values()) > inputs / 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMAT)
def test_the_undamaged_files_are_accepted(name: str):
    for data in FORMAT[name].corpus():
        FORMAT[name].fuzz_one(data)
