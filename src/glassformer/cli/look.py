"""A look inside in the terminal: a short reading, and the page that has the rest."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glassformer import machine
from glassformer.conversion import is_checkpoint
from glassformer.errors import RequestError, WorkError, did_you_mean
from glassformer.figures.terminal import one_line, output, ruled, short, size
from glassformer.files import disk_errors
from glassformer.generation.session import source_of
from glassformer.introspection import edit, rows_of
from glassformer.lens.asking import PATCHING, READINGS, ReadingInputs, ablation
from glassformer.lens.inspection import HeadMap, Inspection, inspect
from glassformer.lens.page.words import visible
from glassformer.lens.reading import Reading
from glassformer.model import Model
from glassformer.naming import parse, preset
from glassformer.naming.loading import load
from glassformer.runs.live import View
from glassformer.text import ByteTokenizer, Tokenizer
from glassformer.text.pairs import START

LONGEST = 4096
"""Tokens that are read, at most; the context of the model may be shorter."""
LONGEST_TEXT = 1_000_000
"""Characters of a file or of standard input that are read."""
FOLDER, PAGE, ALL = "inspection", "inspect.html", "all"
SHOWN_TOKENS, SHOWN_DEPTHS, SHOWN_HEADS, SHOWN_WORDS = 240, 12, 3, 3
WARM = ("", "black on #fbe4d0", "black on #f7c69c", "black on #ee9d59", "black on #dd7422")
"""Surprise, from none to that of a blind guess."""


def show_inspection(
    name: str,
    text: str,
    out: str | None = None,
    as_json: bool = False,
    threads: int | None = None,
    readings: Sequence[str] = (),
    against: str | None = None,
    ablate: Sequence[str] = (),
    source: str | None = None,
) -> None:
    """Reads `text` with a checkpoint, or with an expression of random weights; prints what is seen and writes
    OUT/inspect.html. With `as_json` the reading is printed as JSON, and the page is written where `out` is given.

    `text` is the text itself, `@FILE` for that of a file, or `-` for standard input; what is beyond the model's
    context, or 4,096 tokens, is cut off and said. Each of the `readings` ("all": every one) is printed too, drawn in
    OUT/NAME.png, and stands under its name in the `readings` of the JSON; what the model cannot give is said, and the
    others go on. `against` is the text that activation_patching puts the values of this one into. What `ablate` names
    (`lens.asking.ablation`) is taken away from the model meanwhile, and the page says so. A model with an encoder reads
    a `source`, said as `text` is, and the text behind the token that its texts begin with. Raises RequestError, also
    where not one of the readings can be given."""
    asked, edits = chosen(readings), [ablation(one) for one in ablate]
    if against is not None and PATCHING not in asked:
        raise RequestError(
            f"--against is for --reading {PATCHING}: no other reading has two texts",
            code="conflict", field="against", value=against,
        )  # fmt: skip
    torch.set_num_threads(
        machine.settings("cpu", threads=threads).threads
    )  # freed memory is given back: blocks are large
    words, others = read_text(text), None if against is None else read_text(against, "--against")
    reads = None if source is None else read_text(source, "--source")
    for option, given in (("--text", words), ("--against", others), ("--source", reads)):
        if given == "":
            raise RequestError(f"{option} is empty; give at least one character", code="missing", field=option[2:])
    folder = out if out is not None or as_json else FOLDER
    if folder is not None:  # before the time is spent
        with disk_errors(Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    with View(quiet=as_json) as view, ExitStack() as edited:
        model, tokenizer, trained, begins = opened(name, view.say)
        for gone in edits:
            edited.enter_context(edit(model, gone))
        behind = begins if model.encoder is not None and begins is not None else []
        found = [*behind, *tokenizer.encode(words).tolist()]
        limit = min(LONGEST, model.config.context)
        if len(found) > limit:
            why = f"{name} has a context of {limit:,}" if limit < LONGEST else "more are not drawn"
            view.say(f"the first {limit:,} of {len(found):,} tokens are read: {why}")
        tokens = rows_of(model, found[:limit])
        read = source_of(model, tokenizer, reads)
        ids = None if read is None else torch.tensor([read], device=model.device)
        title = f"{name} without {', '.join(ablate)}" if ablate else name
        again = typed(name, text, out, readings, against, ablate, source)
        seen = inspect(
            model, tokens, tokenizer, source=ids, name=title, trained=trained, command=again, progress=view.progress
        )
        against_ids = None if others is None else [*behind, *tokenizer.encode(others).tolist()]
        other = None if against_ids is None else rows_of(model, against_ids[:limit])
        asking = model if ids is None else model.reading(ids)
        made, refused = ask(asked, ReadingInputs(asking, tokens, tokenizer, seen, other), view)
    page = None if folder is None else seen.save(Path(folder) / PAGE)
    drawn = {} if folder is None else draw(made, Path(folder), view)
    if as_json:
        told = {name: one.to_dict() for name, one in made.items()} | {n: {"error": why} for n, why in refused.items()}
        more = {"readings": told} if asked else {}
        print(json.dumps({**seen.to_dict(), "page": None if page is None else str(page), **more}))
    else:
        console = output()
        tell(seen, console)
        for name, one in made.items():
            tell_reading(name, one, drawn.get(name), console)
        for name, why in refused.items():
            console.print(Text(f"\n{name}: ", style="bold").append(one_line(why), style="not bold"))
        if page is not None:
            print(f"page: {page} ({size(page.stat().st_size)})")
    if asked and not made:
        raise RequestError(
            "; ".join(f"--reading {name}: {why}" for name, why in refused.items()),
            code="conflict", field="reading", value=[*refused],
        )  # fmt: skip


def typed(
    name: str,
    text: str,
    out: str | None,
    readings: Sequence[str],
    against: str | None,
    ablate: Sequence[str],
    source: str | None = None,
) -> str:
    """The command of these arguments, for a shell."""
    options = [("--text", text), ("--source", source), *(("--reading", one) for one in readings),
               ("--against", against), *(("--ablate", one) for one in ablate), ("--out", out)]  # fmt: skip
    given = (word for option, value in options if value is not None for word in (option, value))
    return shlex.join(["glassformer", "inspect", name, *given])


def chosen(readings: Sequence[str]) -> list[str]:
    """The names, each once. Raises RequestError for one that is none."""
    for name in readings:
        if name not in (*READINGS, ALL):
            near = did_you_mean(name, [*READINGS, ALL]) or f"; there are {', '.join(READINGS)}, and {ALL}"
            raise RequestError(f"no reading is named {name!r}{near}", code="unknown", field="reading", value=name)
    return list(READINGS) if ALL in readings else list(dict.fromkeys(readings))


def ask(names: Sequence[str], question: ReadingInputs, view: View) -> tuple[dict[str, Reading], dict[str, str]]:
    """The readings by name, and why there are no others."""
    made, refused = {}, {}
    for name in names:
        asked = replace(question, progress=partial(view.progress, name))
        try:
            made[name] = READINGS[name](asked)
        except (RequestError, WorkError) as problem:
            refused[name] = str(problem)
    return made, refused


def draw(readings: Mapping[str, Reading], folder: Path, view: View) -> dict[str, Path]:
    """The figures, by the name of the reading; none where they cannot be drawn, and that is said."""
    if readings and find_spec("matplotlib") is None:
        view.say("figures are drawn by matplotlib; install it: pip install 'glassformer[figures]'")
        return {}
    paths = {name: folder / f"{name}.png" for name in readings}
    for name, path in paths.items():
        readings[name].save(path)
    return paths


def read_text(text: str, option: str = "--text") -> str:
    """What `--text` names: itself, a file after an @, or standard input."""
    if text == "-":
        return _read("standard input", lambda: sys.stdin, option)
    if text.startswith("@"):
        path = Path(text[1:]).expanduser()
        return _read(str(path), lambda: path.open(encoding="utf-8", newline=""), option)
    return text


def _read(what: str, start: Callable[[], IO[str]], option: str) -> str:
    try:
        source = start()
        try:
            return source.read(LONGEST_TEXT)
        finally:
            if source is not sys.stdin:
                source.close()
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise RequestError(
            f"{what} holds the byte {byte:#04x}; {problem.encoding} text is right", code="damaged", field=option[2:]
        ) from None
    except (OSError, ValueError) as problem:  # ValueError: a name with a null byte
        reason = getattr(problem, "strerror", None) or problem
        raise RequestError(
            f"{option} @{what} cannot be read ({reason}); a text that begins with @ comes through {option} -",
            code="missing", field=option[2:],
        ) from None  # fmt: skip


def opened(name: str, say: Callable[[str], None]) -> tuple[Model, Tokenizer, bool, list[int] | None]:
    """(model, tokenizer, whether it has weights of its own, what a text that is written from a source begins with,
    where that is known). An expression gets random weights, and reads bytes."""
    if is_checkpoint(parse(name)[0]):
        loaded = load(name)
        if loaded.tokenizer is None:
            raise RequestError(
                f"{name} has no tokenizer; gf.lens.inspect(model, tokens) shows it with ids",
                code="missing", field="tokenizer", value=name,
            )  # fmt: skip
        for words in loaded.adapted:
            say(words)
        begins = loaded.generation.get(START, loaded.tokenizer.eos_id)
        return loaded.model, loaded.tokenizer, True, None if begins is None else [begins]
    config = preset(name)
    if (reads := config.embedding.reads) != "tokens":
        raise RequestError(
            f"{name} reads {reads}, and --text is for models of tokens; gf.capture(model, {reads}, sites) looks inside",
            code="conflict", field="model", value=name, expected="a model of tokens",
        )  # fmt: skip
    if config.vocab_size < 256:
        raise RequestError(
            f"vocab_size={config.vocab_size} of {name} is too small for bytes, and it has no tokenizer; "
            "256 or more is right, or a checkpoint",
            code="range", field="vocab_size", value=config.vocab_size,
        )  # fmt: skip
    say(f"{name} names no checkpoint: its weights are random, and it reads bytes")
    return config.build(seed=0).eval(), ByteTokenizer(), False, None


# What the terminal shows


def tell(seen: Inspection, console: Console) -> None:
    facts = [
        f"{seen.name}{'' if seen.trained else ' (random weights)'}: {short(seen.parameters)} parameters",
        f"{len(seen.ids):,} token{'s' if len(seen.ids) > 1 else ''}",
    ]
    if math.isfinite(seen.mean_loss):
        facts.append(f"{seen.mean_loss:.3f} nats per token, perplexity {math.exp(min(seen.mean_loss, 700)):.4g}")
    console.print(Text(", ".join(facts)), "\n", coloured(seen), sep="")
    if dear := dearest(seen):
        console.print(Text("most surprising: ").append(dear))
    if seen.heads:
        console.print(head_table(seen))
    if seen.crossings:
        console.print(crossing_table(seen))
    console.print(prediction_table(seen))


def tell_reading(name: str, reading: Reading, figure: Path | None, console: Console) -> None:
    """What a reading says of itself: its first line, and a row for each other, under what that is of."""
    first, *lines = map(one_line, str(reading).splitlines())
    console.print(Text(f"\n{name}: ", style="bold").append(first, style="not bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for line in lines:
        of, value = HEADED.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches any line
        table.add_row(Text(of or ""), Text(value))
    if lines:
        console.print(table)
    if figure is not None:
        print(f"  figure: {figure}")


HEADED = re.compile(r"""(?:((?:'[^']*'|"[^"]*"|[^'"])*?): )?(.*)""")
"""`layer 3: what`, where no colon within quotes counts."""


def coloured(seen: Inspection) -> Text:
    """The text, each token on a ground as warm as it surprised."""
    line, most = Text(), math.log(max(seen.vocab_size, 2))
    for word, loss in zip(seen.words[:SHOWN_TOKENS], seen.loss.tolist(), strict=False):
        level = min(int(len(WARM) * max(loss, 0.0) / most), len(WARM) - 1) if math.isfinite(loss) else 0
        line.append(shown(word), style=WARM[level])
        if word.endswith("\n"):
            line.append("\n")
    if (left := len(seen.words) - SHOWN_TOKENS) > 0:
        line.append(f" … and {left:,} more tokens", style="dim")
    return line


def shown(word: str) -> str:
    """A space between two words of a text that is coloured token by token is seen as it is."""
    return word if word in ("", " ") else visible(word)


def dearest(seen: Inspection, count: int = 5) -> str:
    """The tokens that cost most, with their nats."""
    paid = [(loss, i) for i, loss in enumerate(seen.loss.tolist()) if math.isfinite(loss)]
    return ", ".join(f"{quoted(seen.words[i])} {loss:.2f}" for loss, i in sorted(paid, reverse=True)[:count])


def quoted(word: str) -> str:
    return f"‘{shown(word).strip() or visible(word)}’"


def head_table(seen: Inspection) -> Table:
    """The heads that stand out, by what for, and what the last token looks at in each."""
    last = len(seen.ids) - 1
    table = ruled("heads that stand out")
    for heading in ("for", "layer", "head", "entropy", "first", "before", "itself", "logit"):
        table.add_column(heading, justify="left" if heading == "for" else "right", no_wrap=True)
    table.add_column(Text(f"{quoted(seen.words[last])} looks at"), overflow="fold")
    for kind, found in seen.notable(SHOWN_HEADS).items():
        for head in found:
            table.add_row(kind, *_numbers(head), Text(looked_at(seen, head, last)))
    return table


def crossing_table(seen: Inspection) -> Table:
    """What the last layer that reads the source takes from it, at some positions."""
    one = seen.crossings[-1]
    table = ruled(f"what layer {one.layer} reads of the source, mean of its heads")
    table.add_column("at", no_wrap=True)
    table.add_column("reads", overflow="fold")
    count = one.maps.shape[1]
    for position in sorted({*range(0, count, max(1, math.ceil(count / SHOWN_DEPTHS))), count - 1}):
        found = seen.read_at(one, position, SHOWN_WORDS)
        words = ", ".join(f"{quoted(seen.source[at])} {weight:.2f}" for at, weight in found)
        table.add_row(Text(f"{position} {quoted(seen.words[position])}"), Text(words))
    return table


def _numbers(head: HeadMap) -> list[str]:
    masses = (head.attention_entropy, head.sink_mass, head.previous_mass, head.self_mass)
    return [str(head.layer), str(head.head), *(f"{mass:.2f}" for mass in masses), f"{head.max_attention_logit:.1f}"]


def looked_at(seen: Inspection, head: HeadMap, position: int) -> str:
    found = seen.looked_at(head.layer, head.head, position, SHOWN_WORDS)
    return ", ".join(f"{quoted(seen.words[key])} {weight:.2f}" for key, weight in found if weight >= 0.005)


def prediction_table(seen: Inspection) -> Table:
    """What each depth would say after the last token; of many depths some, the first and the last among them."""
    last = len(seen.ids) - 1
    where = "after" if seen.causal else "for"
    table = ruled()
    table.title = Text(f"what each depth would say {where} {quoted(seen.words[last])}")
    table.add_column("depth", no_wrap=True)
    for rank in range(SHOWN_WORDS):
        table.add_column("likeliest" if not rank else str(rank + 1), overflow="fold")
    depths = seen.predictions(last)
    step = max(1, math.ceil(seen.layers / (SHOWN_DEPTHS - 1)))
    for depth in sorted({*range(seen.layers, -1, -step), 0}):
        cells = (Text(f"{quoted(word)} {share:.3f}") for word, _, share in depths[depth][:SHOWN_WORDS])
        table.add_row(f"layer {depth - 1}" if depth else "embedding", *cells)
    return table
