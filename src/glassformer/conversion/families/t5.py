"""T5, T5 v1.1 and Flan-T5: `T5ForConditionalGeneration`. Scores are not scaled; one table of relative biases for each
tower. A tied head scales its input by 1 / sqrt(d)."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.conversion.families.common import ACTIVATIONS, encoder_of, halves
from glassformer.conversion.family import Blocked, Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import FFNConfig, GluConfig, MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RelativeBiasConfig
from glassformer.parts.projection import FusedQKVConfig
from glassformer.parts.visibility import BidirectionalConfig, CausalConfig


def _self(stem: str) -> dict[str, str]:
    return {
        f"{stem}.mixer.qkv": "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v",
        f"{stem}.mixer.output": "layer.0.SelfAttention.o",
        f"{stem}.mixer.position.table": "layer.0.SelfAttention.relative_attention_bias",
        f"{stem}.residual.mixer_norm": "layer.0.layer_norm",
    }


def _ffn(stem: str, layer: int, gated: bool) -> dict[str, str]:
    wi = f"layer.{layer}.DenseReluDense"
    return {
        f"{stem}.ffn.gate_proj": f"{wi}.wi_0",
        f"{stem}.ffn.up_proj": f"{wi}.wi_1" if gated else f"{wi}.wi",
        f"{stem}.ffn.down_proj": f"{wi}.wo",
        f"{stem}.residual.ffn_norm": f"layer.{layer}.layer_norm",
    }


def names(config: ModelConfig) -> Names:
    gated = any(isinstance(block.ffn, GluConfig) for block in config.layers())
    return Names(
        "decoder.block.*.",
        {
            "embedding": "shared",
            **_self(".0"),
            ".1.mixer.q_proj": "layer.1.EncDecAttention.q",
            ".1.mixer.kv_proj": "layer.1.EncDecAttention.k layer.1.EncDecAttention.v",
            ".1.mixer.output": "layer.1.EncDecAttention.o",
            ".1.residual.mixer_norm": "layer.1.layer_norm",
            **_ffn(".1", 2, gated),
            "final_norm": "decoder.final_layer_norm",
            "head": "lm_head",
        },
        overflows=True,
        copies=frozenset(f"{tower}.embed_tokens.weight" for tower in ("encoder", "decoder")),
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        blocks=2,
        encoder=Names(
            "encoder.block.*.", {**_self(""), **_ffn("", 1, gated), "final_norm": "encoder.final_layer_norm"}
        ),
    )


def read(fields: Fields, activation: str = "relu", scaled: bool = True, shared: bool = True) -> ModelConfig:
    """Reads T5. `activation`: the family's default; `scaled`: True if a tied head scales its input by default;
    `shared`: True if the layers of a tower share one table of relative biases."""
    n, h, layers = fields.whole("num_heads"), fields.whole("d_kv", 64), fields.layers("num_layers")
    d, context = fields.whole("d_model"), fields.whole("n_positions", 512)
    norm = RMSNormConfig(eps=fields.number("layer_norm_epsilon", 1e-6))
    fields.ignore("dropout_rate", "output_past", "classifier_dropout")
    fields.ignore("tokenizer_class", "relative_attention_num_buckets", "relative_attention_max_distance")
    buckets = fields.whole("relative_attention_num_buckets", 32)
    furthest = fields.whole("relative_attention_max_distance", 128)
    network = _network(fields, activation)

    def own(both_sides: bool) -> AttentionConfig:
        return AttentionConfig(
            n_heads=n, head_dim=h, scale=1.0, projection=FusedQKVConfig(),
            position=RelativeBiasConfig(buckets=buckets, furthest=furthest, both_sides=both_sides, shared=shared),
            visibility=BidirectionalConfig() if both_sides else CausalConfig(),
        )  # fmt: skip

    cross = CrossAttentionConfig(n_heads=n, head_dim=h, scale=1.0)
    tied = fields.flag("tie_word_embeddings", True)
    scaled = scaled and fields.flag("scale_decoder_outputs", tied)
    reads = BlockConfig(mixer=own(True), ffn=network, norm=norm)
    writes = (BlockConfig(mixer=own(False), ffn=None, norm=norm), BlockConfig(mixer=cross, ffn=network, norm=norm))
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=d,
        context=context,
        stack=(Stage(repeat=fields.whole("num_decoder_layers", layers), blocks=writes),),
        final_norm=norm,
        head=HeadConfig(tied=tied, scale=d**-0.5 if scaled else None),
        encoder=TowerConfig(
            embedding=EmbeddingConfig(tied=True), stack=(Stage(repeat=layers, blocks=(reads,)),), final_norm=norm
        ),
    )


def _network(fields: Fields, activation: str) -> FFNConfig:
    said = fields.get("feed_forward_proj", activation)
    word = str(said).removeprefix("gated-")
    phi = "gelu_tanh" if said == "gated-gelu" else ACTIVATIONS.get(word)
    if phi is None:
        raise fields.refuse("feed_forward_proj", said, f"known are {', '.join(ACTIVATIONS)}, and these after gated-")
    if fields.get("dense_act_fn") is not None:  # takes precedence, if both are given
        phi = fields.one_of("dense_act_fn", ACTIVATIONS, word)
    fields.only("is_gated_act", word != said)
    hidden = fields.whole("d_ff")
    if word != said:
        return GluConfig(hidden=hidden, activation=phi)
    return MlpConfig(hidden=hidden, activation=phi, bias=False)


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, (own, cross) = encoder_of(config), halves(config)
    mixer, network = attention(own), ffn(cross)
    if not isinstance(mixer.position, RelativeBiasConfig):
        raise Blocked({"mixer.position.kind": mixer.position and mixer.position.kind})
    gated, phi = isinstance(network, GluConfig), getattr(network, "activation", network.kind)
    word = {"gelu_tanh": "gelu" if gated else "gelu_new"}.get(phi, phi)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": mixer.head_dim,
        "d_ff": network.hidden,
        "num_layers": encoder.n_layers,
        "num_decoder_layers": config.n_layers // 2,
        "num_heads": mixer.n_heads,
        "n_positions": config.context,
        "relative_attention_num_buckets": mixer.position.buckets,
        "relative_attention_max_distance": mixer.position.furthest,
        "layer_norm_epsilon": getattr(own.norm, "eps", None),
        "feed_forward_proj": f"gated-{word}" if gated else word,
        "tie_word_embeddings": config.head.tied,
        "scale_decoder_outputs": (config.head.scale or 1.0) != 1.0,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


FAMILY = Family("t5", "T5ForConditionalGeneration", names, read, write)


def read_mt5(fields: Fields) -> ModelConfig:
    """Reads mT5, `MT5ForConditionalGeneration`: T5 v1.1 without a scale before the head, tied or not."""
    return read(fields, "gated-gelu", scaled=False)


def write_without_scale(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json for mT5 and UMT5, which lack T5's field of the head's scale."""
    said = write(config)
    del said["scale_decoder_outputs"]
    return said


MT5 = Family("mt5", "MT5ForConditionalGeneration", names, read_mt5, write_without_scale)


def read_umt5(fields: Fields) -> ModelConfig:
    """Reads UMT5, `UMT5ForConditionalGeneration`: mT5 with a table of relative biases in each layer, and a scale before
    a tied head as in T5.

    An untied head is read without a scale, because the published checkpoints were trained so; release 5 of
    `transformers` scales every head of this class."""
    return read(fields, "gated-gelu", shared=False)


UMT5 = Family("umt5", "UMT5ForConditionalGeneration", names, read_umt5, write_without_scale)
