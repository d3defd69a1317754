"""The tests that a change can break: those that reach a changed file by imports.

    python -m tools.changed [BASE]     runs them; BASE is the commit to compare with, by default main
    python -m tools.changed --list     names them

The working tree is compared with the last commit that it shares with BASE, new files included. A test also reaches
what it starts as a process, and the conftest.py files above it. The laws of the house are always tried.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tools.imports import COMPUTED, ROOT, SRC, TOPS, file_of, imported, parsed, walk

ALWAYS = tuple(ROOT / "tests" / f"{name}.py" for name in ("test_house", "test_known_once", "test_quick", "test_words"))
EVERYTHING = {"pyproject.toml", "constraints.txt"}
"""Files on which every test depends."""
MODULE = re.compile(r"(?:glassformer|benchmarks|experiments|tools)(?:\.\w+)+")


def differing(base: str) -> list[Path]:
    """Returns the files of the working tree that differ from the last commit it shares with `base`, and gone ones."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    (shared,) = git("merge-base", base, "HEAD")
    names = git("diff", "--no-renames", "--name-only", shared) + git("ls-files", "--others", "--exclude-standard")
    return sorted({ROOT / name for name in names})


@cache
def reached(path: Path) -> list[Path]:
    """Returns the files that a file depends on: its imports, the packages around them, what it names or starts."""
    if path == SRC / "__init__.py":  # the facade imports nothing by itself
        return []
    tree = parsed(path)
    names = [name for _, name in imported(path, tree)]
    for node in () if path.is_relative_to(SRC) else walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # the code or command of a process
            names += MODULE.findall(node.value)
            names += ["glassformer.__main__"] if node.value == "glassformer" else []
    files = [file for name in names if (file := file_of(name)) is not None]
    files += [around for file in files for around in packages(file)]
    if COMPUTED in names:
        files += path.parent.glob("*.py")
    if path.is_relative_to(TOPS["tests"]):
        folders = [folder for folder in path.parents if folder.is_relative_to(TOPS["tests"])]
        files += [file for folder in folders if (file := folder / "conftest.py").is_file()]
    return files


def packages(file: Path) -> Iterator[Path]:
    """Yields the `__init__.py` files around a file but for the facade, which imports nothing by itself."""
    for folder in file.parents:
        if folder in TOPS.values():
            return
        if (around := folder / "__init__.py").is_file():
            yield around


def affected(changed: Iterable[Path]) -> list[Path]:
    """Returns the files of tests that a change of these files can break, those that reach them by the fewest imports
    first."""
    changed = list(changed)
    files = [path for top in TOPS.values() for path in sorted(top.rglob("*.py")) if "__pycache__" not in path.parts]
    tests = [path for path in files if path.name.startswith("test_") and path.is_relative_to(TOPS["tests"])]
    if any(path.relative_to(ROOT).as_posix() in EVERYTHING for path in changed):
        return tests
    users: dict[Path, set[Path]] = defaultdict(set)
    for path in files:
        for file in reached(path):
            users[file].add(path)
    reaching = {file for path in changed for file in touched(path, tests)} | {test for test in ALWAYS if test.is_file()}
    seen: dict[Path, None] = {}
    while reaching:
        seen |= dict.fromkeys(sorted(reaching))
        reaching = {user for file in reaching for user in users[file]} - seen.keys()
    return [file for file in seen if file in tests]


def touched(path: Path, tests: list[Path]) -> list[Path]:
    """Returns the code files affected by a changed file: a Python file itself; for a data file of src, or a deleted
    Python file, the Python files of its folder; for any other file, the tests that name it."""
    if path.suffix == ".py" and path.is_file():
        return [path]
    if path.is_relative_to(SRC) or path.suffix == ".py":
        folder = next(folder for folder in path.parents if any(folder.glob("*.py")) or folder == ROOT)
        return sorted(folder.glob("*.py"))
    pages = [test for test in tests if test.name == "test_docs.py" and path.suffix == ".md"]
    return pages + [test for test in tests if path.name in test.read_text(encoding="utf-8")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests that a change can break.")
    parser.add_argument("base", nargs="?", default="main", help="the commit to compare with")
    parser.add_argument("--list", action="store_true", help="names them only")
    given = parser.parse_args()
    changed = differing(given.base)
    tests = [test.relative_to(ROOT).as_posix() for test in affected(changed)]
    print(f"{len(changed)} changed files: {len(tests)} files of tests", flush=True)
    if given.list:
        print("\n".join(tests))
        return 0
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
