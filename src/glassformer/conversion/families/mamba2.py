"""Mamba-2: `Mamba2ForCausalLM`. Layers of a norm and a recurrence in chunks, without FFN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import read_model, with_modules
from glassformer.conversion.families.mamba import BACKBONE, CONTEXT, recurrence
from glassformer.conversion.family import Blocked, Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Flat
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import Mamba2Config
from glassformer.parts.mixer.mamba2 import heads_of
from glassformer.parts.norm import RMSNormConfig

NAMES = replace(with_modules(BACKBONE, {".mixer.norm": Flat("mixer.norm")}), apart=frozenset({".mixer.norm"}))


def read_limits(fields: Fields, name: str) -> dict[str, Any]:
    """Reads the arguments dt_least and dt_most of a `Mamba2Config` from a pair of numbers; an infinite second one gives
    dt_most=None."""
    limits = fields.get(name, [0.0, math.inf])
    if isinstance(limits, (list, tuple)):  # transformers 5 encodes numbers that JSON lacks
        limits = [math.inf if one == {"__float__": "Infinity"} else one for one in limits]
    whole = isinstance(limits, (list, tuple)) and len(limits) == 2
    if not whole or not all(isinstance(one, (int, float)) and one >= 0 for one in limits) or limits[0] > limits[1]:
        raise fields.refuse(name, limits, "expected two numbers, the smallest and the largest dt")
    return {"dt_least": float(limits[0]), "dt_most": None if math.isinf(limits[1]) else float(limits[1])}


def write_limits(mixer: Mamba2Config, name: str) -> dict[str, Any]:
    """Returns {name: [dt_least, dt_most]}, or {} if dt is unbounded. Raises Blocked for a lower bound only, because
    JSON has no infinity for the upper one."""
    if mixer.dt_most is None:
        if mixer.dt_least:
            raise Blocked({"mixer.dt_least": mixer.dt_least})
        return {}
    return {name: [mixer.dt_least, mixer.dt_most]}


def read(fields: Fields) -> ModelConfig:
    # Fields of initialisation, of the algorithm, of 16-bit precision, and redundant sizes.
    fields.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "chunk_size")
    fields.ignore("rescale_prenorm_residual", "residual_in_fp32", "layer_types")
    fields.only("hidden_act", "silu", "swish")
    fields.only("rms_norm", True)
    fields.only("norm_before_gate", False)
    expand, head_dim = fields.whole("expand", 2), fields.whole("head_dim", 64)
    fields.only("num_heads", expand * fields.whole("hidden_size") // head_dim)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    mixer = Mamba2Config(
        d_state=fields.whole("state_size", 128),
        head_dim=head_dim,
        n_groups=fields.whole("n_groups", 8),
        d_conv=fields.whole("conv_kernel", 4),
        expand=expand,
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
        norm_eps=eps,
        **read_limits(fields, "time_step_limit"),
    )
    block = BlockConfig(mixer=mixer, ffn=None, norm=RMSNormConfig(eps=eps))
    return read_model(fields, fields.whole("max_position_embeddings", CONTEXT), block, HeadConfig(tied=False))


def write(config: ModelConfig) -> dict[str, Any]:
    mixer, said = recurrence(config, Mamba2Config)
    return {
        **said,
        "head_dim": mixer.head_dim,
        "num_heads": heads_of(config.d_model, mixer.expand, mixer.head_dim, mixer.n_groups),
        "n_groups": mixer.n_groups,
        **write_limits(mixer, "time_step_limit"),
    }


FAMILY = Family("mamba2", "Mamba2ForCausalLM", NAMES, read, write)
