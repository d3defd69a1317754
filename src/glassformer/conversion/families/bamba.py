"""Bamba: `BambaForCausalLM`. Layers of Mamba-2 and, at listed indices, of attention that rotates half of each head."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import heads, read_model, sizes
from glassformer.conversion.families.mamba2 import read_limits, write_limits
from glassformer.conversion.family import Blocked, Family, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Flat, Names
from glassformer.conversion.rope import rope_fields, rotary, write_rotary
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, Mamba2Config
from glassformer.parts.mixer.mamba2 import heads_of
from glassformer.parts.norm import RMSNormConfig

NAMES = Names(
    "model.layers.*.",
    {
        "embedding": "model.embed_tokens",
        ".mixer": "mamba",
        ".mixer.in_proj": "mamba.in_proj",
        ".mixer.conv1d": "mamba.conv1d",
        ".mixer.norm": Flat("mamba.norm"),
        ".mixer.out_proj": "mamba.out_proj",
        ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        ".mixer.output": "self_attn.o_proj",
        **{f".ffn.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "pre_ff_layernorm",
        "final_norm": "model.final_layernorm",
        "head": "lm_head",
    },
    prefix="model.",
    apart=frozenset({".mixer.norm"}),
)
TURNED = 0.5
"""Share of each attention head that is rotated, regardless of the fields of config.json."""


def read(fields: Fields) -> ModelConfig:
    fields.ignore("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "layer_types", "layers_block_type")
    fields.ignore("partial_rotary_factor")  # fixed by the class, unless rope_parameters give it
    fields.only("hidden_act", "silu", "swish")  # also of the convolution
    context, eps = fields.whole("max_position_embeddings", 262144), fields.number("rms_norm_eps", 1e-5)
    expand, n = fields.whole("mamba_expand", 2), fields.whole("mamba_n_heads", 128)
    channels = expand * fields.whole("hidden_size")
    if channels % n:
        raise fields.refuse("mamba_n_heads", n, f"expected a divisor of mamba_expand hidden_size = {channels}")
    fields.only("mamba_d_head", channels // n, "auto")
    mamba = Mamba2Config(
        d_state=fields.whole("mamba_d_state", 256),
        head_dim=channels // n,
        n_groups=fields.whole("mamba_n_groups", 1),
        d_conv=fields.whole("mamba_d_conv", 4),
        expand=expand,
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_eps=eps,
        **read_limits(fields, "time_step_limit"),
    )
    attention = AttentionConfig(
        n_heads=fields.whole("num_attention_heads"),
        n_kv_heads=fields.whole("num_key_value_heads", 8),
        bias=fields.flag("attention_bias", False),
        position=rotary(rope_fields(fields), fields, context, fields.number("rope_theta", 1e4), TURNED),
    )
    position, heads = attention.position, attention.n_heads
    if position is not None and int(fields.whole("hidden_size") // heads * getattr(position, "fraction", 1.0)) % 2:
        raise fields.refuse("rope_parameters", fields.get("rope_parameters"), "an even share of a head is turned")
    network = GluConfig(hidden=fields.whole("intermediate_size"), bias=fields.flag("mlp_bias", False))
    layers, named = fields.layers("num_hidden_layers"), fields.get("attn_layer_indices", [])
    if not isinstance(named, list) or not all(isinstance(one, int) and 0 <= one < layers for one in named):
        raise fields.refuse(
            "attn_layer_indices", named, f"expected a list of integers below num_hidden_layers={layers}"
        )
    norm = RMSNormConfig(eps=eps)
    blocks = [BlockConfig(mixer=attention if i in named else mamba, ffn=network, norm=norm) for i in range(layers)]
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def write(config: ModelConfig) -> dict[str, Any]:
    blocks = list(config.layers())
    attention = next((b.mixer for b in blocks if isinstance(b.mixer, AttentionConfig)), None)
    mamba = next((b.mixer for b in blocks if isinstance(b.mixer, Mamba2Config)), None)
    network = ffn(blocks[0])
    if mamba is None or not isinstance(network, GluConfig):
        raise Blocked({"mixer.kind": blocks[0].mixer.kind, "ffn.kind": network.kind})
    said = {"num_attention_heads": 1, "num_key_value_heads": 1}
    if attention is not None:
        said = {name: value for name, value in heads(attention).items() if name != "head_dim"}
        said |= {**write_rotary(attention.position), "attention_bias": attention.bias}
    return {
        **sizes(config),
        **said,
        "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": "silu",
        "mlp_bias": network.bias,
        "attn_layer_indices": [i for i, block in enumerate(blocks) if isinstance(block.mixer, AttentionConfig)],
        "mamba_d_state": mamba.d_state,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_heads": heads_of(config.d_model, mamba.expand, mamba.head_dim, mamba.n_groups),
        "mamba_n_groups": mamba.n_groups,
        "mamba_d_conv": mamba.d_conv,
        "mamba_expand": mamba.expand,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        **write_limits(mamba, "time_step_limit"),
    }


FAMILY = Family("bamba", "BambaForCausalLM", NAMES, read, write)
