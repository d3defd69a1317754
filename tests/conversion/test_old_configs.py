"""The config.json of published models, in the words of the `transformers` of their day."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.family import attention
from glassformer.conversion.folder import read_config
from tests.parity.published import CONFIGS, NO_CLASS, UNCALLED
from tests.parity.test_counts import PARAMETERS
from tests.refused import refused

transformers.logging.set_verbosity_error()

Json = dict[str, Any]
_SAMPLE = {"do_sample": True, "max_length": 50}


# fmt: off
def _says(kind: str, **fields: Any) -> Json:
    return {"model_type": kind, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True,
            "initializer_range": 0.02, "transformers_version": "4.30.0", **fields}


def _gpt2(layers: int, width: int, heads: int) -> Json:
    return _says(
        "gpt2", n_layer=layers, n_embd=width, n_head=heads, n_ctx=1024, n_positions=1024, vocab_size=50257,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1,
        summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index",
        summary_use_proj=True, task_specific_params={"text-generation": _SAMPLE},
    )


def _llama(kind: str, layers: int, width: int, hidden: int, heads: int, vocab: int, context: int, eps: float,
           **more: Any) -> Json:
    return _says(
        kind, num_hidden_layers=layers, hidden_size=width, intermediate_size=hidden, num_attention_heads=heads,
        vocab_size=vocab, max_position_embeddings=context, rms_norm_eps=eps, hidden_act="silu", **more,
    )


def _qwen3(layers: int, width: int, hidden: int, heads: int, tied: bool) -> Json:
    return _llama(
        "qwen3", layers, width, hidden, heads, 151936, 40960, 1e-6, num_key_value_heads=8, head_dim=128,
        attention_bias=False, attention_dropout=0.0, max_window_layers=layers, rope_scaling=None, rope_theta=1000000,
        sliding_window=None, use_sliding_window=False, tie_word_embeddings=tied,
    )


def _bloom(layers: int, width: int, heads: int, tp: int) -> Json:
    return _says(
        "bloom", n_layer=layers, n_embed=width, num_attention_heads=heads, vocab_size=250880, seq_length=2048,
        apply_residual_connection_post_layernorm=False, attention_dropout=0.0, attention_softmax_in_fp32=True,
        bias_dropout_fusion=True, hidden_dropout=0.0, layer_norm_epsilon=1e-5, masked_softmax_fusion=True,
        n_inner=None, offset_alibi=100, pretraining_tp=tp, skip_bias_add=True, skip_bias_add_qkv=False,
        unk_token_id=0, pad_token_id=3,
    )


def _falcon(layers: int, width: int, heads: int, **more: Any) -> Json:
    return _says(
        "falcon", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=65024,
        alibi=False, apply_residual_connection_post_layernorm=False, attention_dropout=0.0, bias=False,
        hidden_dropout=0.0, layer_norm_epsilon=1e-5, multi_query=True, parallel_attn=True, **more,
    )


def _neox(layers: int, width: int, heads: int, vocab: int, act: str, **more: Any) -> Json:
    return _says(
        "gpt_neox", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocab,
        intermediate_size=4 * width, hidden_act=act, layer_norm_eps=1e-5, max_position_embeddings=2048,
        rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False, **more,
    )


def _mpt(layers: int, width: int, heads: int, context: int) -> Json:
    return _says(
        "mpt", n_layers=layers, d_model=width, n_heads=heads, max_seq_len=context, vocab_size=50432,
        attn_config={
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None,
        },
        emb_pdrop=0, embedding_fraction=1.0, expansion_ratio=4, init_device="cpu", learned_pos_emb=True,
        logit_scale=None, no_bias=True, norm_type="low_precision_layernorm", resid_pdrop=0, verbose=0,
        init_config={"name": "kaiming_normal_", "fan_mode": "fan_in", "init_nonlinearity": "relu", "verbose": 0},
        tokenizer_name="EleutherAI/gpt-neox-20b",
    )


# Name -> config.json, number of parameters. A name that is a preset's must give the preset.
PUBLISHED: dict[str, tuple[Json, int]] = {
    "gpt2": (_gpt2(12, 768, 12), 124_439_808),
    "gpt2-medium": (_gpt2(24, 1024, 16), 354_823_168),
    "gpt2-large": (_gpt2(36, 1280, 20), 774_030_080),
    "gpt2-xl": (_gpt2(48, 1600, 25), 1_557_611_200),
    "llama-7b": (_llama("llama", 32, 4096, 11008, 32, 32000, 2048, 1e-6), 6_738_415_616),
    "llama-13b": (_llama("llama", 40, 5120, 13824, 40, 32000, 2048, 1e-6), 13_015_864_320),
    "llama-2-70b": (
        _llama("llama", 80, 8192, 28672, 64, 32000, 4096, 1e-5, num_key_value_heads=8, rope_scaling=None,
               pretraining_tp=1, tie_word_embeddings=False),
        68_976_648_192,
    ),
    "llama-3-8b": (
        _llama("llama", 32, 4096, 14336, 32, 128256, 8192, 1e-5, num_key_value_heads=8, rope_theta=500000.0,
               rope_scaling=None, attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _llama("llama", 16, 2048, 8192, 32, 128256, 131072, 1e-5, num_key_value_heads=8, head_dim=64,
               rope_theta=500000.0, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
               rope_scaling={"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        1_235_814_400,
    ),
    "smollm2-135m": (
        _llama("llama", 30, 576, 1536, 9, 49152, 8192, 1e-5, num_key_value_heads=3, rope_theta=100000,
               rope_scaling=None, tie_word_embeddings=True),
        134_515_008,
    ),
    "mistral-7b": (
        _llama("mistral", 32, 4096, 14336, 32, 32000, 32768, 1e-5, num_key_value_heads=8, rope_theta=10000.0,
               sliding_window=4096, tie_word_embeddings=False),
        7_241_732_096,
    ),
    "Mistral-7B-Instruct-v0.2": (
        _llama("mistral", 32, 4096, 14336, 32, 32000, 32768, 1e-5, num_key_value_heads=8, rope_theta=1000000.0,
               sliding_window=None, tie_word_embeddings=False, attention_dropout=0.0),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        _llama("qwen2", 24, 896, 4864, 14, 151936, 32768, 1e-6, num_key_value_heads=2, rope_theta=1000000.0,
               max_window_layers=24, sliding_window=32768, use_sliding_window=False, use_mrope=False,
               tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        _llama("qwen2", 28, 3584, 18944, 28, 152064, 131072, 1e-6, num_key_value_heads=4, rope_theta=1000000.0,
               max_window_layers=28, sliding_window=131072, use_sliding_window=False, use_mrope=False,
               tie_word_embeddings=False),
        7_615_616_512,
    ),
    "qwen3-0.6b": (_qwen3(28, 1024, 3072, 16, True), 596_049_920),
    "qwen3-8b": (_qwen3(36, 4096, 12288, 32, False), 8_190_735_360),
    "bloom-560m": (_bloom(24, 1024, 16, 1), 559_214_592),
    "bloom-7b1": (_bloom(30, 4096, 32, 2), 7_069_016_064),
    "falcon-7b": (_falcon(32, 4544, 71, new_decoder_architecture=False), 6_921_720_704),
    "falcon-40b": (_falcon(60, 8192, 128, new_decoder_architecture=True, num_kv_heads=8), 41_303_293_952),
    "gpt-neox-20b": (
        _neox(44, 6144, 64, 50432, "gelu_fast", attention_probs_dropout_prob=0, hidden_dropout_prob=0),
        20_554_567_680,
    ),
    "pythia-160m": (_neox(12, 768, 12, 50304, "gelu", use_parallel_residual=True), 162_322_944),
    "pythia-410m": (_neox(24, 1024, 16, 50304, "gelu", use_parallel_residual=True), 405_334_016),
    "mpt-7b": (_mpt(32, 4096, 32, 2048), 6_649_286_656),
    "opt-125m": (
        _says("opt", num_hidden_layers=12, hidden_size=768, num_attention_heads=12, ffn_dim=3072, vocab_size=50272,
              max_position_embeddings=2048, word_embed_proj_dim=768, activation_function="relu",
              activation_dropout=0.0, attention_dropout=0.0, do_layer_norm_before=True, dropout=0.1, init_std=0.02,
              layerdrop=0.0, pad_token_id=1, prefix="</s>"),
        125_239_296,
    ),
    "mixtral-8x7b": (
        _llama("mixtral", 32, 4096, 14336, 32, 32000, 32768, 1e-5, num_key_value_heads=8, rope_theta=1000000.0,
               sliding_window=None, attention_dropout=0.0, num_local_experts=8, num_experts_per_tok=2,
               output_router_logits=False, router_aux_loss_coef=0.02, tie_word_embeddings=False),
        46_702_792_704,
    ),
    "qwen3-30b-a3b": (
        _llama("qwen3_moe", 48, 2048, 6144, 32, 151936, 40960, 1e-6, num_key_value_heads=4, head_dim=128,
               attention_bias=False, attention_dropout=0.0, max_window_layers=48, rope_scaling=None,
               rope_theta=1000000.0, sliding_window=None, use_sliding_window=False, tie_word_embeddings=False,
               decoder_sparse_step=1,
               mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
               num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001),
        30_532_122_624,
    ),
    "mamba-130m": (
        _says("mamba", hidden_size=768, d_model=768, num_hidden_layers=24, n_layer=24, vocab_size=50280, expand=2,
              d_inner=1536, intermediate_size=1536, state_size=16, conv_kernel=4, time_step_rank=48, ssm_cfg={},
              time_step_min=0.001, time_step_max=0.1, time_step_floor=0.0001, time_step_scale=1.0, rms_norm=True,
              time_step_init_scheme="random", rescale_prenorm_residual=False, residual_in_fp32=True,
              fused_add_norm=True, pad_vocab_size_multiple=8, use_bias=False, use_conv_bias=True, hidden_act="silu",
              layer_norm_epsilon=1e-5),
        129_135_360,
    ),
    "gemma-7b": (
        _llama("gemma", 28, 3072, 24576, 16, 256000, 8192, 1e-6, num_key_value_heads=16, head_dim=256,
               attention_bias=False, rope_scaling=None, rope_theta=10000.0)
        | {"hidden_act": "gelu_pytorch_tanh"},
        8_537_680_896,
    ),
    "gemma-2-9b": (
        _llama("gemma2", 42, 3584, 14336, 16, 256000, 8192, 1e-6, num_key_value_heads=8, head_dim=256,
               attention_bias=False, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
               cache_implementation="hybrid", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
               rope_theta=10000.0, sliding_window=4096),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        _llama("gemma3_text", 26, 1152, 6912, 4, 262144, 32768, 1e-6, num_key_value_heads=1, head_dim=256,
               attention_bias=False, attn_logit_softcapping=None, final_logit_softcapping=None,
               cache_implementation="hybrid", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
               rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
               sliding_window_pattern=6),
        999_885_952,
    ),
    "phi-2": (
        _says("phi", num_hidden_layers=32, hidden_size=2560, intermediate_size=10240, num_attention_heads=32,
              num_key_value_heads=32, vocab_size=51200, max_position_embeddings=2048, hidden_act="gelu_new",
              layer_norm_eps=1e-5, partial_rotary_factor=0.4, qk_layernorm=False, rope_scaling=None,
              rope_theta=10000.0, resid_pdrop=0.1, embd_pdrop=0.0, tie_word_embeddings=False),
        2_779_683_840,
    ),
    "Phi-3-mini-4k": (
        _llama("phi3", 32, 3072, 8192, 32, 32064, 4096, 1e-5, num_key_value_heads=32, attention_bias=False,
               original_max_position_embeddings=4096, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
               resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=32000, tie_word_embeddings=False),
        3_821_079_552,
    ),
    "starcoder2-3b": (
        _says("starcoder2", num_hidden_layers=30, hidden_size=3072, intermediate_size=12288, num_attention_heads=24,
              num_key_value_heads=2, vocab_size=49152, max_position_embeddings=16384, hidden_act="gelu_pytorch_tanh",
              norm_epsilon=1e-5, norm_type="layer_norm", mlp_type="default", rope_theta=999999.4420358813,
              sliding_window=4096, use_bias=True, residual_dropout=0.1, embedding_dropout=0.1),
        3_030_371_328,
    ),
    "stablelm-2-1_6b": (
        _says("stablelm", num_hidden_layers=24, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
              num_key_value_heads=32, vocab_size=100352, max_position_embeddings=4096, hidden_act="silu",
              layer_norm_eps=1e-5, partial_rotary_factor=0.25, rope_theta=10000, use_qkv_bias=True,
              tie_word_embeddings=False),
        1_644_515_328,
    ),
    "OLMo-2-1124-7B": (
        _llama("olmo2", 32, 4096, 11008, 32, 100352, 4096, 1e-6, num_key_value_heads=32, attention_bias=False,
               rope_scaling=None, rope_theta=500000, pad_token_id=100277, tie_word_embeddings=False),
        7_298_617_344,
    ),
    "Llama-4-Scout-17B-16E": (  # its text model
        _llama("llama4_text", 48, 5120, 8192, 40, 202048, 10485760, 1e-5, num_key_value_heads=8, head_dim=128,
               intermediate_size_mlp=16384, rope_theta=500000.0, use_qk_norm=True, attention_bias=False,
               attention_chunk_size=8192, attn_scale=0.1, attn_temperature_tuning=True, floor_scale=8192,
               interleave_moe_layer_step=1, no_rope_layers=[], num_experts_per_tok=1, num_local_experts=16,
               for_llm_compressor=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
               output_router_logits=False, tie_word_embeddings=False,
               rope_scaling={"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        107_769_861_120,
    ),
    "Bamba-9B": (
        _llama("bamba", 32, 4096, 14336, 32, 128256, 262144, 1e-5, num_key_value_heads=8, attention_bias=False,
               attention_dropout=0.0, attn_layer_indices=[9, 18, 27], mamba_chunk_size=256, mamba_conv_bias=True,
               mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
               mamba_n_heads=128, mamba_proj_bias=False, mlp_bias=False, num_logits_to_keep=1, rope_scaling=None,
               rope_theta=10000.0, pad_token_id=0, tie_word_embeddings=False),
        9_780_235_392,
    ),
    "MiniMax-Text-01-hf": (
        _llama("minimax", 80, 6144, 9216, 64, 200064, 10240000, 1e-5, num_key_value_heads=8, head_dim=128,
               attention_dropout=0.0, block_size=256, num_local_experts=32, num_experts_per_tok=2,
               output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0, rope_theta=10000000,
               sliding_window=None, tie_word_embeddings=False,
               layer_types=[("full" if i % 8 == 7 else "linear") + "_attention" for i in range(80)],
               **{f"{of}_{name}_factor": value for of in ("mlp", "full_attn", "linear_attn")
                  for name, value in (("alpha", 3.5565588200778455), ("beta", 1.0))}),
        456_089_655_296,
    ),
    "c4ai-command-r-v01": (
        _says("cohere", num_hidden_layers=40, hidden_size=8192, intermediate_size=22528, num_attention_heads=64,
              num_key_value_heads=64, vocab_size=256000, max_position_embeddings=8192, hidden_act="silu",
              layer_norm_eps=1e-5, logit_scale=0.0625, rope_theta=8000000.0, pretraining_tp=1, attention_bias=False),
        34_980_831_232,
    ),
    "granite-3.0-2b": (
        _llama("granite", 40, 2048, 8192, 32, 49155, 4096, 1e-5, num_key_value_heads=8, attention_bias=False,
               attention_dropout=0.1, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0,
               residual_multiplier=0.22, mlp_bias=False, rope_scaling=None, rope_theta=10000.0,
               tie_word_embeddings=True),
        2_533_531_648,
    ),
}
# fmt: on
_LARGE = {
    "scale_embedding": True,
    "add_bias_logits": False,
    "add_final_layer_norm": True,
    "normalize_before": True,
    "is_encoder_decoder": True,
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
}  # fmt: skip
PUBLISHED |= {
    "mbart-large-cc25": (
        {**_says("mbart", vocab_size=250027, activation_function="gelu", encoder_layers=12, decoder_layers=12),
         **_LARGE},
        610_851_840,
    ),
    "pegasus-large": (
        {**_says("pegasus", vocab_size=96103, activation_function="relu", encoder_layers=16, decoder_layers=16),
         **_LARGE, "static_position_embeddings": True, "length_penalty": 0.8, "num_beams": 8},
        568_699_904,
    ),
}  # fmt: skip
_ENCODER = {
    "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "gradient_checkpointing": False,
}  # fmt: skip
PUBLISHED |= {
    "longformer-base-4096": (
        {**_says("longformer", architectures=["LongformerForMaskedLM"], attention_window=[512] * 12, vocab_size=50265,
                 attention_mode="longformer", hidden_act="gelu", ignore_attention_mask=False, layer_norm_eps=1e-5,
                 max_position_embeddings=4098, pad_token_id=1, sep_token_id=2, type_vocab_size=1), **_ENCODER},
        148_711_257,
    ),
    "bigbird-base": (
        {**_says("big_bird", architectures=["BigBirdModel"], attention_type="block_sparse", block_size=64,
                 hidden_act="gelu_new", layer_norm_eps=1e-12, max_position_embeddings=4096, num_random_blocks=3,
                 pad_token_id=0, rescale_embeddings=False, sep_token_id=66, type_vocab_size=2, use_bias=True,
                 vocab_size=50358, position_embedding_type="absolute"), **_ENCODER},
        127_468_800,
    ),
}  # fmt: skip
PUBLISHED |= {name: (fields, PARAMETERS[name]) for name, fields in CONFIGS.items()}


def read(folder: Path, fields: Json) -> ModelConfig:
    """Reads a config as `gf.load` does, but raises an error for an unknown field."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_config(folder)[1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, tmp_path: Path) -> None:
    fields, parameters = PUBLISHED[name]
    config = read(tmp_path, fields)
    assert config.num_params() == parameters
    if name in gf.presets():
        assert config.resolved() == gf.preset(name).resolved()


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_the_same(name: str, tmp_path: Path) -> None:
    """`transformers` makes the same model from the old words: as built, and as saved in today's words."""
    fields, parameters = PUBLISHED[name]
    config = read(tmp_path / "old", fields)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "old")
    with torch.device("meta"):
        named = theirs.architectures
        auto = transformers.AutoModelForCausalLM if config.encoder is None else transformers.AutoModelForSeq2SeqLM
        model = getattr(transformers, named[0])(theirs) if named else auto.from_config(theirs)
    held = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert held - UNCALLED.get(name, 0) == parameters
    theirs.save_pretrained(tmp_path / "new")
    today = json.loads((tmp_path / "new" / "config.json").read_text())
    assert read(tmp_path / "again", today).resolved() == config.resolved()


# Sizes have no defaults here: a config.json without them is broken.
_SIZES = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32}
_TOWERS = {f"{tower}_{name}": value for tower in ("encoder", "decoder")
           for name, value in (("layers", 2), ("ffn_dim", 256), ("attention_heads", 4))}  # fmt: skip
_NAMED = {"gpt2": {"vocab_size": 64, "n_embd": 128, "n_layer": 2, "n_head": 32},
          "bloom": {"vocab_size": 64, "hidden_size": 128, "n_layer": 2, "n_head": 32},
          "mpt": {"vocab_size": 64, "d_model": 128, "n_layers": 2, "n_heads": 32},
          "opt": {**_SIZES, "ffn_dim": 256},
          "distilbert": {"vocab_size": 64, "dim": 128, "n_layers": 2, "n_heads": 32},
          **{kind: {"vocab_size": 64, "d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4}
             for kind in ("t5", "mt5", "umt5")},
          **{kind: {"vocab_size": 64, "d_model": 128, **_TOWERS} for kind in ("bart", "mbart", "pegasus", "marian")},
          "mamba2": {"vocab_size": 64, "hidden_size": 4096, "num_hidden_layers": 2},
          "deepseek_v2": {**_SIZES, "intermediate_size": 256, "num_experts_per_tok": 2},
          "deepseek_v3": {**_SIZES, "intermediate_size": 256, "num_key_value_heads": 32},
          "mamba": {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2}}  # fmt: skip
MINIMAL = {kind: {"model_type": kind, **_NAMED.get(kind, {**_SIZES, "intermediate_size": 256})} for kind in FAMILIES}
MINIMAL["falcon"].pop("intermediate_size")


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_fields(kind: str, tmp_path: Path) -> None:
    """Absent fields of a config.json have the defaults of the class, as `transformers` writes them out."""
    config = read(tmp_path / "old", MINIMAL[kind])
    transformers.AutoConfig.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    whole = json.loads((tmp_path / "new" / "config.json").read_text())
    assert read(tmp_path / "again", whole).resolved() == config.resolved()


@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_from_a_layer_on(kind: str, first: int, tmp_path: Path) -> None:
    """Older Qwen configs give the first layer with a window; newer ones name each layer."""
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": first}
    config = read(tmp_path / "old", {**MINIMAL[kind], "num_hidden_layers": 3, **windows})
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "old").layer_types
    ours = [attention(block).visibility.kind for block in config.layers()]
    assert ours == ["causal" if one == "full_attention" else "sliding_window" for one in theirs]


def test_every_preset_and_family_is_here() -> None:
    assert set(gf.presets()) <= set(PUBLISHED) | NO_CLASS
    assert set(FAMILIES) - {"mt5", "umt5"} == {fields["model_type"] for fields, _ in PUBLISHED.values()}


REFUSED = {
    "a falcon of groups": (_falcon(2, 64, 4, num_kv_heads=2) | {"multi_query": False}, "num_kv_heads"),
    "two norms in the old falcon": (_falcon(2, 64, 4, num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn"),
    "a sequential new falcon": (
        _falcon(2, 64, 4, new_decoder_architecture=True) | {"parallel_attn": False},
        "parallel_attn",
    ),
    "bloom's other residual": (
        _bloom(2, 64, 4, 1) | {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    "bloom without some biases": (_bloom(2, 64, 4, 2) | {"slow_but_exact": True}, "slow_but_exact"),
    "opt-350m": (
        PUBLISHED["opt-125m"][0] | {"hidden_size": 1024, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
        "word_embed_proj_dim",
    ),
    "opt's norms without weights": (
        PUBLISHED["opt-125m"][0] | {"layer_norm_elementwise_affine": False},
        "layer_norm_elementwise_affine",
    ),
    "mpt with biases": (_mpt(2, 64, 4, 64) | {"no_bias": False}, "no_bias"),
    "mpt's prefix": (_mpt(2, 64, 4, 64) | {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm"),
    "mpt's norm of queries": (_mpt(2, 64, 4, 64) | {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
    "mpt without alibi": (_mpt(2, 64, 4, 64) | {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    "mpt-7b-storywriter": (_mpt(2, 64, 4, 64) | {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max"),
    "mpt's newer fields": (
        _mpt(2, 64, 4, 64) | {"attn_config": {"sliding_window_size": 4}},
        "attn_config.sliding_window_size",
    ),
    "windows without a width": (
        PUBLISHED["qwen3-0.6b"][0] | {"layer_types": 28 * ["sliding_attention"]},
        "layer_types",
    ),
    "mistral turned in part": (PUBLISHED["mistral-7b"][0] | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    """A field that no part computes is named in an error, not computed as something else."""
    fields, field = REFUSED[what]
    with refused(code="unsupported", field=field) as caught:
        read(tmp_path, fields)
    assert "\n" not in str(caught.value)
