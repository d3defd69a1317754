"""Phi-3 mini (2404.14219): LLaMA's wiring within a window."""

from __future__ import annotations

from glassformer.architectures.llama import llama
from glassformer.config import ModelConfig


def phi_3_mini() -> ModelConfig:
    return llama(32, 3072, 32, 8192, vocab_size=32064, context=4096, window=2047)
