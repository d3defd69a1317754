"""A diagnosis in the terminal: a paragraph, the causes side by side, the batch where it is to blame."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from glassformer.config import ModelConfig
from glassformer.dynamics.records import NAME, read_records
from glassformer.dynamics.why import Cause, diagnose
from glassformer.errors import RequestError
from glassformer.figures.terminal import output, ruled
from glassformer.parts.core.base import to_plain
from glassformer.training.progress import read_metrics
from glassformer.training.recipe import Recipe

METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 29
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


def show_why(run: str, as_json: bool) -> None:
    """Diagnoses a run folder, or the arm of a comparison. Raises RequestError where it is neither."""
    folder = run_folder(Path(run))
    if (folder / METRICS).stat().st_size > MOST_BYTES:
        raise RequestError(
            f"{folder / METRICS} is larger than the {MOST_BYTES:,} bytes that are read",
            code="range", field="run", value=run,
        )  # fmt: skip
    config, recipe = ModelConfig.from_file(folder / "config.yaml"), Recipe.from_file(folder / "recipe.yaml")
    records = read_records(folder / NAME)
    found = diagnose(read_metrics(folder / METRICS), records, config, to_plain(recipe))
    notes = []
    if records.skipped:
        notes.append(f"{records.skipped:,} lines of {folder / NAME} are no rows, and were left out")
    if records.left_out:
        notes.append(f"of {folder / NAME} the first {records.left_out:,} bytes were left out")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        told = found.to_dict()
        print(json.dumps({**told, "notes": [*told["notes"], *notes]}, allow_nan=False))
        return
    console = output()
    console.print(Text(f"{folder}: {one_line(found.verdict)}", style="bold"))
    if found.losses:
        console.print(Text(f"loss {sparkline(found.losses)} {found.losses[-1]:.3g}"))
    console.print(Text(one_line(found.paragraph())))
    if found.causes:
        table = ruled()
        for heading in ("sure", "cause", "where", "moved", "step", "sigma", "try"):
            table.add_column(heading, overflow="fold")
        for cause in found.causes:
            table.add_row(*map(Text, row(cause)))
        console.print(table)
    if found.moved:
        console.print("what moved first:")
        table = ruled()
        for heading in ("step", "sigma", "statistic", "where"):
            table.add_column(heading, overflow="fold")
        for mover in found.moved:
            head = "" if mover.named_head is None else f", head {mover.head}"
            place = one_line(mover.track.where) + head
            table.add_row(
                *map(Text, (f"{mover.step:,}", f"{mover.sigmas:+.1f}", one_line(mover.track.statistic), place))
            )
        console.print(table)
    if found.batch:
        console.print("the batch:")
        for text in found.batch:
            console.print(Text(f"  {one_line(text)}", no_wrap=True, overflow="ellipsis"))


def run_folder(path: Path) -> Path:
    """The run folder that is meant: itself, or `run` in the folder of an arm."""
    for folder in (path, path / "run"):
        if (folder / METRICS).is_file():
            return folder
    if not path.is_dir():
        raise RequestError(f"there is no run folder {path}", code="missing", field="run", value=str(path))
    if arms := sorted(arm.parents[1].name for arm in path.glob(f"runs/*/run/{METRICS}"))[:5]:
        raise RequestError(
            f"{path} is a comparison; name one of its runs, such as {path / 'runs' / arms[0]}",
            code="conflict", field="run", value=str(path),
        )  # fmt: skip
    raise RequestError(
        f"{path} is no run folder: it has no {METRICS}; name what `glassformer train --out` wrote",
        code="missing", field="run", value=str(path),
    )  # fmt: skip


def row(cause: Cause) -> list[str]:
    """The cells of a cause."""
    sigmas = "" if cause.sigmas is None else f"{cause.sigmas:+.1f}"
    step = "" if cause.step is None else f"{cause.step:,}"
    told = [one_line(text or "") for text in (cause.cause, cause.place, cause.statistic)]
    return [f"{cause.confidence:.0%}", *told, step, sigmas, "\n".join(cause.tries)]


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """One character for each of at most `width` equal stretches: its mean, between the least and the largest."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    means = [min(max(mean, -1e300), 1e300) / 4 for mean in means]  # so that no difference of two is infinite
    low, high = min(means), max(means)
    return "".join(BARS[min(7, int(8 * (mean - low) / ((high - low) or 1.0)))] for mean in means)


def one_line(text: str) -> str:
    """The text with a mark for what a terminal would obey: line ends, escapes, directions."""
    return "".join(letter if letter.isprintable() else "⏎" if letter == "\n" else "·" for letter in text)
