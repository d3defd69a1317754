"""mT5: `MT5ForConditionalGeneration`. T5 v1.1 whose head is not scaled, tied or not."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.convert.families import t5
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields


def read(fields: Fields) -> ModelConfig:
    return t5.read(fields, "gated-gelu", scaled=False)


def write(config: ModelConfig) -> dict[str, Any]:
    said = t5.write(config)
    del said["scale_decoder_outputs"]
    return said


FAMILY = Family("mt5", "MT5ForConditionalGeneration", t5.names, read, write)
