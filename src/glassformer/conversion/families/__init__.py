"""Published families, one file each. A new one is a file with a FAMILY, named in the table here."""

from glassformer.conversion.families import (
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
    minimax,
    mistral,
    mixtral,
    modernbert,
    mpt,
    olmo2,
    olmoe,
    opt,
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
    vit,
)
from glassformer.conversion.family import Family

_MODULES = [
    llama, gpt2, bloom, falcon, gpt_neox, mistral, mpt, opt, qwen2, qwen3,
    gemma, gemma2, gemma3_text, phi, phi3, starcoder2, stablelm, olmo2, cohere, granite,
    mixtral, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss, llama4_text, mamba, mamba2, jamba, bamba, qwen3_next,
    minimax, bert, roberta, distilbert, modernbert, longformer, big_bird, vit,
]  # fmt: skip
_IN_OTHER_WORDS = [t5.FAMILY, t5.MT5, t5.UMT5, bart.FAMILY, bart.MBART, bart.PEGASUS, bart.MARIAN]
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*(module.FAMILY for module in _MODULES), *_IN_OTHER_WORDS)
}
"""model_type -> family. If several can hold a config, it is written as the first."""
