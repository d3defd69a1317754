"""Texts as vectors: `gf.embed`."""

from glassformer.retrieval.embedding import Embedder, embed

__all__ = ["Embedder", "embed"]
