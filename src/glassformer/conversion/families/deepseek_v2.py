"""DeepSeek-V2: `DeepseekV2ForCausalLM`. Keys and values from a latent; some dense layers, then experts in groups, with
a choice of groups first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import (
    ACTIVATIONS,
    name_of,
    read_model,
    read_whole_rotary,
    whole_or_none,
    with_experts,
)
from glassformer.conversion.families.llama import NAMES as LLAMA
from glassformer.conversion.family import Blocked, Family, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachExpert, HeadByHead, Names, TensorLayout
from glassformer.conversion.rope import rope_fields, write_rotary
from glassformer.parts.ffn import ExpertsConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import LatentAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position.rotary import Pairing

MAPS: dict[str, str | TensorLayout] = {
    ".mixer.q_down": "self_attn.q_a_proj",
    ".mixer.q_norm": "self_attn.q_a_layernorm",
    ".mixer.kv_down": "self_attn.kv_a_proj_with_mqa",
    ".mixer.kv_norm": "self_attn.kv_a_layernorm",
    ".mixer.kv_up": HeadByHead("self_attn.kv_b_proj"),
    ".ffn.router": "mlp.gate",
    **{
        f".ffn.{name}_proj": EachExpert(f"mlp.experts.#.{name}_proj", f"mlp.{name}_proj")
        for name in ("gate", "up", "down")
    },
    **{f".ffn.shared.{name}_proj": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
SCALE = "mscale_all_dim"


def names(config: ModelConfig) -> Names:
    """Returns the names of the modules; the projection of queries is `q_b_proj` if they come from a latent, else
    `q_proj`."""
    by_latent = any(block.mixer.q_rank != 0 for block in config.layers() if hasattr(block.mixer, "q_rank"))
    return with_experts(LLAMA, {**MAPS, ".mixer.q_up": f"self_attn.{'q_b_proj' if by_latent else 'q_proj'}"})


def latent(block: BlockConfig) -> LatentAttentionConfig:
    """Returns the block's mixer. Raises Blocked if the mixer is not latent attention."""
    if not isinstance(block.mixer, LatentAttentionConfig):
        raise Blocked({"mixer.kind": block.mixer.kind})
    return block.mixer


def read_mixer(fields: Fields, context: int, pairing: Pairing) -> LatentAttentionConfig:
    fields.ignore("head_dim", "qk_head_dim")  # redundant
    n = fields.whole("num_attention_heads")
    fields.only("num_key_value_heads", n)
    position = read_whole_rotary(fields, context, pairing=pairing)
    content, rope = fields.whole("qk_nope_head_dim", 128), fields.whole("qk_rope_head_dim", 64)
    said, scale = rope_fields(fields), (content + rope) ** -0.5
    if position.scaling is not None and (all_dims := said.number(SCALE, None)):
        scale *= _magnitude(position.scaling.factor, all_dims) ** 2
    return LatentAttentionConfig(
        n_heads=n, head_dim=content, rope_dim=rope, value_dim=fields.whole("v_head_dim", 128),
        kv_rank=fields.whole("kv_lora_rank", 512), q_rank=whole_or_none(fields, "q_lora_rank", 1536) or 0,
        bias=fields.flag("attention_bias", False), position=position, scale=scale,
    )  # fmt: skip


def _magnitude(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_layers(
    fields: Fields, mixer: LatentAttentionConfig, context: int, dense: int, experts: Callable[..., ExpertsConfig]
) -> ModelConfig:
    """Reads a model of some dense layers, followed by layers of experts, from the fields that DeepSeek-V2 and V3 share.
    `dense` is the default number of dense layers; `experts(activation=...)` returns the FFN of the others."""
    fields.ignore("output_router_logits", "ep_size", "seq_aux", "aux_loss_alpha")  # of training and of parallelism
    fields.only("moe_layer_freq", 1)
    activation = fields.one_of("hidden_act", ACTIVATIONS, "silu")
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))
    count = fields.layers("num_hidden_layers")
    first = min(max(int(fields.get("first_k_dense_replace", dense)), 0), count)
    one = GluConfig(hidden=fields.whole("intermediate_size", 11008), activation=activation)
    many = experts(activation=activation)
    kinds = [BlockConfig(mixer=mixer, ffn=network, norm=norm) for network in (one, many)]
    blocks = [kinds[0]] * first + [kinds[1]] * (count - first)
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 2048)
    fields.only("mlp_bias", False)
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)  # only the authors' code applies it, the published class does not
    limited = fields.one_of("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups, chosen = fields.whole("n_group", None) or 1, fields.whole("topk_group", None) or 1

    def experts(activation: Any) -> ExpertsConfig:
        return ExpertsConfig(
            n_experts=fields.whole("n_routed_experts", 64), top_k=fields.whole("num_experts_per_tok"),
            hidden=fields.whole("moe_intermediate_size", 1407), n_shared=fields.whole("n_shared_experts", 2),
            activation=activation, normalised=False, scale=fields.number("routed_scaling_factor", 1.0),
            n_groups=groups if limited else 1, top_groups=chosen if limited else 1,
        )  # fmt: skip

    return read_layers(fields, read_mixer(fields, context, "interleaved"), context, 0, experts)


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json that DeepSeek-V2 and V3 share."""
    blocks = list(config.layers())
    mixer = latent(blocks[0])
    dense = [isinstance(block.ffn, GluConfig) for block in blocks]
    first = dense.index(False) if False in dense else len(blocks)
    experts = blocks[-1].ffn if isinstance(blocks[-1].ffn, ExpertsConfig) else ExpertsConfig(hidden=8, n_shared=1)
    said = write_rotary(mixer.position)
    if said.get("rope_scaling") and (factor := said["rope_scaling"].get("factor", 1.0)) > 1:
        times = (mixer.scale or 1.0) * ((mixer.head_dim or 1) + (mixer.rope_dim or 1)) ** 0.5
        said["rope_scaling"][SCALE] = round((times**0.5 - 1) / (0.1 * math.log(factor)), 9)
    return {
        **said, "vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context, "tie_word_embeddings": config.head.tied,
        "intermediate_size": blocks[0].ffn.hidden if first and blocks[0].ffn else 1, "first_k_dense_replace": first,
        "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.n_heads, "q_lora_rank": mixer.q_rank or None,
        "kv_lora_rank": mixer.kv_rank, "qk_nope_head_dim": mixer.head_dim, "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim, "attention_bias": mixer.bias, "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": name_of(ffn(blocks[0])), "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k, "moe_intermediate_size": experts.hidden,
        "n_shared_experts": experts.n_shared, "routed_scaling_factor": experts.scale, "n_group": experts.n_groups,
        "topk_group": experts.top_groups, "norm_topk_prob": experts.normalised,
    }  # fmt: skip


def write(config: ModelConfig) -> dict[str, Any]:
    said = written(config)
    return {**said, "topk_method": "group_limited_greedy" if said["n_group"] > 1 else "greedy"}


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", names, read, write)
