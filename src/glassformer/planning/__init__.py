"""Costs of a model before it is built: exact counts from its config, without allocating weights.

>>> cost = gf.plan("llama-2-70b", batch=8)
>>> cost.weight_bytes, cost.state_bytes
"""

from glassformer.planning.planned import Plans
from glassformer.planning.plans import SPARE, WEIGHTS, Plan
from glassformer.planning.search import Search
from glassformer.planning.timed import Timed
from glassformer.planning.training import TrainingPlan
from glassformer.planning.verbs import plan

__all__ = ["SPARE", "WEIGHTS", "Plan", "Plans", "Search", "Timed", "TrainingPlan", "plan"]
