"""Faults that are planted to show what the suite catches: each has its place, and what is planted is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.changed import affected
from tools.planted_faults import FAULTS, Caught, Fault, first_failure, planted, rows

ROOT = Path(__file__).parents[1]
FAULT = Fault("sum", "one too many", "sum.py", "a + b", "a + b + 1", "test_sum.py")


def test_every_fault_has_its_place():
    for fault in FAULTS:
        assert planted(fault, (ROOT / fault.file).read_text(encoding="utf-8")).count(fault.new) >= 1, fault.subject
        assert (ROOT / fault.first) in affected([ROOT / fault.file]), fault.first
    assert len(FAULTS) == len({fault.subject for fault in FAULTS}) == 10


@pytest.mark.parametrize("text", ["return a - b", "a + b\na + b\n"])
def test_a_fault_without_its_place_is_refused(text: str):
    with pytest.raises(ValueError):
        planted(FAULT, text)


def test_the_first_test_that_fails_is_named(tmp_path: Path):
    (tmp_path / "test_sound.py").write_text("def test_it():\n    assert True\n")
    (tmp_path / "test_faulty.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('word', ['a - b', 'c'])\n"
        "def test_it(word):\n    assert word == 'c', 'x - y'\n"
    )
    names = ["test_sound.py", "test_faulty.py"]
    assert first_failure(tmp_path, names, 0, 100) == "test_faulty.py::test_it[a - b]"
    assert first_failure(tmp_path, names[:1], 0, 100) is None


def test_fault_that_survives_a_phase_is_reported():
    found = [Caught(0, "tests/test_generic.py::test_it[a]", 3.2), Caught(1, None, 60.0)]
    caught, survives = rows(FAULT, found)
    assert "test_it[a]` | 0 | 3 |" in caught and "it survives | 1 | 60 |" in survives
