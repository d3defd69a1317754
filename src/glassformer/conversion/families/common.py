"""Readers and writers of fields that most families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, TowerConfig, stack_of
from glassformer.conversion.family import Blocked, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, TensorLayout
from glassformer.conversion.rope import read_rotary, write_rotary
from glassformer.parts.ffn import FFNConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.visibility import CausalConfig, SlidingWindowConfig, VisibilityConfig

# Published names of our activations. The first of equal ones is written.
ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
}
_THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


QK_NORM = {".mixer.qk_norm.q_norm": "self_attn.q_norm", ".mixer.qk_norm.k_norm": "self_attn.k_norm"}
QK_NORM_GGUF = {".mixer.qk_norm.q_norm": "attn_q_norm", ".mixer.qk_norm.k_norm": "attn_k_norm"}


def with_modules(names: Names, modules: Mapping[str, str | TensorLayout]) -> Names:
    """Returns a copy of `names` with these modules replaced or added."""
    return replace(names, modules={**names.modules, **modules})


def with_experts(names: Names, modules: Mapping[str, str | TensorLayout]) -> Names:
    """Returns `with_modules(names, modules)` for a published class that holds all experts of a layer in one module,
    `mlp`."""
    return replace(with_modules(names, modules), wholes={".ffn": "mlp"})


def name_of(network: FFNConfig | TransformConfig) -> str:
    """Returns the published name of an FFN's activation."""
    ours = str(getattr(network, "activation", None) or getattr(network, "kind", ""))
    return _THEIRS.get(ours, ours)


def read_heads(fields: Fields, n_kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """Reads the arguments n_heads, n_kv_heads and head_dim of an `AttentionConfig`; the parameters are the family's
    defaults."""
    return {
        "n_heads": fields.whole("num_attention_heads"),
        "n_kv_heads": fields.whole("num_key_value_heads", n_kv_heads),
        "head_dim": fields.whole("head_dim", head_dim),
    }


def read_ffn(fields: Fields, activation: str = "silu") -> dict[str, Any]:
    """Reads the arguments hidden and activation of an FFN's config; `activation` is the family's default, by its
    published name."""
    return {
        "hidden": fields.whole("intermediate_size"),
        "activation": fields.one_of("hidden_act", ACTIVATIONS, activation),
    }


def read_routing(
    fields: Fields,
    hidden: str,
    n_experts: int,
    top_k: int,
    also: str = "num_local_experts",
    width: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Reads the arguments hidden, activation, n_experts and top_k of an `ExpertsConfig`; `n_experts` and `top_k` are
    the family's defaults. `hidden` names the field of one expert's hidden size, required unless `width` has a default;
    `also` names an older field of the number of experts."""
    fields.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")  # fields of training only
    older = fields.whole(also, n_experts)
    return {
        "hidden": fields.whole(hidden, *width),
        "activation": fields.one_of("hidden_act", ACTIVATIONS, "silu"),
        "n_experts": fields.whole("num_local_experts", older),
        "top_k": fields.whole("num_experts_per_tok", top_k),
    }


def read_model(
    fields: Fields, context: int, block: BlockConfig, tokens: HeadConfig | None = None, **own: Any
) -> ModelConfig:
    """Returns the config of a model of equal blocks, whose norm is also the final norm. `tokens` is the head, tied by
    default if the field tie_word_embeddings is absent; `own` replaces arguments of `ModelConfig`."""
    head = tokens or HeadConfig()
    said: dict[str, Any] = {
        "vocab_size": fields.whole("vocab_size"),
        "d_model": fields.whole("hidden_size"),
        "context": context,
        "stack": stack_of([block] * fields.layers("num_hidden_layers")),
        "final_norm": block.norm,
        "head": head.replace(tied=fields.flag("tie_word_embeddings", head.tied)),
    }
    return ModelConfig(**said | own)


def encoder_of(config: ModelConfig) -> TowerConfig:
    """Returns the encoder. Raises Blocked for a model without one."""
    if config.encoder is None:
        raise Blocked({"encoder": None})
    return config.encoder


def halves(config: ModelConfig) -> tuple[BlockConfig, BlockConfig]:
    """Returns the two blocks that make one layer of a published decoder: self-attention, and cross-attention with FFN.
    Raises Blocked for other blocks."""
    own, cross, *_ = [*config.layers(), None, None]
    if own is None or cross is None or not isinstance(cross.mixer, CrossAttentionConfig):
        raise Blocked({"stack": "blocks of another kind"})
    return own, cross


def heads(mixer: AttentionConfig) -> dict[str, Any]:
    """Returns the fields of config.json for the attention's numbers of heads and head size."""
    return {
        "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads,
        "head_dim": mixer.head_dim,
    }


def sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": ffn(next(config.layers())).hidden,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
    }


def usual(config: ModelConfig, fraction_name: str | None = None) -> dict[str, Any]:
    """Returns the fields of config.json for sizes, heads, rotary positions and activation, without the eps of norms and
    without fields special to a family. `fraction_name` is the field of the rotated share of a head, None without one.
    """
    block = next(config.layers())
    mixer = attention(block)
    return {
        **sizes(config),
        **heads(mixer),
        **write_rotary(mixer.position, fraction_name),
        "hidden_act": name_of(ffn(block)),
    }


def divided(config: ModelConfig) -> ModelConfig:
    """Returns the config itself. Raises Blocked if its width is not divisible by the number of heads, which some
    published classes require regardless of head_dim."""
    n_heads = attention(next(config.layers())).n_heads
    if config.d_model % n_heads:
        raise Blocked({"mixer.n_heads": n_heads})
    return config


def read_whole_rotary(fields: Fields, context: int, **more: Any) -> RotaryConfig:
    """Reads rotary positions that rotate the whole head. Raises RequestError for a partial_rotary_factor, which
    `transformers` applies to these classes in some scalings only."""
    position = read_rotary(fields, context, **more)
    if position.fraction != 1.0:
        raise fields.refuse("partial_rotary_factor", position.fraction, "this family turns the whole head")
    return position


def number_or_none(fields: Fields, name: str, default: float | None) -> float | None:
    """Returns the number in the field `name`: None if it is null, `default` if it is absent."""
    return fields.number(name, None) if name in fields.values else default


def whole_or_none(fields: Fields, name: str, default: int) -> int | None:
    """Returns the positive integer in the field `name`: None if it is null, `default` if it is absent."""
    return fields.whole(name, None if name in fields.values else default)


SLIDING, FULL = "sliding_attention", "full_attention"


def window(mixer: AttentionConfig) -> int | None:
    return getattr(mixer.visibility, "window", None)


def within(window: int | None) -> VisibilityConfig:
    return CausalConfig() if window is None else SlidingWindowConfig(window=window)


def layer_types(config: ModelConfig) -> list[str]:
    return [FULL if window(attention(block)) is None else SLIDING for block in config.layers()]
