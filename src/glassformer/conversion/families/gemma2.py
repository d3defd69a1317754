"""Gemma 2: four norms a layer, softcapped scores and logits, every other layer with a window: `Gemma2ForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families import common, gemma, llama
from glassformer.conversion.families.common import ACTIVATIONS, FULL, SLIDING, number_or_none, window, with_modules
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Shifted
from glassformer.conversion.rope import write_rotary
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.residual import SandwichConfig

NAMES = with_modules(
    llama.NAMES,
    {
        ".residual.mixer_post_norm": "post_attention_layernorm",
        ".residual.ffn_norm": "pre_feedforward_layernorm",
        ".residual.ffn_post_norm": "post_feedforward_layernorm",
    },
)
GGUF = with_modules(
    gemma.GGUF,
    {
        ".residual.mixer_post_norm": Shifted("post_attention_norm"),
        ".residual.ffn_post_norm": Shifted("post_ffw_norm"),
    },
)
CONTEXT, CAP = 8192, "final_logit_softcapping"
FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    CAP: CAP,
}


def read(fields: Fields) -> ModelConfig:
    n_layers = fields.layers("num_hidden_layers")
    kinds = fields.names("layer_types", (SLIDING, FULL), n_layers) or [(SLIDING, FULL)[i % 2] for i in range(n_layers)]
    mixer = read_mixer(fields).replace(
        position=common.read_whole_rotary(fields, fields.whole("max_position_embeddings", CONTEXT)),
        softcap=number_or_none(fields, "attn_logit_softcapping", 50.0),
    )
    near = mixer.replace(visibility=common.within(fields.whole("sliding_window", 4096)))
    return assemble(fields, kinds, {SLIDING: near, FULL: mixer}, CONTEXT, number_or_none(fields, CAP, 30.0))


def read_mixer(fields: Fields) -> AttentionConfig:
    fields.only("use_bidirectional_attention", False)
    return AttentionConfig(
        **common.read_heads(fields, n_kv_heads=4, head_dim=256),
        bias=fields.flag("attention_bias", False),
        scale=fields.whole("query_pre_attn_scalar", 256) ** -0.5,
    )


def read_norm(fields: Fields) -> RMSNormConfig:
    return RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6), unit_offset=True)


def assemble(
    fields: Fields, kinds: list[str], mixers: Mapping[str, AttentionConfig], context: int, softcap: float | None
) -> ModelConfig:
    """Returns a model of Gemma 2 or 3: layer i has the mixer `mixers[kinds[i]]`, the head the `softcap`; `context` is
    the family's default."""
    fields.ignore("hidden_act")  # hidden_activation takes precedence
    d, norm = fields.whole("hidden_size"), read_norm(fields)
    network = GluConfig(
        hidden=fields.whole("intermediate_size"),
        activation=fields.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    blocks = {
        kind: BlockConfig(mixer=mixer, ffn=network, norm=norm, residual=SandwichConfig())
        for kind, mixer in mixers.items()
    }
    return common.read_model(
        fields,
        fields.whole("max_position_embeddings", context),
        blocks[kinds[0]],
        HeadConfig(tied=True, softcap=softcap),
        embedding=EmbeddingConfig(scale=d**0.5),
        stack=stack_of([blocks[kind] for kind in kinds]),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return {**written(config), **write_rotary(attention(next(config.layers())).position)}


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json, except those of the rotary positions. Raises Blocked."""
    block = next(common.divided(config).layers())
    mixer = attention(block)
    windows = [window(attention(one)) for one in config.layers()]
    return {
        **common.sizes(config),
        **common.heads(mixer),
        "layer_types": common.layer_types(config),
        "sliding_window": next(filter(None, windows), config.context),
        "query_pre_attn_scalar": max(1, round(max(mixer.scale or 1.0, 1e-9) ** -2)),
        "attn_logit_softcapping": mixer.softcap,
        CAP: config.head.softcap,
        "rms_norm_eps": block.norm.eps,
        "hidden_activation": common.name_of(ffn(block)),
        "attention_bias": mixer.bias,
    }


def scaled_by(said: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Returns {"query_pre_attn_scalar": width / heads} for the family's largest model, recognised by its `largest`
    layers; for others {"query_pre_attn_scalar": head_dim}. `said` is the metadata of a GGUF."""
    width, n_heads, h = (said.get(key) for key in ("embedding_length", "attention.head_count", "attention.key_length"))
    wide = said.get("block_count") == largest and isinstance(width, int) and isinstance(n_heads, int) and n_heads > 0
    return {"query_pre_attn_scalar": width // n_heads if wide else h}  # type: ignore[operator]


FAMILY = Family(
    "gemma2", "Gemma2ForCausalLM", NAMES, read, write,
    Gguf("gemma2", GGUF, FIELDS, implied=lambda said: scaled_by(said, 46)),
)  # fmt: skip
