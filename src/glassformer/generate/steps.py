"""The two things that are computed: a prompt is read, and one more token is."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from glassformer.capture import in_vocabulary
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.state import ModelState

CHUNK = 1024
"""Tokens of a prompt read at once: the memory of a pass grows with them, its speed no more."""


def prefill(model: Model, tokens: Int[Tensor, "b s"], state: ModelState, chunk: int = CHUNK) -> Float[Tensor, "b v"]:
    """Reads the prompt; logits of the token after it. Only the last token's are made."""
    if chunk < 1:
        raise RequestError(f"chunk={chunk} must be at least 1")
    for part in tokens.split(chunk, dim=1):
        x = model.read(part, state)
    return model.logits(model.head(x[:, -1:], model.embedding.weight))[:, -1]


def decode(model: Model, tokens: Int[Tensor, "b 1"], state: ModelState) -> Float[Tensor, "b v"]:
    """Reads one token in each row; logits of the token after it."""
    return model(tokens, state)[:, -1]


def check_tokens(model: Model, tokens: Tensor) -> None:
    """RequestError where these tokens (b, s) cannot be continued by this model."""
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise RequestError(
            f"tokens must be (batch, length) with at least one token in each row, and are {tuple(tokens.shape)}"
        )
    visibilities = (getattr(layer.mixer, "visibility", None) for layer in model.layers)
    if not all(visibility is None or visibility.causal for visibility in visibilities):
        raise RequestError("this model sees both ways; it cannot write on from left to right")
    vocab_size = model.embedding.weight.shape[0]
    for token in (int(tokens.max()), int(tokens.min())):
        in_vocabulary(token, vocab_size)
