"""What fewer bits cost SmolLM2-135M-Instruct: perplexity on the held-out part of `python-docs`, windows of 512 tokens.

The file's matrices have 4 bits (Q4_1), its embedding, which is the head too, 8 (Q8_0): `float32` is what they stand
for. `int8` has a scale for each row; `int4` one and a middle for each group of 32, the grid of the file itself, so that
the matrices keep their values but for bf16 scales, and a head of 4 bits is what costs. `bytes` counts all that is held:
the table in which tokens are looked up stays as it was loaded. Decoding reads all but that table for each token.
Rounds are of 4,000 tokens.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import glassformer as gf
from glassformer import machine
from glassformer.convert.quality import qualities

MODEL = "smollm2"


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    machine.apply(machine.settings("cpu", threads=threads))
    rows = []
    for row in qualities(partial(gf.load, MODEL), tokens=4000 * rounds):
        rows.append(asdict(row))
        if not quiet:
            print(f"{row.weights}, head {row.head}: perplexity {row.perplexity:.4f}", file=sys.stderr)
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


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
