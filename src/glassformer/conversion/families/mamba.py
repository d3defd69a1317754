"""Mamba: `MambaForCausalLM`. Layers of a norm and a recurrence, without FFN."""

from __future__ import annotations

from typing import Any, TypeVar

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.families.common import read_model, with_modules
from glassformer.conversion.family import Blocked, Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import Mamba2Config, MambaConfig
from glassformer.parts.norm import RMSNormConfig

BACKBONE = Names(
    "backbone.layers.*.",
    {
        "embedding": "backbone.embeddings",
        ".mixer": "mixer",
        ".mixer.in_proj": "mixer.in_proj",
        ".mixer.conv1d": "mixer.conv1d",
        ".mixer.out_proj": "mixer.out_proj",
        ".residual.mixer_norm": "norm",
        "final_norm": "backbone.norm_f",
        "head": "lm_head",
    },
    prefix="backbone.",
)
"""Names of the modules that Mamba and Mamba-2 share."""
NAMES = with_modules(BACKBONE, {".mixer.x_proj": "mixer.x_proj", ".mixer.dt_proj": "mixer.dt_proj"})
CONTEXT = 2048
"""Training context of the published models in tokens; their configs have no field for it."""
M = TypeVar("M", MambaConfig, Mamba2Config)


def read(fields: Fields) -> ModelConfig:
    # Fields of initialisation, of equivalent algorithms, of 16-bit precision, and redundant sizes.
    fields.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme")
    fields.ignore("rescale_prenorm_residual", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple")
    fields.ignore("use_mambapy", "use_associative_scan", "d_inner", "d_model", "n_layer")
    fields.only("hidden_act", "silu", "swish")
    fields.only("rms_norm", True)
    fields.only("ssm_cfg", {})
    expand = fields.whole("expand", 2)
    fields.only("intermediate_size", expand * fields.whole("hidden_size"))
    rank = None if fields.get("time_step_rank", "auto") == "auto" else fields.whole("time_step_rank")
    mixer = MambaConfig(
        d_state=fields.whole("state_size", 16),
        d_conv=fields.whole("conv_kernel", 4),
        expand=expand,
        dt_rank=rank,
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    block = BlockConfig(mixer=mixer, ffn=None, norm=RMSNormConfig(eps=fields.number("layer_norm_epsilon", 1e-5)))
    return read_model(fields, fields.whole("max_position_embeddings", CONTEXT), block, HeadConfig(tied=True))


def recurrence(config: ModelConfig, kind: type[M]) -> tuple[M, dict[str, Any]]:
    """Returns the mixer of the first layer and the fields of config.json that Mamba and Mamba-2 share. Raises Blocked
    if the mixer is not of `kind`."""
    block = next(config.layers())
    mixer = block.mixer
    if not isinstance(mixer, kind):
        raise Blocked({"mixer.kind": mixer.kind})
    return mixer, {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
        "layer_norm_epsilon": block.norm.eps,
        "state_size": mixer.d_state,
        "conv_kernel": mixer.d_conv,
        "expand": mixer.expand,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
    }


def write(config: ModelConfig) -> dict[str, Any]:
    mixer, said = recurrence(config, MambaConfig)
    return {**said, "time_step_rank": mixer.dt_rank}


FAMILY = Family("mamba", "MambaForCausalLM", NAMES, read, write)
