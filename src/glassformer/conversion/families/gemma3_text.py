"""Gemma 3, its text model: five layers with a window to one without, each kind with separate rotary positions, norms of
queries and keys: `Gemma3ForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glassformer.config import ModelConfig
from glassformer.conversion.families import gemma2
from glassformer.conversion.families.common import (
    FULL,
    QK_NORM,
    SLIDING,
    layer_types,
    number_or_none,
    with_modules,
    within,
)
from glassformer.conversion.family import Family, Gguf, attention
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Shifted
from glassformer.conversion.rope import rotary_by_kind, write_rotary
from glassformer.parts.mixer import QKNormConfig

NAMES = with_modules(gemma2.NAMES, QK_NORM)
GGUF = with_modules(
    gemma2.GGUF,
    {
        "head": "output",
        ".mixer.qk_norm.q_norm": Shifted("attn_q_norm"),
        ".mixer.qk_norm.k_norm": Shifted("attn_k_norm"),
    },
)
CONTEXT = 131072
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
FIELDS = {
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    gemma2.CAP: gemma2.CAP,
}


def read(fields: Fields) -> ModelConfig:
    n_layers, every = fields.layers("num_hidden_layers"), fields.whole("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")  # layer_types were derived from it
    kinds = fields.names("layer_types", (SLIDING, FULL), n_layers) or _kinds(every, n_layers)
    fields.only("attn_logit_softcapping", None)
    mixer = gemma2.read_mixer(fields).replace(qk_norm=QKNormConfig(norm=gemma2.read_norm(fields)))
    context = fields.whole("max_position_embeddings", CONTEXT)
    positions, near = rotary_by_kind(fields, context, BASES, {FULL}), within(fields.whole("sliding_window", 4096))
    mixers = {
        FULL: mixer.replace(position=positions[FULL]),
        SLIDING: mixer.replace(position=positions[SLIDING], visibility=near),
    }
    return gemma2.assemble(fields, kinds, mixers, CONTEXT, number_or_none(fields, gemma2.CAP, None))


def _kinds(every: int, n_layers: int) -> list[str]:
    return [SLIDING if layer % every else FULL for layer in range(1, n_layers + 1)]


def write(config: ModelConfig) -> dict[str, Any]:
    said = gemma2.written(config) | {"attn_logit_softcapping": None}  # no softcap of scores
    kinds, n = layer_types(config), config.n_layers
    if periods := [every for every in range(1, n + 2) if _kinds(every, n) == kinds]:
        said["sliding_window_pattern"] = periods[0]
    of = dict(zip(kinds, map(attention, config.layers()), strict=True))
    if FULL in of:
        said |= write_rotary(of[FULL].position)
    if SLIDING in of:
        said["rope_local_base_freq"] = getattr(of[SLIDING].position, "base", None)
    return said


def _implied(said: Mapping[str, Any]) -> dict[str, Any]:
    every = said.get("attention.sliding_window_pattern", 6)
    return {
        **gemma2.scaled_by(said, 62),
        "sliding_window_pattern": 2 if every == 1 else every,
    }  # llama.cpp aborts without a window


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", NAMES, read, write, Gguf("gemma3", GGUF, FIELDS, implied=_implied))
