"""Memory of a rank against torch's own FSDP and trackers, on fake tensors in fake groups of 64 to 1,024 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import glassformer as gf
from glassformer.config import Stage
from glassformer.parallel.layout import Layout, stage_layers
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.shard import piece_of, shards_of
from glassformer.planning.ranks import RankWeights, owned, share
from glassformer.planning.trace import MicrobatchShare, faked, trace
from glassformer.planning.training import plan_training
from glassformer.training.optimizers import AdamWConfig


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """Starts a fake group in which this is rank 0; yields its number of ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def peak_of(tracker: MemTracker) -> int:
    return sum(of["Total"] for of in tracker.get_tracker_snapshot("peak").values())


def of_fsdp(config: gf.ModelConfig, ranks: int, batch: int, context: int) -> int:
    """Bytes at the peak of loss and backward pass, before there is any state of an optimizer."""
    mesh, mixed = init_device_mesh("cpu", (ranks,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with FakeTensorMode():
        model = config.outline().train()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        fully_shard(model, mesh=mesh, mp_policy=mixed)
        model.to_empty(device="cpu")
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        tracker = FSDPMemTracker(model, torch.optim.AdamW(model.parameters()))
        tracker.track_inputs((tokens,))
        with tracker:
            model(tokens, targets=tokens).backward()
    return peak_of(tracker)


CASES = [
    ("llama@1m+vocab_size=512", 4, 64, 64),  # activations
    pytest.param("llama@10m+vocab_size=512", 4, 256, 64, marks=pytest.mark.slow),
    pytest.param("llama@10m", 4, 256, 64, marks=pytest.mark.slow),  # the loss
    pytest.param("llama@10m+vocab_size=512", 1, 16, 256, marks=pytest.mark.slow),  # what is gathered and summed
    pytest.param("gpt2@10m+vocab_size=512", 2, 64, 1024, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "batch", "context", "group"), CASES, indirect=["group"])
def test_memory_of_an_fsdp_rank_equals_torchs(name: str, batch: int, context: int, group: int):
    config = gf.preset(name)
    plan = plan_training(config, batch * group, context, torch.bfloat16, AdamWConfig(), Layout.of(f"fsdp={group}"))
    before = max(one.total - one.optimizer for one in plan.moments.values())
    assert before == pytest.approx(of_fsdp(config, group, batch, context), rel=0.02)


@pytest.mark.parametrize(
    "name", ["llama@10m", "gpt2@10m+vocab_size=512", "llama@10m+moe:4:2+vocab_size=512", "llama@10m+gqa:2"]
)
def test_planned_values_of_an_owner_equal_declared_pieces(name: str):
    config, layout = gf.preset(name), Layout.of("tp=2,ep=2,dp=2")
    model, cuts = config.outline(), shards_of(config.outline())
    pieces = {key: piece_of(weight, cuts[key], 0, 2).numel() for key, weight in model.named_parameters()}
    held = share(config, layout, AdamWConfig())
    whole = sum(held.layers, held.first + held.last)
    assert whole.values == sum(pieces.values()) and whole.state == 2 * whole.values
    dense = owned(config, 2).num_params() - (0 if "moe" not in name else whole.experts)
    assert whole.values == dense


@pytest.mark.slow
@pytest.mark.parametrize("group", [64, 1024], indirect=True)
def test_memory_of_a_tensor_parallel_rank_equals_torchs_tracker(group: int):
    """The model of one of 4 owners, whose branches end with an all-reduce, and start with one in the backward pass."""
    config, tp = gf.preset("llama@10m+heads=8+vocab_size=512"), 4
    mesh = init_device_mesh("cpu", (group // tp, tp), mesh_dim_names=("dp", "tp"))
    model = owned(config, tp).outline().train()

    def ends(_module: nn.Module, _given: Any, y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y.detach(), group=mesh["tp"].get_group())
        return y

    for layer in model.layers:
        layer.mixer.register_forward_hook(ends)
        layer.ffn.register_forward_hook(ends)
    with FakeTensorMode():
        faked(model, torch.float32)
        tokens, optimizer, tracker = (
            torch.zeros(4, 256, dtype=torch.int64),
            torch.optim.AdamW(model.parameters()),
            MemTracker(),
        )
        tracker.track_external(model, optimizer)
        with tracker:
            model.loss(tokens, tokens).backward()
    layout = Layout.of(f"dp={group // tp},tp={tp}")
    plan = plan_training(config, 4 * group // tp, 256, torch.float32, AdamWConfig(), layout)
    found = plan.moments.values()  # whose buffers are the buckets of DistributedDataParallel, which is not here
    before = max(one.total - one.optimizer - one.buffers for one in found)
    assert before == pytest.approx(peak_of(tracker), rel=0.02)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_piece_of_a_sequence_has_scores_against_all_keys(cp: int):
    """s / cp queries of n heads against s keys. In fp32 the definition keeps 8 n bytes of a pair, its softmax and that
    without rows that see nothing, and a bool of what is visible. From two lengths: all else grows with the length."""
    config = gf.preset("llama@1m+vocab_size=64+kernel=naive+context=1024")
    heads = next(config.layers()).mixer.heads(config.ctx)
    assert heads is not None

    def kept(s: int) -> int:
        plan = plan_training(config, 1, s, torch.float32, AdamWConfig(), Layout(cp=cp))
        return max(one.activations for one in plan.moments.values())

    n, layers = heads.n_heads, config.n_layers
    quadratic = kept(512) - 2 * kept(256)  # q (2 s)^2 - 2 q s^2
    assert quadratic == pytest.approx(2 * 256**2 / cp * layers * (8 * n + 1), rel=0.001)


def test_pieces_whose_keys_go_round_hold_none_but_theirs():
    """Ring attention: a fused kernel has no value for a pair (Liu et al. 2023, 2310.01889)."""
    config = gf.preset("llama@1m+vocab_size=64+kernel=sdpa+context=1024")
    plans = [
        plan_training(config, 1, 256 * cp, torch.float32, AdamWConfig(), Layout(cp=cp)).moments["loss"].activations
        for cp in (1, 4)
    ]
    assert plans[0] == plans[1]


def test_experts_see_the_tokens_that_tensor_parallelism_leaves_them():
    """Each of tp owners has them whole: where the residual stream is divided by tokens, it has a part of the tokens."""
    config = gf.preset("llama@1m+moe:4:2+vocab_size=64")

    def kept(slices: int) -> int:
        found = trace(config, 4, 64, torch.float32, torch.float32, pieces=MicrobatchShare(slices=slices))
        return sum(layer.kept for layer in found.layers)

    ffn, shape = next(config.layers()).ffn, Shape.training(4, 64, torch.float32)
    assert ffn is not None
    of_experts = config.n_layers * ffn.costs(config.ctx.at(0), shape).kept
    assert kept(1) - kept(2) == pytest.approx(of_experts / 2, rel=0.05)
    assert kept(2) - kept(4) == pytest.approx(of_experts / 4, rel=0.05)
    with_shared = config.replace(
        stack=(Stage(blocks=tuple(b.replace(ffn=ffn.replace(n_shared=1)) for b in config.layers())),)
    )
    plans = [
        plan_training(with_shared, 4, 64, torch.float32, AdamWConfig(), Layout.of(layout)).moments["loss"].activations
        for layout in ("tp=2", "tp=2,sp=1")
    ]
    assert plans[1] < plans[0]


def test_layers_that_do_not_divide_leave_the_ends_less():
    """Llama 3's 126 layers: 16 on each of 8 stages, embedding and head counted as a layer (2407.21783, section 3.3)."""
    assert [len(own) for own in stage_layers(126, 8)] == [15, 16, 16, 16, 16, 16, 16, 15]
    for layers, pp in ((61, 16), (8, 8), (7, 3)):
        assert (
            sum(map(len, stage_layers(layers, pp))) == layers
            and min(map(len, stage_layers(layers, pp))) >= layers // pp
        )


def test_stages_hold_the_microbatches_that_are_in_flight():
    """1F1B: the first of p stages holds p microbatches, the last holds one; fewer if a step has fewer."""
    config = gf.preset("gpt2@1m+vocab_size=65+layers=4")

    def kept(layout: str) -> int:
        plan = plan_training(config, 8, 64, torch.float32, AdamWConfig(), Layout.of(layout))
        return max(one.activations for one in plan.moments.values())

    one = kept("pp=4,micro=8")
    assert kept("pp=4,micro=1") == pytest.approx(one / 2, rel=0.01)  # four of one sequence, not one of eight
    assert kept("pp=4,micro=4") == pytest.approx(one, rel=0.01)
    assert RankWeights() + RankWeights(1, 2, 3, 4, 5) == RankWeights(1, 2, 3, 4, 5)


def test_experts_of_several_ranks_are_planned_in_half_precision_too():
    """Products of whole blocks have separate groups: those of this rank's experts."""
    made = [
        gf.plan(
            gf.preset("llama@1m+moe:8:2"), train=True, batch=16, context=256, dtype=torch.bfloat16, layout=layout
        ).memory
        for layout in ("fsdp=8", "fsdp=8,ep=4")
    ]
    assert made[0]["optimizer"] == pytest.approx(made[1]["optimizer"], rel=0.02)
