"""Training: a recipe, a loop, checkpoints that survive a crash, and evaluation on text held out."""

from glassformer.dynamics.rates import default_learning_rate
from glassformer.training.callbacks import Callback, Report, Reporter
from glassformer.training.evaluate import evaluate, extrapolate, frequency_loss
from glassformer.training.fast import fast_training
from glassformer.training.loop import run_request, train
from glassformer.training.objectives import MaskedConfig, NextTokenConfig, ObjectiveConfig
from glassformer.training.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    Lion,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from glassformer.training.pretrained import Pretrained
from glassformer.training.recipe import Recipe
from glassformer.training.request import Request, prepare_run
from glassformer.training.schedule import ConstantConfig, CosineConfig, NoamConfig, ScheduleConfig, WsdConfig
from glassformer.training.trained import Interrupted, Run, load_run, training_of

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "Callback",
    "ConstantConfig",
    "CosineConfig",
    "Interrupted",
    "Lion",
    "LionConfig",
    "MaskedConfig",
    "MuonConfig",
    "NextTokenConfig",
    "NoamConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Pretrained",
    "Recipe",
    "Report",
    "Reporter",
    "Request",
    "Run",
    "SGDConfig",
    "ScheduleConfig",
    "WsdConfig",
    "default_learning_rate",
    "evaluate",
    "extrapolate",
    "frequency_loss",
    "fast_training",
    "load_run",
    "prepare_run",
    "run_request",
    "train",
    "training_of",
]
