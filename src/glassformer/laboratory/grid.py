"""Grid of runs: sizes by budgets, its parser, and the check that it suffices for a form of law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.errors import RequestError
from glassformer.laboratory.forms import FORMS
from glassformer.naming import shape
from glassformer.units import quantity

RUNG = 2.0
"""Approximate ratio of successive rungs of a ladder A..B."""
MOST_RUNGS = 100


@dataclass(frozen=True)
class Cell:
    """One size and one budget (of tokens or FLOPs) of a grid, at which all models are compared."""

    size: str
    budget: float
    isoflop: bool

    @property
    def name(self) -> str:
        """Name of the cell's folder, made of its size and budget."""
        return f"{self.size}-{self.budget:.6g}-{'flops' if self.isoflop else 'tokens'}"

    @property
    def given(self) -> dict[str, Any]:
        """Budget of the cell as a keyword argument of `compare`."""
        return {"flops": self.budget} if self.isoflop else {"tokens": int(self.budget)}


@dataclass(frozen=True)
class Grid:
    sizes: tuple[str, ...]
    budgets: tuple[float, ...]
    isoflop: bool

    @property
    def cells(self) -> list[Cell]:
        """Cells ordered by budget, then by size, so that the cheapest are trained first."""
        return [Cell(size, budget, self.isoflop) for budget in self.budgets for size in self.sizes]

    def check(self, form: str) -> None:
        """Raises RequestError if a law of this form cannot be fitted to this number of sizes and budgets."""
        if form not in FORMS:
            raise RequestError(code="unknown", field="form", value=form, expected=f"one of {', '.join(FORMS)}")
        chosen, runs = FORMS[form], len(self.sizes) * len(self.budgets)
        axes = {"params": len(self.sizes), "tokens": len(self.budgets), "flops": runs}
        if self.isoflop:  # at one budget, larger models train on fewer tokens
            axes["tokens"] = runs
        of_flops = " or budgets" if self.isoflop else ""
        if missing := chosen.lacks(**{what: axes[what] for what in chosen.reads}):
            asked = "sizes" if "params" in missing else f"budgets{of_flops}"
            raise RequestError(f"{missing}: give more {asked}", code="range", field=asked.split()[0])
        figures = len(chosen.names)
        if runs <= figures:
            raise RequestError(
                f"{len(self.sizes)} sizes and {len(self.budgets)} budgets are {runs} runs of a model, and the "
                f"{figures} figures of {chosen.formula} take {figures + 1} at least; add {figures + 1 - runs}, or more",
                code="range", field="sizes", value=runs, expected=f"at least {figures + 1} runs",
            )  # fmt: skip


def grid(sizes: Any, budgets: Any = None, isoflop: Any = None) -> Grid:
    """Parses sizes (0.3m,0.6m,1m..10m) and either budgets in tokens (250k,1M..4M) or in training FLOPs (1e13,3e13) to a
    grid. A..B is a ladder of equal ratios, near two, with both ends; A..B:N has N rungs. Raises RequestError."""
    if (budgets is None) == (isoflop is None):
        raise RequestError(
            "give the budgets of the runs, in tokens (budgets) or in FLOPs (isoflop), and not both",
            code="missing" if budgets is None else "conflict", field="budgets", expected="one of budgets, isoflop",
        )  # fmt: skip
    named = _ladder(sizes, "sizes")
    shapes: dict[Any, str] = {}
    for size in named:
        known = shapes.setdefault(shape(size), size)
        if known != size:
            raise RequestError(
                f"{known} and {size} are the same layers, width and heads; leave one out", field="sizes",
                code="conflict",
            )  # fmt: skip
    field = "budgets" if isoflop is None else "isoflop"
    given = _ladder(budgets if isoflop is None else isoflop, field)
    amounts = [quantity(one, field=field) for one in given]
    for text, amount in zip(given, amounts, strict=True):
        if amount < 1 or (isoflop is None and amount != int(amount)):
            raise RequestError(code="range", field=field, value=text, expected="at least 1, and whole for tokens")
    order = sorted(named, key=lambda size: _params(size, "sizes"))
    return Grid(tuple(order), tuple(sorted(amounts)), isoflop is not None)


def _ladder(given: Any, field: str) -> list[str]:
    """Returns the items of a comma-separated list, with ranges A..B replaced by their values. Raises RequestError for
    duplicates."""
    if isinstance(given, str | int | float):
        words = [word.strip() for word in str(given).split(",")]
    elif isinstance(given, Sequence):
        words = [part.strip() for word in given for part in str(word).split(",")]
    else:
        raise RequestError(code="type", field=field, value=given, expected="a text such as 0.3m,1m..10m, or a list")
    found = [one for word in words for one in (_rungs(word, field) if ".." in word else [word])]
    if not all(found):
        raise RequestError(code="missing", field=field, value=given, expected="values with commas between")
    twice = next((one for i, one in enumerate(found) if one in found[:i]), None)
    if twice is not None:
        raise RequestError(f"{field}: {twice} is named twice", code="conflict", field=field, value=twice)
    return found


def _rungs(word: str, field: str) -> list[str]:
    """Expands a range A..B or A..B:N to the list of its values; both ends keep their spelling."""
    ends, _, many = word.partition(":")
    first, _, last = (part.strip() for part in ends.partition(".."))
    low, high = _params(first, field), _params(last, field)
    wrong = RequestError(
        f"{field}: {word} is not a ladder; give A..B with B above A, or A..B:N of 2 to {MOST_RUNGS} rungs",
        code="range", field=field, value=word, expected="A..B with B above A",
    )  # fmt: skip
    if high <= low * (1 + 1e-9) or (many and not many.isdecimal()):
        raise wrong
    rungs = int(many) if many else round(math.log(high / low, RUNG)) + 1
    if not 2 <= rungs <= MOST_RUNGS:
        raise wrong
    ratio = (high / low) ** (1 / (rungs - 1))
    return [first, *(_written(low * ratio**i, field) for i in range(1, rungs - 1)), last]


def _params(text: str, field: str) -> float:
    return quantity(text, field=field)


def _written(value: float, field: str) -> str:
    """Formats a size or a budget to three digits; a size with the letter of its unit, as in names of sizes."""
    short = float(f"{value:.3g}")
    if field != "sizes":
        return f"{short:.0f}" if short < 1e6 else f"{short:.6g}"
    power, letter = next(((p, c) for p, c in ((1e9, "b"), (1e6, "m")) if short >= p), (1e6, "m"))
    return f"{short / power:.4g}{letter}"
