"""Coordinate check of muP: activations of wide and narrow models should move equally far.

Yang et al. 2022, 2203.03466, appendix D.1: one model at several widths takes a few steps of Adam on one batch, at one
learning rate, and mean |x_t - x_0|, the mean change of an activation after t steps, is compared between widths. If it
grows with the width, the best learning rate falls; a correct parametrisation keeps it level, or lets it fall.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from glassformer.config import BlockConfig, ModelConfig
from glassformer.errors import RequestError, check_whole, keeping
from glassformer.figures.document import write_figure
from glassformer.figures.terminal import Tabular, ruled, unbroken
from glassformer.introspection import capture
from glassformer.model import Model
from glassformer.parts.mup import parameter_groups
from glassformer.progress import counted

WIDTHS = (64, 128, 256, 512)
HEADS = 4
"""Maximum number of heads, at every width: head dims grow with the width."""
VOCABULARY = 256
"""Maximum vocabulary size; the check draws tokens at random."""
LEVEL = 0.1
"""Largest slope of log2 change against log2 width that does not count as growth."""


@dataclass(frozen=True)
class CoordinateCheck(Tabular):
    """Result of a coordinate check: mean |x| (`sizes`) and mean |x_t - x_0| (`changes`) over layers, seeds and
    elements, by kind of site (such as `mixer.q`), step 0 ... `steps` and width: `sizes["mixer.q"][step][width
    index]`."""

    widths: tuple[int, ...]
    steps: int
    learning_rate: float
    sizes: dict[str, list[list[float]]]
    changes: dict[str, list[list[float]]]
    picture: Path | None = None
    """File of the figure; None if it was not drawn."""

    @property
    def slopes(self) -> dict[str, float]:
        """Slopes of log2 mean |x_t - x_0| after the last step against log2 of the width, by kind of site; 1 is
        proportional growth."""
        return {kind: slope(self.widths, by_step[-1]) for kind, by_step in self.changes.items()}

    @property
    def growing(self) -> list[str]:
        """Kinds of site whose slope is above LEVEL, or nan; steepest first."""
        slopes = self.slopes
        return sorted((kind for kind, one in slopes.items() if not one <= LEVEL), key=lambda kind: -slopes[kind])

    def lost(self) -> list[tuple[str, int, int]]:
        """Returns (kind of site, step, width) of each change that is nan or infinite."""
        return [
            (kind, step, width)
            for kind, by_step in self.changes.items()
            for step, by_width in enumerate(by_step)
            for width, value in zip(self.widths, by_width, strict=True)
            if not math.isfinite(value)
        ]

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each kind of site: its name, its slope, and its change after the last step at every
        width."""
        return [
            {"site": kind, "slope": one, **dict(zip(map(str, self.widths), self.changes[kind][-1], strict=True))}
            for kind, one in self.slopes.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, the slopes and the growing kinds of site as plain values; `figure` is the file of the
        figure or None."""
        numbers = asdict(replace(self, picture=None))
        del numbers["picture"]
        figure = None if self.picture is None else str(self.picture)
        return {**numbers, "slopes": self.slopes, "growing": self.growing, "figure": figure}

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields a heading, a table of slopes and changes by width, the finding, and the file of the figure."""
        yield f"mean |x - x0| after {self.steps} steps of Adam at {self.learning_rate:g}, by width"
        table = ruled()
        table.add_column("site")
        for heading in ("slope", *(f"width {width}" for width in self.widths)):
            table.add_column(heading, justify="right")
        growing = self.growing
        for kind, one in self.slopes.items():
            mark = Text(f"{one:+.2f}", style="red" if kind in growing else "")
            table.add_row(kind, mark, *(f"{value:.3g}" for value in self.changes[kind][-1]))
        yield table
        if growing:
            yield f"{', '.join(growing)} grow with the width: the best learning rate will fall with it; try +mup"
        else:
            yield f"nothing grows with the width (every slope is at most {LEVEL:g})"
        if self.picture is not None:
            yield unbroken(f"figure: {self.picture}")

    def draw(self, figure: Any) -> None:
        """Fills a matplotlib figure: a panel per kind of site, in it a line of change against width per step, both axes
        in powers of two."""
        from matplotlib.ticker import NullLocator

        across = 4
        axes = figure.subplots(-(-len(self.changes) // across), across, squeeze=False, sharex=True).flatten()
        for place, (kind, by_step) in zip(axes, self.changes.items(), strict=False):
            for step in range(1, self.steps + 1):
                shade = str(0.75 * (1 - step / self.steps))
                place.plot(self.widths, by_step[step], "o-", ms=3, lw=1.2, color=shade, label=f"step {step}")
            place.set_xscale("log", base=2)
            place.set_yscale("log", base=2)
            place.set_xticks(self.widths, [str(width) for width in self.widths])
            place.xaxis.set_minor_locator(NullLocator())
            found = self.slopes[kind]
            place.set_title(f"{kind}  {found:+.2f}", fontsize=9, color="#b03a00" if not found <= LEVEL else "black")
        for place in axes[len(self.changes) :]:
            place.axis("off")
        axes[0].legend(fontsize=7, frameon=False)
        figure.supxlabel("width")
        figure.supylabel("mean |x_t − x_0|")
        figure.suptitle(f"Coordinate check, learning rate {self.learning_rate:g}: slope against width", fontsize=11)

    def save(self, path: str | Path) -> None:
        """Writes the figure as .png, .svg or .pdf, by the suffix. Raises RequestError if matplotlib is not
        installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise RequestError(
                "figures are drawn by matplotlib; install it: pip install 'glassformer[figures]'",
                code="missing", field="matplotlib",
            ) from None  # fmt: skip
        figure = Figure(figsize=(11, 2 + 1.9 * -(-len(self.changes) // 4)), layout="constrained")
        self.draw(figure)
        write_figure(figure, Path(path), dpi=110)


def coordinate_check(
    config: ModelConfig,
    widths: Sequence[int] = WIDTHS,
    steps: int = 4,
    learning_rate: float = 3e-3,
    seeds: int = 1,
    batch: int = 8,
    length: int = 32,
) -> CoordinateCheck:
    """Trains `config` at every width for `steps` steps of Adam on one batch of random tokens, and returns the mean
    sizes and changes of the activations at every site.

    Heads, layers and vocabulary stay constant, so that only widths differ (`at_width`). Raises RequestError for fewer
    than two widths, a width that the heads do not divide, numbers below one, and activations that become nan or
    infinite. An error or interrupt that ends the work has the check of the finished widths, if two or more, as
    `error.so_far`."""
    if len(set(widths)) < 2:
        raise RequestError(
            f"widths={list(widths)}: a slope needs two widths or more", code="range", field="widths", value=list(widths)
        )
    for name, value in (
        ("steps", steps),
        ("seeds", seeds),
        ("batch", batch),
        ("length", length),
        *(("width", w) for w in widths),
    ):
        check_whole(name, value)
    made = [at_width(config, width, length) for width in widths]
    for one in made:
        one.check()
    measured = list[tuple[Measure, Measure]]()

    def check() -> CoordinateCheck:
        sizes, changes = (
            {
                kind: [[one[which][step][kind] for one in measured] for step in range(steps + 1)]
                for kind in measured[0][0][0]
            }
            for which in (0, 1)
        )
        return CoordinateCheck(tuple(widths[: len(measured)]), steps, learning_rate, sizes, changes)

    def so_far() -> CoordinateCheck | None:
        return None if len(measured) < 2 or (found := check()).lost() else found

    with keeping(so_far):
        for one in counted("widths", made, len(made)):
            runs = [_measure(one, steps, learning_rate, seed, batch, length) for seed in range(seeds)]
            measured.append(_mean(runs))
    found = check()
    for kind, step, width in found.lost():
        raise RequestError(
            f"{kind} is not a number at width {width} after step {step}: nothing can be held against "
            f"the width; take a learning rate below {learning_rate:g}, or another model",
            code="diverged", field="learning_rate", value=learning_rate,
        )  # fmt: skip
    return found


def at_width(config: ModelConfig, width: int, length: int = 32) -> ModelConfig:
    """Returns `config` with d_model `width` and context `length`: hidden layers in proportion, at most `HEADS` heads
    (grouped as before), at most `VOCABULARY` tokens, no dropout."""

    def fit(block: BlockConfig) -> BlockConfig:
        mixer, ffn = block.mixer, block.ffn
        heads = mixer.heads(config.ctx)
        mixer = mixer.resized(HEADS if heads is None else min(HEADS, 1 << (heads.n_heads.bit_length() - 1)))
        mixer = mixer.changed("dropout", lambda old: 0.0) or mixer
        if ffn is not None and ffn.hidden is not None:
            ffn = ffn.replace(hidden=max(8, round(ffn.hidden * width / config.d_model / 8) * 8))
        return block.replace(mixer=mixer, ffn=ffn, residual=block.residual.replace(dropout=0.0))

    stack = tuple(stage.replace(blocks=tuple(fit(block) for block in stage.blocks)) for stage in config.stack)
    embedding = config.embedding.replace(dropout=0.0)
    vocabulary = min(config.vocab_size, VOCABULARY)
    return config.replace(d_model=width, stack=stack, embedding=embedding, vocab_size=vocabulary, context=length)


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Returns the least-squares slope of log2 value on log2 width; 0 if all values are 0, nan if a value is 0 or not
    finite."""
    if not any(values):
        return 0.0
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.nan
    x, y = [math.log2(width) for width in widths], [math.log2(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


Measure = list[dict[str, float]]
"""Means over activations: `measure[step][kind of site]`."""


def _measure(
    config: ModelConfig, steps: int, learning_rate: float, seed: int, batch: int, length: int
) -> tuple[Measure, Measure]:
    """Returns (mean |x|, mean |x_t - x_0|), by step and kind of site, of a new model trained on one random batch."""
    model = config.build(seed=seed)
    text = torch.randint(config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    tokens, targets = text[:, :-1], text[:, 1:]
    optimizer = torch.optim.Adam(parameter_groups(model, learning_rate, 0.0, config.rates))
    first = _seen(model, tokens)
    sizes, changes = [_by_kind(first)], [_by_kind({site: torch.zeros(()) for site in first})]
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
        now = _seen(model, tokens)
        sizes.append(_by_kind(now))
        changes.append(_by_kind({site: x - first[site] for site, x in now.items()}))
    return sizes, changes


def _seen(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """Returns {site: activations}; scores of invisible keys are zero."""
    model.eval()
    seen = {site: x.masked_fill(x.isneginf(), 0.0) for site, x in capture(model, tokens, "*").items()}
    model.train()
    return seen


def _by_kind(seen: dict[str, Tensor]) -> dict[str, float]:
    """Returns {kind of site: mean |x|}, averaged over the layers."""
    found: dict[str, list[float]] = {}
    for site, x in seen.items():
        found.setdefault(re.sub(r"^layers\.\d+\.", "", site), []).append(float(x.abs().mean()))
    return {kind: sum(values) / len(values) for kind, values in found.items()}


def _mean(runs: list[tuple[Measure, Measure]]) -> tuple[Measure, Measure]:
    """Returns the mean over seeds of each of the two measures of the runs: sizes and changes."""

    def over(which: list[Measure]) -> Measure:
        return [{kind: sum(one[kind] for one in at) / len(at) for kind in at[0]} for at in zip(*which, strict=True)]

    sizes, changes = zip(*runs, strict=True)
    return over(list(sizes)), over(list(changes))
