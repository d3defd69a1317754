"""The page of an inspection: one HTML file that needs nothing else."""

from glassformer.lens.page.page import render

__all__ = ["render"]
