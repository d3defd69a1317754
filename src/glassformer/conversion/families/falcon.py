"""Falcon 7B, 40B and 2-11B, and the sequential models before them: `FalconForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families import bloom, gpt_neox
from glassformer.conversion.families.common import ACTIVATIONS, name_of, read_whole_rotary, with_modules
from glassformer.conversion.family import Family, Gguf, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, TensorPiece
from glassformer.conversion.rope import write_rotary
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import AlibiConfig
from glassformer.parts.residual import ParallelConfig, PreConfig

ALIBI = AlibiConfig(rounded=True, scaled=True)
ONE_NORM = replace(bloom.NAMES, ignored=r"transformer\.h\.\d+\.self_attention\.(maybe_)?rotary(_emb)?\.inv_freq")
TWO_NORMS = with_modules(ONE_NORM, {".residual.mixer_norm": "ln_attn", ".residual.ffn_norm": "ln_mlp"})


class _Gguf(Names):
    """Names in a GGUF: `attn_norm` is the FFN's norm, and attention's too if the layer has no separate
    `attn_norm_2`."""

    def pieces(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, list[TensorPiece]]]:
        two = any(path.endswith(".ffn_norm") for path in modules)
        norms = {".residual.mixer_norm": "attn_norm_2" if two else "attn_norm", ".residual.ffn_norm": "attn_norm"}
        yield from Names(self.layer, {**self.modules, **norms}).pieces(modules)


GGUF = _Gguf("blk.*.", gpt_neox.GGUF.modules)


def names(config: ModelConfig) -> Names:
    residual = next(config.layers()).residual
    return TWO_NORMS if isinstance(residual, ParallelConfig) and not residual.shared_norm else ONE_NORM


def read(fields: Fields) -> ModelConfig:
    context, width = fields.whole("max_position_embeddings", 2048), fields.whole("hidden_size", None)
    d = fields.whole("n_embed", width) or fields.whole("hidden_size")  # the older name takes precedence
    n, bias = fields.whole("num_attention_heads"), fields.flag("bias", False)
    norm = LayerNormConfig(eps=fields.number("layer_norm_epsilon", 1e-5))
    new, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    multi_query, groups = fields.flag("multi_query", True), fields.whole("num_kv_heads", None) or n
    shared = fields.get("num_ln_in_parallel_attn") == 1 or not new
    if new:
        fields.only("parallel_attn", True)
        fields.only("num_ln_in_parallel_attn", 2, 1)
    else:
        if parallel:
            fields.only("num_ln_in_parallel_attn", 1)
        if not multi_query and groups != n:
            raise fields.refuse("num_kv_heads", groups, "it needs multi_query or new_decoder_architecture")
        groups = 1 if multi_query else n
    turned = read_whole_rotary(fields, context)  # read, but without effect with alibi
    by_distance = fields.flag("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=n, n_kv_heads=groups, bias=bias, position=ALIBI if by_distance else turned),
        ffn=MlpConfig(
            hidden=fields.whole("ffn_hidden_size", 4 * d),
            activation=fields.one_of("activation", ACTIVATIONS, "gelu"),
            bias=bias,
        ),
        norm=norm,
        residual=ParallelConfig(shared_norm=shared) if parallel else PreConfig(),
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        d_model=d,
        context=context,
        stack=stack_of([block] * fields.layers("num_hidden_layers")),
        final_norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", True)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json, in their older form if that can hold the config: one KV head, or one per query
    head."""
    block = next(config.layers())
    mixer, network = attention(block), ffn(block)
    parallel = isinstance(block.residual, ParallelConfig)
    two = names(config) is TWO_NORMS
    some = mixer.n_kv_heads not in (1, mixer.n_heads)
    new = two or (parallel and some)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "ffn_hidden_size": network.hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": mixer.n_heads,
        "num_kv_heads": mixer.n_heads if some and not new else mixer.n_kv_heads,
        "max_position_embeddings": config.context,
        "new_decoder_architecture": new,
        "multi_query": mixer.n_kv_heads == 1,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
        **write_rotary(mixer.position),
        "alibi": isinstance(mixer.position, AlibiConfig),
        "bias": mixer.bias,
        "activation": name_of(network),
        "layer_norm_epsilon": block.norm.eps,
        "tie_word_embeddings": config.head.tied,
    }


FIELDS = {"ffn_hidden_size": "feed_forward_length", "num_kv_heads": "attention.head_count_kv"}
FLAGS = {"new_decoder_architecture": "blk.0.attn_norm_2.weight"}

FAMILY = Family("falcon", "FalconForCausalLM", names, read, write, Gguf("falcon", GGUF, FIELDS, FLAGS))
