"""Speed claims of guides to the transformer, measured on this machine.

Both sides of a claim are measured in turn, in fp32, after one warm-up round; the fastest round counts. The ratio is
that of the side claimed to be slower over the other side. The guides that name their hardware measured on GPUs.
`holds`: at least 0.8 times the claimed ratio; `less here`: the same side wins, by less; `does not hold here`: within
3 %, or the other side wins.

attention    one call, 16 heads of 64, causal, 2,048 tokens: `naive`, which materialises all scores, against the kernel
             that `auto` selects here. `backward` times only the backward pass. Memory is the growth of the resident set
             over both passes
heads        a model of 4 layers, width 768, 12 heads: the state's bytes, a step of decoding after 2,048 tokens, and a
             training pass of 512 tokens, with 12, 4 and 1 KV heads
norm         2,048 tokens of width 4,096, eager and compiled
rotary       a training pass of that model with and without it
window       one call as above with 4,096 tokens and a window of 1,024, against causal and bidirectional attention
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import glassformer as gf
from benchmarks import among
from benchmarks.mixers import grown
from glassformer import machine
from glassformer.parts.kernel import AttentionCall, Kernel, Naive
from glassformer.parts.norm import LayerNorm, RMSNorm
from glassformer.parts.region import compiled_regions
from glassformer.parts.visibility import Bidirectional, Causal, SlidingWindow, Visibility

NEAR, SAME = 0.8, 1.03
HEADS, HEAD_DIM = 16, 64
MODEL = "llama@1m+layers=4+d_model=768+heads=12+vocab_size=256+context=4096"
Run = Callable[[], float]
"""Function that does the work of one side and returns the measured quantity: seconds or bytes."""


@dataclass(frozen=True)
class Claim:
    """A published claim that one side costs `claimed` times the other (None for a claim without a ratio). `make()`
    returns (the costlier side, the cheaper side)."""

    what: str
    claimed: float | None
    make: Callable[[], tuple[Run, Run]]


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def attended(kernel: Kernel, visibility: Visibility, s: int, part: str) -> float:
    """Returns the seconds of a call's forward or backward pass, or of both."""
    q, k, v = (torch.randn(1, s, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    began = time.perf_counter()
    z = kernel(AttentionCall(q, k, v, visibility))
    between = time.perf_counter()
    if part == "forward":
        return between - began
    z.backward(torch.ones_like(z))
    return time.perf_counter() - (between if part == "backward" else began)


def attention(part: str) -> tuple[Run, Run]:
    fused = _auto()
    if part == "memory":
        return partial(_grown, Naive()), partial(_grown, fused)
    return partial(attended, Naive(), Causal(), 2048, part), partial(attended, fused, Causal(), 2048, part)


def _grown(kernel: Kernel) -> float:
    """Returns the growth of the resident set in a forward and backward pass, in bytes."""
    return float(grown(partial(attended, kernel, Causal(), 2048, "both")) or 0)


def _auto() -> Kernel:
    mixer: Any = gf.preset("llama@1m").build(seed=0).layers[0].mixer
    return mixer.kernel


def windowed(other: Visibility) -> tuple[Run, Run]:
    kernel = _auto()
    return partial(attended, kernel, other, 4096, "both"), partial(attended, kernel, SlidingWindow(1024), 4096, "both")


def state(groups: str) -> tuple[Run, Run]:
    whole, shared = (gf.preset(MODEL + change).state_bytes(2048, torch.float16) for change in ("", groups))
    return lambda: float(whole), lambda: float(shared)


def decoding(change: str) -> Run:
    """Returns a function that measures the median seconds of decoding one token after 2,048."""
    model = gf.preset(MODEL + change).build(seed=0).eval()

    @torch.inference_mode()
    def run() -> float:
        held = model.init_state(1, 2100)
        model(torch.randint(256, (1, 2048)), held)
        return statistics.median(seconds(lambda: model(torch.randint(256, (1, 1)), held)) for _ in range(15))

    return run


def training(change: str) -> Run:
    model = gf.preset(MODEL + change).build(seed=0)
    tokens = torch.randint(256, (1, 512))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(tokens, tokens.roll(-1, 1)).backward()

    return lambda: seconds(step)


def norms(part: str, compiled: bool) -> tuple[Run, Run]:
    x = torch.randn(2048, 4096, requires_grad=True)
    ones = torch.ones(2048, 4096)

    def run(norm: Callable[[Tensor], Tensor]) -> float:
        with compiled_regions() if compiled else nullcontext():
            began = time.perf_counter()
            y = norm(x)
            between = time.perf_counter()
            if part == "forward":
                return between - began
            y.backward(ones)
            x.grad = None
            return time.perf_counter() - between

    return partial(run, LayerNorm(4096)), partial(run, RMSNorm(4096))


CLAIMS: dict[str, Claim] = {
    "attention, forward": Claim("FlashAttention over plain attention", 3.6, partial(attention, "forward")),
    "attention, backward": Claim("FlashAttention over plain attention", 3.4, partial(attention, "backward")),
    "attention, memory": Claim("FlashAttention over plain attention", 3.9, partial(attention, "memory")),
    "heads, state of one": Claim("MQA's state, 8 %", 12.0, partial(state, "+mqa")),
    "heads, state of 4": Claim("GQA's state, 33 %", 3.0, partial(state, "+gqa:4")),
    "heads, decoding with one": Claim("MQA, 30 to 40 % less time", 1.43, lambda: (decoding(""), decoding("+mqa"))),
    "heads, decoding with 4": Claim("GQA, 1.3 times", 1.3, lambda: (decoding(""), decoding("+gqa:4"))),
    "heads, training with 4": Claim("GQA, 1.1 times", 1.1, lambda: (training(""), training("+gqa:4"))),
    "norm, forward": Claim("RMSNorm over LayerNorm", 1.9, partial(norms, "forward", False)),
    "norm, backward": Claim("RMSNorm over LayerNorm", 1.8, partial(norms, "backward", False)),
    "norm, forward, compiled": Claim("RMSNorm over LayerNorm", 1.9, partial(norms, "forward", True)),
    "norm, backward, compiled": Claim("RMSNorm over LayerNorm", 1.8, partial(norms, "backward", True)),
    "rotary, training": Claim("RoPE's cost over none", None, lambda: (training(""), training("+nope"))),
    "window, over all before": Claim("a window, 4 times at 4k", 4.0, lambda: windowed(Causal())),
    "window, over all": Claim("a window, 4 times at 4k", 4.0, lambda: windowed(Bidirectional())),
}


def verdict(found: float, claimed: float | None) -> str:
    if claimed is None:
        return f"{found - 1:+.1%}"
    if found >= NEAR * claimed:
        return "holds"
    return "less here" if found > SAME else "does not hold here"


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False, only: str | None = None) -> dict[str, Any]:
    machine.apply(machine.settings("cpu", threads=threads))
    torch.manual_seed(0)
    rows: dict[str, dict[str, Any]] = {}
    for name in among(CLAIMS, only):
        claim = CLAIMS[name]
        sides = claim.make()
        took: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for side, times in zip(sides, took, strict=True):
                value = side()
                if turn:
                    times.append(value)
        more, less = min(took[0]), min(took[1])
        rows[name] = {"claim": claim.what, "claimed": claim.claimed, "more": more, "less": less,
                      "found": more / less, "verdict": verdict(more / less, claim.claimed)}  # fmt: skip
        if not quiet:
            print(name, rows[name], file=sys.stderr, flush=True)
    lines = ["| | said | the one | the other | times claimed | times here | |", "|---|---|--:|--:|--:|--:|---|"]
    for name, row in rows.items():
        one, other = (_shown(name, row[side]) for side in ("more", "less"))
        claimed = "" if row["claimed"] is None else f"{row['claimed']:g}"
        lines.append(
            f"| {name} | {row['claim']} | {one} | {other} | {claimed} | {row['found']:.2f} | {row['verdict']} |"
        )
    return {"machine": machine.machine(), "rounds": rounds, "rows": rows, "table": "\n".join(lines)}


def _shown(name: str, value: float) -> str:
    return f"{value / 1e6:,.2f} MB" if "memory" in name or "state" in name else f"{1e3 * value:,.2f} ms"
