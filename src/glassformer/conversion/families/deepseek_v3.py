"""DeepSeek-V3 and R1: `DeepseekV3ForCausalLM`. V2's attention; experts scored by a sigmoid and chosen with a
load-balancing bias. Layers of multi-token prediction (MTP) are left out, as in `transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import ModelConfig
from glassformer.conversion.families import deepseek_v2 as v2
from glassformer.conversion.family import Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.position import RotaryConfig


def names(config: ModelConfig) -> Names:
    buffers = {".ffn.router.selection_bias": "mlp.gate.e_score_correction_bias"}
    return replace(v2.names(config), buffers=buffers, ignored=rf"model\.layers\.{config.n_layers}\..+")


def read(fields: Fields) -> ModelConfig:
    context = fields.whole("max_position_embeddings", 4096)
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    pairing: Any = "interleaved" if fields.flag("rope_interleave", True) else "half"

    def experts(activation: Any) -> ExpertsConfig:
        return ExpertsConfig(
            n_experts=fields.whole("n_routed_experts", 256), top_k=fields.whole("num_experts_per_tok", 8),
            hidden=fields.whole("moe_intermediate_size", 2048), n_shared=fields.whole("n_shared_experts", 1),
            activation=activation, score="sigmoid", normalised=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 2.5), n_groups=fields.whole("n_group", 8),
            top_groups=fields.whole("topk_group", 4), group_best=2, balance_loss=1e-4, balance_rate=1e-3,
        )  # fmt: skip

    return v2.read_layers(fields, v2.read_mixer(fields, context, pairing), context, 3, experts)


def write(config: ModelConfig) -> dict[str, Any]:
    position = v2.latent(next(config.layers())).position
    interleaved = not isinstance(position, RotaryConfig) or position.pairing == "interleaved"
    return {**v2.written(config), "rope_interleave": interleaved}


FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", names, read, write)
