"""Ways to choose experts and to bound them, against the published classes and against counting by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import glassformer as gf
from glassformer.parts.core import auxiliary
from glassformer.parts.core.base import BuildContext
from glassformer.parts.ffn import Clamp, ExpertChoice, ExpertChoiceConfig, Experts, ExpertsConfig, Glu, Router
from glassformer.parts.ffn.fused_activation import clamped_glu
from glassformer.parts.ffn.glu import naive_clamped_glu
from glassformer.parts.forward_pass import Pass
from glassformer.training.objectives import NextTokenConfig
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"
CTX = BuildContext(d_model=16, vocab_size=61, context=64, n_layers=2)


def moved(module: nn.Module, seed: int = 0) -> Any:
    """Every parameter and buffer off its start."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.4)
    return module


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.detach().abs().max().item()))


def same_choice(mine: tuple[Tensor, Tensor], weights: Tensor, chosen: Tensor, e: int) -> None:
    """In any order."""
    both = []
    for w, i in (mine, (weights, chosen)):
        both.append(torch.zeros(*w.shape[:-1], e).scatter(-1, i, w))
    close(*both)
    assert (both[0] != 0).sum(-1).eq(chosen.shape[-1]).all()


# Groups


@pytest.mark.parametrize(("n_groups", "top_groups", "k"), [(4, 2, 3), (2, 1, 4), (4, 3, 6), (1, 1, 3)])
def test_groups_are_chosen_as_deepseek_chooses_them(n_groups: int, top_groups: int, k: int):
    """V2 by the best expert of a group, V3 by its two best with their selection bias."""
    x = torch.randn(64, 16)
    said: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "n_routed_experts": 8, "n_group": n_groups}
    said |= {"num_experts_per_tok": k, "topk_group": top_groups, "routed_scaling_factor": 1.7}
    two = moved(DeepseekV2TopkRouter(DeepseekV2Config(**said, topk_method="group_limited_greedy")))
    mine = Router(16, 8, k, normalised=False, scale=1.7, n_groups=n_groups, top_groups=top_groups)
    mine.weight.data.copy_(two.weight)
    same_choice(mine.choose(mine.score(mine(x))), *two(x)[1:], 8)

    three = moved(DeepseekV3TopkRouter(DeepseekV3Config(**said)))
    mine = Router(
        16, 8, k, "sigmoid", scale=1.7, balance_rate=0.0, n_groups=n_groups, top_groups=top_groups, group_best=2
    )
    mine.weight.data.copy_(three.weight)
    assert mine.selection_bias is not None
    mine.selection_bias.copy_(three.e_score_correction_bias)
    same_choice(mine.choose(mine.score(mine(x))), *three(x)[1:], 8)
    plain = Router(16, 8, k, "sigmoid", scale=1.7)
    plain.weight.data.copy_(three.weight)
    assert n_groups == 1 or not torch.equal(plain.choose(plain.score(plain(x)))[1], mine.choose(mine.score(mine(x)))[1])


# Bounds and biases


def test_a_clamped_glu_is_its_definition():
    draw = torch.Generator().manual_seed(0)
    gate, up, probe = (torch.randn(64, 8, generator=draw) * 3 for _ in range(3))
    clamp = Clamp(limit=2.0, alpha=1.3, shift=0.5)
    made = []
    for function, given in ((naive_clamped_glu, (clamp,)), (clamped_glu, (clamp.limit, clamp.alpha, clamp.shift))):
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        y = function(*leaves, *given)
        made.append([y, *torch.autograd.grad((y * probe).sum(), leaves)])
    for a, b in zip(*made, strict=True):
        close(a, b, 1e-6)
    cut = made[0][1][gate > 2]
    assert len(cut) and not cut.any()
    close(naive_clamped_glu(gate, up, Clamp(limit=1e4, alpha=1.0, shift=0.0)), torch.nn.functional.silu(gate) * up)


def test_experts_of_gpt_oss():
    """Bounded gates, biases of experts and of the router: outputs and every gradient."""
    theirs = moved(GptOssMLP(GptOssConfig(hidden_size=16, intermediate_size=12, num_local_experts=5,
                                          num_experts_per_tok=2, swiglu_limit=0.7)))  # fmt: skip
    config = ExpertsConfig(n_experts=5, top_k=2, hidden=12, bias=True, router_bias=True, clamp=Clamp(limit=0.7))
    part = config.build(CTX)
    assert config.num_params(CTX) == sum(p.numel() for p in part.parameters())
    assert config.num_params(CTX) == sum(p.numel() for p in theirs.parameters())

    def as_ours(of: Any) -> dict[str, Tensor]:
        e = of(theirs.experts.gate_up_proj), of(theirs.experts.gate_up_proj_bias)
        return {
            "router.weight": of(theirs.router.weight), "router.bias": of(theirs.router.bias),
            "gate_proj.weight": e[0][..., ::2].transpose(1, 2).flatten(0, 1), "gate_proj.bias": e[1][:, ::2].flatten(),
            "up_proj.weight": e[0][..., 1::2].transpose(1, 2).flatten(0, 1), "up_proj.bias": e[1][:, 1::2].flatten(),
            "down_proj.weight": of(theirs.experts.down_proj).transpose(1, 2).flatten(0, 1),
            "down_proj.bias": of(theirs.experts.down_proj_bias).flatten(),
        }  # fmt: skip

    part.load_state_dict(as_ours(lambda weight: weight.detach()))
    x = torch.randn(2, 9, 16)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = part(mine), theirs(other)[0]
    close(y, expected)
    probe = torch.randn(y.shape)
    (y * probe).sum().backward()
    (expected * probe).sum().backward()
    close(mine.grad, other.grad)
    wanted = as_ours(lambda weight: weight.grad)
    for name, parameter in part.named_parameters():
        close(parameter.grad, wanted[name])


def test_gated_shared_expert_equals_qwen2_moe():
    """Qwen2-MoE's block."""
    theirs = moved(Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(hidden_size=16, moe_intermediate_size=12, num_experts=4,
        shared_expert_intermediate_size=20, num_experts_per_tok=2)))  # fmt: skip
    config = ExpertsConfig(
        n_experts=4, top_k=2, hidden=12, n_shared=1, shared_hidden=20, shared_gate=True, normalised=False
    )
    part = config.build(CTX)
    assert config.num_params(CTX) == sum(p.numel() for p in part.parameters())
    gate, up = theirs.experts.gate_up_proj.chunk(2, 1)
    shared = {f"shared.{name}.weight": getattr(theirs.shared_expert, name).weight
              for name in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    part.load_state_dict({
        "router.weight": theirs.gate.weight, "gate_proj.weight": gate.flatten(0, 1), "up_proj.weight": up.flatten(0, 1),
        "down_proj.weight": theirs.experts.down_proj.flatten(0, 1), **shared,
        "shared_gate.weight": theirs.shared_expert_gate.weight,
    })  # fmt: skip
    x = torch.randn(2, 9, 16)
    expected = theirs(x)
    close(part(x), expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("blocks", [False, True])
def test_the_weight_may_be_the_inputs(blocks: bool, monkeypatch: pytest.MonkeyPatch):
    """E_i(w x): the definition, an expert at a time, also where rows are filled up to blocks."""
    if blocks:
        monkeypatch.setattr("glassformer.parts.ffn.experts.wants_blocks", lambda *given: True)
        monkeypatch.setattr("glassformer.parts.ffn.experts.BLOCK", 5)
    part = moved(ExpertsConfig(n_experts=4, top_k=2, hidden=12, weigh="input", score="sigmoid").build(CTX))
    draw = torch.Generator().manual_seed(1)
    x, weights = torch.randn(9, 16, generator=draw), torch.rand(9, 2, generator=draw)
    chosen = torch.rand(9, 4, generator=draw).argsort(1)[:, :2]
    gate, up, down = (m.weight.unflatten(0, (4, -1)) for m in (part.gate_proj, part.up_proj, part.down_proj))

    def by_hand(x: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for row in range(9):
            inputs = [(int(i), w * x[row]) for i, w in zip(chosen[row], weights[row], strict=True)]
            rows.append(sum(down[i] @ (nn.functional.silu(gate[i] @ y) * (up[i] @ y)) for i, y in inputs))
        return torch.stack(rows)  # type: ignore[arg-type]

    made = []
    for mix in (by_hand, lambda x, w: part.mix(x, w, chosen), lambda x, w: part.naive_mix(x, w, chosen)):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = mix(*leaves)
        made.append([y, *torch.autograd.grad(y.sin().sum(), [*leaves, part.gate_proj.weight, part.down_proj.weight])])
    for other in made[1:]:
        for a, b in zip(other, made[0], strict=True):
            close(a, b)


# Capacity


def test_expert_serves_up_to_capacity_and_counts_dropped_tokens():
    router = Router(4, 3, 2, capacity=0.75)
    weights = torch.rand(2, 4, 2) + 0.5
    chosen = torch.tensor([[[0, 1], [0, 1], [0, 2], [0, 1]], [[1, 0], [2, 0], [1, 0], [2, 1]]])
    served = router.serve(weights, chosen)
    room, wanted = [4, 4, 4], weights.clone()  # ceil(0.75 * 16 / 3)
    for row in range(2):
        for place in range(4):
            for j in range(2):
                room[int(chosen[row, place, j])] -= 1
                if room[int(chosen[row, place, j])] < 0:
                    wanted[row, place, j] = 0
    assert torch.equal(served, wanted)
    assert float(router.dropped) == pytest.approx(float((wanted == 0).float().mean())) and router.dropped > 0
    assert torch.equal(Router(4, 3, 2).serve(weights, chosen), weights)
    assert torch.equal(Router(4, 3, 2, capacity=3.0).serve(weights, chosen), weights)


def test_capacity_applies_only_in_training_and_is_causal():
    part: Experts = moved(ExpertsConfig(n_experts=4, top_k=2, hidden=8, capacity=0.5).build(CTX))
    free: Experts = ExpertsConfig(n_experts=4, top_k=2, hidden=8).build(CTX)
    free.load_state_dict(part.state_dict())
    x = torch.randn(1, 12, 16)
    assert torch.equal(part.eval()(x), free(x))
    y = part.train()(x)
    assert not torch.allclose(y, free(x)) and 0 < float(part.router.dropped) < 1
    later = x.clone()
    later[:, 7:] = torch.randn(1, 5, 16)
    close(part(later)[:, :7], y[:, :7])


@pytest.mark.parametrize("told", ["documents", "targets"])
def test_padding_counts_for_nothing(told: str):
    """A padded batch is its rows one behind the other: what experts serve, their load, and every gradient."""
    moe = "moe:4:2+ffn.capacity=0.75+ffn.balance_loss=0.5+ffn.z_loss=0.3+ffn.balance_rate=0.1"
    made = gf.preset(f"llama@1m+layers=1+d_model=32+heads=4+vocab_size=61+context=32+{moe}")
    tokens = torch.randint(0, 61, (2, 10), generator=torch.Generator().manual_seed(1))
    real = torch.arange(10) < torch.tensor([[4], [10]])
    targets = tokens.roll(-1, 1).masked_fill(~real, -100)
    packed = {"documents": torch.tensor([[1] * 4 + [2] * 10])}
    padded = {"documents": real.long()} if told == "documents" else {}
    found = []
    for x, y, more in (
        (tokens, targets, padded), (tokens[real][None], targets[real][None], packed), (tokens, targets * 0, padded),
    ):  # fmt: skip
        model = made.build(seed=0)
        loss = model.loss(x, y, **more)
        router = model.layers[0].ffn.router
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss, router.load.clone(), router.dropped, *gradients))
    assert 0 < float(found[0][2]) < 1
    for mine, wanted in zip(found[0], found[1], strict=True):
        close(mine, wanted)
    assert found[0][1].sum() == 2 * 14 and found[2][1].sum() == (2 * 14 if told == "documents" else 2 * 20)


def test_results_without_padding_keep_every_bit():
    """Results are equal if all tokens are marked as real and without a mask; without real tokens no loss is added."""
    part: Experts = moved(
        ExpertsConfig(n_experts=3, top_k=2, hidden=8, capacity=0.7, balance_loss=0.3, z_loss=0.2).build(CTX)
    )
    x = torch.randn(3, 7, 16)
    found = []
    for real in (None, torch.ones(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool)):
        with auxiliary.gathering() as added:
            y = part(x, None if real is None else Pass(0, 7, documents=real.long()))
        found.append([y, *added, *torch.autograd.grad(sum(added), part.router.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all((one == 0).all() for one in found[2][1:]) and float(part.router.dropped) == 0


# Experts that choose


@pytest.mark.parametrize("gated", [True, False])
def test_experts_choose_their_tokens(gated: bool):
    """Every expert has ceil(s k / e) tokens of each text; outputs and gradients are the definition's."""
    activation = "silu" if gated else "gelu"
    config = ExpertChoiceConfig(n_experts=5, top_k=2, hidden=12, gated=gated, activation=activation, bias=True)
    part: ExpertChoice = moved(config.build(CTX))
    assert config.num_params(CTX) == sum(p.numel() for p in part.parameters())
    x = torch.randn(3, 9, 16)
    p = part.router(x).softmax(-1)
    weights, taken = part.take(p)
    assert taken.shape == (3, 5, 4)
    for row in range(3):
        for i in range(5):
            best = sorted(range(9), key=lambda t, row=row, i=i: -p[row, t, i].item())[:4]  # type: ignore[misc]
            assert set(taken[row, i].tolist()) == set(best)
            close(weights[row, i], p[row, taken[row, i], i])
    made = []
    for mix in (part.mix, part.naive_mix):
        leaves = [x.clone().requires_grad_(), weights.detach().clone().requires_grad_()]
        y = mix(*leaves, taken)
        maps = [value for name, value in part.named_parameters() if "router" not in name]
        made.append([y, *torch.autograd.grad(y.sin().sum(), [*leaves, *maps])])
    for a, b in zip(*made, strict=True):
        close(a, b)
    close(part(x)[:1], part(x[:1]))  # texts choose for themselves


def test_one_expert_that_takes_all_is_a_dense_network():
    part: ExpertChoice = moved(ExpertChoiceConfig(n_experts=1, top_k=1, hidden=12).build(CTX))
    dense = Glu(16, 12)
    names = ("gate_proj", "up_proj", "down_proj")
    dense.load_state_dict({f"{name}.weight": getattr(part, name).weight for name in names})
    x = torch.randn(2, 7, 16)
    close(part(x), dense(x))


def test_experts_that_choose_are_refused_where_the_next_token_is_predicted():
    """The choice looks ahead: a change of the last token moves the first one's output."""
    part: ExpertChoice = moved(ExpertChoiceConfig(n_experts=4, top_k=1, hidden=12).build(CTX))
    x = torch.randn(1, 8, 16)
    later = x.clone()
    later[:, 4:] = 3 * torch.randn(1, 4, 16)
    assert not torch.allclose(part(x)[:, :4], part(later)[:, :4])
    config = gf.preset(f"gpt2@1m+{TINY}+expert_choice:4:2")
    model = config.build().eval()
    assert not config.causal and not model.causal
    with refused(code="causal", field="layers.0.ffn"):
        NextTokenConfig().check(config)
    with refused(code="causal", field="model"):
        gf.generate(model, tokens=torch.zeros(1, 3, dtype=torch.long), max_tokens=2)
    with refused(code="conflict", field="documents"):
        model(torch.zeros(1, 4, dtype=torch.long), documents=torch.tensor([[0, 0, 1, 1]]))


# Refusals


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ("moe:8:2+ffn.n_groups=3", "range", "stack.0.blocks.0.ffn.n_groups"),
        ("moe:8:2+ffn.n_groups=4+ffn.top_groups=5", "range", "stack.0.blocks.0.ffn.top_groups"),
        ("moe:8:3+ffn.n_groups=4", "range", "stack.0.blocks.0.ffn.top_k"),
        ("moe:8:2+ffn.n_groups=4+ffn.group_best=3", "range", "stack.0.blocks.0.ffn.group_best"),
        ("moe:8:2+ffn.capacity=0", "range", "stack.0.blocks.0.ffn.capacity"),
        ("moe:8:2+ffn.shared_gate=true", "conflict", "stack.0.blocks.0.ffn.n_shared"),
        ("geglu+moe:8:2+ffn.clamp=7", "conflict", "stack.0.blocks.0.ffn.clamp"),
        ("expert_choice:4:5", "range", "top_k"),
        ("expert_choice:0:1", "range", "expert_choice"),
    ],
)
def test_wrong_requests_get_one_sentence(change: str, code: str, field: str):
    with refused(code=code, field=field) as caught:
        gf.preset(f"llama@1m+{TINY}+{change}")
    assert "\n" not in str(caught.value)
