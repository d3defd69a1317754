"""Qwen2.5 (2412.15115): LLaMA's wiring with biases on queries, keys and values only, rotary base 1e6."""

from __future__ import annotations

from glassformer.architectures.llama import llama
from glassformer.config import ModelConfig


def qwen2_5(
    n_layers: int, d_model: int, n_heads: int, hidden: int, n_kv_heads: int, vocab_size: int, tied: bool, context: int
) -> ModelConfig:
    return llama(
        n_layers, d_model, n_heads, hidden, n_kv_heads, vocab_size, context, base=1e6, eps=1e-6, tied=tied,
        qkv_bias=True,
    )  # fmt: skip


def qwen2_5_0_5b() -> ModelConfig:
    return qwen2_5(24, 896, 14, 4864, 2, vocab_size=151936, tied=True, context=32768)


def qwen2_5_1_5b() -> ModelConfig:
    return qwen2_5(28, 1536, 12, 8960, 2, vocab_size=151936, tied=True, context=131072)


def qwen2_5_7b() -> ModelConfig:
    return qwen2_5(28, 3584, 28, 18944, 4, vocab_size=152064, tied=False, context=131072)
