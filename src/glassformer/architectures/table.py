"""Table of the published models: name -> function that returns the config."""

from __future__ import annotations

from collections.abc import Callable

from glassformer.architectures.bart import bart_base, bart_large, opus_mt
from glassformer.architectures.bert import (
    bert_base,
    bert_base_mlm,
    bigbird_base,
    distilbert_base,
    longformer_base,
    minilm_l6,
    roberta_base,
)
from glassformer.architectures.bloom import bloom_7b1, bloom_560m
from glassformer.architectures.deepseek import deepseek_v2_lite, deepseek_v3
from glassformer.architectures.falcon import falcon_7b, falcon_40b
from glassformer.architectures.gemma import gemma_2_2b, gemma_2_9b, gemma_3_1b, gemma_3_270m
from glassformer.architectures.glam import glam
from glassformer.architectures.gpt2 import gpt2, gpt2_large, gpt2_medium, gpt2_xl, gpt_1, gpt_3, starcoder
from glassformer.architectures.gpt_neox import gpt_neox_20b, pythia_160m
from glassformer.architectures.gpt_oss import gpt_oss_20b, gpt_oss_120b
from glassformer.architectures.jamba import jamba_v0_1
from glassformer.architectures.llama import (
    llama_2_70b,
    llama_3_2_1b,
    llama_3_2_3b,
    llama_3_8b,
    llama_7b,
    llama_13b,
    phi_3_mini,
    smollm2_1_7b,
    smollm2_135m,
    smollm2_360m,
)
from glassformer.architectures.mamba import mamba2_130m, mamba_130m
from glassformer.architectures.mistral import mistral_7b, mixtral_8x7b
from glassformer.architectures.modernbert import modernbert_base
from glassformer.architectures.mpt import mpt_7b
from glassformer.architectures.olmo import olmo_2_1b, olmo_2_7b, olmoe_1b_7b
from glassformer.architectures.palm import palm_8b, palm_540b
from glassformer.architectures.qwen2 import qwen2_5_0_5b, qwen2_5_1_5b, qwen2_5_7b
from glassformer.architectures.qwen3 import qwen3_0_6b, qwen3_8b, qwen3_30b_a3b
from glassformer.architectures.qwen3_next import qwen3_next_80b
from glassformer.architectures.t5 import flan_t5_small, switch_base, t5_small
from glassformer.architectures.transformer import transformer_base, transformer_big
from glassformer.architectures.vit import vit_base
from glassformer.config import ModelConfig
from glassformer.typed import typed

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
    "gpt-1": gpt_1,
    "gpt-3": gpt_3,
    "starcoder": starcoder,
    "palm-8b": palm_8b,
    "palm-540b": palm_540b,
    "glam": glam,
    "llama-7b": llama_7b,
    "llama-13b": llama_13b,
    "llama-2-70b": llama_2_70b,
    "llama-3-8b": llama_3_8b,
    "llama-3.2-1b": llama_3_2_1b,
    "llama-3.2-3b": llama_3_2_3b,
    "smollm2-135m": smollm2_135m,
    "smollm2-360m": smollm2_360m,
    "smollm2-1.7b": smollm2_1_7b,
    "mistral-7b": mistral_7b,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen2.5-0.5b": qwen2_5_0_5b,
    "qwen2.5-1.5b": qwen2_5_1_5b,
    "qwen2.5-7b": qwen2_5_7b,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-8b": qwen3_8b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v3": deepseek_v3,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-120b": gpt_oss_120b,
    "olmo-2-1b": olmo_2_1b,
    "olmo-2-7b": olmo_2_7b,
    "olmoe-1b-7b": olmoe_1b_7b,
    "gemma-2-2b": gemma_2_2b,
    "gemma-2-9b": gemma_2_9b,
    "gemma-3-270m": gemma_3_270m,
    "gemma-3-1b": gemma_3_1b,
    "phi-3-mini": phi_3_mini,
    "bloom-560m": bloom_560m,
    "bloom-7b1": bloom_7b1,
    "falcon-7b": falcon_7b,
    "falcon-40b": falcon_40b,
    "gpt-neox-20b": gpt_neox_20b,
    "pythia-160m": pythia_160m,
    "mpt-7b": mpt_7b,
    "mamba-130m": mamba_130m,
    "mamba2-130m": mamba2_130m,
    "jamba-v0.1": jamba_v0_1,
    "qwen3-next-80b": qwen3_next_80b,
    "bert-base": bert_base,
    "bert-base-mlm": bert_base_mlm,
    "minilm-l6": minilm_l6,
    "roberta-base": roberta_base,
    "distilbert-base": distilbert_base,
    "modernbert-base": modernbert_base,
    "longformer-base": longformer_base,
    "bigbird-base": bigbird_base,
    "transformer-base": transformer_base,
    "transformer-big": transformer_big,
    "t5-small": t5_small,
    "flan-t5-small": flan_t5_small,
    "switch-base": switch_base,
    "bart-base": bart_base,
    "bart-large": bart_large,
    "opus-mt": opus_mt,
    "vit-base": vit_base,
}


@typed
def presets(word: str = "") -> list[str]:
    """Returns the names of the published models, those that an expression may start with.

    Parameters
    ----------
    word
        Part of the names that are returned; by default all are.

    Returns
    -------
    list of str
        Names for `gf.preset`.

    Examples
    --------
    >>> "qwen3-8b" in gf.presets()
    True
    >>> gf.presets("mamba")
    ['mamba-130m', 'mamba2-130m']
    """
    return [name for name in PRESETS if word in name]
