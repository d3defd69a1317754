"""Pegasus: `PegasusForConditionalGeneration`. Norms before the branches, and sinusoids, all sines first."""

from __future__ import annotations

from glassformer.config import ModelConfig
from glassformer.convert.families import bart
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields
from glassformer.parts.position import SinusoidalConfig

SINES = SinusoidalConfig(layout="halves")


def read(fields: Fields) -> ModelConfig:
    return bart.read_towers(fields, SINES, embedding_norm=False, before=True)


FAMILY = Family("pegasus", "PegasusForConditionalGeneration", bart.NAMES, read, bart.write)
