"""Generation of tokens for a batch of rows: each step adds a token to every row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from glassformer.errors import RequestError, WorkError, check_seed, check_whole
from glassformer.generation.compiled import CompiledStep
from glassformer.generation.rules import Rules
from glassformer.generation.sampling import Sampling, choose, row_generator
from glassformer.generation.steps import (
    CHUNK,
    check_documents,
    check_rows,
    check_source,
    check_state,
    check_tokens,
    decode,
    encoded,
    new_state,
    prefill,
    prefill_rows,
)
from glassformer.introspection import at_rest
from glassformer.model import Model
from glassformer.parts.state import ModelState

Rows = TypeVar("Rows", Tensor, list[list[int]])
"""Tokens (b, s), or a list of ids for each row, of any lengths."""


def stream(
    model: Model,
    tokens: Int[Tensor, "b s"] | list[list[int]],
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    state: ModelState | None = None,
    compiled: CompiledStep | None = None,
    chunk: int = CHUNK,
    logprobs: int | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    source: Int[Tensor, "b t"] | list[list[int]] | None = None,
    source_documents: Int[Tensor, "b t"] | None = None,
    rules: Rules | None = None,
    stop_at_eos: bool = True,
    eos_id: int | Collection[int] | None = None,
    **sampling: Any,
) -> Iterator[Any]:
    """Yields the next token of every row, one step at a time.

    Row i draws from a generator of (seed, i), and its text does not depend on the other rows (docs/decisions.md has
    the exceptions).

    Parameters
    ----------
    model
        A model that attends only to earlier tokens, or an encoder-decoder.
    tokens
        Prompts: ids (b, s), or a list of ids for each row, of any lengths. An encoder-decoder gets the start token of
        its texts.
    max_new_tokens
        Largest number of steps.
    temperature
        Divisor of the logits; 0 takes the most likely token.
    top_k
        Number of most likely tokens to draw from.
    seed
        Seed of the draws. If None, draws differ from call to call.
    state
        Decode state that holds what precedes `tokens`. If None, a new one.
    compiled
        A compiled decoding step of this model.
    chunk
        Number of prompt tokens that are prefilled at once.
    logprobs
        If a number k, each step is a `Sampled`: `tokens` (b,), `logprobs` (b,) in nats of the model's own distribution,
        and for k > 0 `top_ids`, `top_logprobs` (b, k) of the most likely tokens.
    documents
        Document numbers (b, s) of a tensor padded on the left, 0 for padding; each row continues its last document.
    source, source_documents
        Token ids (b, t) for the encoder, with document numbers (b, t), 0 for padding; or a list of ids for each row.
    rules
        Tokens that the model's folder forces or bans, and least lengths: `Rules.of(loaded.generation)`.
    stop_at_eos
        If False, no token ends a text.
    eos_id
        Id or ids at which a text ends. If None, those of the model (`Model.ends`, set by `gf.load`).
    **sampling
        Fields of `gf.Sampling`: top_p, min_p, typical_p, penalties, logit_bias, logits_processor.

    Yields
    ------
    Tensor or Sampled
        Tokens (b,). The last step is the one at which the last row ends; rows that ended before continue until then.

    Raises
    ------
    RequestError
        For a request that cannot be generated, before anything is computed.
    WorkError
        For logits that are not numbers.

    Examples
    --------
    >>> model = gf.preset("llama@0.3m+vocab_size=100").build(seed=0)
    >>> [token.shape for token in gf.stream(model, [[1, 2, 3], [4]], max_new_tokens=2)]
    [torch.Size([2]), torch.Size([2])]
    """
    refuse_text(model, tokens)
    if isinstance(tokens, Tensor):
        tokens = check_tokens(model, tokens)
        rows = list(tokens)
    else:
        if documents is not None:
            raise RequestError(
                "documents are of tokens in a tensor; rows in lists are not padded", code="conflict", field="documents"
            )
        rows = check_rows(model, tokens)
    check_whole("max_new_tokens", max_new_tokens)
    check_whole("chunk", chunk)
    if seed is not None:
        check_seed(seed)
    if logprobs is not None:
        check_whole("logprobs", logprobs, 0)
    check_source(model, len(rows), state, source, source_documents)
    if source is not None and compiled is not None:
        raise RequestError("a compiled step reads no source; leave it out", code="conflict", field="compiled")
    rule = Sampling(temperature=temperature, top_k=top_k, **sampling)
    b, s = len(rows), max(map(len, rows))
    rule.check(model.vocab_size)
    rules = rules or Rules()
    rules.check(model.vocab_size)
    if documents is not None:
        check_documents(documents, torch.stack(rows))
        if compiled is not None or (state is not None and state.rows is not None):
            raise RequestError(
                "padded rows and documents do not go with a compiled step, or rows that were spread",
                code="conflict", field="documents",
            )  # fmt: skip
    padded = documents is not None or (
        state is not None and (state.documents is not None or state.positions is not None)
    )
    together = len({len(row) for row in rows}) == 1 and (b == 1 or padded or not _rounds_to_16_bits(model))
    if padded and not together:
        raise RequestError(
            "a state of padded rows continues with rows of equal length; give the same number of ids in each",
            code="conflict", field="tokens",
        )  # fmt: skip
    if state is not None:
        check_state(model, state, b, s + max_new_tokens - 1)
    generators = [] if rule.temperature == 0 else [row_generator(seed, row, rows[0].device) for row in range(b)]
    past = rows
    if documents is not None:
        past = [row[ids == ids[-1]] for row, ids in zip(rows, documents, strict=True)]
    given = [len(row) for row in past]
    token, ended, samplings = rows[0].new_empty(0), [False] * b, [rule] * b
    ends = ends_of(model, stop_at_eos, eos_id)
    with at_rest(model):
        memory = None if source is None else encoded(model, source, source_documents)
        room = 0 if memory is None else memory.x.shape[1]
        if state is None:
            new = s + max_new_tokens
            state = new_state(model, b, new, memory_len=room) if compiled is None else compiled.init_state()
            check_state(model, state, b, s + max_new_tokens - 1)
        for step in range(max_new_tokens):
            with torch.inference_mode():
                if step == 0 and together:
                    logits = prefill(model, torch.stack(rows), state, chunk, documents, memory)
                elif step == 0:
                    logits = prefill_rows(model, rows, state, chunk, memory)
                else:
                    logits = compiled(token[:, None], state) if compiled else decode(model, token[:, None], state)
                logits = rules(logits, given, step, max_new_tokens, past, ends)
                chosen = choose(logits, samplings, past, given, generators, logprobs or 0, logprobs is not None)
            if any(chosen.bad.tolist()):
                raise WorkError(f"the model's logits are not numbers after {s + step} tokens", code="diverged")
            if logprobs is not None:
                chosen = chosen.clone()
            token = chosen.tokens.clone()  # an ordinary tensor, not one of inference mode
            if rule.penalizes or rules.reads_text:
                past = [torch.cat([row, new]) for row, new in zip(past, token[:, None], strict=True)]
            if ends:
                ended = [one or i in ends for one, i in zip(ended, token.tolist(), strict=True)]
            yield token if logprobs is None else chosen
            if all(ended):
                return


def _rounds_to_16_bits(model: Model) -> bool:
    """Returns True if a prompt rounds visibly differently in a batch than by itself: 16-bit products on a CPU."""
    return model.dtype.itemsize < 4 and model.device.type == "cpu"


def ends_of(model: Model, stop_at_eos: bool, eos_id: int | Collection[int] | None) -> frozenset[int]:
    """Returns the ids at which a text ends. Raises RequestError for a value that is not an id."""
    given = model.ends if eos_id is None else eos_id if isinstance(eos_id, Collection) else [eos_id]
    for one in given:
        check_whole("eos_id", one, 0)
    return frozenset(map(int, given)) if stop_at_eos else frozenset()


def is_end(token: Int[Tensor, "*b"], ends: Collection[int]) -> Bool[Tensor, "*b"]:
    return torch.isin(token, torch.tensor(sorted(ends), dtype=token.dtype, device=token.device))


def generate(
    model: Model,
    tokens: Rows,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop_at_eos: bool = True,
    eos_id: int | Collection[int] | None = None,
    **more: Any,
) -> Rows:
    """Returns the tokens of each row followed by the generated ones.

    Parameters
    ----------
    model
        A model that attends only to earlier tokens, or an encoder-decoder.
    tokens
        Prompts: ids (b, s), or a list of ids for each row, of any lengths.
    max_new_tokens
        Largest number of generated tokens.
    temperature
        Divisor of the logits; 0 takes the most likely token.
    top_k
        Number of most likely tokens to draw from.
    seed
        Seed of the draws. If None, draws differ from call to call.
    stop_at_eos
        If False, no token ends a text.
    eos_id
        Id or ids at which a text ends. If None, those of the model (`Model.ends`, set by `gf.load`).
    **more
        Further parameters of `gf.stream` (source, state, top_p, ...), except logprobs.

    Returns
    -------
    Tensor or list of list of int
        For a tensor, (b, s + t), in which a row repeats its end token until all rows have ended; for lists, each row up
        to its end token.

    Raises
    ------
    RequestError
        For a request that cannot be generated, before anything is computed.
    WorkError
        For logits that are not numbers.

    Examples
    --------
    >>> model = gf.preset("llama@0.3m+vocab_size=100").build(seed=0)
    >>> gf.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=5).shape
    torch.Size([1, 8])
    >>> [len(row) for row in gf.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
    [8, 6]
    """
    if more.get("logprobs") is not None:
        raise RequestError(
            "generate returns only tokens; stream(..., logprobs=k) gives their log-probabilities",
            code="unsupported", field="logprobs", value=more["logprobs"],
        )  # fmt: skip
    refuse_text(model, tokens)
    ends = ends_of(model, stop_at_eos, eos_id)
    new = stream(
        model, tokens, max_new_tokens, temperature, top_k, seed, stop_at_eos=stop_at_eos, eos_id=eos_id, **more
    )
    added = torch.stack(list(new), dim=1)
    goes_on = is_end(added, ends).cumsum(1) == 0
    end = goes_on.sum(1, keepdim=True).clamp(max=added.shape[1] - 1)
    added = torch.where(goes_on, added, added.gather(1, end))
    if isinstance(tokens, Tensor):
        return torch.cat([tokens, added], dim=1)
    return [_joined(row, ids, ends) for row, ids in zip(tokens, added.tolist(), strict=True)]


def refuse_text(model: Any, tokens: Any) -> None:
    """Raises RequestError for a text, and for a model that is a name or a `Loaded` (use `Loaded.generate`)."""
    module = isinstance(model, nn.Module)
    if not module or isinstance(tokens, str):
        raise RequestError(
            "gf.generate and gf.stream take a built model and token ids; for text: gf.load(MODEL).generate(TEXT)",
            code="type", field="tokens" if module else "model", value=type(tokens if module else model).__name__,
            expected="rows of ids" if module else "a built model",
        )  # fmt: skip


def _joined(row: list[int], new: list[int], ends: Collection[int]) -> list[int]:
    end = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
    return [*map(int, row), *new[:end]]
