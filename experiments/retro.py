"""A language model with and without neighbours: RETRO (Borgeaud et al. 2021, 2112.04426) on the documentation of
Python.

>>> python -m experiments.retro          # trains the arms and writes docs/retro.md
>>> python -m experiments.retro --quick  # the same in seconds, to see that it runs; prints the page
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

import glassformer as gf
from glassformer import machine
from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.model import Model
from glassformer.parts.ffn import GluConfig
from glassformer.parts.forward_pass import Memory
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import BidirectionalConfig
from glassformer.text.corpora import open_corpus
from glassformer.text.subword import BPETokenizer

PAGE = Path(__file__).parents[1] / "docs" / "retro.md"
CHUNK, NEIGHBOURS, CONTEXT, VOCABULARY = 32, 2, 256, 1024
VALUE = 2 * CHUNK
"""Tokens of a neighbour: a chunk and its continuation."""
CHUNKS = CONTEXT // CHUNK
WIDTH, ENCODER_WIDTH, HEADS = 96, 48, 4
STEPS, BATCH, SEEDS, RATE = 250, 8, (0, 1), 2e-3
CHARACTERS = 600_000
"""Of the corpus: whole documents, by the hash of their names."""
HELD_OUT = 10
"""One document in so many."""
COPIED = 8
"""So many tokens in a row that stand in a neighbour too make a chunk one that could be copied."""
ARMS = {"neighbours": "the nearest of other documents", "random": "drawn from all", "none": "nothing"}


@dataclass
class Windows:
    """(n, CONTEXT + 1) tokens, -1 behind the end of a document, and the rows of the database that are each chunk's
    neighbours, (n, CHUNKS, NEIGHBOURS), -1 where there is none."""

    tokens: Tensor
    neighbours: Tensor


def corpus(quick: bool) -> tuple[BPETokenizer, list[list[int]], list[list[int]]]:
    """Tokens of training and held-out documents."""
    documents = [(one.name, one.text) for one in open_corpus("python-docs").documents()]
    documents.sort(key=lambda one: sha256(one[0].encode()).digest())
    kept, size = [], 0
    for name, text in documents:
        if size < CHARACTERS // (20 if quick else 1):
            kept.append((name, text))
            size += len(text)
    held, rest = kept[::HELD_OUT], [one for i, one in enumerate(kept) if i % HELD_OUT]
    tokenizer = BPETokenizer.train((text for _, text in rest), VOCABULARY)
    train, apart = ([tokenizer.encode(text).tolist() for _, text in some] for some in (rest, held))
    return tokenizer, train, apart


def chunked(documents: list[list[int]]) -> list[tuple[int, list[int], list[int]]]:
    """(document, chunk, chunk and continuation) of every whole chunk."""
    return [
        (i, tokens[at : at + CHUNK], tokens[at : at + VALUE])
        for i, tokens in enumerate(documents) for at in range(0, len(tokens) - CHUNK + 1, CHUNK)
    ]  # fmt: skip


def nearest(tokenizer: BPETokenizer, train: list[list[int]], held: list[list[int]]) -> tuple[list[list[int]], Any]:
    """The values of the database, and for (side, document) the neighbours of its chunks."""
    stored = chunked(train)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "chunks.jsonl"
        texts = [tokenizer.decode(chunk).strip() or "." for _, chunk, _ in stored]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        index = gf.index(data, Path(folder) / "index")
        if len(index) != len(stored):
            raise ValueError("a chunk is longer than the encoder reads")
        outside = chunked(held)
        rows = {
            "train": index.near(index.vectors, 8 * NEIGHBOURS),
            "held": index.nearest([tokenizer.decode(chunk).strip() or "." for _, chunk, _ in outside], NEIGHBOURS),
        }
        found: dict[tuple[str, int], list[list[int]]] = {}
        for side, asked in (("train", stored), ("held", outside)):
            for (document, _, _), row in zip(asked, rows[side], strict=True):
                others = [i for _, i in row if side == "held" or stored[i][0] != document][:NEIGHBOURS]
                found.setdefault((side, document), []).append(others + [-1] * (NEIGHBOURS - len(others)))
    return [value for _, _, value in stored], found


def windows(side: str, documents: list[list[int]], found: dict[tuple[str, int], list[list[int]]]) -> Windows:
    rows, beside = [], []
    for i, tokens in enumerate(documents):
        neighbours = found.get((side, i), [])
        for at in range(0, len(tokens) - CHUNK, CONTEXT):
            row = tokens[at : at + CONTEXT + 1]
            rows.append(row + [-1] * (CONTEXT + 1 - len(row)))
            some = neighbours[at // CHUNK : at // CHUNK + CHUNKS]
            beside.append(some + [[-1] * NEIGHBOURS] * (CHUNKS - len(some)))
    return Windows(torch.tensor(rows), torch.tensor(beside))


def config() -> ModelConfig:
    shared: dict[str, Any] = {"norm": RMSNormConfig(), "residual": PreConfig()}
    own = AttentionConfig(n_heads=HEADS, position=RotaryConfig())
    both = AttentionConfig(n_heads=2, position=RotaryConfig(), visibility=BidirectionalConfig())
    cross = CrossAttentionConfig(n_heads=HEADS, chunks={"chunk": CHUNK, "width": NEIGHBOURS * VALUE})
    plain = BlockConfig(mixer=own, ffn=GluConfig(), **shared)
    reads = BlockConfig(mixer=own, ffn=None, **shared), BlockConfig(mixer=cross, ffn=GluConfig(), **shared)
    encoder = BlockConfig(mixer=both, ffn=GluConfig(), **shared)
    return ModelConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, context=CONTEXT, final_norm=RMSNormConfig(),
        stack=(Stage(repeat=2, blocks=(plain, *reads)),),
        encoder=TowerConfig(d_model=ENCODER_WIDTH, context=VALUE, stack=(Stage(repeat=1, blocks=(encoder,)),),
                            final_norm=RMSNormConfig()),
    )  # fmt: skip


class Database:
    """Rows of tokens, padded with -1."""

    def __init__(self, values: list[list[int]]):
        self.values = torch.tensor([value + [-1] * (VALUE - len(value)) for value in values])

    def memory(self, model: Model, rows: Tensor) -> Memory:
        """What the encoder makes of neighbours (b, chunks, k), each read alone."""
        tokens = self.values[rows.clamp(min=0)].masked_fill((rows < 0)[..., None], -1)  # (b, chunks, k, VALUE)
        b, real = len(rows), tokens >= 0
        flat, seen = tokens.clamp(min=0).flatten(0, 2), real.flatten(0, 2).long()
        seen[:, 0] = 1  # of one that is not there, a token is read that nobody sees
        x = model.encode(flat, seen).x
        return Memory(x.reshape(b, -1, x.shape[-1]), real.reshape(b, -1).long())


def given(arm: str, rows: Tensor, stored: int, draw: torch.Generator) -> Tensor:
    """The neighbours of this arm; random ones where, and as many as, there are nearest ones."""
    if arm == "none":
        return torch.full_like(rows, -1)
    return torch.randint(stored, rows.shape, generator=draw).where(rows >= 0, -1) if arm == "random" else rows


def trained(arm: str, seed: int, train: Windows, database: Database, steps: int) -> Model:
    model = config().build(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(seed)  # the same text in the same order for each arm
    other = torch.Generator().manual_seed(seed + 1000)
    for at in batches(len(train.tokens), steps, draw):
        rows = given(arm, train.neighbours[at], len(database.values), other)
        loss = losses(model, train.tokens[at], database.memory(model, rows))
        optimizer.zero_grad(set_to_none=True)
        (loss.sum() / (train.tokens[at][:, 1:] >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rule.step()
    return model.eval()


def batches(n: int, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
    waiting = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(waiting) < BATCH:
            waiting = torch.cat((waiting, torch.randperm(n, generator=draw)))
        yield waiting[:BATCH]
        waiting = waiting[BATCH:]


def losses(model: Model, tokens: Tensor, memory: Memory) -> Tensor:
    """(b, CONTEXT) nats, 0 behind the end of a document."""
    targets = tokens[:, 1:].where(tokens[:, 1:] >= 0, -100)
    return model(tokens[:, :-1].clamp(min=0), targets=targets, memory=memory, reduction="none").view(targets.shape)


@torch.no_grad()
def measured(model: Model, arm: str, held: Windows, database: Database, copies: Tensor) -> dict[str, float]:
    """Nats per held-out token: of all, of those that neighbours can reach, and of these where nothing can be copied."""
    draw, found = torch.Generator().manual_seed(7), []
    for at in torch.arange(len(held.tokens)).split(BATCH):
        rows = given(arm, held.neighbours[at], len(database.values), draw)
        found.append(losses(model, held.tokens[at], database.memory(model, rows)))
    loss, real = torch.cat(found), held.tokens[:, 1:] >= 0
    reached = real & (torch.arange(CONTEXT) >= CHUNK - 1)
    fresh, copied = reached & ~copies, reached & copies
    named = {"all": real, "reached": reached, "fresh": fresh, "copied": copied}
    return {name: float(loss[where].mean()) if where.any() else 0.0 for name, where in named.items()}


def copied(held: Windows, database: Database) -> Tensor:
    """(n, CONTEXT) whether the text that a prediction is part of, the chunk after the neighbours' own, has `COPIED`
    tokens in a row that a neighbour has too."""
    found = torch.zeros(len(held.tokens), CONTEXT, dtype=torch.bool)
    for i, (row, beside) in enumerate(zip(held.tokens.tolist(), held.neighbours.tolist(), strict=True)):
        for u, numbers in enumerate(beside):
            following = grams(row[(u + 1) * CHUNK : (u + 2) * CHUNK])
            if any(following & grams(database.values[n].tolist()) for n in numbers if n >= 0):
                found[i, (u + 1) * CHUNK - 1 : (u + 2) * CHUNK - 1] = True
    return found


def grams(tokens: list[int]) -> set[tuple[int, ...]]:
    real = [token for token in tokens if token >= 0]
    return {tuple(real[i : i + COPIED]) for i in range(len(real) - COPIED + 1)}


def run(quick: bool = False) -> dict[str, Any]:
    tokenizer, documents, apart = corpus(quick)
    values, found = nearest(tokenizer, documents, apart)
    database = Database(values)
    train, held = windows("train", documents, found), windows("held", apart, found)
    copies, rows = copied(held, database), []
    for seed in SEEDS[: 1 if quick else None]:
        for arm in ARMS:
            model = trained(arm, seed, train, database, 3 if quick else STEPS)
            rows.append({"arm": arm, "seed": seed, **measured(model, arm, held, database, copies)})
            print(rows[-1], file=sys.stderr, flush=True)
    reached = (held.tokens[:, 1:] >= 0) & (torch.arange(CONTEXT) >= CHUNK - 1)
    return {
        "rows": rows, "parameters": config().num_params(), "stored": len(values), "machine": machine.machine(),
        "tokens": [int((one.tokens >= 0).sum()) for one in (train, held)],
        "copied": float(copies[reached].float().mean()),
    }  # fmt: skip


TEXT = """# With and without neighbours

RETRO (Borgeaud et al. 2021, 2112.04426) on the documentation of Python, as `python -m experiments.retro` trains it.
Text is cut into chunks. Those of the training documents are indexed by MiniLM (`gf.index`); the value of a chunk is the
chunk and the one that follows it. For each chunk of a training or held-out document, the two nearest of *other*
documents are its neighbours, so that none holds what comes next in the document itself. A small encoder reads each
neighbour, and a third of the decoder's blocks have chunked cross-attention to them: `cross_attention` with `chunks`.

## What was measured

{here}. {parameters:,} parameters, context {context}, chunks of {chunk} tokens, {k} neighbours of {value} tokens each;
{steps} steps of {batch} windows (AdamW, one cycle to {rate:g}), {seeds} seeds, the same text in the same order for each
arm. {train:,} tokens to train on, {stored:,} chunks in the index, {held:,} held-out tokens of documents that are not in
the index. All arms are one model: *random* gets as many chunks drawn at random, *none* gets padding alone, so that its
cross-attention adds nothing.

Nats per held-out token, mean over seeds (and the standard deviation between them):

{table}

*reached*: tokens with a whole chunk before them in their window, which is all that neighbours can help. *to be copied*:
tokens of chunks which have {copied_n} tokens in a row that stand in a neighbour too, {share:.1%} of those reached;
*fresh*: the others.

Neighbours against random chunks, by seed: {against}. Against none: {plain}.
"""


def page(result: dict[str, Any]) -> str:
    names = {"all": "all", "reached": "reached", "fresh": "fresh", "copied": "to be copied"}
    lines = ["| arm | what it reads | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 2) + "|"]
    of = {arm: [row for row in result["rows"] if row["arm"] == arm] for arm in ARMS}
    for arm, some in of.items():
        cells = [f"{mean(v):.3f} ({stdev(v) if len(v) > 1 else 0:.3f})" for v in ([r[n] for r in some] for n in names)]
        lines.append(f"| {arm} | {ARMS[arm]} | " + " | ".join(cells) + " |")

    def against(arm: str) -> str:
        pairs = zip(of["neighbours"], of[arm], strict=True)
        return ", ".join(f"{mine['reached'] - other['reached']:+.3f}" for mine, other in pairs) + " nats"

    here = result["machine"]
    return TEXT.format(
        table="\n".join(lines), against=against("random"),
        here=f"{date.today()}, {here['processor']}, torch {here['torch']}", parameters=result["parameters"],
        context=CONTEXT, chunk=CHUNK, k=NEIGHBOURS, value=VALUE, steps=STEPS, batch=BATCH, rate=RATE, seeds=len(SEEDS),
        train=result["tokens"][0], held=result["tokens"][1], stored=result["stored"], copied_n=COPIED,
        share=result["copied"], plain=against("none"),
    )  # fmt: skip


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    text = page(run(quick))
    if quick:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
