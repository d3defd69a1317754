"""Training: a recipe, a loop, checkpoints that survive a crash, and evaluation on text held out."""

from glassformer.callable_module import make_callable
from glassformer.train.evaluate import evaluate, extrapolate
from glassformer.train.loop import Interrupted, Report, Run, train
from glassformer.train.recipe import Recipe, default_learning_rate
from glassformer.train.run import Loaded, load
from glassformer.train.schedule import ConstantConfig, CosineConfig, NoamConfig, ScheduleConfig, WsdConfig

__all__ = [
    "ConstantConfig",
    "CosineConfig",
    "Interrupted",
    "Loaded",
    "NoamConfig",
    "Recipe",
    "Report",
    "Run",
    "ScheduleConfig",
    "WsdConfig",
    "default_learning_rate",
    "evaluate",
    "extrapolate",
    "load",
    "train",
]

make_callable(__name__)
