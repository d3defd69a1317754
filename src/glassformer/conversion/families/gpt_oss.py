"""gpt-oss: `GptOssForCausalLM`. Every other layer has a window, every head a sink, experts have biases and a bounded
SwiGLU. The published weights are quantised (mxfp4) and refused; unquantised ones of a fine-tuned model are read."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import (
    FULL,
    SLIDING,
    heads,
    layer_types,
    read_heads,
    read_model,
    read_whole_rotary,
    window,
    with_experts,
    within,
)
from glassformer.conversion.families.llama import NAMES as LLAMA
from glassformer.conversion.family import Family, attention, experts
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Bare, OfExperts
from glassformer.conversion.rope import rope_fields, write_rotary
from glassformer.parts.ffn import Clamp, ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = with_experts(
    LLAMA,
    {
        ".mixer.sinks": Bare("self_attn.sinks"),
        ".ffn.router": "mlp.router",
        ".ffn.gate_proj": OfExperts("mlp.experts.gate_up_proj", 0, 2, interleaved=True),
        ".ffn.up_proj": OfExperts("mlp.experts.gate_up_proj", 1, 2, interleaved=True),
        ".ffn.down_proj": OfExperts("mlp.experts.down_proj"),
    },
)
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Default of `rope_scaling`."""


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 131072)
    # the gate is fixed; the others are redundant
    fields.ignore("hidden_act", "experts_per_token", "initial_context_length")
    fields.ignore("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")  # of training
    if not rope_fields(fields).values:
        fields = fields.changed({"rope_scaling": YARN})
    layers = fields.layers("num_hidden_layers")
    kinds = fields.names("layer_types", (SLIDING, FULL), layers) or [(SLIDING, FULL)[i % 2] for i in range(layers)]
    far = AttentionConfig(
        **read_heads(fields, n_kv_heads=8, head_dim=64),
        bias=fields.flag("attention_bias", True),
        position=read_whole_rotary(fields, context, theta=1.5e5),
        sinks=True,
    )
    network = ExpertsConfig(
        hidden=fields.whole("intermediate_size"),
        n_experts=fields.whole("num_local_experts", 128),
        top_k=fields.whole("num_experts_per_tok", 4),
        bias=True,
        router_bias=True,
        clamp=Clamp(limit=fields.number("swiglu_limit", 7.0), alpha=fields.number("swiglu_alpha", 1.702)),
    )
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5))
    near = far.replace(visibility=within(fields.whole("sliding_window", 128)))
    blocks = {kind: BlockConfig(mixer=mixer, ffn=network, norm=norm) for kind, mixer in ((SLIDING, near), (FULL, far))}
    stack = stack_of([blocks[kind] for kind in kinds])
    return read_model(fields, context, blocks[kinds[0]], HeadConfig(tied=False), stack=stack)


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer, network = attention(block), experts(block)
    clamp = network.clamp or Clamp()
    return {
        **heads(mixer),
        "rope_scaling": {"rope_type": "default"},  # an absent field means YaRN here
        **write_rotary(mixer.position),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": network.hidden,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
        "rms_norm_eps": block.norm.eps,
        "attention_bias": mixer.bias,
        "layer_types": layer_types(config),
        "sliding_window": next(filter(None, (window(attention(one)) for one in config.layers())), config.context),
        "num_local_experts": network.n_experts,
        "num_experts_per_tok": network.top_k,
        "swiglu_limit": clamp.limit,
        "swiglu_alpha": clamp.alpha,
    }


FAMILY = Family("gpt_oss", "GptOssForCausalLM", NAMES, read, write)
