"""What every experiment hands back, and how its figure looks.

An experiment is a module of this folder with `run(quick=False) -> Outcome`. `quick` is the same experiment made small
enough for a test: it checks what still holds at that size and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "dynamics"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's palette: told apart by colour-blind readers too."""
STYLE: dict[str, Any] = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass
class Outcome:
    """A published claim, what was measured, and whether it held.

    >>> outcome = Outcome("rank_collapse", "Attention alone collapses.", "Dong et al. 2021, arXiv 2103.03404")
    >>> outcome.rows.append({"layer": 3, "mu": 2e-7})
    >>> outcome.check(2e-7 < 1e-5, "mu falls below 1e-5 by layer 3")
    """

    name: str
    claim: str
    source: str
    rows: list[dict[str, object]] = field(default_factory=list)
    """The table: one dict a line, column -> value; a line may lack columns."""
    sentences: list[str] = field(default_factory=list)
    figure: Path | None = None
    passed: bool = True

    def check(self, holds: object, sentence: str) -> None:
        """One assertion of the verdict: the verdict is that all of them hold."""
        self.sentences.append(f"{'holds' if holds else 'FAILS'}: {sentence}")
        self.passed = self.passed and bool(holds)

    def note(self, sentence: str) -> None:
        """Something a reader should know that the verdict does not hang on."""
        self.sentences.append(f"note: {sentence}")

    def draw(self, figure: Figure) -> None:
        """Keeps the figure as docs/figures/dynamics/NAME.png."""
        FIGURES.mkdir(parents=True, exist_ok=True)
        self.figure = FIGURES / f"{self.name}.png"
        figure.savefig(self.figure, dpi=110, metadata={"Software": None})


def canvas(rows: int = 1, columns: int = 1, width: float = 9.0, height: float = 3.4) -> tuple[Figure, Any]:
    """A figure of rows x columns axes in the house style, and the array of its axes (always two-dimensional)."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=list(COLOURS))}
    mpl.rcParams.update(style)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def shown(value: object) -> str:
    """A table's value: floats to four figures."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, object]]) -> str:
    """Plain text, columns aligned, in the order in which the lines first name them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) if rows else ""
