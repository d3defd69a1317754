"""The published families, one file each. A new one is a file with a FAMILY, named in the table here."""

from __future__ import annotations

from glassformer.convert.families import (
    bamba,
    bart,
    bert,
    big_bird,
    bloom,
    cohere,
    deepseek_v2,
    deepseek_v3,
    distilbert,
    falcon,
    gemma,
    gemma2,
    gemma3_text,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    jamba,
    llama,
    llama4_text,
    longformer,
    mamba,
    mamba2,
    marian,
    mbart,
    minimax,
    mistral,
    mixtral,
    modernbert,
    mpt,
    mt5,
    olmo2,
    olmoe,
    opt,
    pegasus,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    roberta,
    stablelm,
    starcoder2,
    t5,
    umt5,
    vit,
)
from glassformer.convert.family import Family

_MODULES = [
    llama, gpt2, bloom, falcon, gpt_neox, mistral, mpt, opt, qwen2, qwen3,
    gemma, gemma2, gemma3_text, phi, phi3, starcoder2, stablelm, olmo2, cohere, granite,
    mixtral, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss, llama4_text, mamba, mamba2, jamba, bamba, qwen3_next,
    minimax, bert, roberta, distilbert, modernbert, longformer, big_bird, vit,
    t5, mt5, umt5, bart, mbart, pegasus, marian,
]  # fmt: skip
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""model_type -> family. Where several can hold a config, the first is the one it is written as."""
