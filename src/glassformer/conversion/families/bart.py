"""BART, mBART, Pegasus and Marian: encoder-decoders whose configs share their field names."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.conversion.families.common import ACTIVATIONS, encoder_of, halves, name_of
from glassformer.conversion.family import Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import EmbeddingPositionConfig, LearnedConfig, SinusoidalConfig
from glassformer.parts.residual import PostConfig, PreConfig
from glassformer.parts.visibility import BidirectionalConfig

NORM = LayerNormConfig(eps=1e-5)
LEARNED = LearnedConfig(offset=2)
SINES = SinusoidalConfig(layout="halves")
UNUSED = (
    "encoder_layerdrop", "decoder_layerdrop", "num_labels",
    "force_bos_token_to_be_generated", "num_beams", "max_length", "min_length", "early_stopping",
    "length_penalty", "prefix",
    "num_hidden_layers", "normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits",
    "static_position_embeddings", "extra_pos_embeddings",
)  # fmt: skip
"""Fields of training and decoding, and fields that follow from the family."""


def _tower(name: str) -> dict[str, str]:
    return {
        "embedding.position": f"model.{name}.embed_positions",
        "embedding.norm": f"model.{name}.layernorm_embedding",
        "final_norm": f"model.{name}.layer_norm",
    }


def _self(stem: str) -> dict[str, str]:
    return {
        f"{stem}.mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        f"{stem}.mixer.output": "self_attn.out_proj",
        f"{stem}.residual.mixer_norm": "self_attn_layer_norm",
    }


def _ffn(stem: str) -> dict[str, str]:
    return {
        f"{stem}.ffn.up_proj": "fc1",
        f"{stem}.ffn.down_proj": "fc2",
        f"{stem}.residual.ffn_norm": "final_layer_norm",
    }


NAMES = Names(
    "model.decoder.layers.*.",
    {
        "embedding": "model.shared",
        **_tower("decoder"),
        **_self(".0"),
        ".1.mixer.q_proj": "encoder_attn.q_proj",
        ".1.mixer.kv_proj": "encoder_attn.k_proj encoder_attn.v_proj",
        ".1.mixer.output": "encoder_attn.out_proj",
        ".1.residual.mixer_norm": "encoder_attn_layer_norm",
        **_ffn(".1"),
        "head": "lm_head",
    },
    ignored=r"model\.(en|de)coder\.embed_positions\.weight",
    copies=frozenset(f"model.{tower}.embed_tokens.weight" for tower in ("encoder", "decoder")),
    buffers={"head.offset": "final_logits_bias"},
    absent=frozenset({"final_logits_bias"}),
    blocks=2,
    encoder=Names("model.encoder.layers.*.", {**_tower("encoder"), **_self(""), **_ffn("")}),
)


def read_towers(
    fields: Fields, position: EmbeddingPositionConfig, embedding_norm: bool, before: bool, activation: str = "gelu"
) -> ModelConfig:
    """Reads the config of an encoder-decoder. `before`: True for pre-norm with a final norm, False for post-norm;
    `embedding_norm`: True for a norm after the embedding; `activation`: the family's default."""
    d, context = fields.whole("d_model"), fields.whole("max_position_embeddings", 1024)
    fields.ignore(*UNUSED)
    scale = d**0.5 if fields.flag("scale_embedding", False) else None
    phi = fields.one_of("activation_function", ACTIVATIONS, activation)
    embedding = EmbeddingConfig(scale=scale, norm=NORM if embedding_norm else None, position=position)

    def block(tower: str, mixer: Any, network: bool = True) -> BlockConfig:
        ffn = MlpConfig(hidden=fields.whole(f"{tower}_ffn_dim"), activation=phi, bias=True)
        return BlockConfig(
            mixer=mixer, ffn=ffn if network else None, norm=NORM, residual=PreConfig() if before else PostConfig()
        )

    heads = {tower: fields.whole(f"{tower}_attention_heads") for tower in ("encoder", "decoder")}
    reads = AttentionConfig(n_heads=heads["encoder"], bias=True, visibility=BidirectionalConfig())
    own = AttentionConfig(n_heads=heads["decoder"], bias=True)
    cross = CrossAttentionConfig(n_heads=heads["decoder"], bias=True)
    writes = (block("decoder", own, network=False), block("decoder", cross))
    final = NORM if before else None
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=d,
        context=context,
        embedding=embedding,
        stack=(Stage(repeat=fields.layers("decoder_layers"), blocks=writes),),
        final_norm=final,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True), offset=True),
        encoder=TowerConfig(
            embedding=embedding.replace(tied=True),
            stack=(Stage(repeat=fields.layers("encoder_layers"), blocks=(block("encoder", reads),)),),
            final_norm=final,
        ),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, (own, cross) = encoder_of(config), halves(config)
    reads = next(encoder.layers())
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "max_position_embeddings": config.context,
        "encoder_layers": encoder.n_layers,
        "decoder_layers": config.n_layers // 2,
        "encoder_attention_heads": attention(reads).n_heads,
        "decoder_attention_heads": attention(own).n_heads,
        "encoder_ffn_dim": ffn(reads).hidden,
        "decoder_ffn_dim": ffn(cross).hidden,
        "activation_function": name_of(ffn(cross)),
        "scale_embedding": (config.embedding.scale or 1.0) != 1.0,
        "tie_word_embeddings": config.head.tied,
        "is_encoder_decoder": True,
    }


def read(fields: Fields) -> ModelConfig:
    """Reads BART, `BartForConditionalGeneration`: post-norm, and a norm on the embedding."""
    return read_towers(fields, LEARNED, embedding_norm=True, before=False)


FAMILY = Family("bart", "BartForConditionalGeneration", NAMES, read, write, start="eos_token_id")


def read_mbart(fields: Fields) -> ModelConfig:
    """Reads mBART, `MBartForConditionalGeneration`: BART with pre-norm and a final norm."""
    return read_towers(fields, LEARNED, embedding_norm=True, before=True)


MBART = Family("mbart", "MBartForConditionalGeneration", NAMES, read_mbart, write)


def read_pegasus(fields: Fields) -> ModelConfig:
    """Reads Pegasus, `PegasusForConditionalGeneration`: pre-norm, and sinusoids with all sines first."""
    return read_towers(fields, SINES, embedding_norm=False, before=True)


PEGASUS = Family("pegasus", "PegasusForConditionalGeneration", NAMES, read_pegasus, write)


def read_marian(fields: Fields) -> ModelConfig:
    """Reads Marian (OPUS-MT), `MarianMTModel`: post-norm, and sinusoids with all sines first."""
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        fields.only(name, True)
    fields.only("decoder_vocab_size", fields.whole("vocab_size"))
    return read_towers(fields, SINES, embedding_norm=False, before=False)


MARIAN = Family("marian", "MarianMTModel", NAMES, read_marian, write)
