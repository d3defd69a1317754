"""mBART: `MBartForConditionalGeneration`. BART with its norms before the branches, and one after the last."""

from __future__ import annotations

from glassformer.config import ModelConfig
from glassformer.convert.families import bart
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields


def read(fields: Fields) -> ModelConfig:
    return bart.read_towers(fields, bart.LEARNED, embedding_norm=True, before=True)


FAMILY = Family("mbart", "MBartForConditionalGeneration", bart.NAMES, read, bart.write)
