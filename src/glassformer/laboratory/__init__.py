"""Experiments of many runs: what they show together that none shows alone."""

from glassformer.laboratory.law import Law as Law
from glassformer.laboratory.law import fit_scaling_law as fit_scaling_law
