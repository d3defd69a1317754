"""Diagnosis of a run, as a value that prints itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from glassformer.dynamics.evidence import Mover
from glassformer.figures import plain_table, tag
from glassformer.figures.terminal import Tabular, dim, one_line, ruled, unbroken

BARS = "▁▂▃▄▅▆▇█"
SPARKS = 60
"""Maximum characters of a curve in a line of text."""


@dataclass(frozen=True)
class Cause:
    """Failure that the run matches, with its evidence, place and remedies."""

    cause: str
    confidence: float
    why: str
    """Evidence, in a sentence."""
    tries: tuple[str, ...]
    """Changes to try, as changes of the model (`+qknorm`) or of the recipe (`recipe.clip=1.0`)."""
    layer: int | None = None
    site: str | None = None
    statistic: str | None = None
    head: int | None = None
    step: int | None = None
    sigmas: float | None = None
    """Change of the statistic in robust standard deviations. If unknown: of the first statistic that moved at the site,
    else in the layer, else of a loss spike near the step; None without such a change."""
    batch: tuple[str, ...] = ()
    """Texts of the sequences with the largest losses in the batch that failed; empty for other causes."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields but `why` and `batch` as plain values: sigmas become None if unknown or not
        finite, the head is part of the statistic (`weight_norm[2]`)."""
        return {
            "cause": self.cause,
            "layer": self.layer,
            "site": self.site,
            "statistic": self.statistic if self.head is None else f"{self.statistic}[{self.head}]",
            "step": self.step,
            "sigmas": _counted(self.sigmas),
            "confidence": round(float(self.confidence), 2),
            "try": list(self.tries),
        }

    @property
    def place(self) -> str:
        """Site and head, as in `layers.2.mixer.q, head 1`."""
        return (self.site or "") + (f", head {self.head}" if self.head is not None else "")

    @property
    def cells(self) -> list[str]:
        """Cells of the cause's row in the table of causes, under `HEADINGS`."""
        sigmas = "" if self.sigmas is None else f"{self.sigmas:+.1f}"
        step = "" if self.step is None else f"{self.step:,}"
        words = [one_line(text or "") for text in (self.cause, self.place, self.statistic)]
        return [words[0], f"{self.confidence:.0%}", *words[1:], step, sigmas, ", ".join(self.tries)]


HEADINGS = ("cause", "sure", "where", "moved", "step", "sigma", "try")


@dataclass(frozen=True)
class Diagnosis(Tabular):
    """Known failures that a run matches, the statistics that moved first, and changes to try."""

    verdict: str
    """`nothing wrong`, or the failure and its cause, in a line."""
    causes: tuple[Cause, ...]
    """Causes, the most likely first."""
    story: tuple[str, ...]
    """Sentences: the failure, the first mover, the most likely cause, changes to try, other causes, notes."""
    losses: tuple[float, ...] = field(default=(), repr=False)
    """Loss of every step with a valid row of metrics."""
    moved: tuple[Mover, ...] = ()
    """Statistics that moved before the failure showed, at most ten, in order of time."""
    notes: tuple[str, ...] = ()
    """Sentences that hold for any verdict: spikes that passed, steps and lines left out, returns to a checkpoint."""
    batch: tuple[str, ...] = field(default=(), repr=False)
    """Texts of the batch of the most likely cause with one, or else of the largest loss spike."""
    name: str = ""
    """Name of the run, usually its folder."""
    command: str = ""
    """Command that trains again with the first remedy; empty if the command of the run is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict, causes, movers, notes and the command, if it is known, as plain values."""
        moved = [
            {
                "site": mover.track.where,
                "layer": mover.track.layer,
                "head": mover.named_head,
                "statistic": mover.track.statistic,
                "step": mover.step,
                "sigmas": _counted(mover.sigmas),
            }
            for mover in self.moved
        ]
        found = {"verdict": self.verdict, "causes": self.records(), "moved": moved, "notes": list(self.notes)}
        return found | ({"command": self.command} if self.command else {})

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each cause, the most likely first."""
        return [cause.to_dict() for cause in self.causes]

    def paragraph(self) -> str:
        """Returns the story as one paragraph."""
        return " ".join(self.story)

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the verdict, the loss as a curve, the story, tables of causes and of movers, the batch, notes and the
        command."""
        yield Text(f"{self.name}{': ' if self.name else ''}{one_line(self.verdict)}", style="bold")
        if self.losses:
            yield f"loss {sparkline(self.losses)} {self.losses[-1]:.3g}"
        yield one_line(self.paragraph())
        if self.causes:
            table = ruled()
            for heading in HEADINGS:
                table.add_column(heading, overflow="fold")
            for cause in self.causes:
                table.add_row(*cause.cells)
            yield table
            yield dim("sure: how well the run fits each cause; causes can hold together and are not shares of 100 %")
        if self.moved:
            yield "what moved first:"
            table = ruled()
            for heading in ("step", "sigma", "statistic", "where"):
                table.add_column(heading, overflow="fold")
            for mover in self.moved:
                head = "" if mover.named_head is None else f", head {mover.head}"
                place, statistic = one_line(mover.track.where) + head, one_line(mover.track.statistic)
                table.add_row(f"{mover.step:,}", f"{mover.sigmas:+.1f}", statistic, place)
            yield table
        if self.batch:
            yield "the batch:"
            yield from (Text(f"  {one_line(text)}", no_wrap=True, overflow="ellipsis") for text in self.batch)
        yield from (f"note: {one_line(note)}" for note in self.notes if note not in self.story)
        if self.command:
            yield unbroken(f"next: {one_line(self.command)}")

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: the causes as a table, and the paragraph."""
        rows = [cause.cells for cause in self.causes]
        return tag("div", plain_table(self.verdict, HEADINGS, rows), tag("p", self.paragraph()))


def sparkline(values: Sequence[float], width: int = SPARKS) -> str:
    """Returns `values` as a row of bars, one character for each of at most `width` equal intervals; a bar shows the
    mean of its interval, on a scale from the smallest to the largest mean."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    means = [min(max(mean, -1e300), 1e300) / 4 for mean in means]  # avoids an infinite difference of two
    low, high = min(means), max(means)
    return "".join(BARS[min(7, int(8 * (mean - low) / ((high - low) or 1.0)))] for mean in means)


def _counted(sigmas: float | None) -> float | None:
    return round(float(sigmas), 2) if sigmas is not None and math.isfinite(sigmas) else None
