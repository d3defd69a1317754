"""The choice of cases: all of them over the phases, and some of every test in each phase."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import quick
from tests.quick import DECKS, PHASES, SAMPLED, left_out
from tools.changed import affected

ROOT = Path(__file__).parents[1]


class Named:
    """An item of pytest, as far as the choice depends on it."""

    def __init__(self, nodeid: str):
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> None:
        return None


def tried(names: list[str], now: int) -> list[str]:
    items: list[Any] = [Named(name) for name in names]
    return [item.nodeid for item in items if item not in left_out(items, now)]


def cases(parts: int, count: int) -> list[str]:
    start = next(start for start, n in SAMPLED.items() if n == parts and start.endswith(".py"))
    return [f"{start}::test_it[{case}]" for case in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 23])
@pytest.mark.parametrize("parts", sorted(set(SAMPLED.values())))
def test_consecutive_phases_numbering_the_parts_try_every_case(parts: int, count: int):
    names = cases(parts, count)
    for first in range(PHASES):
        found = Counter(name for now in range(first, first + parts) for name in tried(names, now % PHASES))
        assert set(found) == set(names)
    each = [len(tried(names, now)) for now in range(PHASES)]
    assert min(each) >= 1 and max(each) - min(each) <= 1


def test_decks_are_dealt_as_the_cases_of_one_test():
    for deck in DECKS:
        each = [tried(list(deck), now) for now in range(4)]
        assert {name for names in each for name in names} == set(deck) and all(each)


def test_unsampled_tests_are_always_tried():
    names = ["tests/test_house.py::test_it[a]", "tests/test_house.py::test_it[b]", "tests/test_generic.py::test_alone"]
    assert tried(names, 3) == names


def test_names_in_the_tables_exist():
    assert all(PHASES % parts == 0 for parts in SAMPLED.values())
    for start in SAMPLED:
        assert (ROOT / start.partition("::")[0]).exists(), start
    for name in (name for deck in DECKS for name in deck):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a new repository; returns a function that adds a commit."""
    monkeypatch.delenv(quick.PHASE, raising=False)
    monkeypatch.setattr(quick, "__file__", str(tmp_path / "quick.py"))

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    return lambda: git("commit", "-q", "--allow-empty", "-m", "one")


def test_each_commit_moves_the_phase_on_by_one(commits: Any):
    found = []
    for _ in range(5):
        commits()
        found.append(quick.phase.__wrapped__())
    assert found == [n % PHASES for n in (1, 2, 3, 4, 5)]


def test_without_a_history_there_is_a_phase_too(commits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert quick.phase.__wrapped__() == 0  # no commit yet
    commits()
    (tmp_path / ".git" / "shallow").write_text(quick._git("rev-parse", "HEAD") + "\n")
    assert quick.phase.__wrapped__() == int(quick._git("rev-parse", "HEAD")[:8], 16) % PHASES
    monkeypatch.setenv(quick.PHASE, "7")
    assert quick.phase.__wrapped__() == 7 % PHASES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "reached", "not_reached"),
    [
        ("src/glassformer/lens/sinks.py", ["lens/test_sinks.py", "cli/test_look.py"], ["parts/test_norm.py"]),
        ("src/glassformer/planning/machines.yaml", ["planning/test_machines.py"], ["lens/test_sinks.py"]),
        ("src/glassformer/errors.py", ["test_errors.py", "test_generic.py", "cli/test_cli.py"], []),
        ("src/glassformer/planning/gone.py", ["planning/test_plan.py"], ["lens/test_sinks.py"]),
        ("docs/architecture.md", ["test_house.py", "test_docs.py"], ["lens/test_sinks.py"]),
        ("tests/parallel/processes.py", ["parallel/test_stages.py"], ["lens/test_sinks.py"]),
        ("tests/lens/test_sinks.py", ["lens/test_sinks.py", "test_known_once.py"], ["lens/test_edits.py"]),
        ("pyproject.toml", ["lens/test_sinks.py", "planning/test_plan.py"], []),
    ],
)
def test_a_change_reaches_its_tests(file: str, reached: list[str], not_reached: list[str]):
    found = {test.relative_to(ROOT / "tests").as_posix() for test in affected([ROOT / file])}
    assert set(reached) <= found and not set(not_reached) & found
