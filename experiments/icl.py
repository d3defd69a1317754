"""Learning in context, in full: what docs/in_context.md shows.

>>> python -m experiments.icl                       # all but the last, two minutes of one core
>>> python -m experiments.icl softmax               # seven minutes
>>> python -m experiments.icl induction --seeds 5 --out folder
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glassformer.figures import document
from glassformer.laboratory import icl
from glassformer.laboratory.induction import MODEL, induction

LONG, CONTROL_STEPS = 1_500, 2_000
"""Steps of learned positions, and of a single layer."""


def construction(seeds: int) -> Iterator[tuple[str, Any]]:
    for dims, examples in ((5, 10), (10, 20)):
        yield f"construction {dims} {examples}", icl.exact_step(dims, examples)


def one_step(seeds: int) -> Iterator[tuple[str, Any]]:
    for seed in range(seeds):
        yield f"one step, seed {seed}", icl.one_step(seed=seed)


def heads(seeds: int) -> Iterator[tuple[str, Any]]:
    for seed in range(seeds):
        yield f"induction, seed {seed}", induction(seed=seed)


def controls(seeds: int) -> Iterator[tuple[str, Any]]:
    yield "one layer", induction(MODEL.replace("layers=2", "layers=1"), steps=CONTROL_STEPS)
    yield "learned positions", induction(MODEL.replace("+rope", ""), steps=LONG)


def softmax(seeds: int) -> Iterator[tuple[str, Any]]:
    yield "softmax", icl.softmax()


EXPERIMENTS: dict[str, Callable[[int], Iterator[tuple[str, Any]]]] = {
    "construction": construction, "one_step": one_step, "induction": heads, "controls": controls, "softmax": softmax,
}  # fmt: skip
USUAL = [name for name in EXPERIMENTS if name != "softmax"]


def told(found: Any) -> dict[str, Any]:
    """Figures without curves."""
    values = {name: value for name, value in dataclasses.asdict(found).items() if name not in ("curve", "looks")}
    more = {name: getattr(found, name) for name in ("first", "fall", "final", "likest") if hasattr(found, name)}
    return {**values, **more}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.icl", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *EXPERIMENTS], help="by default all but softmax")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for figures and numbers")
    given = parser.parse_args(arguments)
    for name in given.name or USUAL:
        for title, found in EXPERIMENTS[name](given.seeds):
            print(title, json.dumps(told(found)), flush=True)
            if given.out is not None:
                given.out.mkdir(parents=True, exist_ok=True)
                plain = title.replace(", ", "_").replace(" ", "_")
                (given.out / f"{plain}.json").write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")
                if hasattr(found, "draw"):
                    (given.out / f"{plain}.html").write_text(document(title, found.draw()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
