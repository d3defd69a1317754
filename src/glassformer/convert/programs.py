"""Which programs run a model once it is saved."""

from __future__ import annotations

from typing import Literal

from glassformer.config import ModelConfig
from glassformer.convert.families.own import OWN
from glassformer.convert.family import Family
from glassformer.convert.gguf import llama_cpp

Format = Literal["hf", "gguf"]

VLLM = frozenset({
    "BloomForCausalLM", "CohereForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "MixtralForCausalLM", "MptForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM",
})  # fmt: skip
"""Classes that vLLM registers for text, of those written here: `_TEXT_GENERATION_MODELS` of its
vllm/model_executor/models/registry.py at commit 0002bff."""


def runs_in(config: ModelConfig, family: Family, written: Format | None = None) -> list[str]:
    """What was `written`, a folder or a GGUF; where nothing is yet, whichever of them there can be.

    vLLM where it registers the class, whatever the fields say; llama.cpp where a GGUF of the model, read back, gives
    the same config."""
    file = ["llama.cpp"] if written != "hf" and llama_cpp(config).open else []
    if written == "gguf":
        return file
    if family is OWN:
        return ["glassformer", "transformers (after import glassformer)"]
    return ["transformers", *(["vLLM"] if family.architecture_of(config) in VLLM else []), *file]
