"""Objectives: the losses a model is trained on. A new one is a config with a `kind` in a file that is imported here."""

from glassformer.training.objectives.base import Answered, Asked, ObjectiveConfig, usual_objective
from glassformer.training.objectives.classes import ClassesConfig
from glassformer.training.objectives.contrastive import ContrastiveConfig
from glassformer.training.objectives.infill import InfillConfig
from glassformer.training.objectives.masked import MaskedConfig
from glassformer.training.objectives.next_token import NextTokenConfig
from glassformer.training.objectives.prefix import PrefixObjectiveConfig
from glassformer.training.objectives.regression import RegressionConfig
from glassformer.training.objectives.seq2seq import Seq2seqConfig
from glassformer.training.objectives.span import SpanConfig
from glassformer.training.objectives.spans import SpansConfig
from glassformer.training.objectives.task import TaskConfig

__all__ = [
    "Answered",
    "Asked",
    "ClassesConfig",
    "ContrastiveConfig",
    "InfillConfig",
    "MaskedConfig",
    "NextTokenConfig",
    "ObjectiveConfig",
    "PrefixObjectiveConfig",
    "RegressionConfig",
    "Seq2seqConfig",
    "SpanConfig",
    "SpansConfig",
    "TaskConfig",
    "usual_objective",
]
