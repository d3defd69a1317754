"""The planned memory of a rank against what torch's MemTracker sees of its tensors, in fake groups."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import glassformer as gf
from glassformer.parallel.apply import Ranks
from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.training import Recipe

LLAMA, GPT2 = "llama@3m+vocab_size=512+heads=8", "gpt2@3m+vocab_size=512"
EXPERTS = "llama@1m+vocab_size=512+moe:8:2"


def peak(expression: str, layout: Layout, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes at the peak of the second of two steps on rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        ranks, half = Ranks(ProcessGroups(0, layout)), dtype != torch.float32
        model = ranks.build(gf.preset(expression), 0, "cpu", dtype if half else None).train()
        tokens = torch.zeros(batch // layout.dp, context, dtype=torch.int64)
        optimizer, tracker = Recipe.of(tokens=1).optimizer.create(model, 1e-3, 0.1), MemTracker()
        tracker.track_external(model, optimizer)
        with tracker, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                with ranks.passing(), torch.autocast("cpu", dtype, enabled=half):
                    loss = model.loss(tokens, tokens)
                loss.backward()
                if layout.tp == 1:  # the sums of norms' gradients under tp are small
                    ranks.add_up(model)
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return sum(of["Total"] for of in tracker.get_tracker_snapshot("peak").values())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("expression", "layout", "batch", "dtype"),
    [
        (LLAMA, "fsdp=2", 4, "float32"),
        (LLAMA, "fsdp=8", 8, "float32"),
        (LLAMA, "fsdp=8", 8, "bfloat16"),
        (LLAMA, "fsdp=64", 64, "float32"),
        (LLAMA, "tp=4", 4, "float32"),
        (LLAMA, "tp=4", 4, "bfloat16"),
        (LLAMA, "tp=4,sp=1", 4, "float32"),
        (LLAMA, "fsdp=4,tp=2", 8, "float32"),
        (LLAMA, "fsdp=8,replicate=2", 16, "float32"),
        (LLAMA, "replicate=2", 4, "float32"),
        (LLAMA, "replicate=4", 8, "float32"),
        (LLAMA, "replicate=16", 16, "float32"),
        (GPT2, "fsdp=4", 8, "float32"),
        (EXPERTS, "fsdp=8", 8, "float32"),
        (EXPERTS, "fsdp=8,ep=8", 8, "float32"),
        (EXPERTS, "fsdp=8,ep=2", 8, "float32"),
        (EXPERTS, "fsdp=8,ep=2", 8, "bfloat16"),
        (EXPERTS, "fsdp=4,replicate=2,ep=2", 8, "float32"),
    ],
)
def test_peak_of_a_rank_equals_the_plan(expression: str, layout: str, batch: int, dtype: str) -> None:
    """Within 10 %; other processors choose other kernels, which keep a little more or less."""
    shape, of_products = Layout.of(layout), getattr(torch, dtype)
    found = peak(expression, shape, batch, 128, of_products)
    plan = gf.plan(
        gf.preset(expression), train=True, batch=batch, context=128, dtype=of_products, optimizer="adamw", layout=shape
    )
    print(f"{layout} {dtype}: planned {plan.memory['total'] / found - 1:+.1%}")
    assert plan.memory["total"] == pytest.approx(found, rel=0.1)
