"""Training: a recipe, a loop, checkpoints that survive a crash, and evaluation on text held out."""

from glassformer.dynamics.rates import default_learning_rate
from glassformer.training.evaluate import evaluate, extrapolate
from glassformer.training.loop import Interrupted, Report, Run, train
from glassformer.training.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    Lion,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from glassformer.training.recipe import Recipe
from glassformer.training.run import Loaded, load
from glassformer.training.schedule import ConstantConfig, CosineConfig, NoamConfig, ScheduleConfig, WsdConfig

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "ConstantConfig",
    "CosineConfig",
    "Interrupted",
    "Lion",
    "LionConfig",
    "Loaded",
    "MuonConfig",
    "NoamConfig",
    "OptimizerConfig",
    "Recipe",
    "Report",
    "Run",
    "SGDConfig",
    "ScheduleConfig",
    "WsdConfig",
    "default_learning_rate",
    "evaluate",
    "extrapolate",
    "load",
    "train",
]
