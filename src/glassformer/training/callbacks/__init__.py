"""Callbacks, which a training run calls at every step. Each holds its state and its part of the checkpoint."""

from glassformer.training.callbacks.base import Callback
from glassformer.training.callbacks.divergence import Divergence
from glassformer.training.callbacks.log import Log
from glassformer.training.callbacks.qk_clip import ClipQK
from glassformer.training.callbacks.report import Report, Reporter
from glassformer.training.callbacks.spikes import SpikePolicy
from glassformer.training.callbacks.watch import Watching

__all__ = [
    "Callback",
    "ClipQK",
    "Divergence",
    "Log",
    "Report",
    "Reporter",
    "SpikePolicy",
    "Watching",
    "check_callbacks",
]
