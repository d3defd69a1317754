"""Qwen 2 and 2.5, and readers shared with Qwen 3: `Qwen2ForCausalLM`."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import (
    FULL,
    SLIDING,
    layer_types,
    read_ffn,
    read_model,
    read_whole_rotary,
    usual,
    whole_or_none,
    window,
    with_modules,
    within,
)
from glassformer.conversion.families.llama import GGUF as LLAMA
from glassformer.conversion.families.llama import NAMES
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig

GGUF = with_modules(LLAMA, {".mixer.qkv": "attn_q attn_k attn_v"})


def read(fields: Fields) -> ModelConfig:
    return read_qwen(fields, head_dim=fields.whole("head_dim", None), bias=True, out_bias=False)


def read_qwen(fields: Fields, **own: Any) -> ModelConfig:
    """Reads a model from the fields that Qwen 2 and Qwen 3 share; `own` are further arguments of `AttentionConfig`."""
    context = fields.whole("max_position_embeddings", 32768)
    mixer = AttentionConfig(
        n_heads=fields.whole("num_attention_heads"),
        n_kv_heads=whole_or_none(fields, "num_key_value_heads", 32),
        position=read_whole_rotary(fields, context),
        **own,
    )
    network, norm = GluConfig(**read_ffn(fields)), RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))
    fields.only("use_mrope", False)
    seen = [within(width) for width in read_windows(fields, fields.layers("num_hidden_layers"))]
    blocks = [BlockConfig(mixer=mixer.replace(visibility=one), ffn=network, norm=norm) for one in seen]
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def read_windows(fields: Fields, n_layers: int) -> list[int | None]:
    """Returns the attention window of each layer in tokens, None without one: layers from `max_window_layers` on have
    it, unless `layer_types` names them."""
    width = whole_or_none(fields, "sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    first = n_layers if width is None else fields.number("max_window_layers", 28)
    fields.ignore("sliding_window", "max_window_layers")
    kinds = fields.names("layer_types", (FULL, SLIDING), n_layers)
    kinds = kinds or [FULL if layer < first else SLIDING for layer in range(n_layers)]
    if width is None and SLIDING in kinds:
        raise fields.refuse("layer_types", SLIDING, "it needs use_sliding_window=true and a sliding_window")
    return [width if kind == SLIDING else None for kind in kinds]


def write(config: ModelConfig) -> dict[str, Any]:
    block = next(config.layers())
    windows = [window(attention(one)) for one in config.layers()]
    return {
        **usual(config),
        "rms_norm_eps": block.norm.eps,
        "use_sliding_window": any(windows),
        "sliding_window": next(filter(None, windows), None),
        "max_window_layers": windows.count(None),
        "layer_types": layer_types(config),
    }


FAMILY = Family("qwen2", "Qwen2ForCausalLM", NAMES, read, write, Gguf("qwen2", GGUF))
