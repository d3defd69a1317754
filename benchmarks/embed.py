"""Vectors of 10,000 sentences by all-MiniLM-L6-v2 in fp32: us and `sentence-transformers` in turn, in one process.

The sentences are those of the documentation and the docstrings of Python's standard library (`python-docs`), the first
10,000 different ones of 20 to 400 characters. A round is a call from a list of texts to an array of vectors,
tokenising included: `gf.embed` of a loaded model, and `SentenceTransformer.encode` with batches of 32, which it takes
by itself (128 were slower here). Both have the same threads. Before rounds count, a call of each with 256 sentences;
`difference` is the largest between the numbers of any vector of the two, whose length is 1.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import glassformer as gf
from glassformer import machine
from glassformer.conversion import locate
from glassformer.generation.vectors import Embedder
from glassformer.text.corpora import open_corpus

SENTENCES, QUICK = 10_000, 500
CHARACTERS = (20, 400)
WARM = 256
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n\s*\n")


def sentences(n: int) -> list[str]:
    """Returns the first n different sentences of the documentation. Raises ValueError if it has fewer."""
    found: dict[str, None] = {}
    for document in open_corpus("python-docs").documents():
        for sentence in _END.split(document.text):
            sentence = " ".join(sentence.split())
            if CHARACTERS[0] <= len(sentence) <= CHARACTERS[1] and sentence.endswith((".", "!", "?")):
                found.setdefault(sentence)
                if len(found) == n:
                    return list(found)
    raise ValueError(f"python-docs has {len(found):,} sentences of these, and {n:,} are asked for")


def sides() -> dict[str, Callable[[Sequence[str]], np.ndarray]]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(locate("minilm")), device="cpu")
    ours = Embedder(gf.load("minilm"))
    return {
        "glassformer": lambda texts: ours(texts).numpy(),
        "sentence-transformers": partial(theirs.encode, batch_size=32, show_progress_bar=False),
    }


def run(rounds: int = 3, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    """Medians over `rounds` of each side, taken in turn."""
    if threads is not None:
        torch.set_num_threads(threads)
    texts, compared = sentences(QUICK if quick else SENTENCES), sides()
    seconds, vectors = dict[str, list[float]](), dict[str, np.ndarray]()
    for side in compared.values():
        side(texts[:WARM])
    for _ in range(rounds):
        for name, side in compared.items():
            began = time.perf_counter()
            vectors[name] = side(texts)
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            if not quiet:
                print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    ours = next(iter(compared))
    rows = [
        {
            "side": name, "seconds": statistics.median(some), "lowest": min(some), "highest": max(some),
            "sentences_per_second": len(texts) / statistics.median(some),
            "difference": float(np.abs(vectors[name] - vectors[ours]).max()),
            "share": statistics.median(mine / one for mine, one in zip(seconds[ours], some, strict=True)),
        }
        for name, some in seconds.items()
    ]  # fmt: skip
    return {"machine": machine.machine(), "sentences": len(texts), "rows": rows, "table": table(rows)}


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("", "seconds", "lowest to highest", "sentences/s", "times as long as ours", "difference")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += [
        f"| {row['side']} | {row['seconds']:.2f} | {row['lowest']:.2f} to {row['highest']:.2f} | "
        f"{row['sentences_per_second']:,.0f} | {1 / row['share']:.2f} | {row['difference']:.1e} |"
        for row in rows
    ]
    return "\n".join(lines)
