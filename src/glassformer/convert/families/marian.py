"""Marian (OPUS-MT): `MarianMTModel`. Norms behind the sums, and sinusoids, all sines first."""

from __future__ import annotations

from glassformer.config import ModelConfig
from glassformer.convert.families import bart
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields
from glassformer.parts.position import SinusoidalConfig

SINES = SinusoidalConfig(layout="halves")


def read(fields: Fields) -> ModelConfig:
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        fields.only(name, True)
    fields.only("decoder_vocab_size", fields.whole("vocab_size"))
    return bart.read_towers(fields, SINES, embedding_norm=False, before=False)


FAMILY = Family("marian", "MarianMTModel", bart.NAMES, read, bart.write)
