"""Proof that the default suite catches faults: ten are planted, one at a time, and the tests that reach them run.

    python -m tools.planted_faults              plants all of them
    python -m tools.planted_faults kernel page  plants these
    python -m tools.planted_faults --list       names them

Each is planted in a copy of the working tree. The tests that `tools/changed.py` names for its file run there as `make
test` runs them, those of its subject first, until one fails; that one must pass without the fault. If its cases are
divided (`tests/quick.py`), the same is done in further phases. Exit status 1 if a fault survives in a phase that was
tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.quick import PHASE, parts_of
from tools.changed import ALWAYS, affected
from tools.imports import ROOT

MOST_PHASES = 4
"""Phases that are tried at most: all cases of a test are then, unless they are divided into more parts."""
MINUTES = 30
"""Time after which a fault counts as one that survives a phase."""
AT_ONCE = 12
"""Files of tests in one process: fewer start it more often, more collect what is not reached."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """A slip that a person could make: `old`, which is once in `file`, is replaced by `new`."""

    subject: str
    """The kind of code at fault, which is also the name of the fault."""
    slip: str
    file: str
    old: str
    new: str
    first: str
    """The file of tests that is run before the others, as its subject is that of the fault."""


FAULTS = (
    Fault(
        "kernel",
        "the first of several queries loses the oldest key of its window",
        "src/glassformer/parts/kernel/direct.py",
        "spans = call.visibility.spans(t - s, t, t)",
        "spans = call.visibility.spans(t - s + 1, t, t)",
        "tests/parts/test_kernel.py",
    ),
    Fault(
        "state",
        "rows of unequal lengths do not move after a chunk of several tokens",
        "src/glassformer/parts/state.py",
        "if self.rows is not None and tokens:",
        "if self.rows is not None and tokens == 1:",
        "tests/parts/test_mamba.py",
    ),
    Fault(
        "converter",
        "Phi-3's gate and up projection are taken for one another",
        "src/glassformer/conversion/families/phi3.py",
        """        ".ffn.gate_proj": Part("mlp.gate_up_proj", 0, 2),
        ".ffn.up_proj": Part("mlp.gate_up_proj", 1, 2),
""",
        """        ".ffn.gate_proj": Part("mlp.gate_up_proj", 1, 2),
        ".ffn.up_proj": Part("mlp.gate_up_proj", 0, 2),
""",
        "tests/conversion/test_parity.py",
    ),
    Fault(
        "sampler",
        "top-p drops the token whose probability reaches p",
        "src/glassformer/generation/sampling.py",
        "last = (reached < enough).sum(-1, keepdim=True).clamp_(max=k - 1)",
        "last = ((reached < enough).sum(-1, keepdim=True) - 1).clamp_(min=0)",
        "tests/generation/test_sampling.py",
    ),
    Fault(
        "checkpoint",
        "checkpoints that a thread writes hold the values of the first one",
        "src/glassformer/training/checkpoint.py",
        """            if key not in room:
                room[key] = torch.empty(piece.values.shape, dtype=piece.values.dtype)
            return piece._replace(values=room[key].copy_(piece.values))
""",
        """            return piece._replace(values=room.setdefault(key, piece.values.clone()))
""",
        "tests/training/test_checkpoint.py",
    ),
    Fault(
        "statistic",
        "the variance of paired differences is divided by n",
        "src/glassformer/runs/contrasts.py",
        "** 2).sum(-2) / (seeds - 1)",
        "** 2).sum(-2) / seeds",
        "tests/comparison/test_statistics.py",
    ),
    Fault(
        "cost",
        "KV heads count as query heads in bytes moved",
        "src/glassformer/parts/mixer/attend.py",
        "shape.tokens * (n + g) * (h + value_dim)",
        "shape.tokens * 2 * n * (h + value_dim)",
        "tests/parts/test_cost.py",
    ),
    Fault(
        "cut",
        "each rank adds the bias of a map that is cut by rows",
        "src/glassformer/parts/linear.py",
        "y = self.leave(as_among_others(lambda x: F.linear(x, weight), x))",
        "return self.leave(as_among_others(lambda x: F.linear(x, weight, self.bias), x))",
        "tests/parallel/test_tensor.py",
    ),
    Fault(
        "tokenizer",
        "a slash after punctuation is a separate piece in GPT-4o's way to cut text",
        "src/glassformer/text/gguf/pre_tokenizers.py",
        r"[^\s\p{{L}}\p{{N}}]+[\r\n/]*",
        r"[^\s\p{{L}}\p{{N}}]+[\r\n]*",
        "tests/text/test_gguf_tokenizer.py",
    ),
    Fault(
        "page",
        "the arm with the lowest loss is marked best, whatever the verdicts are",
        "src/glassformer/report/summary.py",
        "arm.name == results.best",
        "arm is order[0]",
        "tests/report/test_best.py",
    ),
)


def copied(folder: Path) -> Path:
    """Copies the working tree, without what git ignores, into a folder."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def planted(fault: Fault, text: str) -> str:
    """Returns the text of the fault's file with the fault. Raises ValueError unless `old` is in it once."""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file} has the text that the fault {fault.subject!r} replaces {count} times, not once")
    return text.replace(fault.old, fault.new)


def first_failure(tree: Path, tests: Sequence[str], phase: int, seconds: float) -> str | None:
    """Returns the first test that fails, of files or names, in a tree; None if all pass or the time is over."""
    end = time.monotonic() + seconds
    around = {**os.environ, PHASE: str(phase), "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    for some in (tests[:1], *(tests[i : i + AT_ONCE] for i in range(1, len(tests), AT_ONCE))):
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *some]
        try:
            done = subprocess.run(
                command, cwd=tree, env=around, capture_output=True, text=True, timeout=max(1.0, end - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            return None
        if found := FAILED.search(done.stdout):
            return found[1]
        if done.returncode not in (0, 5):  # 5: all tests of these files are slow ones
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return None


class Caught(NamedTuple):
    """The test that catches a fault in a phase, or no test if the fault survives there."""

    phase: int
    test: str | None
    seconds: float


def hunt(fault: Fault, tree: Path) -> list[Caught]:
    """Plants a fault in a tree, looks for a test that catches it in each phase that may differ, and takes it out
    again. Raises RuntimeError for a test that fails without the fault too."""
    reaching = [test.relative_to(ROOT).as_posix() for test in affected([ROOT / fault.file]) if test not in ALWAYS]
    tests = [fault.first, *(test for test in reaching if test != fault.first)]
    place, found = tree / fault.file, list[Caught]()
    whole = place.read_text(encoding="utf-8")
    place.write_text(planted(fault, whole), encoding="utf-8")
    for phase in range(MOST_PHASES):
        began = time.monotonic()
        test = first_failure(tree, tests, phase, 60 * MINUTES)
        found.append(Caught(phase, test, time.monotonic() - began))
        if test is not None:
            if parts_of(test) == 1:
                break
            file = test.partition("::")[0]
            tests = [file, *(other for other in tests if other != file)]
    place.write_text(whole, encoding="utf-8")
    for test in {one.test for one in found if one.test is not None}:
        if first_failure(tree, [test], 0, 60 * MINUTES) is not None:
            raise RuntimeError(f"{test} fails without the fault {fault.subject!r}, too")
    return found


def rows(fault: Fault, found: Sequence[Caught]) -> list[str]:
    """Returns the lines of a table in Markdown about one fault: one for each test that catches it."""
    by_test: dict[str | None, list[Caught]] = {}
    for one in found:
        by_test.setdefault(one.test, []).append(one)
    made = []
    for test, some in by_test.items():
        always = test is not None and parts_of(test) == 1 and len(found) == 1
        phases = "all" if always else ", ".join(str(one.phase) for one in some)
        by = "nothing: it survives" if test is None else f"`{test}`"
        seconds = ", ".join(f"{one.seconds:.0f}" for one in some)
        made.append(f"| {fault.subject}: {fault.slip} | {fault.file} | {by} | {phases} | {seconds} |")
    return made


def main() -> int:
    subjects = [fault.subject for fault in FAULTS]
    parser = argparse.ArgumentParser(description="Shows which tests catch faults that are planted.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"faults: {', '.join(subjects)}")
    parser.add_argument("--list", action="store_true", help="names them only")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(subjects)):
        parser.error(f"{unknown[0]} is unknown; use {', '.join(subjects)}")
    chosen = [fault for fault in FAULTS if fault.subject in (given.names or subjects)]
    if given.list:
        print("\n".join(f"{fault.subject:12}{fault.file}: {fault.slip}" for fault in chosen))
        return 0
    survived = False
    print("| fault | file | caught by | in phases | seconds |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for fault in chosen:
            found = hunt(fault, tree)
            survived |= any(one.test is None for one in found)
            print("\n".join(rows(fault, found)), flush=True)
    return int(survived)


if __name__ == "__main__":
    raise SystemExit(main())
