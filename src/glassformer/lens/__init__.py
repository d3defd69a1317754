"""Readings of a model: each is a function that returns data and draws itself. Built on `gf.capture` and `gf.edit`."""

from glassformer.lens.reading import Reading

__all__ = ["Reading"]
