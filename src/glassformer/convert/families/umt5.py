"""UMT5: `UMT5ForConditionalGeneration`. mT5 with a table of relative biases in each layer, and T5's scaled tied head.

The published checkpoints say that their head is not tied, and were trained with one that is not scaled; so they are
read. Release 5 of `transformers` scales every head of this class."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.convert.families import t5
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields


def read(fields: Fields) -> ModelConfig:
    return t5.read(fields, "gated-gelu", shared=False)


def write(config: ModelConfig) -> dict[str, Any]:
    said = t5.write(config)
    del said["scale_decoder_outputs"]
    return said


FAMILY = Family("umt5", "UMT5ForConditionalGeneration", t5.names, read, write)
