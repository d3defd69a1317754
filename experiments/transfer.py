"""Whether the best learning rate of a small model is that of a larger one: under muP (Yang et al. 2022, 2203.03466),
and in the standard parametrisation with the usual rule by size.

>>> python -m experiments.transfer            # hours; goes on where it was stopped; writes docs/transfer.md
>>> python -m experiments.transfer --quick    # the same in minutes, to see that it runs; prints the page

Every size is a tuned comparison of both arms (`gf.tune`). Under muP the rate is that of the base width, which is the
width of the smallest size here, so that a rate that transfers is the same number at every size.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import glassformer as gf
from glassformer.laboratory.rates import FACTOR
from glassformer.naming import SIZES

PAGE = Path(__file__).parents[1] / "docs" / "transfer.md"
RUNS = Path("transfer")
TESTED = ("1m", "3m", "10m")
BASE = SIZES[TESTED[0]][1]
"""The width at which muP is the standard parametrisation."""
DATA, TOKENS, SEEDS = "python-docs", 1_500_000, 2
QUICK: dict[str, Any] = {"tokens": 20_000, "batch_size": 4, "context": 64}
ARMS = {"standard": "llama@{}", "muP": "llama@{}+mup:" + str(BASE)}


def tuned(size: str, out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Arm -> what was found of its rate, as results.json has it."""
    names = {arm: expression.format(size) for arm, expression in ARMS.items()}
    results = gf.tune(list(names.values()), DATA, out=out / size, seeds=SEEDS, **{"tokens": TOKENS, **options})
    arms = {one["name"]: one for one in results["tuning"]["arms"]}
    return {arm: arms[name] for arm, name in names.items()}


def page(found: Mapping[str, Mapping[str, Mapping[str, Any]]], tokens: int) -> str:
    """`found`: size -> arm -> what was found."""
    sizes = list(found)
    lines = [
        "# Does the best learning rate transfer?", "",
        f"`python -m experiments.transfer`, {date.today():%Y-%m-%d}: {DATA}, {tokens:,} tokens a run.", "",
        "| size | arm | usual rate | best rate | loss at usual | loss at best |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for size in sizes:
        for arm, one in found[size].items():
            losses = (_shown(one[key]) for key in ("loss_usual", "loss_chosen"))
            lines.append(f"| {size} | {arm} | {one['usual']:.3g} | {one['chosen']:.3g} | {' | '.join(losses)} |")
    return "\n".join([*lines, "", *verdicts(found), ""])


def verdicts(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Whether each arm's best rate stays within a factor of 2 from the smallest size to every other."""
    small, *others = found
    told = []
    for arm in ARMS:
        ratios = {size: found[size][arm]["chosen"] / found[small][arm]["chosen"] for size in others}
        holds = all(abs(math.log(ratio, FACTOR)) <= 1 for ratio in ratios.values())
        each = ", ".join(f"{ratio:.2f} at {size}" for size, ratio in ratios.items())
        word = "transfers" if holds else "does not transfer"
        told.append(f"- {arm}: the best rate {word} within a factor of {FACTOR:g}; times that of {small}: {each}.")
    return told


def _shown(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small budgets of the two smaller sizes")
    parser.add_argument("--out", type=Path, default=RUNS, help="folder of the runs")
    given = parser.parse_args(arguments)
    options = QUICK if given.quick else {}
    found = {size: tuned(size, given.out, **options) for size in (TESTED[:2] if given.quick else TESTED)}
    written = page(found, options.get("tokens", TOKENS))
    if given.quick:
        print(written)
    else:
        PAGE.write_text(written, encoding="utf-8")
        print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
