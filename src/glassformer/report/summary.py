"""The table of arms: one row each, lowest validation loss first, the best figure of every column marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..figures import Markup, fixed, join, si, tag
from ..runs.results import RunResult
from .html import arm_label, arm_name, caption, none, scroll, section
from .read import (
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
    last_seen,
    ranked,
    run_status,
    seed_of,
)

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PLAIN = ((1.0, ""),)


@dataclass(frozen=True)
class Column:
    """A quantity, its title and units; `better` is -1 where less is better."""

    quantity: Quantity
    title: str
    per: str = ""
    better: int = 0
    units: tuple[tuple[float, str], ...] = _PLAIN
    decimals: int | None = None


COLUMNS = (
    Column(PARAMETERS, "Parameters", units=_COUNTS),
    Column(LOSS, "Validation loss", "nats/token", -1, decimals=3),
    Column(BITS_PER_BYTE, "Bits per byte", "bits", -1, decimals=3),
    Column(PERPLEXITY, "Perplexity", "per token", -1),
    Column(TRAINING_SPEED, "Training speed", "tokens/s", 1, decimals=0),
    Column(PEAK_MEMORY, "Peak memory", "", -1, _BYTES),
    Column(SECONDS_PER_TOKEN, "Generation", "/token", -1, _SECONDS),
    Column(STATE_BYTES, "State", "/token", -1, _BYTES),
)


def summary(arms: Sequence[Arm]) -> Markup:
    """The section with the table."""
    if not arms:
        return section("summary", "Summary", tag("p", "No runs were recorded.", class_="gf-empty"))
    order = ranked(arms)
    columns = [_Cells(column, order) for column in COLUMNS]
    heads = [_head("Arm", ""), *(c.head for c in columns), _head("Status", "")]
    rows = [_row(arm, columns) for arm in order]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="gf-sortable numbers summary")
    return section("summary", "Summary", scroll("Summary table", table), _caption(arms), _unfinished(order))


def _head(title: str, unit: str, ascending: bool = False) -> Markup:
    """A heading that sorts; the unit stands below the title."""
    words = tag("button", title, tag("small", unit) if unit else None, type="button")
    return tag("th", words, scope="col", aria_sort="ascending" if ascending else None)


class _Cells:
    """One column with its unit chosen for all arms together."""

    def __init__(self, column: Column, arms: Sequence[Arm]) -> None:
        self.column = column
        self.stats = {arm.index: arm.stat(column.quantity) for arm in arms}
        means = [abs(stat.mean) for stat in self.stats.values() if stat and stat.mean]
        largest, smallest = max(means, default=1.0), min(means, default=1.0)
        self.scale, self.unit = next((u for u in column.units if largest >= u[0]), column.units[-1])
        places = 2 - math.floor(math.log10(smallest / self.scale)) if smallest >= 1e-12 * self.scale else 3
        self.decimals = column.decimals if column.decimals is not None else min(max(places, 0), 3)
        self.best = self._best(arms)

    @property
    def head(self) -> Markup:
        unit = f"{self.unit}{self.column.per}" if self.column.units is not _PLAIN else self.column.per
        return _head(self.column.title, unit, ascending=self.column.quantity is LOSS)

    def words(self, value: float) -> str:
        """A value in the unit of the column."""
        scaled = value / self.scale
        if abs(scaled) >= 1e7:
            return si(scaled)
        text = fixed(scaled, self.decimals)
        return _thousands(text) if abs(scaled) >= 10_000 else text

    def _best(self, arms: Sequence[Arm]) -> str | None:
        """The best value as printed, among arms of which every seed finished; None where all are alike."""
        shown = [stat for arm in arms if arm.complete and (stat := self.stats[arm.index])]
        if not self.column.better or len({self.words(stat.mean) for stat in shown}) < 2:
            return None
        pick = max if self.column.better > 0 else min
        return self.words(pick(stat.mean for stat in shown))

    def cell(self, arm: Arm) -> Markup:
        """The value of one arm, with its spread below it."""
        stat = self.stats[arm.index]
        if stat is None:
            return tag("td", none(arm.reason(self.column.quantity)), data_sort="")
        best = arm.complete and self.best == self.words(stat.mean)
        mark = join([tag("span", "●", class_="best-mark", aria_hidden="true"), tag("span", "best", class_="gf-quiet")])
        return tag("td", mark if best else None, self.words(stat.mean), self._spread(stat),
                   class_="best" if best else None, data_sort=f"{stat.mean:.12g}")  # fmt: skip

    def _spread(self, stat: Stat) -> Markup | None:
        if not stat.spread:
            return None
        return tag("small", f"± {self.words(stat.spread)}", class_="spread")


def _thousands(text: str) -> str:
    """A thin space between groups of three digits."""
    whole, dot, rest = text.partition(".")
    sign, digits = (whole[0], whole[1:]) if whole[0] in "−-" else ("", whole)
    groups = [digits[max(0, end - 3) : end] for end in range(len(digits), 0, -3)]
    return sign + "\u202f".join(reversed(groups)) + dot + rest


def _row(arm: Arm, columns: Sequence[_Cells]) -> Markup:
    head = tag("th", arm_label(arm), scope="row", data_sort=arm.name)
    return tag(
        "tr",
        head,
        *(c.cell(arm) for c in columns),
        _status(arm),
        class_=None if arm.finished else "unfinished",
    )


def _status(arm: Arm) -> Markup:
    """How the runs of an arm ended, and for those that did not finish what was last seen."""
    if arm.complete:
        share = tag("small", f"{len(arm.runs)} seeds") if len(arm.runs) > 1 else None
        return tag("td", "ok", share, class_="status", data_sort="0")
    lost = len(arm.runs) - len(arm.finished)
    share = tag("small", f"{lost} of {len(arm.runs)} seeds") if len(arm.runs) > 1 else None
    return tag("td", tag("b", arm.trouble, class_="bad"), share, class_="status", data_sort="1")


def _unfinished(arms: Sequence[Arm]) -> Markup | None:
    """For the runs that did not finish: what they said, and what was last seen of them."""
    items = [tag("li", arm_name(arm), ": ", words) for arm in arms for words in _last_words(arm)]
    return join([tag("h3", "Did not finish"), tag("ul", *items, class_="unfinished-runs")]) if items else None


def _last_words(arm: Arm) -> list[str]:
    """One sentence per thing that went wrong, naming the seeds to which it happened."""
    said: dict[str, list[str]] = {}
    for run in arm.runs:
        if (status := run_status(run)) != "ok":
            error = str(run.error or status)
            said.setdefault(error.strip().rstrip("."), []).append(_seen(run, len(arm.runs) > 1))
    return [f"{error}. Last seen: {'; '.join(seen)}." for error, seen in said.items()]


def _seen(run: RunResult, seeds: bool) -> str:
    """The last loss of a run."""
    last = last_seen(run)
    words = f"loss {fixed(last[1], 2)} at {si(last[0])} tokens" if last else "nothing"
    return f"{words} (seed {seed_of(run)})" if seeds else words


def _caption(arms: Sequence[Arm]) -> Markup:
    """What the marks mean."""
    words = ["● the best figure of its column"]
    if all(len(arm.runs) < 2 for arm in arms):
        words[0] += ", as measured once: with one seed no difference in loss is proven."
    else:
        words[0] += "; whether a difference is more than chance is for the verdicts below."
    if any(len(arm.runs) > 1 for arm in arms):
        words.append("Each figure is the mean over seeds ± the sample standard deviation.")
    if any(arm.finished and not arm.complete for arm in arms):
        words.append("Where a seed did not finish, figures are means of the seeds that did, and are not marked best.")
    words.append("Press a heading to sort.")
    return caption(" ".join(words))
