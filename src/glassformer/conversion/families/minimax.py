"""MiniMax-Text-01: `MiniMaxForCausalLM`. Layers of lightning attention and, at listed indices, of softmax attention,
with experts; each branch is added to the normalised stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import (
    FULL,
    heads,
    name_of,
    read_heads,
    read_model,
    read_routing,
    read_whole_rotary,
    sizes,
    window,
    with_modules,
    within,
)
from glassformer.conversion.families.mixtral import NAMES as MIXTRAL
from glassformer.conversion.family import Blocked, Family, experts
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import HeadByHead, OwnParameter, Stacked, TensorLayout, TensorPiece
from glassformer.conversion.rope import write_rotary
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, Retention, RetentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import NormedConfig

LINEAR = "linear_attention"
QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
LIGHTNING: dict[str, Any] = {
    "lightning": True, "expand": 1, "rotate": False, "key_scale": 1.0, "inner": "silu", "norm": "all",
    "gate": "sigmoid", "eps": 1e-6,
}  # fmt: skip
"""Settings of lightning attention that have no field in config.json."""


class _Of(TensorLayout):
    """Two layouts in one: `lightning` for layers of lightning attention, `softmax` for those of softmax attention."""

    def __init__(self, lightning: TensorLayout, softmax: TensorLayout):
        super().__init__(*lightning.names)
        self.lightning, self.softmax = lightning, softmax

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return (self.lightning if isinstance(at.mixer, Retention) else self.softmax).pieces(at)


NAMES = replace(
    with_modules(
        MIXTRAL,
        {
            ".mixer.qkv": _Of(HeadByHead("self_attn.qkv_proj"), Stacked(*QKV)),
            ".mixer.gate_proj": "self_attn.output_gate",
            ".mixer.norm": "self_attn.norm",
            ".mixer.output": _Of(Stacked("self_attn.out_proj"), Stacked("self_attn.o_proj")),
        },
    ),
    ignored=r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",
)


def read(fields: Fields) -> ModelConfig:
    fields.ignore("block_size")  # affects the order of computation only
    fields.only("hidden_act", "silu", "swish")  # also of q, k and v
    layers, context = fields.layers("num_hidden_layers"), fields.whole("max_position_embeddings", 131072)
    alpha, beta = fields.number("mlp_alpha_factor", 1.0), fields.number("mlp_beta_factor", 1.0)
    for kind in ("full", "linear"):  # a wiring has one of each
        fields.only(f"{kind}_attn_alpha_factor", alpha)
        fields.only(f"{kind}_attn_beta_factor", beta)
    norm, of_heads = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-5)), read_heads(fields, 8)
    attention = AttentionConfig(
        **of_heads,
        position=read_whole_rotary(fields, context, theta=1e6),
        visibility=within(fields.whole("sliding_window", None)),
    )
    lightning = RetentionConfig(n_heads=of_heads["n_heads"], head_dim=of_heads["head_dim"], **LIGHTNING)
    usual = [FULL if i % 2 == 0 else LINEAR for i in range(layers)]
    kinds = fields.names("layer_types", (LINEAR, FULL), layers) or usual
    network = ExpertsConfig(**read_routing(fields, "intermediate_size", n_experts=8, top_k=2, width=(14336,)))
    residual = NormedConfig(alpha=alpha, scale=beta)

    def block(kind: str) -> BlockConfig:
        return BlockConfig(mixer=attention if kind == FULL else lightning, ffn=network, norm=norm, residual=residual)

    stack = stack_of([block(kind) for kind in kinds])
    return read_model(fields, context, block(FULL), HeadConfig(tied=False), stack=stack)


def write(config: ModelConfig) -> dict[str, Any]:
    blocks = list(config.layers())
    network, wiring = experts(blocks[0]), blocks[0].residual
    if not isinstance(wiring, NormedConfig):
        raise Blocked({"residual.kind": wiring.kind})
    attention = next((b.mixer for b in blocks if isinstance(b.mixer, AttentionConfig)), None)
    lightning = next((b.mixer for b in blocks if isinstance(b.mixer, RetentionConfig)), None)
    said: dict[str, Any] = {}
    if attention is not None:
        said = {**heads(attention), **write_rotary(attention.position), "sliding_window": window(attention)}
    elif lightning is not None:
        said = {"num_attention_heads": lightning.n_heads, "num_key_value_heads": 1, "head_dim": lightning.head_dim}
    return {
        **sizes(config),
        **said,
        "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": name_of(network),
        "num_local_experts": network.n_experts,
        "num_experts_per_tok": network.top_k,
        "layer_types": [FULL if isinstance(block.mixer, AttentionConfig) else LINEAR for block in blocks],
        **{f"{of}_alpha_factor": wiring.alpha for of in ("mlp", "full_attn", "linear_attn")},
        **{f"{of}_beta_factor": wiring.scale for of in ("mlp", "full_attn", "linear_attn")},
    }


FAMILY = Family("minimax", "MiniMaxForCausalLM", NAMES, read, write)
