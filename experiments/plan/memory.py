"""Published memory of training runs, and what a plan makes of the same inputs; whether 216 runs that ran would fit.

>>> python -m experiments.plan.memory       # docs/planning-memory.md, the two tables that are made of published figures
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from experiments.plan import mpt
from experiments.plan.published import GIB, LLAMA_70B, LLAMA_405B, TITAN, TRAINY, config
from glassformer.parallel.layout import Layout
from glassformer.planning.machines import machines
from glassformer.planning.memory import Loss
from glassformer.planning.training import TrainingPlan, plan_training
from glassformer.training.optimizers import AdamWConfig

LLAMA_8B = "llama-3-8b+context=262144"


@dataclass(frozen=True)
class Point:
    """A published size of the memory that a rank's allocator reserved, in GiB, and its plan."""

    number: int
    what: str
    published: float
    plan: TrainingPlan
    tolerance: float | None
    note: str = ""

    @property
    def ours(self) -> float:
        """GiB reserved."""
        return self.plan.memory["reserved"] / GIB

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


@cache
def planned(name: str, batch: int, context: int, layout: str, loss: Loss) -> TrainingPlan:
    how = Layout.of(layout)
    return plan_training(config(name), batch, context, torch.bfloat16, AdamWConfig(), how, device="cuda", loss=loss)


def points() -> Iterator[Point]:
    """Yields torchtitan's peak reserved memory in GiB. Its runs recompute every second matmul, or a whole layer. Those
    of December 2024 have all logits at once, as their loss was not compiled (torchtitan e8977b0, 2024-12-18); those of
    June 2025 compiled it."""

    def point(
        number: int, what: str, name: str, batch: int, context: int, layout: str, published: float,
        tolerance: float | None, note: str = "", loss: Loss = "whole",
    ) -> Point:  # fmt: skip
        return Point(number, what, published, planned(name, batch, context, layout, loss), tolerance, note)

    regions = "what is traced is eager: compiled layers keep less"
    for number, ranks, eager, compiled in ((1, 8, 82.4, 77.0), (2, 128, 67.0, 62.0)):
        layout = f"fsdp={ranks},recompute=alternate"
        for how, published, tolerance in (("eager", eager, 0.05), ("compiled", compiled, None)):
            note = "" if how == "eager" else regions
            yield point(
                number, f"8B, FSDP {ranks}, {how}", LLAMA_8B, 2 * ranks, 8192, layout, published, tolerance, note
            )
    for cp, published in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5)):
        layout, s = f"fsdp={8 // cp},cp={cp},recompute=full", 32768 * cp
        yield point(3, f"8B, context {s:,}, CP {cp}", LLAMA_8B, 8 // cp, s, layout, published, 0.05)
    layout = "fsdp=32,tp=8,sp=1,recompute=full"
    yield point(4, "70B, FSDP 32, TP 8", LLAMA_70B, 512, 8192, layout, 71.9, 0.12, "what tp gathers counts once")
    for v, published, tolerance in ((1, 82.5, 0.05), (2, 72.7, 0.05)):
        layout, how = f"fsdp=8,tp=8,pp=8,interleave={v},sp=1,micro=4,recompute=full", ("1F1B", "interleaved")[v - 1]
        note = "" if v == 1 else "only one chunk has whole gradients at a time: microbatches equal stages"
        yield point(5, f"405B, FSDP 8, TP 8, PP 8, {how}", LLAMA_405B, 256, 8192, layout, published, tolerance, note)
    for ranks, published in ((32, 47.96), (64, 46.97)):
        layout, note = f"fsdp={ranks},recompute=alternate", "H200, float8, loss compiled (June 2025)"
        yield point(6, f"8B, FSDP {ranks}", LLAMA_8B, 2 * ranks, 8192, layout, published, 0.1, note, "fused")


@cache
def fit(row: mpt.Row) -> float:
    """Returns the planned share of the accelerator's memory for a run of MPT, whose loss works in place."""
    layout = Layout(dp=row.gpus, zero=row.zero, micro=row.micro, recompute=row.recompute)
    plan = plan_training(
        row.config, row.gpus * row.micro, row.context, torch.bfloat16, AdamWConfig(), layout, device="cuda",
        loss="in_place",
    )  # fmt: skip
    moments = plan.moments.values()
    halves = [(one.weights + one.gradients + one.optimizer) // 2 if row.pure else 0 for one in moments]  # in 16 bits
    return max(one.total - half for one, half in zip(moments, halves, strict=True)) / machines()[row.gpu].memory


def table() -> str:
    """Returns a table of published and planned memory."""
    lines = ["| | run | GiB published | planned | error | |", "|---|---|---:|---:|---:|---|"]
    lines += [
        f"| {one.number} | {one.what} | {one.published:.1f} | {one.ours:.1f} | {one.error:+.0%} | {one.note} |"
        for one in points()
    ]
    return "\n".join([*lines, "", f"Sources: {TITAN}; {TRAINY}."])


if __name__ == "__main__":
    print(table())
    shares = {row: fit(row) for row in mpt.rows()}
    print(f"of {len(shares)} runs of MPT that ran, {sum(share <= 1 for share in shares.values())} fit by plan")
    for row, share in sorted(shares.items(), key=lambda pair: -pair[1])[:12]:
        print(f"{share:.2f} {row}")
