"""Qwen 3, dense models: `Qwen3ForCausalLM`. Qwen 2 with normalised queries and keys, and an optional bias."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.conversion.families import llama, qwen2
from glassformer.conversion.families.common import QK_NORM, QK_NORM_GGUF, with_modules
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.parts.mixer import QKNormConfig
from glassformer.parts.norm import RMSNormConfig

NAMES, GGUF = with_modules(llama.NAMES, QK_NORM), with_modules(qwen2.GGUF, QK_NORM_GGUF)


def read(fields: Fields) -> ModelConfig:
    return qwen2.read_qwen(
        fields,
        head_dim=fields.whole("head_dim", 128),
        bias=fields.flag("attention_bias", False),
        qk_norm=QKNormConfig(norm=RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return {**qwen2.write(config), "attention_bias": attention(next(config.layers())).bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", NAMES, read, write, Gguf("qwen3", GGUF))
