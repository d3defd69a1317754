"""Published rules that are often used to size a model, against the figures of the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import glassformer as gf
from glassformer.config import ModelConfig

MODELS = (
    "gpt2", "llama-7b", "llama-3-8b", "mistral-7b", "qwen3-8b", "falcon-7b", "bloom-7b1", "gemma-2-9b", "mixtral-8x7b",
    "deepseek-v2-lite",
)  # fmt: skip
CONTEXT = 1024


@dataclass(frozen=True)
class Shape:
    """Inputs of the rules: figures of a published config.json."""

    layers: int
    d: int
    vocab: int
    heads: int
    kv_heads: int
    hidden: int
    linears: int = 3
    experts: int = 0


SHAPES = {
    "gpt2": Shape(12, 768, 50257, 12, 12, 3072, 2), "llama-7b": Shape(32, 4096, 32000, 32, 32, 11008),
    "llama-3-8b": Shape(32, 4096, 128256, 32, 8, 14336), "mistral-7b": Shape(32, 4096, 32000, 32, 8, 14336),
    "qwen3-8b": Shape(36, 4096, 151936, 32, 8, 12288), "falcon-7b": Shape(32, 4544, 65024, 71, 1, 18176, 2),
    "bloom-7b1": Shape(30, 4096, 250880, 32, 32, 16384, 2), "gemma-2-9b": Shape(42, 3584, 256000, 16, 8, 14336),
    "mixtral-8x7b": Shape(32, 4096, 32000, 32, 8, 14336, 3, 8),
    "deepseek-v2-lite": Shape(27, 2048, 102400, 16, 16, 1408, 3, 64),
}  # fmt: skip


def twelve(of: Shape) -> float:
    """Returns 12 L d^2 + v d parameters: exact only for GPT-2's layers without biases."""
    return 12 * of.layers * of.d**2 + of.vocab * of.d


def cookbook(of: Shape) -> float:
    """Returns the parameters by EleutherAI/cookbook, calc_transformer_mem.py at 069ae2e: always two tables and learned
    positions; every expert is an FFN of full width, in every layer."""
    ratio = of.kv_heads / of.heads
    ends = 2 * of.vocab * of.d + of.d * CONTEXT + 8 * of.d * of.layers + 2 * of.d
    attention = 2 * (1 + ratio) * of.layers * of.d**2
    return ends + attention + max(of.experts, 1) * of.linears * of.layers * of.d * of.hidden


def cookbook_cache(of: Shape) -> float:
    """Returns the cache bytes per token by calc_transformer_mem.py: bytes x d x L, without the factor 2 of keys and
    values, and as if all heads had keys."""
    return 2 * of.d * of.layers


def full_heads_cache(of: Shape) -> float:
    """Returns the cache bytes per token, in 16 bits, with keys and values of every query head: 2 x 2 L d."""
    return 2 * 2 * of.d * of.layers


def cookbook_training(of: Shape) -> float:
    """Returns the training bytes by calc_transformer_mem.py for one GPU, mixed precision, no activation checkpointing:
    2 + 4 + 12 bytes per parameter, 34 d + 5 n s per token and layer, no logits."""
    kept = CONTEXT * of.d * of.layers * (34 + 5 * of.heads * CONTEXT / of.d)
    return 18 * cookbook(of) + kept


@dataclass(frozen=True)
class Rule:
    """A published rule, and our figure of the same quantity."""

    what: str
    unit: str
    rule: Callable[[str], float]
    ours: Callable[[str], float]


@cache
def config(name: str) -> ModelConfig:
    return gf.preset(name)


@cache
def training_bytes(name: str) -> float:
    """Returns the bytes of an AdamW step on one sequence of `CONTEXT` tokens (`glassformer plan NAME --train`)."""
    planned: Any = gf.plan(config(name), train=True, context=CONTEXT)
    return float(planned.memory["total"])


def parameters(name: str) -> float:
    return config(name).num_params()


def state(name: str) -> float:
    """Bytes of a token in the decode state, bf16, of a short text: windows are not full yet."""
    return config(name).state_bytes(512, torch.bfloat16) / 512


RULES = (
    Rule("12 L d^2 + V d", "parameters", lambda name: twelve(SHAPES[name]), parameters),
    Rule("cookbook", "parameters", lambda name: cookbook(SHAPES[name]), parameters),
    Rule("cookbook", "cache of a token", lambda name: cookbook_cache(SHAPES[name]), state),
    Rule("2 L H d", "cache of a token", lambda name: full_heads_cache(SHAPES[name]), state),
    Rule("accelerate, 4 x fp32", "training memory", lambda name: 16 * parameters(name), training_bytes),
    Rule("cookbook", "training memory", lambda name: cookbook_training(SHAPES[name]), training_bytes),
)


def errors(rule: Rule) -> dict[str, float]:
    """Returns {model: rule / ours - 1}."""
    return {name: rule.rule(name) / rule.ours(name) - 1 for name in MODELS}
