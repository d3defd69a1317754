"""Table of arms: one row each, lowest validation loss first; the best arm by the verdicts is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..figures import Markup, fixed, join, si, tag
from ..runs.arms import (
    BITS_PER_BYTE,
    LOSS,
    PARAMETERS,
    PEAK_MEMORY,
    PERPLEXITY,
    SECONDS_PER_TOKEN,
    STATE_BYTES,
    TRAINING_SPEED,
    Arm,
    Quantity,
    Stat,
    held_out_tokens,
    last_seen,
    ranked,
)
from ..runs.results import Results, RunResult
from ..runs.wording import BEST, best_words
from .html import Absent, arm_label, arm_name, caption, none, scroll, section

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_MILLISECONDS = ((1e-3, "ms"),)
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_PLAIN = ((1.0, ""),)


@dataclass(frozen=True)
class Column:
    """A column of the table of arms: a quantity with its title and units; `counted` is True for numbers in the format
    of counts, `38.0k`."""

    quantity: Quantity
    title: str
    per: str = ""
    units: tuple[tuple[float, str], ...] = _PLAIN
    decimals: int | None = None
    counted: bool = False


COLUMNS = (
    Column(PARAMETERS, "Parameters", counted=True),
    Column(LOSS, "Validation loss", "nats/token", decimals=3),
    Column(BITS_PER_BYTE, "Bits per byte", "bits", decimals=3),
    Column(PERPLEXITY, "Perplexity", "per token"),
    Column(TRAINING_SPEED, "Training speed", "tokens/s", counted=True),
    Column(PEAK_MEMORY, "Peak memory", "", _BYTES),
    Column(SECONDS_PER_TOKEN, "Generation", "/token", _MILLISECONDS),
    Column(STATE_BYTES, "State", "/token", _BYTES),
)


def summary(results: Results, arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with the table of arms; Absent without runs."""
    if not arms:
        return Absent("Summary", "no runs were recorded.")
    order = ranked(arms)
    without = () if any(arm.stat(BITS_PER_BYTE) for arm in order) else (BITS_PER_BYTE,)
    columns = [_Cells(column, order) for column in COLUMNS if column.quantity not in without]
    heads = [_head("Arm", ""), *(c.head for c in columns), _head("Status", "")]
    rows = [_row(arm, columns, arm.name == results.best) for arm in order]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="gf-sortable numbers summary")
    return section("summary", "Summary", scroll("Summary table", table), _caption(results, arms), _unfinished(order))


def _head(title: str, unit: str, ascending: bool = False) -> Markup:
    """Returns the heading of a column: a button that sorts the table by the column, with the unit below the title."""
    words = tag("button", title, tag("small", unit) if unit else None, type="button")
    return tag("th", words, scope="col", aria_sort="ascending" if ascending else None)


class _Cells:
    """Cells of one column of the table of arms, all in the same unit."""

    def __init__(self, column: Column, arms: Sequence[Arm]) -> None:
        self.column = column
        self.stats = {arm.index: arm.stat(column.quantity) for arm in arms}
        means = [abs(stat.mean) for stat in self.stats.values() if stat and stat.mean]
        largest, smallest = max(means, default=1.0), min(means, default=1.0)
        self.scale, self.unit = next((u for u in column.units if largest >= u[0]), column.units[-1])
        places = 2 - math.floor(math.log10(smallest / self.scale)) if smallest >= 1e-12 * self.scale else 3
        self.decimals = column.decimals if column.decimals is not None else min(max(places, 0), 3)

    @property
    def head(self) -> Markup:
        unit = f"{self.unit}{self.column.per}" if self.column.units is not _PLAIN else self.column.per
        return _head(self.column.title, unit, ascending=self.column.quantity is LOSS)

    def words(self, value: float, beside: float | None = None) -> str:
        """Formats a value in the column's unit. With a second argument, a mean, the value is the spread of that mean,
        and is formatted with the suffix and decimals of the mean."""
        if self.column.counted:
            return _counted(value, value if beside is None else beside)
        scaled = value / self.scale
        return si(scaled) if abs(scaled) >= 9_999.5 else fixed(scaled, self.decimals)

    def cell(self, arm: Arm) -> Markup:
        """Returns the value of one arm, with its spread below it."""
        stat = self.stats[arm.index]
        if stat is None:
            return tag("td", none(arm.unmeasured), data_sort="")
        return tag("td", self.words(stat.mean), self._spread(stat), data_sort=f"{stat.mean:.12g}")

    def _spread(self, stat: Stat) -> Markup | None:
        if not stat.spread:
            return None
        return tag("small", f"± {self.words(stat.spread, stat.mean)}", class_="spread")


def _counted(value: float, beside: float) -> str:
    """Formats a count, or the spread of a mean count, with the suffix and the decimals of the second value, the mean: a
    spread of 0.2k at a mean of 38.0k."""
    if abs(beside) < 9_999.5:
        return fixed(value, 0) if abs(beside) >= 100 or float(value).is_integer() else si(value)
    scale, suffix = next((scale, suffix) for scale, suffix in _SUFFIXES if abs(beside) >= 0.9995 * scale)
    return fixed(value / scale, max(0, 2 - math.floor(math.log10(abs(beside) / scale * 1.0005)))) + suffix


def _row(arm: Arm, columns: Sequence[_Cells], best: bool) -> Markup:
    dot = tag("span", "●", class_="best-mark", aria_hidden="true")
    mark = tag("span", "\u2002", dot, BEST, class_="best") if best else None
    head = tag("th", arm_label(arm), mark, scope="row", data_sort=arm.name)
    return tag(
        "tr",
        head,
        *(c.cell(arm) for c in columns),
        _status(arm),
        class_=None if arm.finished else "unfinished",
    )


def _status(arm: Arm) -> Markup:
    """Returns the table cell with the status of an arm: ok, or the statuses and number of its unfinished runs."""
    if arm.complete:
        share = tag("small", f"{len(arm.runs)} seeds") if len(arm.runs) > 1 else None
        return tag("td", "ok", share, class_="status", data_sort="0")
    lost = len(arm.runs) - len(arm.finished)
    share = tag("small", f"{lost} of {len(arm.runs)} seeds") if len(arm.runs) > 1 else None
    return tag("td", tag("b", arm.trouble, class_="bad"), share, class_="status", data_sort="1")


def _unfinished(arms: Sequence[Arm]) -> Markup | None:
    """Returns a list of the errors and last losses of unfinished runs; None without any."""
    items = [tag("li", arm_name(arm), ": ", words) for arm in arms for words in _last_words(arm)]
    return join([tag("h3", "Did not finish"), tag("ul", *items, class_="unfinished-runs")]) if items else None


def _last_words(arm: Arm) -> list[str]:
    """Returns a text for each distinct error of an arm's runs, with the last loss of each run that had the error."""
    said: dict[str, list[str]] = {}
    for run in arm.runs:
        if run.status != "ok":
            error = run.error or run.status
            said.setdefault(error.strip().rstrip("."), []).append(_seen(run, len(arm.runs) > 1))
    return [f"{error}. Last seen: {'; '.join(seen)}." for error, seen in said.items()]


def _seen(run: RunResult, seeds: bool) -> str:
    """Returns the last recorded loss of a run and its tokens as text; `seeds` adds the seed."""
    last = last_seen(run)
    words = f"loss {fixed(last[1], 2)} at {si(last[0])} tokens" if last else "nothing"
    return f"{words} (seed {run.seed})" if seeds else words


def _caption(results: Results, arms: Sequence[Arm]) -> Markup:
    """Returns the caption of the table of arms: the meaning of its numbers, and of the mark at the best arm."""
    words = [best_words(results)] if len(arms) > 1 else []
    if any(len(arm.runs) > 1 for arm in arms):
        words.append("Figures are means over seeds ± the sample standard deviation.")
    if any(arm.finished and not arm.complete for arm in arms):
        words.append("Where a seed did not finish, figures are means of the seeds that did.")
    if tokens := held_out_tokens([run for arm in arms for run in arm.finished])[0]:
        words.append(f"Validation is the loss of the trained model on {tokens} held-out tokens.")
    words.append("Press a heading to sort.")
    return caption(" ".join(words))
