"""python -m experiments.dynamics NAME...|all [--quick]: prints tables and verdicts; exit status 1 where one fails."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from experiments.dynamics.common import Outcome, table


def names() -> list[str]:
    """The experiments: every module of this folder but what they share."""
    return sorted(module.name for module in iter_modules([str(Path(__file__).parent)]) if module.name not in SHARED)


SHARED = {"common", "__main__"}


def run(name: str, quick: bool) -> Outcome:
    outcome: Outcome = import_module(f"experiments.dynamics.{name}").run(quick=quick)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.dynamics", description=__doc__)
    parser.add_argument("name", nargs="+", help=f"all, or some of: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="small sizes, no figures")
    given = parser.parse_args(arguments)
    if unknown := set(given.name) - {"all", *names()}:
        parser.error(f"there is no experiment {sorted(unknown)[0]!r}; there are {', '.join(names())}")
    failed = []
    for name in names() if "all" in given.name else given.name:
        start, worked = time.perf_counter(), time.process_time()
        outcome = run(name, given.quick)
        print(f"\n{outcome.name}: {outcome.claim}\n({outcome.source})\n\n{table(outcome.rows)}\n")
        print("\n".join(outcome.sentences))
        verdict = "holds" if outcome.passed else "does not hold"
        figure = f"; figure {outcome.figure}" if outcome.figure else ""
        seconds = f"{time.perf_counter() - start:.0f} s, {time.process_time() - worked:.0f} s of processor time"
        print(f"=> {outcome.name} {verdict} ({seconds}{figure})", flush=True)
        failed += [] if outcome.passed else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
