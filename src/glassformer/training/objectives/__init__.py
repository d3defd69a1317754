"""Objectives: what a model is trained for. A new one is a config with a `kind` in a file of its own, imported here."""

from glassformer.training.objectives.base import ObjectiveConfig
from glassformer.training.objectives.masked import MaskedConfig
from glassformer.training.objectives.next_token import NextTokenConfig
from glassformer.training.objectives.seq2seq import Seq2seqConfig

__all__ = [
    "MaskedConfig",
    "NextTokenConfig",
    "ObjectiveConfig",
    "Seq2seqConfig",
]
