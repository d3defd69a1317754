"""Qwen 3, the dense ones: `Qwen3ForCausalLM`. Qwen 2 with normalised queries and keys, and a bias only where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import ModelConfig
from glassformer.convert.families import qwen2
from glassformer.convert.families.llama import NAMES as LLAMA
from glassformer.convert.family import Family, Gguf, attention
from glassformer.convert.fields import Fields
from glassformer.parts.mixer import QKNormConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = replace(
    LLAMA,
    modules={
        **LLAMA.modules,
        ".mixer.qk_norm.q_norm": "self_attn.q_norm",
        ".mixer.qk_norm.k_norm": "self_attn.k_norm",
    },
)
GGUF = replace(
    qwen2.GGUF,
    modules={
        **qwen2.GGUF.modules,
        ".mixer.qk_norm.q_norm": "attn_q_norm",
        ".mixer.qk_norm.k_norm": "attn_k_norm",
    },
)


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
