"""The collectives of a step as planned, against those that the trainer makes in fake groups of up to 1,024 ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import glassformer as gf
from glassformer.parallel import tensor
from glassformer.parallel.apply import Ranks
from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.planning.collectives import collectives

OPERATIONS = {
    "_allgather_base_": "all-gather", "alltoall_base_": "all-to-all", "allreduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter", "send": "send", "broadcast_": "broadcast",
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


def exchanged(received: torch.Tensor, sent: torch.Tensor, *sizes: Any, **words: Any) -> Any:
    """Replaces the exchange in a group without other ranks: each rank sends the number of rows it gets."""
    if not received.is_floating_point():
        received.copy_(sent)
    return all_to_all(received, sent, *sizes, **words)


def agreed(*_: Any, **__: Any) -> torch.Tensor:
    """Returns the vote of stages before their first batch: all know the shapes."""
    return torch.ones(1, dtype=torch.int32)


all_to_all = dist.all_to_all_single


def counted(expression: str, layout: Layout, dtype: torch.dtype, pieces: int, rank: int = 0) -> Counting:
    """Returns the collectives of a training step of `pieces` micro-batches on a rank, as the trainer makes it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        ranks, half = Ranks(ProcessGroups(rank, layout)), dtype != torch.float32
        config = gf.preset(expression)
        model: Any = ranks.build(config, 0, "cpu", dtype if half else None)
        tokens = torch.zeros(pieces, CONTEXT, dtype=torch.int64)
        with (
            Counting() as counting,
            patch.object(dist, "all_to_all_single", exchanged),
            patch.object(PipelineStage, "_warmup_forward_vote", agreed),
            patch.object(PipelineStage, "_warmup_backward_result", agreed),
            patch.object(tensor, "sum_partial", lambda model: None),  # of norms' gradients under tp: small
        ):
            for some in tokens.split(1) if layout.pp == 1 else ():
                with ranks.passing(), torch.autocast("cpu", dtype, enabled=half):
                    loss = model.loss(some, some)
                loss.backward()
            if layout.pp > 1:
                model.step(tokens, tokens, pieces, 1 / pieces)
            ranks.add_up(model)
        return counting
    finally:
        dist.destroy_process_group()


SMALL = "llama@1m+vocab_size=512+heads=8"
EXPERTS = f"{SMALL}+moe:8:2"


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
        (EXPERTS, "fsdp=8,ep=8", "float32", 2),
        (EXPERTS, "fsdp=64,ep=8", "bfloat16", 1),
        (EXPERTS, "fsdp=512,ep=4,replicate=2", "float32", 1),
        (SMALL, "cp=4", "float32", 2),
        (SMALL + "+gqa:2+qknorm", "cp=8", "bfloat16", 1),
        (SMALL + "+mla:16", "cp=4", "float32", 1),
        (SMALL + "+share:2", "cp=4", "float32", 1),
        ("gpt2@1m+vocab_size=512", "cp=3,fsdp=2", "float32", 1),
        (SMALL, "tp=2,cp=2", "bfloat16", 1),
        (SMALL, "tp=2,cp=2,sp=1", "float32", 1),
    ],
)
def test_planned_collectives_are_those_of_a_step(expression: str, layout: str, dtype: str, pieces: int) -> None:
    compared(expression, layout, dtype, pieces)


def compared(expression: str, layout: str, dtype: str, pieces: int, rank: int = 0) -> None:
    shape, of_products = Layout.of(layout), getattr(torch, dtype)
    found = counted(expression, shape, of_products, pieces, rank)
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


@pytest.mark.parametrize(
    ("layout", "dtype", "pieces", "rank"),
    [
        ("pp=2", "float32", 4, 0),
        ("pp=4", "bfloat16", 4, 1),
        ("pp=2,interleave=2", "float32", 4, 1),
        ("pp=2,replicate=4", "float32", 2, 4),
    ],
)
def test_planned_collectives_of_stages_are_those_of_the_rank_that_sends_most(
    layout: str, dtype: str, pieces: int, rank: int
) -> None:
    compared(SMALL + "+untied", layout, dtype, pieces, rank)


@pytest.mark.parametrize("layout", ["dp=8,ep=4", "fsdp=2,replicate=4,ep=4", "pp=2,tp=2", "fsdp=4,zero=1"])
def test_plan_without_trainer_support_has_no_collectives(layout: str) -> None:
    plan = gf.plan(
        gf.preset(EXPERTS + "+untied"), train=True, batch=16, context=CONTEXT, optimizer="adamw",
        layout=Layout.of(layout.replace("fsdp=4", "dp=4")),
    )  # fmt: skip
    assert plan.collectives == [] and plan.memory["total"] > 0


def test_one_process_makes_none() -> None:
    assert collectives(gf.preset(SMALL), Layout(), 4, CONTEXT, torch.float32) == []
