"""Page of an inspection: one self-contained HTML file."""

from glassformer.lens.page.page import render

__all__ = ["render"]
