"""Mixtures of experts against the published models: Mixtral, Qwen3-MoE, and DeepSeek-V3's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import glassformer as gf
from glassformer.model import Model
from glassformer.parts.ffn import Experts, ExpertsConfig

from .families import close

VOCAB, D, E, K, F_ = 43, 32, 4, 2, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": K,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OURS = (
    f"llama@1m+layers=2+d_model={D}+heads=4+gqa:2+vocab_size={VOCAB}+context=64+norm.eps=1e-5+untied+moe:{E}:{K}:{F_}"
)
TOKENS = torch.randint(VOCAB, (3, 13), generator=torch.Generator().manual_seed(0))


def mixtral() -> tuple[str, nn.Module]:
    config = MixtralConfig(**SIZES, num_local_experts=E, intermediate_size=F_, rope_parameters=rope(1e6))
    return f"{OURS}+position.base=1e6", MixtralForCausalLM(config)


def qwen3(normalised: bool) -> tuple[str, nn.Module]:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=E, moe_intermediate_size=F_, norm_topk_prob=normalised, rope_parameters=rope(1e4)
    )
    return f"{OURS}+qknorm+position.base=1e4+ffn.normalised={normalised}", Qwen3MoeForCausalLM(config)


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def translate(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, or their gradients, under our names; each of theirs is used once."""
    ours = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    made = {name: theirs.pop(path) for name, path in ours.items()} | {"head.weight": theirs.pop("lm_head.weight")}
    for layer in (0, 1):
        at, mine = f"model.layers.{layer}.", f"layers.{layer}."
        qkv = [theirs.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv"]
        made[f"{mine}mixer.qkv.weight"] = torch.cat(qkv)
        made[f"{mine}mixer.output.weight"] = theirs.pop(f"{at}self_attn.o_proj.weight")
        for name in "qk":
            if f"{at}self_attn.{name}_norm.weight" in theirs:
                made[f"{mine}mixer.qk_norm.{name}_norm.weight"] = theirs.pop(f"{at}self_attn.{name}_norm.weight")
        made[f"{mine}residual.mixer_norm.weight"] = theirs.pop(f"{at}input_layernorm.weight")
        made[f"{mine}residual.ffn_norm.weight"] = theirs.pop(f"{at}post_attention_layernorm.weight")
        of_ffn = {path.removeprefix(f"{at}mlp."): theirs.pop(path) for path in list(theirs) if f"{at}mlp." in path}
        made |= {f"{mine}ffn.{name}": value for name, value in experts(of_ffn).items()}
    assert not theirs
    return made


def experts(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the experts of one layer: theirs are (e, 2f, d) and (e, d, f), ours stacked by rows."""
    gate, up = theirs["experts.gate_up_proj"].chunk(2, dim=1)
    made = {
        "gate_proj.weight": gate.flatten(0, 1),
        "up_proj.weight": up.flatten(0, 1),
        "down_proj.weight": theirs["experts.down_proj"].flatten(0, 1),
        "router.weight": theirs["gate.weight"],
    }
    return made | {path.replace("shared_experts", "shared"): theirs[path] for path in theirs if "shared_" in path}


def pair(expression: str, other: nn.Module) -> tuple[Model, nn.Module]:
    """Returns both models with the same random weights; routers are scaled up, so that choices are far from chance."""
    draw = torch.Generator().manual_seed(1)
    for path, weight in other.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        weight.data.copy_(noise * 0.3 + 1 if weight.dim() == 1 else noise * (1.5 if "mlp.gate" in path else 0.3))
    mine = gf.preset(expression).build(seed=None)
    mine.load_state_dict(translate({path: weight.detach() for path, weight in other.named_parameters()}))
    return mine.eval(), other.eval()


def gradients(end: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(end, parameters), strict=True))


@pytest.mark.parametrize("case", ["mixtral", "qwen3", "qwen3, not normalised"])
def test_logits_and_gradients(case: str) -> None:
    mine, other = pair(*(mixtral() if case == "mixtral" else qwen3(case == "qwen3")))
    logits, expected = mine(TOKENS), other(TOKENS).logits
    close(logits, expected, 1e-5)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    wanted = translate(gradients((expected * probe).sum(), other))
    for name, grad in gradients((logits * probe).sum(), mine).items():
        close(grad, wanted[name], 1e-5)


def test_cached_decoding() -> None:
    mine, other = pair(*mixtral())
    made = other.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=8, do_sample=False)
    assert torch.equal(gf.generate(mine, TOKENS, max_new_tokens=8), made)


def test_the_balance_loss_is_theirs() -> None:
    """The losses of one layer are equal: theirs counts k f_i, and multiplies layers before it sums over experts."""
    mine, other = pair(*mixtral())
    mine.train()
    for router in (layer.ffn.router for layer in mine.layers):
        router.balance_loss = 0.25
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    out = other(inputs, output_router_logits=True)
    aux = sum(load_balancing_loss_func((logits,), E, K) for logits in out.router_logits)
    assert aux > 2.05 * K  # it is not level
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    wanted = translate(gradients(loss + 0.25 / K * aux, other))
    found = mine.loss(inputs, targets)
    close(found, loss, 1e-5)
    for name, grad in gradients(found, mine).items():
        close(grad, wanted[name], 1e-5)


def test_a_layer_of_deepseek() -> None:
    """Sigmoid scores, a bias that chooses and does not weigh, normalised weights times 2.5, a shared expert."""
    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=8, num_local_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1,
        n_shared_experts=2, moe_intermediate_size=F_, norm_topk_prob=True, routed_scaling_factor=2.5,
        experts_implementation="eager",
    )  # fmt: skip
    other = DeepseekV3MoE(config)
    draw = torch.Generator().manual_seed(3)
    for weight in other.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    bias = torch.randn(8, generator=draw) * 0.2
    other.gate.e_score_correction_bias.copy_(bias)
    block = gf.preset(f"llama@1m+d_model={D}+heads=4+moe:8:3:{F_}").stack[0].blocks[0]
    assert isinstance(block.ffn, ExpertsConfig)
    ffn = block.ffn.replace(score="sigmoid", scale=2.5, n_shared=2, balance_rate=0.0, balance_loss=0.0)
    mine = ffn.build(gf.preset(f"llama@1m+d_model={D}+heads=4").ctx)
    assert isinstance(mine, Experts)
    weights = experts(dict(other.named_parameters()))
    mine.load_state_dict(weights | {"router.selection_bias": bias, "router.load": torch.zeros(8)})
    x = torch.randn(2, 11, D, generator=draw).requires_grad_()
    close(mine(x), other(x), 1e-5)
    plain = mine.router.score(mine.router(x)).topk(3).indices.sort().values
    chosen = mine.router.choose(mine.router.score(mine.router(x)))[1].sort().values
    assert (plain != chosen).any()  # the bias has a say
    probe = torch.linspace(-1, 1, D)
    close(*(torch.autograd.grad((part(x) * probe).sum(), x)[0] for part in (mine, other)), 1e-5)  # type: ignore[misc]
    wanted = experts(gradients((other(x) * probe).sum(), other))
    for name, grad in gradients((mine(x) * probe).sum(), mine).items():
        close(grad, wanted[name], 1e-5)
