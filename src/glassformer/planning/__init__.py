"""What a model costs, before it is built: exact counts from its config alone, nothing allocated.

>>> cost = gf.plan(gf.preset("llama-2-70b"), batch=8)
>>> cost.weight_bytes, cost.state_bytes
"""

from glassformer.planning.plans import SPARE, WEIGHTS, Plan, plan, search

__all__ = ["SPARE", "WEIGHTS", "Plan", "plan", "search"]
