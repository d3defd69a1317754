"""Thirty sampled steps on this machine: the peak that torch's MemTracker sees on real tensors, against the plan's.

>>> python -m experiments.plan.peaks       # writes docs/planning-memory.md, with the published runs of `memory.py`
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker

import glassformer as gf
from experiments.plan import memory, mpt, process
from glassformer.model import Model
from glassformer.parallel.layout import POLICIES
from glassformer.planning.trace import recomputing
from glassformer.training import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "planning-memory.md"
MODELS = (
    "gpt2@1m", "gpt2@3m+vocab_size=512", "llama@1m", "llama@3m+vocab_size=512", "llama@3m+vocab_size=512+gqa:1",
    "llama@3m+vocab_size=512+moe:4:2", "llama@3m+vocab_size=512+window:32", "gemma-2-2b@1m",
    "qwen3-0.6b@3m+vocab_size=512", "bloom@1m+vocab_size=512", "gpt2@3m+vocab_size=512+parallel",
    "olmo-2-1b@1m+vocab_size=512",
)  # fmt: skip
OPTIMIZERS = ("adamw", "sgd", "lion", "muon", "adafactor")


@dataclass(frozen=True)
class Sample:
    model: str
    batch: int
    context: int
    optimizer: str
    recompute: str
    dtype: torch.dtype


def samples(count: int = 30, seed: int = 0) -> list[Sample]:
    """Returns steps drawn from the lists above, with every model and optimizer."""
    draw = random.Random(seed)
    return [
        Sample(
            MODELS[i % len(MODELS)], draw.choice((1, 2, 4, 8)), draw.choice((32, 64, 128, 256)),
            OPTIMIZERS[i % len(OPTIMIZERS)], draw.choice(POLICIES), draw.choice((torch.float32, torch.bfloat16)),
        )
        for i in range(count)
    ]  # fmt: skip


def measured(one: Sample) -> int:
    """Bytes at the peak of the second of two steps, eagerly."""
    config = gf.preset(one.model)
    model = config.build().train()
    for layer in model.layers:
        recomputing(layer, one.recompute)
    return peak(model, torch.randint(config.vocab_size, (one.batch, one.context)), one.dtype, one.optimizer)


def peak(model: Model, tokens: torch.Tensor, dtype: torch.dtype, kind: str) -> int:
    """Returns the peak bytes in the second of two steps on tokens (b, s), as torch's MemTracker counts them."""
    optimizer, tracker = Recipe.of(tokens=1, optimizer=kind).optimizer.create(model, 1e-3, 0.1), MemTracker()
    tracker.track_external(model, optimizer)
    with tracker, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model.loss(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return sum(of["Total"] for of in tracker.get_tracker_snapshot("peak").values())


def planned(one: Sample) -> int:
    plan = gf.plan(
        gf.preset(one.model), train=True, batch=one.batch, context=one.context, dtype=one.dtype,
        optimizer=one.optimizer, recompute=one.recompute,
    )  # fmt: skip
    return plan.memory["total"]


def page() -> str:
    rows, errors = [], []
    for one in samples():
        real, ours = measured(one), planned(one)
        errors.append(ours / real - 1)
        dtype = str(one.dtype).removeprefix("torch.")
        rows.append(
            f"| `{one.model}` | {one.batch} x {one.context} | {one.optimizer} | {one.recompute} | {dtype} "
            f"| {real / 2**20:.1f} | {ours / 2**20:.1f} | {errors[-1]:+.1%} |"
        )
    shares = [memory.fit(row) for row in mpt.rows()]
    near = sum(abs(error) <= 0.05 for error in errors)
    return f"""<!-- `python -m experiments.plan.peaks` writes this page. -->

# Memory of training, planned and measured

## Steps on this machine

Peak of the second of two eager steps on real tensors on a CPU, in MiB, by torch's
`torch.distributed._tools.mem_tracker.MemTracker`, against `gf.plan(config, train=True, ...).memory["total"]`.
Within 5 %: {near} of {len(errors)}; furthest below {min(errors):+.1%}, above {max(errors):+.1%}.

| model | batch | optimizer | recompute | dtype | measured | planned | error |
|---|---|---|---|---|---:|---:|---:|
{chr(10).join(rows)}

## Processes on a CPU

{process.section()}

## Published runs

GiB that the allocator of one GPU reserved, against `memory["reserved"]`, for a loss that has all logits at once.

{memory.table()}

Of {len(shares)} published runs of MPT that ran (125M to 70B, `experiments/plan/mpt_runs.csv`),
{sum(share <= 1 for share in shares)} fit by plan; the fullest takes {max(shares):.0%} of its accelerator.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
