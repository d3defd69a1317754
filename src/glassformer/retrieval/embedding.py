"""One vector for each text, by any model that `gf.load` reads."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from glassformer.naming.resolve import ModelLike, resolve
from glassformer.text import OnProgress
from glassformer.text.storage import silent


def embed(model: ModelLike, texts: Sequence[str], progress: OnProgress = silent) -> Float[Tensor, "n d"]:
    """(n, d) fp32 vectors of the texts, in their order, pooled and normalised as the model's folder says; the mean over
    tokens with length 1 where it says nothing.

    A model whose head pools (`+pooled:cls`) gives what that gives. Texts are cut to the length the folder names, at
    most the model's context. Raises RequestError for no texts, for one that is no string or has no tokens, and for a
    model without a tokenizer.

    >>> x = gf.embed("minilm", ["That is a happy person", "Today is a sunny day"])
    >>> x @ x.T
    """
    return resolve(model, weights=True).embed(texts, progress)
