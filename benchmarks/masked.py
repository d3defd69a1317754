"""A training step of bert@10m on masked tokens against Hugging Face transformers' BERT.

All sides train a BERT of one shape (6 layers, width 384, 6 heads, 4,096 tokens, 16 x 256 tokens with 15 % masked, no
dropout) in one process, step by step in turn, with fused AdamW and gradients clipped at 1. Reported are medians, ratios
of medians, and the memory that each side adds in a separate process. `transformers` is called as its users call it,
`model(input_ids, labels=labels).loss`, with each of its attentions and in both precisions; ours runs as the defaults
choose, and eager. Each side draws its weights, and the losses of the first step are printed: both start near ln(4096).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.train import BATCH, CONTEXT, SHORT, Step, grown, loop, memory, trained
from glassformer import machine
from glassformer.naming import preset
from glassformer.parts.loss import IGNORED

VOCAB = 4096
HIDDEN = 0.15


def ours(dtype: str, compile: bool) -> Step:
    return trained(preset(f"bert@10m+vocab_size={VOCAB}+context={CONTEXT}"), dtype, compile)


def transformers(dtype: str, attention: str) -> Step:
    from transformers import BertConfig, BertForMaskedLM

    shape: Any = BertConfig
    model: Any = BertForMaskedLM(
        shape(
            vocab_size=VOCAB, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
            max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
    )  # fmt: skip
    how = machine.settings("cpu", dtype, compile=False)
    return loop(model, how, lambda inputs, targets: model(input_ids=inputs, labels=targets).loss)


SIDES = {
    **{f"glassformer {short} compiled": (ours, dtype, True) for dtype, short in SHORT.items()},
    **{f"glassformer {short} eager": (ours, dtype, False) for dtype, short in SHORT.items()},
    **{
        f"transformers {short} {attention}": (transformers, dtype, attention)
        for dtype, short in SHORT.items()
        for attention in ("sdpa", "eager")
    },
}


def make(side: str) -> Step:
    maker, *arguments = SIDES[side]
    return maker(*arguments)  # type: ignore[operator]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random inputs (b, s) with a share HIDDEN replaced by the mask token, and targets, IGNORED elsewhere."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB - 1, (BATCH, CONTEXT), generator=draw)
    hidden = torch.rand(tokens.shape, generator=draw) < HIDDEN
    return tokens.masked_fill(hidden, VOCAB - 1), tokens.masked_fill(~hidden, IGNORED)


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    how = machine.settings("cpu", threads=threads)
    machine.apply(how)
    best = f"glassformer {SHORT[how.dtype]} compiled"
    inputs, targets = batch()
    steps, first = {name: make(name) for name in SIDES}, {}
    for name, step in steps.items():
        first[name] = step(inputs, targets)
        step(inputs, targets)
        if not quiet:
            print(f"{name}: first loss {first[name]:.3f}", file=sys.stderr, flush=True)
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step(inputs, targets)
            took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in took.items()}
    added = {name: memory("masked", name) for name in steps}
    lines = [f"{BATCH} x {CONTEXT} tokens a step, {HIDDEN:.0%} hidden; {how.threads} threads", "",
             "| side | tokens/s | ms/step | memory added | first loss |", "|---|--:|--:|--:|--:|"]  # fmt: skip
    lines += [
        f"| {name} | {BATCH * CONTEXT / value:,.0f} | {1000 * value:.0f} | {added[name] / 1e6:,.0f} MB "
        f"| {first[name]:.3f} |"
        for name, value in medians.items()
    ]
    peers = {
        short: min((name for name in medians if name.startswith(f"transformers {short}")), key=medians.__getitem__)
        for short in SHORT.values()
    }
    against = {short: medians[name] / medians[best] for short, name in peers.items()}
    lines += [
        "",
        f"{best}: "
        + ", ".join(f"{against[short]:.2f} times {name}" for short, name in peers.items())
        + f"; adds {added[best] / 1e6:,.0f} MB, "
        + " and ".join(f"{added[name] / 1e6:,.0f}" for name in peers.values())
        + " these two",
    ]
    return {
        "machine": machine.machine(), "rounds": rounds, "threads": how.threads, "ours": best, "peers": peers,
        "against": against, "seconds": took, "memory_bytes": added, "first_loss": first, "table": "\n".join(lines),
    }  # fmt: skip


def main(side: str) -> None:
    machine.apply(machine.settings("cpu"))
    if side.startswith("transformers"):
        import transformers  # noqa: F401  # not what is measured
    print(grown(lambda: make(side), *batch()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        print(json.dumps(run()))
