"""The two things that are computed: a prompt is read, and one more token is. And what is asked of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.capture import in_vocabulary
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.state import ModelState

CHUNK = 1024
"""Tokens of a prompt read at once: the memory of a pass grows with them, its speed no more."""


def prefill(
    model: Model,
    tokens: Int[Tensor, "b s"],
    state: ModelState,
    chunk: int = CHUNK,
    documents: Int[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b v"]:
    """Reads the prompt; logits of the token after it. Only the last token's are made. `documents` as for the model:
    padding on the left is a document of its own."""
    if chunk < 1:
        raise RequestError(f"chunk={chunk} must be at least 1")
    parts = tokens.split(chunk, dim=1)
    told = [None] * len(parts) if documents is None else documents.split(chunk, dim=1)
    for part, ids in zip(parts, told, strict=True):
        x = model.read(part, state, documents=ids)
    return model.logits(model.head(x[:, -1:], model.embedding.weight))[:, -1]


def decode(model: Model, tokens: Int[Tensor, "b 1"], state: ModelState) -> Float[Tensor, "b v"]:
    """Reads one token in each row; logits of the token after it."""
    return model(tokens, state)[:, -1]


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b s"] | None]:
    """Rows of token ids as one tensor that ends where they do, and its documents: 0 for padding, 1 for text; None where
    nothing is padded."""
    try:
        read = [torch.as_tensor(row, device=device) for row in rows]
    except (TypeError, ValueError, RuntimeError):
        read = []
    if not read or any(row.dim() != 1 for row in read):
        raise RequestError("tokens must be a tensor (batch, length), or rows of token ids such as [[1, 2, 3], [4]]")
    for i, row in enumerate(read):
        if not len(row):
            raise RequestError(f"row {i} of tokens is empty; give at least one token in each row")
        read[i] = _whole(row)
    tokens = pad_sequence(read, batch_first=True, padding_side="left")
    if len({len(row) for row in read}) == 1:
        return tokens, None
    return tokens, pad_sequence([torch.ones_like(row) for row in read], batch_first=True, padding_side="left")


def check_tokens(model: Model, tokens: Tensor) -> Int[Tensor, "b s"]:
    """The tokens (b, s) in int64; RequestError where they cannot be continued by this model."""
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise RequestError(
            f"tokens must be (batch, length) with at least one token in each row, and are {tuple(tokens.shape)}"
        )
    tokens = _whole(tokens)
    visibilities = (getattr(layer.mixer, "visibility", None) for layer in model.layers)
    if not all(visibility is None or visibility.causal for visibility in visibilities):
        raise RequestError("this model sees both ways; it cannot write on from left to right")
    vocab_size = model.embedding.weight.shape[0]
    for token in (int(tokens.max()), int(tokens.min())):
        in_vocabulary(token, vocab_size)
    return tokens


def _whole(tokens: Tensor) -> Tensor:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise RequestError(f"tokens are {tokens.dtype}; give ids, in torch.int64")
    return tokens.long()


def check_documents(documents: Tensor, tokens: Tensor) -> None:
    if documents.shape != tokens.shape or documents.is_floating_point():
        raise RequestError(
            f"documents are {documents.dtype} of shape {tuple(documents.shape)}; give a whole number for each of the "
            f"tokens {tuple(tokens.shape)}"
        )


def check_state(model: Model, state: ModelState, rows: int, more: int) -> None:
    """RequestError where the state is not of this model and so many rows, or has no room for so many tokens more."""
    if state.batch != rows:
        raise RequestError(f"the state has batch={state.batch} and the tokens have {rows} rows; make it with as many")
    dtype = torch.int8 if any(tensor.dtype == torch.int8 for tensor in state.tensors().values()) else None
    like = model.init_state(state.batch, state.max_len, dtype, state.rewind, "meta")
    mine, its = ({name: one.shape for name, one in each.tensors().items()} for each in (like, state))
    if len(model.layers) != len(state.layers) or mine != its:
        raise RequestError("the state is that of another model; make it with this model's init_state")
    if (wanted := state.length + more) > state.max_len:
        raise RequestError(
            f"the state holds max_len={state.max_len} tokens and {wanted} are asked for; make it with max_len={wanted} "
            "or ask for fewer"
        )
