"""Llama 4, its text model: `Llama4ForCausalLM`. Three of four layers rotate queries and keys and attend within a
token's chunk; the fourth attends to everything, without positions, with patterns that sharpen with position. Experts
with weighted inputs, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import (
    ACTIVATIONS,
    FULL,
    heads,
    name_of,
    read_heads,
    read_model,
    read_whole_rotary,
    with_experts,
)
from glassformer.conversion.families.llama import NAMES as LLAMA
from glassformer.conversion.family import Blocked, Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import OfExperts
from glassformer.conversion.rope import write_rotary
from glassformer.parts.ffn import ExpertsConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig, TemperatureConfig
from glassformer.parts.visibility import CausalConfig, ChunkedConfig

CHUNKED, OURS = "chunked_attention", "feed_forward"
_UP = f"{OURS}.experts.gate_up_proj"
_EXPERTS = with_experts(
    LLAMA,
    {
        ".ffn.router": f"{OURS}.router",
        ".ffn.gate_proj": OfExperts(_UP, 0, 2, dense=f"{OURS}.gate_proj"),
        ".ffn.up_proj": OfExperts(_UP, 1, 2, dense=f"{OURS}.up_proj"),
        ".ffn.down_proj": OfExperts(f"{OURS}.experts.down_proj", dense=f"{OURS}.down_proj"),
        **{f".ffn.shared.{name}_proj": f"{OURS}.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    },
)
NAMES = replace(_EXPERTS, wholes={".ffn": OURS}, apart=frozenset({".ffn.router"}))


def _places(fields: Fields, name: str, default: list[int], most: int) -> list[int]:
    """Reads a field that is a list of integers from 0 to `most` - 1."""
    value = fields.get(name) or default
    if not isinstance(value, list) or not all(isinstance(one, int) and 0 <= one < most for one in value):
        raise fields.refuse(name, value, f"expected a list of whole numbers below {most}")
    return value


def read(fields: Fields) -> ModelConfig:
    context, layers = fields.whole("max_position_embeddings", 131072), fields.layers("num_hidden_layers")
    fields.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "for_llm_compressor")
    every = fields.whole("no_rope_layer_interval", 4)
    turned = _places(fields, "no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)], 2)
    if len(turned) != layers:
        raise fields.refuse("no_rope_layers", turned, f"expected one number for each of the {layers} layers")
    step = fields.whole("interleave_moe_layer_step", 1)
    mixed = _places(fields, "moe_layers", list(range(step - 1, layers, step)), layers)
    kinds = fields.names("layer_types", (CHUNKED, FULL), layers) or [(FULL, CHUNKED)[one] for one in turned]
    chunk, activation = fields.whole("attention_chunk_size", 8192), fields.one_of("hidden_act", ACTIVATIONS, "silu")
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5))
    own = {**read_heads(fields, n_kv_heads=8, head_dim=128), "bias": fields.flag("attention_bias", False)}
    rotary = read_whole_rotary(fields, context, theta=5e5, pairing="interleaved")
    plain = QKNormConfig(norm=RMSNormConfig(eps=norm.eps, affine=False), after_position=True)
    late = TemperatureConfig(every=fields.whole("floor_scale", 8192), share=fields.number("attn_scale", 0.1))
    late_or_none = late if fields.get("attn_temperature_tuning", True) else None
    normed = plain if fields.flag("use_qk_norm", True) else None
    dense = GluConfig(hidden=fields.whole("intermediate_size_mlp", 16384), activation=activation)
    width = fields.whole("intermediate_size")
    experts = ExpertsConfig(
        hidden=width, n_experts=fields.whole("num_local_experts", 16), top_k=fields.whole("num_experts_per_tok", 1),
        activation=activation, score="sigmoid", normalised=False, weigh="input", n_shared=1, shared_hidden=width,
    )  # fmt: skip

    def block(layer: int) -> BlockConfig:
        mixer = AttentionConfig(
            **own,
            position=rotary if turned[layer] else late_or_none,
            qk_norm=normed if turned[layer] else None,
            visibility=ChunkedConfig(chunk=chunk) if kinds[layer] == CHUNKED else CausalConfig(),
        )
        return BlockConfig(mixer=mixer, ffn=experts if layer in mixed else dense, norm=norm)

    blocks = [block(layer) for layer in range(layers)]
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def write(config: ModelConfig) -> dict[str, Any]:
    blocks = list(config.layers())
    mixers = [attention(block) for block in blocks]
    turned = [isinstance(mixer.position, RotaryConfig) for mixer in mixers]
    mixed = [layer for layer, block in enumerate(blocks) if isinstance(block.ffn, ExpertsConfig)]
    networks = [block.ffn for block in blocks]
    experts = next((one for one in networks if isinstance(one, ExpertsConfig)), None)
    dense = next((one for one in networks if isinstance(one, GluConfig)), None)
    if not mixed:  # an empty list of such layers means the default
        raise Blocked({"ffn.kind": ffn(blocks[0]).kind})
    chunks = [mixer.visibility.chunk for mixer in mixers if isinstance(mixer.visibility, ChunkedConfig)]
    late = [mixer.position for mixer in mixers if isinstance(mixer.position, TemperatureConfig)]
    rotary = next((mixer.position for mixer in mixers if isinstance(mixer.position, RotaryConfig)), None)
    assert experts is not None
    return {
        **heads(mixers[0]), **write_rotary(rotary), "vocab_size": config.vocab_size, "hidden_size": config.d_model,
        "intermediate_size": experts.hidden, "intermediate_size_mlp": dense.hidden if dense else experts.hidden,
        "num_hidden_layers": config.n_layers, "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied, "rms_norm_eps": blocks[0].norm.eps,
        "attention_bias": mixers[0].bias, "hidden_act": name_of(experts),
        "no_rope_layers": [int(one) for one in turned],
        "layer_types": [CHUNKED if isinstance(mixer.visibility, ChunkedConfig) else FULL for mixer in mixers],
        "attention_chunk_size": next(iter(chunks), 8192), "moe_layers": mixed, "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k, "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": bool(late), "floor_scale": late[0].every if late else 8192,
        "attn_scale": late[0].share if late else 0.1,
    }  # fmt: skip


FAMILY = Family("llama4_text", "Llama4ForCausalLM", NAMES, read, write)
