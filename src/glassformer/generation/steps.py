"""Prefill of a prompt and decoding of one token, with the checks of their tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.generation.native_step import native_step
from glassformer.introspection import in_vocabulary
from glassformer.machine.threads import paced
from glassformer.model import Model
from glassformer.parts.forward_pass import Memory
from glassformer.parts.state import ModelState

CHUNK = 1024
"""Number of prompt tokens prefilled at once; more take more memory without more speed."""

HALVINGS, LEAST_PIECE = (512, 2048), 16
"""Lengths of a text at which the size of the pieces of its prompt halves, down to `LEAST_PIECE` tokens: the attention
of a token takes time in proportion to the length of the text before it."""


def piece_end(start: int, piece: int) -> int:
    """Returns the end of the piece of a prompt that starts, or is continued, at token `start`. Ends depend only on
    `piece`, the largest number of tokens, so that every bit of a text depends only on its request."""
    size = max(piece >> sum(start >= length for length in HALVINGS), min(piece, LEAST_PIECE))
    return (start // size + 1) * size


def split_pieces(tokens: Tensor, piece: int | None, settled: int | None = None) -> list[Tensor]:
    """Returns the pieces (b, s') of a prompt (b, s) from its start; of `CHUNK` tokens without a `piece`. A prompt of
    more than `settled` tokens (`Model.settled`) is one piece."""
    if settled is not None and tokens.shape[1] > settled:
        return [tokens]
    if piece is None:
        return list(tokens.split(CHUNK, 1))
    found, start = [], 0
    while start < tokens.shape[1]:
        end = piece_end(start, piece)
        found.append(tokens[:, start:end])
        start = end
    return found


def prefill(
    model: Model,
    tokens: Int[Tensor, "b s"],
    state: ModelState,
    chunk: int = CHUNK,
    documents: Int[Tensor, "b s"] | None = None,
    memory: Memory | None = None,
) -> Float[Tensor, "b v"]:
    """Reads a prompt into `state`, in pieces of `chunk` tokens; returns the logits (b, v) of the next token.

    `documents` are as for the model: tokens of padding on the left are a separate document. `memory` is the encoder's
    output, which the state keeps. For a model with a prefix, the prompt is the prefix and is read in one piece; so is a
    prompt past the length at which rotary frequencies change, because all its tokens have those of the whole length."""
    check_whole("chunk", chunk)
    prefix = None
    if warn_crossing(model.settled, state, tokens.shape[1]):
        chunk = state.length + tokens.shape[1]
    if model.takes_prefix and not state.length:
        prefix, chunk = torch.ones_like(tokens, dtype=torch.bool), tokens.shape[1]
    first = min(chunk - state.length % chunk, tokens.shape[1])  # pieces end at multiples of `chunk`
    whole, rest = divmod(tokens.shape[1] - first, chunk)
    sizes = [first, *[chunk] * whole, *[rest] * bool(rest)]
    told = [None] * len(sizes) if documents is None else documents.split(sizes, dim=1)
    read = 0
    for part, ids in zip(tokens.split(sizes, dim=1), told, strict=True):
        with paced(model, ("prefill", part.numel().bit_length()), part.numel(), same_bits(model)):
            x = model.hidden_states(part, state, documents=ids, memory=memory, global_tokens=prefix)
            if (read := read + part.shape[1]) == tokens.shape[1]:
                logits = model.logits(model.unembed(x[:, -1:]))[:, -1]
        memory = None
    return logits


class PieceReader:
    """Prefill of a piece of a prompt, tokens (1, s), a few layers at a time; the bits are those of `prefill`.

    The tokens follow those of `state`, which contains them once `hidden` is set."""

    def __init__(self, model: Model, tokens: Int[Tensor, "1 s"], state: ModelState) -> None:
        self.model, self.state, self.size = model, state, tokens.shape[1]
        self.end = state.length + self.size
        self.hidden: Tensor | None = None
        """Hidden states (1, s, d) after the last layer; None until all layers have read the piece."""
        self._layers = model.states_by_layer(tokens, state)

    def read(self, enough: Callable[[], bool]) -> bool:
        """Computes layers, at least one, until `enough()` or the last layer. Returns True after the last layer."""
        kind = ("prefill", self.size.bit_length())
        count = len(self.model.layers)
        with paced(self.model, kind, self.size / count, same_bits(self.model)):
            x = next(self._layers)
        while self.state.length < self.end:
            if enough():
                return False
            with paced(self.model, kind, self.size / count, same_bits(self.model)):
                x = next(self._layers)
        self.hidden = x
        return True

    def logits(self) -> Float[Tensor, "1 v"]:
        """Returns the logits of the token after the piece, once `read` has returned True."""
        assert self.hidden is not None
        return self.model.logits(self.model.unembed(self.hidden[:, -1:]))[:, -1]


def prefill_rows(
    model: Model,
    rows: Sequence[Int[Tensor, " s"]],
    state: ModelState,
    chunk: int = CHUNK,
    memory: Memory | None = None,
) -> Float[Tensor, "b v"]:
    """Reads a prompt of any length into each row of `state`, one row at a time, with the bits of a single prompt.

    Returns the logits (b, v) of the next tokens. If lengths differ, the state keeps a length for each row."""
    logits, lengths = [], []
    for i, tokens in enumerate(rows):
        alone = state.row(i)
        logits.append(prefill(model, tokens[None], alone, chunk, memory=memory and memory.row(i)))
        state.put(i, alone)
        lengths.append(alone.length)
    if state.rows is None and len(set(lengths)) == 1:
        state.seek(lengths[0])
    else:
        state.spread(lengths)
    return torch.cat(logits)


def new_state(model: Model, batch: int, max_len: int, *rest: Any, **more: Any) -> ModelState:
    """Returns `model.init_state(batch, max_len, ...)`, computed on fewer threads if other processes use the cores:
    threads that wait for a busy core at each tensor take a third of a prompt's time."""
    with paced(model, "state", batch * max_len):
        return model.init_state(batch, max_len, *rest, **more)


def decode(model: Model, tokens: Int[Tensor, "b 1"], state: ModelState) -> Float[Tensor, "b v"]:
    """Reads one token in each row into `state`; returns the logits (b, v) of the next token."""
    step = native_step(model, state)
    warn_crossing(model.settled if step is None else step.settled, state, 1)
    with paced(model, ("decode", len(tokens)), free=step is not None or same_bits(model)):
        return model(tokens, state)[:, -1] if step is None else step(model, tokens, state)


def decode_several(model: Model, tokens: Int[Tensor, "1 s"], state: ModelState) -> Float[Tensor, "s v"]:
    """Reads some tokens of one text into `state`; returns the logits (s, v) after each. Computed natively, they have
    the bits of `decode`."""
    count = tokens.shape[1]
    step = native_step(model, state, count)
    with paced(model, ("several", count), free=step is not None or same_bits(model)):
        return model(tokens, state)[0] if step is None else step(model, tokens, state, every=True)


def warn_crossing(settled: int | None, state: ModelState, more: int) -> bool:
    """Returns True if `more` tokens end past the length `settled` at which a model's encodings of positions change.

    Warns if the state holds a shorter text: its keys keep the encodings that they were read with."""
    if settled is None or state.length + more <= settled:
        return False
    if 0 < state.length <= settled:
        warnings.warn(
            f"the text passes {settled:,} tokens, and this model's rotary frequencies change there: what was read "
            "before keeps the old ones, so what follows is not what the model gives to the whole text at once; "
            f"to avoid it, stay within {settled:,} tokens or start from a longer prompt"
        )
    return True


def same_bits(model: Model) -> bool:
    """Returns True if one thread computes the same bits as several: in 16 bits and packed products. In fp32, MKL
    divides the inner dimension among threads."""
    return model.dtype.itemsize < 4


@torch.inference_mode()
def encoded(model: Model, source: Tensor | Sequence[Sequence[int]], documents: Tensor | None = None) -> Memory:
    """Returns the encoder's output for a source (b, t) with document numbers (b, t), or for rows of any lengths, which
    are padded on the right; padding is document 0."""
    if isinstance(source, Tensor):
        return model.encode(_as_ids(source), documents)
    rows = [torch.as_tensor(row, device=model.device) for row in source]
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model.encode(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), real)


def check_source(model: Model, rows: int, state: ModelState | None, source: Any, documents: Tensor | None) -> None:
    """Raises RequestError, before anything is computed, for a source that the encoder of the model cannot read."""
    model.check_source(rows, state, source=source)
    if source is None:
        return
    if state is not None and state.length:
        raise RequestError(
            "the state has read its source; give none to continue from it", code="conflict", field="source"
        )
    if documents is not None:
        if not isinstance(source, Tensor):
            raise RequestError(
                "source_documents are of a source in a tensor; rows in lists are not padded",
                code="conflict", field="source_documents",
            )  # fmt: skip
        check_documents(documents, source, "source_documents", "source tokens")
    assert model.encoder is not None
    vocab_size = model.vocab_size if model.encoder.embedding.tied else model.encoder.embedding.vocab_size
    for i, row in enumerate(source):
        ids = torch.as_tensor(row)
        if ids.dim() != 1 or not len(ids):
            raise RequestError(
                f"row {i} of the source is empty, or not a list of ids; give at least one token in each row",
                code="range", field="source",
            )  # fmt: skip
        for token in (int(_as_ids(ids).max()), int(ids.min())):
            in_vocabulary(token, vocab_size, "source token", "source")


def check_rows(model: Model, rows: Sequence[Sequence[int]]) -> list[Int[Tensor, " s"]]:
    """Returns rows of token ids as int64 tensors (s,). Raises RequestError for rows that the model cannot continue."""
    device = model.device
    try:
        read = [torch.as_tensor(row, device=device) for row in rows]
    except (TypeError, ValueError, RuntimeError):
        read = []
    if not read or any(row.dim() != 1 for row in read):
        raise RequestError(
            "tokens must be a tensor (batch, length), or rows of token ids such as [[1, 2, 3], [4]]",
            code="type", field="tokens",
        )  # fmt: skip
    for i, row in enumerate(read):
        if not len(row):
            raise RequestError(
                f"row {i} of tokens is empty; give at least one token in each row",
                code="range", field="tokens", value=0,
            )  # fmt: skip
    return [check_tokens(model, row[None])[0] for row in read]


def check_tokens(model: Model, tokens: Tensor) -> Int[Tensor, "b s"]:
    """Returns the tokens (b, s) in int64. Raises RequestError for tokens that the model cannot continue."""
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise RequestError(
            f"tokens must be (batch, length) with at least one token in each row, and are {tuple(tokens.shape)}",
            code="range", field="tokens", value=tuple(tokens.shape),
        )  # fmt: skip
    tokens = _as_ids(tokens)
    if not model.writes:
        raise RequestError(
            "this model is bidirectional (not causal), so it cannot generate", code="causal", field="model"
        )
    vocab_size = model.vocab_size
    for token in (int(tokens.max()), int(tokens.min())):
        in_vocabulary(token, vocab_size)
    return tokens


def _as_ids(tokens: Tensor) -> Tensor:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise RequestError(
            f"tokens are {tokens.dtype}; give ids, in torch.int64", code="type", field="tokens", value=str(tokens.dtype)
        )
    return tokens.long()


def check_documents(documents: Tensor, tokens: Tensor, name: str = "documents", of: str = "tokens") -> None:
    if documents.shape != tokens.shape or documents.is_floating_point():
        raise RequestError(
            f"{name} are {documents.dtype} of shape {tuple(documents.shape)}; give a whole number for each of the "
            f"{of} {tuple(tokens.shape)}",
            code="conflict", field=name, value=tuple(documents.shape),
        )  # fmt: skip


def check_state(model: Model, state: ModelState, rows: int, more: int) -> None:
    """Raises RequestError unless the state is one of this model, with `rows` rows and room for `more` tokens."""
    if state.batch != rows:
        raise RequestError(
            f"the state has batch={state.batch} and the tokens have {rows} rows; make it with that number",
            code="conflict", field="state.batch", value=state.batch,
        )  # fmt: skip
    dtype = torch.int8 if any(tensor.dtype == torch.int8 for tensor in state.tensors().values()) else None
    like = model.init_state(state.batch, state.max_len, dtype, state.rewind, "meta", state.memory_len)
    mine, its = ({name: one.shape for name, one in each.tensors().items()} for each in (like, state))
    if len(model.layers) != len(state.layers) or mine != its:
        raise RequestError(
            "the state is that of another model; make it with this model's init_state", code="conflict", field="state"
        )
    if (wanted := state.length + more) > state.max_len:
        raise RequestError(
            f"the state holds max_len={state.max_len} tokens and {wanted} are asked for; make it with max_len={wanted} "
            "or ask for fewer",
            code="range", field="state.max_len", value=state.max_len,
        )  # fmt: skip
