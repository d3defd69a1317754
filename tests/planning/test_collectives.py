"""The collectives of a step as planned, against those that the trainer makes in fake groups of up to 1,024 ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import glassformer as gf
from glassformer.parallel.apply import Ranks
from glassformer.parallel.crew import Crew
from glassformer.parallel.layout import Layout
from glassformer.planning.collectives import collectives

OPERATIONS = {
    "_allgather_base_": "all-gather", "alltoall_base_": "all-to-all", "allreduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
}  # fmt: skip
CONTEXT = 16


class Counting(TorchDispatchMode):
    """Operations between ranks, and the bytes of the largest tensor of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        if namespace == "c10d" and (operation := OPERATIONS.get(name.split(".")[0])):
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.counts[operation] += 1
            self.bytes[operation] += max(one.numel() * one.element_size() for one in tensors)
        return func(*args, **(kwargs or {}))


def counted(expression: str, layout: Layout, dtype: torch.dtype, pieces: int) -> Counting:
    """Of a step of so many micro-batches on rank 0, as the trainer makes it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        ranks, half = Ranks(Crew(0, layout)), dtype != torch.float32
        config = gf.preset(expression)
        model = ranks.build(config, 0, "cpu", dtype if half else None)
        tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
        with Counting() as counting:
            for _ in range(pieces):
                with ranks.passing(), torch.autocast("cpu", dtype, enabled=half):
                    loss = model.loss(tokens, tokens)
                loss.backward()
            if layout.tp == 1:  # the sums of norms' gradients under tp are the trainer's, and small
                ranks.add_up(model)
        return counting
    finally:
        dist.destroy_process_group()


SMALL = "llama@1m+vocab_size=512+heads=8"


@pytest.mark.parametrize(
    ("expression", "layout", "dtype", "pieces"),
    [
        (SMALL, "fsdp=64", "float32", 1),
        (SMALL, "fsdp=64", "float32", 2),
        (SMALL, "fsdp=64", "bfloat16", 1),
        (SMALL, "fsdp=256", "bfloat16", 2),
        (SMALL, "fsdp=1024", "float32", 1),
        (SMALL, "fsdp=1024", "bfloat16", 1),
        (SMALL, "fsdp=512,replicate=2", "float32", 1),
        (SMALL, "replicate=64", "float32", 1),
        ("gpt2@20m+vocab_size=512", "replicate=4", "float32", 1),
        ("gpt2@1m+vocab_size=512", "fsdp=64", "bfloat16", 1),
        ("mamba@1m+vocab_size=512", "fsdp=64", "bfloat16", 1),
        ("llama@1m+vocab_size=512+moe:8:2", "fsdp=256", "bfloat16", 1),
        (SMALL, "tp=8", "float32", 1),
        (SMALL, "tp=8", "bfloat16", 2),
        (SMALL, "fsdp=8,tp=8", "bfloat16", 1),
        (SMALL, "fsdp=128,tp=8", "float32", 1),
        (SMALL, "fsdp=8,tp=8,sp=1", "float32", 1),
        (SMALL, "tp=8,sp=1", "bfloat16", 1),
        ("gpt2@1m+vocab_size=512+heads=8", "tp=4", "float32", 1),
        ("llama@1m+vocab_size=512+heads=8+moe:8:2", "tp=4", "float32", 1),
    ],
)
def test_planned_collectives_are_those_of_a_step(expression: str, layout: str, dtype: str, pieces: int) -> None:
    shape, of_products = Layout.of(layout), getattr(torch, dtype)
    found = counted(expression, shape, of_products, pieces)
    batch = shape.dp * pieces
    shape = shape.model_copy(update={"micro": 1})
    planned = collectives(gf.preset(expression), shape, batch, CONTEXT, of_products)
    counts: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for one in planned:
        counts[one.operation] += one.count
        size[one.operation] += one.bytes
    assert counts == found.counts
    assert size == found.bytes


def test_one_process_makes_none() -> None:
    assert collectives(gf.preset(SMALL), Layout(), 4, CONTEXT, torch.float32) == []
