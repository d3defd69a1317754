"""A few seconds of what `python -m tests.convert.storage.fuzz` does for as long as one likes."""

from __future__ import annotations

import pytest

from tests.convert.storage.fuzz import FORMAT, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMAT)
def test_thousands_of_damaged_files(name: str):
    result = run(name, seed=0, inputs=3000)
    assert not result.findings, next(iter(result.findings.items()))
    assert result.tried == 3000 and result.accepted > 30 and sum(result.refused.values()) > 1000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMAT)
def test_the_undamaged_files_are_accepted(name: str):
    fuzz_one, corpus = FORMAT[name]
    for data in corpus():
        fuzz_one(data)
