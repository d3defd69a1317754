"""Optimizers: an axis like the schedules. A new one is a config with a `kind` in a file that is imported here."""

from glassformer.training.optimizers.adafactor import AdafactorConfig
from glassformer.training.optimizers.adamw import AdamWConfig
from glassformer.training.optimizers.base import OptimizerConfig
from glassformer.training.optimizers.lion import Lion, LionConfig
from glassformer.training.optimizers.muon import MuonConfig
from glassformer.training.optimizers.sgd import SGDConfig

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "Lion",
    "LionConfig",
    "MuonConfig",
    "OptimizerConfig",
    "SGDConfig",
]
