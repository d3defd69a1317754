"""One vector for each text, by any model that `gf.load` reads."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from glassformer.naming.resolve import ModelLike, resolve
from glassformer.text import OnProgress
from glassformer.text.storage import silent


def embed(model: ModelLike, texts: Sequence[str], progress: OnProgress = silent) -> Float[Tensor, "n d"]:
    """Returns (n, d) fp32 vectors of the texts, in their order, pooled and normalised as the model's folder says; by
    default the mean over tokens with length 1.

    A model whose head pools (`+pooled:cls`) gives the vector of its head. Texts are cut to the length the folder names,
    at most the model's context. Raises RequestError for an empty list, a value of another type than text, a text
    without tokens, and a model without a tokenizer.

    >>> x = gf.embed("minilm", ["That is a happy person", "Today is a sunny day"])
    >>> x @ x.T
    """
    return resolve(model, weights=True).embed(texts, progress)
