"""Phi-3 and Phi-4: Llama with fused projections, part of each head rotated, longrope: `Phi3ForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families import llama
from glassformer.conversion.families.common import read_ffn, read_heads, read_model, usual, window, with_modules, within
from glassformer.conversion.family import Blocked, Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Part
from glassformer.conversion.rope import rope_fields, rotary
from glassformer.parts.core.base import BuildContext
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import LongRopeScalingConfig

NAMES = with_modules(
    llama.NAMES,
    {
        ".mixer.qkv": "self_attn.qkv_proj",
        ".ffn.gate_proj": Part("mlp.gate_up_proj", 0, 2),
        ".ffn.up_proj": Part("mlp.gate_up_proj", 1, 2),
    },
)
GGUF = with_modules(
    llama.GGUF,
    {
        ".mixer.qkv": "attn_qkv",
        ".ffn.gate_proj": Part("ffn_up", 0, 2),
        ".ffn.up_proj": Part("ffn_up", 1, 2),
    },
)
UNHEEDED = frozenset({"attention.sliding_window"})
FIELDS = {"original_max_position_embeddings": "rope.scaling.original_context_length"}


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(bias, False)
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    block = BlockConfig(
        mixer=AttentionConfig(
            **read_heads(fields),
            position=_position(fields, context),
            visibility=within(fields.whole("sliding_window", None)),
        ),
        ffn=GluConfig(**read_ffn(fields)),
        norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5)),
    )
    return read_model(fields, context, block, HeadConfig(tied=False))


def _position(fields: Fields, context: int) -> RotaryConfig:
    """Reads rotary positions with or without longrope, also under its early names su and yarn; a trained context
    outside the mapping takes precedence over one inside."""
    said, trained = rope_fields(fields), "original_max_position_embeddings"
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in ("default", "longrope", "su", "yarn"):
        raise fields.refuse("rope_scaling.type", kind, "this family has only longrope")
    kind = "default" if kind == "default" else "longrope"
    said = said.changed({"rope_type": kind, trained: fields.whole(trained, 4096)})
    theta, fraction = fields.number("rope_theta", 1e4), fields.number("partial_rotary_factor", 1.0)
    return rotary(said, fields, context, theta, fraction)


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    mixer = attention(block)
    scaling = getattr(mixer.position, "scaling", None)
    if scaling and mixer.head_dim != config.d_model // mixer.n_heads:  # the class checks the number of factors
        raise Blocked({"mixer.head_dim": mixer.head_dim})
    return {
        **usual(config, "partial_rotary_factor"),
        **(_shortly(scaling, config.ctx) if isinstance(scaling, LongRopeScalingConfig) else {}),
        "original_max_position_embeddings": scaling.original_context if scaling else config.context,
        "sliding_window": window(mixer),
        "rms_norm_eps": block.norm.eps,
    }


def _shortly(scaling: LongRopeScalingConfig, ctx: BuildContext) -> dict[str, Any]:
    """Returns {"rope_scaling": ...} with only the three keys that `transformers` 4 allows, or {} if factor and
    magnitude do not follow from the two contexts."""
    plain = scaling.replace(factor=ctx.context / (scaling.original_context or ctx.context), attention_factor=None)
    if plain.build(ctx).magnitude != scaling.build(ctx).magnitude:
        return {}
    factors = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    return {"rope_scaling": {"type": "longrope", **factors}}


FAMILY = Family(
    "phi3", "Phi3ForCausalLM", NAMES, read, write, Gguf("phi3", GGUF, FIELDS, unheeded=UNHEEDED, factors=True)
)
