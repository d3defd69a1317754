"""Ranking of kernels by speed. On CPUs by measurement: `python -m benchmarks kernels` prints the measurements,
docs/benchmarks/kernels.md has them. On GPUs by rule, which an H200 has run but not measured."""

from __future__ import annotations

import torch

from glassformer.parts import fused_loops
from glassformer.parts.kernel.base import CallFacts

# CPU, forward and backward: numbers of queries s for which blocks beat torch's SDPA, from <= s < to; under a window
# they win for more too. Our own C++ (`fused_loops`) beats both. From 8192 the patterns that blocks keep for the
# backward pass outweigh the speed. At 2048 in fp32 blocks win by 7 % on one processor and lose by 6 % on another
# (docs/log.md).
CPU_BANDED = {torch.float32: (256, 4096), torch.bfloat16: (2, 8192)}
CPU_BANDED_OTHER = (256, 4096)

CPU_DIRECT = 4
"""Largest number of queries for which two matmuls (`direct`) are fastest, in a forward-only call that continues a
decode state on a CPU; except for one row in fp32 without a mask. The number of keys does not matter, because a row of a
batch may have more of them than by itself."""

GPU_FEW = 32
"""Largest number of queries for which SDPA with a mask is chosen rather than a kernel compiled for the mask, in a call
that continues a decode state on a GPU. Not measured."""


def ranking(facts: CallFacts) -> tuple[str, ...]:
    """Returns the names of the kernels for a call with these facts, expected fastest first. The last kernel computes
    such a call on every machine."""
    goes_on = facts.s < facts.t or facts.s == 1
    return _on_cpu(facts, goes_on) if facts.device == "cpu" else _elsewhere(facts, goes_on)


def _on_cpu(facts: CallFacts, goes_on: bool) -> tuple[str, ...]:
    if facts.s <= CPU_DIRECT and goes_on:
        alone = facts.batch == 1 and facts.dtype == torch.float32 and facts.plain and facts.t < 1024
        return ("sdpa",) if alone else ("direct",)
    if not facts.additive or facts.sinks:
        return ("banded",)
    if fused_loops.attends(facts):
        return ("sdpa",)
    first, last = CPU_BANDED.get(facts.dtype, CPU_BANDED_OTHER)
    windowed = facts.width is not None and facts.width <= facts.t // 2
    return ("banded",) if first <= facts.s and (facts.s < last or windowed) else ("sdpa",)


def _elsewhere(facts: CallFacts, goes_on: bool) -> tuple[str, ...]:
    """Returns the names of kernels, fastest first, for devices other than CPUs: Flex if SDPA would need a mask or
    cannot serve. If Flex cannot serve either (dropout, no Triton, another device): SDPA with a mask, or `banded` for a
    bias that is not additive and for sinks, for whose gradient SDPA would hold all scores in memory."""
    few = facts.s <= GPU_FEW and goes_on
    if not facts.additive or facts.sinks:
        return ("direct",) if few else ("flex", "banded")
    return ("flex", "sdpa") if facts.masked and not few else ("sdpa",)
