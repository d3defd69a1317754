"""Runs as the points of a scaling law: parameters N, tokens D and loss, one row for each measurement."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.errors import RequestError, shown

Numbers = NDArray[np.float64]

NAMES = {
    "params": ("params", "parameters", "n", "num_params", "model size"),
    "tokens": ("tokens", "d", "training tokens"),
    "flops": ("flops", "c", "flop", "training flop", "training flops", "compute"),
    "loss": ("loss", "l", "val_loss", "validation loss"),
    "run": ("run", "name"),
}
"""Quantity -> usual names of its column; case does not matter."""

LARGEST_FILE = 64 << 20
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Points:
    """Data points of a scaling law as columns: parameters, tokens, loss. `flops` are those of training, 6 N D. Points
    of one `run` are not independent, so the bootstrap draws them together."""

    params: Numbers
    tokens: Numbers
    loss: Numbers
    run: NDArray[np.str_]
    left_out: int = 0
    """Number of rows without a finite loss: runs that diverged or did not end."""
    counted: Numbers | None = None
    """Counted training FLOPs, with attention and the vocabulary's matmuls, if the table has them in addition to
    tokens."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def flops(self) -> Numbers:
        return 6 * self.params * self.tokens

    @property
    def spent(self) -> Numbers:
        """FLOPs of each point, which define its budget: counted ones, else 6 N D."""
        return self.flops if self.counted is None else self.counted

    def take(self, rows: Any) -> Points:
        """Returns the points with these rows: indices, or a mask."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: col[rows] for name, col in columns.items() if isinstance(col, np.ndarray)})

    def without_worst(self, count: int) -> Points:
        """Returns the points without the `count` highest losses."""
        kept = np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count])
        return self.take(kept)

    def largest(self) -> NDArray[np.bool_]:
        """Returns a mask of the points that belong to the run, or runs, of most compute."""
        runs = np.unique(self.run[self.flops >= self.flops.max() * (1 - 1e-9)])
        return np.isin(self.run, runs)


Source = Points | str | Path | Mapping[str, Sequence[float]] | Iterable[Mapping[str, Any]]
"""Source of points: see `points`."""


def points(
    source: Source,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> Points:
    """Reads the data points of a scaling law from a CSV file with a header, the folder of `scale` or of a comparison, a
    table of columns, or rows.

    columns   names in this table: `{"loss": "loss_c4_val"}`; other columns are found by their usual names (`NAMES`)
    where     only rows that have these texts in these columns: `{"dataset": "c4"}`

    Instead of tokens there may be FLOPs, C = 6 N D; with both, FLOPs define the budgets. Rows with a loss that is not
    finite are left out and counted. Rows of a folder also have a column `model`, and if there are several models,
    `where` has to choose one."""
    if isinstance(source, Points):
        return source
    rows = _rows(source)
    several = {str(row["model"]) for row in rows} if "model" not in (where or {}) and _is_folder(source) else set()
    if len(several) > 1:
        raise RequestError(
            f"{source} holds runs of {shown(', '.join(sorted(several)))}; say which, as where model=NAME",
            code="missing", field="where", value=str(source), expected="model=NAME",
        )  # fmt: skip
    for name, text in (where or {}).items():
        if rows and name not in rows[0]:
            raise _unknown(name, rows[0])
        rows = [row for row in rows if str(row[name]) == text]
        if not rows:
            raise RequestError(f"no row has {name}={shown(text)}", code="missing", field="where", value=text)
    if not rows:
        raise RequestError("the table has no rows to fit a law to", code="missing", field="points")
    named = {what: _column(what, rows[0], (columns or {}).get(what)) for what in NAMES}
    for what in set(columns or {}) - set(NAMES):
        raise RequestError(code="unknown", field="columns", value=what, expected=f"one of {', '.join(NAMES)}")
    for what in ("params", "loss"):
        if named[what] is None:
            raise _missing(what, rows[0])
    if named["tokens"] is None and named["flops"] is None:
        raise _missing("tokens", rows[0])
    given = {what: np.array([_number(row, name) for row in rows]) for what, name in named.items()
             if name is not None and what != "run"}  # fmt: skip
    sizes = given["params"]
    tokens = given["tokens"] if "tokens" in given else given["flops"] / (6 * sizes)
    for what, values in (("params", sizes), ("tokens", tokens)):
        if not (np.isfinite(values) & (values > 0)).all():
            bad = int(np.flatnonzero(~(np.isfinite(values) & (values > 0)))[0])
            raise RequestError(code="range", field=f"{what} of row {bad + 1}", value=float(values[bad]), expected="> 0")
    loss = given["loss"]
    fine = np.isfinite(loss)
    if (loss[fine] <= 0).any():
        bad = int(np.flatnonzero(fine & (loss <= 0))[0])
        raise RequestError(code="range", field=f"loss of row {bad + 1}", value=float(loss[bad]), expected="> 0")
    counted = given["flops"] if {"tokens", "flops"} <= given.keys() else None
    if counted is not None and not (np.isfinite(counted) & (counted > 0)).all():
        counted = None
    run = named["run"]
    names = [str(i) if run is None else str(row[run]) for i, row in enumerate(rows)]
    held = Points(sizes, tokens, loss, np.array(names), counted=counted)
    return replace(held.take(fine), left_out=int((~fine).sum()))


def _rows(source: Any) -> list[Mapping[str, Any]]:
    if isinstance(source, (str, Path)):
        return _from_folder(Path(source)) if _is_folder(source) else _from_csv(Path(source))
    if isinstance(source, Mapping):
        lengths = {name: len(values) for name, values in source.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} {n}" for name, n in lengths.items())
            raise RequestError(f"the columns are not equally long: {told}", code="conflict", field="points")
        return [dict(zip(source, row, strict=True)) for row in zip(*source.values(), strict=True)]
    return [dict(row) for row in source]


def _is_folder(source: Any) -> bool:
    return isinstance(source, (str, Path)) and Path(source).is_dir()


def _from_folder(path: Path) -> list[Mapping[str, Any]]:
    from glassformer.laboratory.cells import runs_of  # imports torch, which a table does not need

    return [run.row for run in runs_of(path) if run.params and run.tokens]


def _from_csv(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise RequestError(
                f"{path} has more than {LARGEST_FILE >> 20} MiB; give a table of runs", field="data", code="range"
            )
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows: list[Mapping[str, Any]] = []
            for row in csv.DictReader(file):
                if None in row or None in row.values():
                    raise RequestError(
                        f"line {len(rows) + 2} of {path} has another number of fields than its first line",
                        code="damaged", field="data",
                    )  # fmt: skip
                rows.append(row)
                if len(rows) > MOST_ROWS:
                    raise RequestError(
                        f"{path} has more than {MOST_ROWS:,} rows; give one for each run", field="data", code="range"
                    )
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", code="missing", field="data") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(
            f"{path} is not a table of comma-separated values: {error}", field="data", code="damaged"
        ) from None
    return rows


def _column(what: str, row: Mapping[str, Any], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in row:
            raise _unknown(asked, row)
        return asked
    found = [name for name in row if str(name).strip().lower() in NAMES[what]]
    if len(found) > 1:
        told = " and ".join(found)
        raise RequestError(
            f"{told} could all be {what}; say which, as columns {what}={found[0]}", field="columns", code="conflict"
        )
    return found[0] if found else None


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    try:
        return float(value) if str(value).strip() else math.nan
    except (TypeError, ValueError):
        raise RequestError(code="type", field=f"column {name}", value=value, expected="a number") from None


def _unknown(name: str, row: Mapping[str, Any]) -> RequestError:
    return RequestError(code="unknown", field="columns", value=name, expected=f"one of {_told(row)}")


def _missing(what: str, row: Mapping[str, Any]) -> RequestError:
    return RequestError(
        f"no column is called {what} ({', '.join(NAMES[what][:3])}); the table has {_told(row)}: say "
        f"columns {what}=NAME",
        code="missing", field="columns", value=what,
    )  # fmt: skip


def _told(row: Mapping[str, Any]) -> str:
    return shown(", ".join(map(str, row)))
