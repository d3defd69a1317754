"""Experiments of many runs: claims, ladders, scaling laws, tuning, and their pages."""

from glassformer.laboratory.law import Law as Law
from glassformer.laboratory.law import fit_scaling_law as fit_scaling_law
