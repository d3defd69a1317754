"""The example of docs/kinds/encoder-decoder.md: answers of a trained translator, and its attention to the source.

python -m experiments.docs.translation RUN "A sentence" writes the part of the page that was measured, and its picture,
from the folder of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import glassformer as gf
from experiments.docs import BEGIN, DOCS, END, escaped
from experiments.docs.kinds import FOLDER
from experiments.svg import HEAD, PAPER, style_of
from glassformer.figures import Axis, HeatColumn, heat_map, heat_scale, tag
from glassformer.runs.results import Answers
from glassformer.text import Tokenizer

PAGE, PICTURE = DOCS / "kinds" / "encoder-decoder.md", FOLDER / "translation.svg"
BROKEN = "�"
"""Sign in the text of a token that ends within a character."""
WIDTH = 760


def pieces(ids: list[int], tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Returns text and places of the smallest groups of tokens that hold whole characters."""
    found: list[tuple[str, list[int]]] = []
    held: list[int] = []
    for place in range(len(ids)):
        held.append(place)
        text = tokenizer.decode([ids[i] for i in held])
        if BROKEN not in text:
            found.append((text.strip() or ("␣" if text else "(end)"), held))
            held = []
    return found


def looked(run: gf.Loaded, source: str) -> tuple[str, int, int, Tensor, list[str], list[str]]:
    """Returns the translation, the layer and head with the sharpest weights of tokens before the end, and the weights
    (s, t) with the names of both sides; a piece of several tokens has their mean as a row and their sum as a column."""
    tokenizer = run.tokenizer
    assert tokenizer is not None and tokenizer.eos_id is not None
    end = int(tokenizer.eos_id)
    read = [*tokenizer.encode(source).tolist(), end]
    written = run.generate(source=source, temperature=0, max_new_tokens=60).tokens
    target = [token for token in written if token != end]
    seen = gf.capture(run.model, torch.tensor([[end, *target]]), "layers.*.mixer.pattern", source=torch.tensor([read]))
    cross = {int(name.split(".")[1]): p[0] for name, p in seen.items() if int(name.split(".")[1]) % 2}
    sharp = {
        (layer, head): float(one[:, :-1].amax(-1).mean()) for layer, p in cross.items() for head, one in enumerate(p)
    }
    layer, head = max(sharp, key=lambda at: sharp[at])
    weights = cross[layer][head]
    rows, columns = pieces([*target, end], tokenizer), pieces(read, tokenizer)
    summed = torch.stack([weights[:, places].sum(1) for _, places in columns], 1)
    told = torch.stack([summed[places].mean(0) for _, places in rows])
    return tokenizer.decode(target), layer, head, told, [name for name, _ in rows], [name for name, _ in columns]


def picture(weights: Tensor, rows: list[str], columns: list[str], title: str) -> str:
    """Returns the weights as the text of a file, first row at the top."""
    values = weights.flip(0).T.tolist()
    cells = [HeatColumn(i - 0.5, i + 0.5, one, columns[i]) for i, one in enumerate(values)]
    ticks = [(float(i), name) for i, name in enumerate(columns)]
    axis = Axis("read from the source", low=-0.5, high=len(columns) - 0.5, ticks=ticks)
    drawn = heat_map(
        cells, rows[::-1], heat_scale("weight", [], low=0.0, high=1.0), axis, title, "written", width=WIDTH
    )
    paper = tag("rect", x=-60.0, y=-8.0, width="100%", height="100%", fill=PAPER)
    box = f'viewBox="-60 -8 {WIDTH + 72} 246"'
    opening, rest = str(drawn).split(">", 1)
    head = opening.replace("<svg ", f"<svg {HEAD}", 1).replace(f'viewBox="0 0 {WIDTH} 230"', box, 1)
    return f"{head}>{style_of(str(drawn))}{paper}{rest}\n"


def measured(folder: Path, source: str) -> tuple[str, str]:
    """Returns the part of the page and its picture."""
    answers = Answers(**json.loads((folder / "answers.json").read_text(encoding="utf-8")))
    command = (folder / "command.txt").read_text(encoding="utf-8").strip()
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    written, layer, head, weights, rows, columns = looked(gf.load(folder), source)
    title = f"Weights of head {head} of layers.{layer}, the sharpest before the end of the source"
    table = "\n".join(f"| {' | '.join(map(escaped, one))} |" for one in answers.samples)
    told = [
        f"```\n{command}\n```",
        f"{last['tokens']:,} tokens in {last['seconds'] / 60:.0f} minutes; held-out loss "
        f"{last['validation']['loss']:.2f} nats per token of the targets. {answers.words} (`{answers.signatures[0]}`).",
        f"| message | translation of the program | answer |\n|---|---|---|\n{table}",
        f"![{title}](../figures/kinds/{PICTURE.name})",
        f'"{escaped(source)}" becomes "{escaped(written)}". {title}: a row for each piece that is written, a column '
        "for each that is read; the darkest is a weight of 1.",
    ]
    return "\n\n".join(told), picture(weights, rows, columns, title)


def main(arguments: list[str]) -> None:
    folder, source = arguments
    told, drawn = measured(Path(folder), source)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{told}\n\n{END}{after}", encoding="utf-8")
    PICTURE.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
