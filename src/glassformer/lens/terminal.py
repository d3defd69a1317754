"""Inspections and readings as text for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from glassformer.figures.terminal import TextTable, bare, dim, one_line, ruled, short, unbroken
from glassformer.lens.inspected import HeadMap, Inspected
from glassformer.lens.page.words import likely, visible
from glassformer.lens.reading import Reading
from glassformer.units import plural

SHOWN_TOKENS, SHOWN_DEPTHS, SHOWN_HEADS, SHOWN_WORDS = 240, 12, 3, 3
WARM = ("", "black on #fbe4d0", "black on #f7c69c", "black on #ee9d59", "black on #dd7422")
"""Terminal styles for levels of surprisal, from zero to that of a uniform guess."""
COLUMNS = (
    "entropy: 0 if a head reads one token, 1 if all alike; first, before, itself: its mean weight on these tokens; "
    "logit: its largest score"
)
"""Caption of the table of heads."""
HEADED = re.compile(r"""(?:((?:'[^']*'|"[^"]*"|[^'"])*?): )?(.*)""")
"""Pattern of a line such as `layer 3: ...`, which separates its head; colons within quotes do not count."""


def inspection_lines(seen: Inspected) -> Iterator[str | RenderableType]:
    """Yields the output of an inspection: the loss, the text coloured by surprisal, and tables of heads,
    cross-attention and predictions."""
    facts = [
        f"{seen.name}{'' if seen.trained else ' (random weights)'}: {short(seen.parameters)} parameters",
        plural(len(seen.ids), "token"),
    ]
    if math.isfinite(seen.mean_loss):
        facts.append(f"{seen.mean_loss:.3f} nats per token, perplexity {math.exp(min(seen.mean_loss, 700)):.4g}")
    yield ", ".join(facts)
    if sentence := likely(seen):
        yield Text(sentence, style="bold")
    yield coloured(seen)
    if surprising := most_surprising(seen):
        yield f"most surprising: {surprising}"
    if seen.heads:
        yield head_table(seen)
        yield dim(COLUMNS)
    if seen.crossings:
        yield crossing_table(seen)
    yield prediction_table(seen)


def reading_lines(name: str, reading: Reading | str, figure: Path | None = None) -> Iterator[str | RenderableType]:
    """Yields the output of a reading: its first line and a table of the others; or the reason why the model cannot give
    it. `figure`: file of its figure, if one was written."""
    first, *lines = map(one_line, str(reading).splitlines() if isinstance(reading, Reading) else [reading])
    yield Text(f"\n{name}: ", style="bold").append(first, style="not bold")
    table = bare()
    for line in lines:
        of, value = HEADED.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches any line
        table.add_row(Text(of or ""), Text(value))
    if lines:
        yield table
    if figure is not None:
        yield unbroken(f"  figure: {figure}")


def coloured(seen: Inspected) -> Text:
    """Returns the inspected text, each token on a background that is warmer the larger its surprisal."""
    line, most = Text(), math.log(max(seen.vocab_size, 2))
    for word, loss in zip(seen.words[:SHOWN_TOKENS], seen.loss.tolist(), strict=False):
        level = min(int(len(WARM) * max(loss, 0.0) / most), len(WARM) - 1) if math.isfinite(loss) else 0
        line.append(spaced(word), style=WARM[level])
        if word.endswith("\n"):
            line.append("\n")
    if (left := len(seen.words) - SHOWN_TOKENS) > 0:
        line.append(f" … and {left:,} more tokens", style="dim")
    return line


def spaced(word: str) -> str:
    """Returns the characters of a token for a text that is coloured token by token, in which a space between words
    stays a space."""
    return word if word in ("", " ") else visible(word)


def most_surprising(seen: Inspected, count: int = 5) -> str:
    """Returns the `count` tokens of largest loss as text, with their nats."""
    paid = [(loss, i) for i, loss in enumerate(seen.loss.tolist()) if math.isfinite(loss)]
    return ", ".join(f"{quoted(seen.words[i])} {loss:.2f}" for loss, i in sorted(paid, reverse=True)[:count])


def quoted(word: str) -> str:
    """Returns a token's text in quotes, its spaces stripped."""
    return f"‘{spaced(word).strip() or visible(word)}’"


def head_table(seen: Inspected) -> TextTable:
    """Returns a table of the notable heads by kind, with the tokens to which the last token attends in each head."""
    last = len(seen.ids) - 1
    table = ruled("notable heads")
    for heading in ("for", "layer", "head", "entropy", "first", "before", "itself", "logit"):
        table.add_column(heading, justify="left" if heading == "for" else "right", no_wrap=True)
    table.add_column(Text(f"{quoted(seen.words[last])} attends to"), overflow="fold")
    for kind, found in seen.notable(SHOWN_HEADS).items():
        for head in found:
            table.add_row(kind, *_numbers(head), looked_at(seen, head, last))
    return table


def crossing_table(seen: Inspected) -> TextTable:
    """Returns a table of the cross-attention at some positions, in the last layer that has it."""
    one = seen.crossings[-1]
    table = ruled(f"what layer {one.layer} reads of the source, mean of its heads")
    table.add_column("at", no_wrap=True)
    table.add_column("reads", overflow="fold")
    count = one.maps.shape[1]
    for position in sorted({*range(0, count, max(1, math.ceil(count / SHOWN_DEPTHS))), count - 1}):
        found = seen.read_at(one, position, SHOWN_WORDS)
        words = ", ".join(f"{quoted(seen.source[at])} {weight:.2f}" for at, weight in found)
        table.add_row(f"{position} {quoted(seen.words[position])}", words)
    return table


def _numbers(head: HeadMap) -> list[str]:
    masses = (head.attention_entropy, head.sink_mass, head.previous_mass, head.self_mass)
    return [str(head.layer), str(head.head), *(f"{mass:.2f}" for mass in masses), f"{head.max_attention_logit:.1f}"]


def looked_at(seen: Inspected, head: HeadMap, position: int) -> str:
    found = seen.looked_at(head.layer, head.head, position, SHOWN_WORDS)
    return ", ".join(f"{quoted(seen.words[key])} {weight:.2f}" for key, weight in found if weight >= 0.005)


def prediction_table(seen: Inspected) -> TextTable:
    """Returns a table of the predictions after the last token, of at most `SHOWN_DEPTHS` depths."""
    last = len(seen.ids) - 1
    where = "after" if seen.causal else "for"
    table = ruled(f"what each depth would say {where} {quoted(seen.words[last])}")
    table.add_column("depth", no_wrap=True)
    for rank in range(SHOWN_WORDS):
        table.add_column("most likely" if not rank else str(rank + 1), overflow="fold")
    depths = seen.predictions(last)
    step = max(1, math.ceil(seen.layers / (SHOWN_DEPTHS - 1)))
    for depth in sorted({*range(seen.layers, -1, -step), 0}):
        cells = (f"{quoted(word)} {share:.3f}" for word, _, share in depths[depth][:SHOWN_WORDS])
        table.add_row(f"layer {depth - 1}" if depth else "embedding", *cells)
    return table
