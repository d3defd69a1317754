"""The attention kernels against each other, forward and backward.

Its rows decide the table in src/glassformer/parts/kernel/table.py. Each shape has 4096 tokens and 6 heads of
64; figures are medians of rounds taken in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from glassformer import machine
from glassformer.parts.kernel import AttentionCall, Banded, Kernel, Naive, Sdpa
from glassformer.parts.visibility import Causal, SlidingWindow, Visibility

TOKENS, HEADS, HEAD_DIM = 4096, 6, 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
WINDOW = 128
LARGEST_NAIVE = 2048


def once(kernel: Kernel, visibility: Visibility, s: int, dtype: torch.dtype) -> float:
    """Seconds of one forward and backward pass."""
    shape = (TOKENS // s, s, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    began = time.perf_counter()
    z = kernel(AttentionCall(q, k, v, visibility))
    z.backward(torch.ones_like(z))
    return time.perf_counter() - began


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    how = machine.settings("cpu", threads=threads)
    machine.apply(how)
    kernels: dict[str, Kernel] = {"naive": Naive(), "sdpa": Sdpa(), "banded": Banded()}
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for visibility, label in ((Causal(), "causal"), (SlidingWindow(WINDOW), f"window {WINDOW}")):
            for s in LENGTHS:
                usable = {name: kernel for name, kernel in kernels.items() if name != "naive" or s <= LARGEST_NAIVE}
                took: dict[str, list[float]] = {name: [] for name in usable}
                for turn in range(rounds + 1):  # the first warms up
                    for name, kernel in usable.items():
                        seconds = once(kernel, visibility, s, dtype)
                        if turn:
                            took[name].append(1000 * seconds)
                row = {name: statistics.median(values) for name, values in took.items()}
                rows.append({"dtype": str(dtype).removeprefix("torch."), "visibility": label, "s": s, "ms": row})
                if not quiet:
                    print(rows[-1], file=sys.stderr, flush=True)
    lines = ["| dtype | visibility | s | naive ms | sdpa ms | banded ms |", "|---|---|--:|--:|--:|--:|"]
    for entry in rows:
        cells = " | ".join(f"{entry['ms'][name]:.1f}" if name in entry["ms"] else "" for name in kernels)
        lines.append(f"| {entry['dtype']} | {entry['visibility']} | {entry['s']} | {cells} |")
    return {"machine": machine.machine(), "rounds": rounds, "rows": rows, "table": "\n".join(lines)}
