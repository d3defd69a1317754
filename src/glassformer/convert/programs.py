"""Which programs run a model once it is saved."""

from __future__ import annotations

from glassformer.config import ModelConfig
from glassformer.convert.families.own import OWN
from glassformer.convert.family import Family
from glassformer.convert.gguf import llama_cpp


def runs_in(config: ModelConfig, family: Family) -> list[str]:
    """vLLM by its list of classes; llama.cpp where a GGUF of the model, read back, gives the same config."""
    if family is OWN:
        return ["glassformer", "transformers (after import glassformer)"]
    return ["transformers", "vLLM", *(["llama.cpp"] if llama_cpp(config).open else [])]
