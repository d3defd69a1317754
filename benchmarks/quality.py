"""Perplexity of SmolLM2-135M-Instruct with fewer bits, on the held-out part of `python-docs`, windows of 512 tokens.

The file's matrices have 4 bits (Q4_1), its embedding, which is the head too, 8 (Q8_0); `float32` holds the dequantised
weights. `int8` has a scale per row; `int4` a scale and a middle per group of 32, the grid of the file itself, so that
the matrices keep their values but for bf16 scales, and a head of 4 bits is what costs. `bytes` counts all that is held:
the table in which tokens are looked up stays as it was loaded. Decoding reads all but that table for each token.
Rounds are of 4,000 tokens.

The second table sets a text read token by token, with a state, against the same text read in one pass. Both add up the
same numbers, but a product of one row and one of many do so in another order and by other kernels, so they differ by
what sums are rounded to: in fp32 the seventh digit, in bf16, which keeps 8 bits of every value between two operations,
by about as much as either differs from fp32. A state in fewer bits rounds keys and values once more.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

import glassformer as gf
from glassformer import machine
from glassformer.laboratory.quality import qualities, windows_of
from glassformer.model import Model

MODEL = "smollm2"
READ = 256
"""Tokens that are read one by one."""
STATES = [
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.int8),
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8),
]  # fmt: skip
"""dtypes of weights and state."""


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    machine.apply(machine.settings("cpu", threads=threads))
    rows = []
    for row in qualities(partial(gf.load, MODEL), tokens=4000 * rounds):
        rows.append(asdict(row))
        if not quiet:
            print(f"{row.weights}, head {row.head}: perplexity {row.perplexity:.4f}", file=sys.stderr)
    read = cached(quiet)
    return {"machine": machine.machine(), "rows": rows, "cached": read, "table": f"{table(rows)}\n\n{read_table(read)}"}


@torch.inference_mode()
def cached(quiet: bool = False) -> list[dict[str, Any]]:
    """Compares the logits of READ tokens, read one by one with a state, with those of one pass, and both with fp32."""
    loaded = gf.load(MODEL)
    assert loaded.tokenizer is not None
    text = next(iter(windows_of(loaded.tokenizer, READ, tokens=READ))).batch.inputs[:, :READ]
    model, exact, rows = loaded.model, loaded.model(text)[0], []
    for weights, memory in STATES:
        model = model.to(weights)
        whole, read = model(text)[0].float(), step_by_step(model, text, memory).float()
        rows.append({
            "weights": str(weights).removeprefix("torch."), "state": str(memory).removeprefix("torch."),
            "from_one_pass": distance(read, whole, text), "from_fp32": distance(read, exact, text),
            "one_pass_from_fp32": distance(whole, exact, text),
        })  # fmt: skip
        if not quiet:
            print(rows[-1], file=sys.stderr)
    return rows


def step_by_step(model: Model, text: Tensor, memory: torch.dtype) -> Tensor:
    state = model.init_state(1, text.shape[1], memory)
    return torch.cat([model(token, state)[0] for token in text.split(1, dim=1)])


def distance(a: Tensor, b: Tensor, text: Tensor) -> dict[str, float]:
    """Returns how far logits a and b (s, v) differ: the largest difference over the largest logit, the mean difference
    in nats of the log-probability of the text's next token, and the number of differing most likely tokens."""
    next_token = text[0, 1:, None]
    nats = [x[:-1].log_softmax(-1).gather(-1, next_token) for x in (a, b)]
    return {
        "largest": float((a - b).abs().max() / b.abs().max()),
        "nats": float((nats[0] - nats[1]).abs().mean()),
        "choices": int((a.argmax(-1) != b.argmax(-1)).sum()),
    }


def read_table(rows: list[dict[str, Any]]) -> str:
    heads = ("weights", "state", "cached against one pass", "cached against fp32", "one pass against fp32")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [
            f"{one['largest']:.1e}, {one['nats']:.1e}, {one['choices']}"
            for one in (row["from_one_pass"], row["from_fp32"], row["one_pass_from_fp32"])
        ]
        lines.append("| " + " | ".join([row["weights"], row["state"], *cells]) + " |")
    what = (
        "largest difference of the logits, of the largest; mean difference in nats of the log-probability of the next"
    )
    return "\n".join([*lines, "", f"{READ} tokens: {what} token; how many of the most likely tokens differ."])


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("weights", "head", "bytes", "read for a token", "perplexity", "bits per byte", "perplexity lost")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [
            row["weights"], row["head"], f"{row['bytes'] / 1e6:.1f} MB", f"{row['bytes_per_token'] / 1e6:.1f} MB",
            f"{row['perplexity']:.4f}", f"{row['bits_per_byte']:.4f}", f"{100 * row['change']:+.3f} %",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{rows[0]['tokens']:,} tokens."])
