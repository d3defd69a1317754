"""Text in, text out: requests of one model, from any number of threads, in one batch.

Session             submits, cancels, and yields pieces of text as they come
Reply, Completion   a prompt that is being continued, and its text once it is complete
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Unpack
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError, check_whole, so_far
from glassformer.figures import Markup, tag
from glassformer.figures.terminal import size
from glassformer.generation.beams import Beam, beams
from glassformer.generation.compiled import CompiledStep
from glassformer.generation.engine import MOST_READ, Engine, GenerationRequest, TextPiece, check_text, reason
from glassformer.generation.grammar import Grammar
from glassformer.generation.observed import Observer, observed
from glassformer.generation.prompt_cache import check_keeps, kept_tokens, load_state, save_state
from glassformer.generation.prompt_scores import PromptScores
from glassformer.generation.rows import stream
from glassformer.generation.rules import Rules, search_options
from glassformer.generation.sampling import Sampling
from glassformer.generation.speculate import AHEAD, Proposer, Speculation, speculate
from glassformer.generation.steps import check_source, check_tokens, new_state, prefill
from glassformer.generation.text import GrowingText
from glassformer.introspection import at_rest, rows_of
from glassformer.model import STATE_DTYPES, Model
from glassformer.options import GenerationKeywords, GenerationOptions
from glassformer.text import Tokenizer
from glassformer.text.chat_template import ChatTemplate, Message
from glassformer.text.messages import chat_ids
from glassformer.text.pairs import START, source_ids
from glassformer.units import plural

__all__ = ["Completion", "GenerationOptions", "TextPiece", "Prompt", "Reply", "Session"]

NEW_TOKENS = 200
"""Default number of new tokens of a text."""
SLOTS = 8
"""Default number of texts decoded in one batch; more wait."""
CHARACTERS = 64
"""Bound on a text's average number of characters a token; of a prompt above it, a part is enough to refuse it."""
SMALLEST = 512
"""Tokens that the first state has room for, doubled until a request fits, so that few sizes of steps are compiled."""

Prompt = str | Sequence[int] | np.ndarray | Tensor | Sequence[Message]
"""A text, token ids, or the messages of a chat."""
Source = str | Sequence[int]
"""A text or token ids that the encoder of an encoder-decoder reads."""


class Ready(Protocol):
    """A model with its tokenizer, such as `Loaded`."""

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation: Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """Text that continues a prompt; it prints as the text.

    Examples
    --------
    >>> run = gf.train("llama@0.3m", "tiny.txt", steps=2, batch_size=2, context=16, tokenizer="byte", progress=False)
    >>> found = run.loaded.generate("Once", max_new_tokens=3, logprobs=0)
    >>> len(found.tokens), len(found.logprobs), found.finish_reason
    (3, 3, 'length')
    """

    text: str
    """New text, without the prompt, an end token or a stop string."""
    tokens: list[int]
    """New token ids, with the one that ended the text."""
    finish_reason: str
    """"stop" at an end token or a stop string, "length" at `max_new_tokens` or the end of the context, "cancelled",
    or "failed"."""
    logprobs: list[float] | None = None
    """Log-probability of each new token in nats, before any warper; None unless asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """Log-probabilities of the most likely tokens at each step by id, best first; None unless asked for."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt."""
    error: str | None = None
    """Reason of a failure; None otherwise."""
    score: float | None = None
    """Score of a beam; None for other texts."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values.

        Returns
        -------
        dict
            Field -> value.

        Examples
        --------
        >>> found.to_dict()["finish_reason"]
        'length'
        """
        return asdict(self)

    def _repr_html_(self) -> str:
        facts = f"{plural(len(self.tokens), 'token')}, {self.finish_reason}"
        return tag("div", Markup(tag("p", self.text)), tag("p", self.error or facts))


class Reply:
    """A prompt that a session continues.

    Iterating computes and yields the pieces; `result` waits for the whole text. Requests of one session share each
    step, whichever of them a thread waits for. A request that is garbage collected is cancelled.
    """

    def __init__(self, session: Session, asked: GenerationRequest):
        self._session, self._asked = session, asked

    @property
    def speculation(self) -> Speculation | None:
        """Counts of guessed tokens; None without a proposer."""
        return self._asked.speculation

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._asked.prompt

    @property
    def ends(self) -> frozenset[int]:
        """Token ids at which the text ends, and which are not part of it."""
        return self._asked.ends

    @property
    def stop(self) -> str | None:
        """Stop string that ended the text; None if another cause did, or none yet."""
        return self._asked.written.stop

    @property
    def time(self) -> float:
        """`time.perf_counter` at the request."""
        return self._asked.asked

    @property
    def first_token_time(self) -> float | None:
        """`time.perf_counter` at the first new token; None before it."""
        return self._asked.first

    @property
    def finish_reason(self) -> str | None:
        """Reason of the end as in `Completion`; None while the request runs."""
        return self._asked.finish if self._asked.closed else None

    def __iter__(self) -> Iterator[TextPiece]:
        """Yields the pieces not yielded before, and computes further ones, until the text is complete."""
        while (piece := self._session._next_piece(self._asked)) is not None:
            yield piece

    def take(self) -> list[TextPiece]:
        """Returns the pieces that have been computed and not yielded yet; computes nothing."""
        pieces, found = self._asked.pieces, []
        while pieces:
            found.append(pieces.popleft())
        return found

    def cancel(self) -> None:
        """Ends the request; characters that were held back can still be read."""
        self._session.cancel(self)

    @property
    def text(self) -> str:
        """Text up to now."""
        return self._asked.text

    def result(self) -> Completion:
        """Returns the completion once the text is complete."""
        self._session._complete(self._asked)
        return self.so_far()

    def so_far(self) -> Completion:
        """Returns the tokens and the text up to now, with the finish reason "cancelled" if more would follow."""
        one = self._asked
        logprobs, top = (one.logprobs, one.top_logprobs) if one.top is not None else (None, None)
        return Completion(
            one.text, list(one.tokens), one.finish or "cancelled", logprobs and list(logprobs), top and list(top),
            len(one.prompt), one.error,
        )  # fmt: skip

    def __del__(self) -> None:
        self._asked.cancel()


class Session:
    """Generator of texts with one model, for any number of threads, whose requests are decoded in one batch.

    No thread runs in the background: of the threads that wait for text, one at a time computes a step for all
    requests and wakes the others. So a single thread has no overhead, an exception such as Ctrl-C reaches the caller
    whose thread computed, and nothing is left running when no caller waits.

    Parameters
    ----------
    loaded
        A model with its tokenizer: what `gf.load` returns.
    slots
        Requests decoded in one batch; more wait.
    context
        Tokens of a prompt and its answer together, for which states have room. If None, states grow as requests need,
        while no other request runs.
    dtype
        Dtype of the decode state, which may be narrower than the weights; None for that of the weights.
    compiled
        Compile the decode step (one to three minutes once, then cached).
    kept
        Largest number of prompts whose states are kept for prompts that start alike. The weights must not change
        while they are kept.
    answers
        Keep states after an answer instead of after a prompt, for chats that continue it.
    on_build
        Called before a step is compiled that is not cached yet.
    piece
        Largest number of tokens of prompts that a step reads, so that a long prompt does not delay other texts; if
        None, a step reads whole prompts.

    Raises
    ------
    RequestError
        If the model has no tokenizer to continue a text with, or a setting is out of range.

    Examples
    --------
    >>> import glassformer as gf
    >>> from glassformer.loaded import Loaded
    >>> from glassformer.text import ByteTokenizer
    >>> config = gf.preset("llama@1m+vocab_size=257+context=64")
    >>> llm = Loaded(config.build(seed=0), config, ByteTokenizer())
    >>> with gf.Session(llm) as session:
    ...     requests = [session.submit(text, max_new_tokens=4) for text in ("Once", "Twice")]
    ...     [len(request.result().tokens) for request in requests]
    [4, 4]
    """

    def __init__(
        self,
        loaded: Ready,
        *,
        slots: int = SLOTS,
        context: int | None = None,
        dtype: torch.dtype | str | None = None,
        compiled: bool = False,
        kept: int = MOST_READ,
        answers: bool = False,
        on_build: Callable[[], object] | None = None,
        piece: int | None = None,
    ):
        check_ready(loaded, "loaded")
        if context is not None:
            check_whole("context", context, 2)
        dtype = None if dtype is None else machine.dtype_of(dtype, known=STATE_DTYPES)
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        self.dtype, self._grows, self._compiled, self._on_build = dtype, context is None, compiled, on_build
        position = self.model.embedding.position
        self.longest = max(self.loaded.config.context, context or 0)
        """Largest number of tokens of a prompt."""
        self.limit = None if position is None else position.limit
        """Number of learned positions; None if positions are unbounded."""
        room = min(context or SMALLEST, self.limit or context or SMALLEST)
        self._engine = Engine(
            self.model, self.tokenizer, slots=slots, context=room, dtype=dtype, kept=kept, answers=answers, piece=piece
        )
        self._template: ChatTemplate | None = None
        self._inbox: deque[tuple[GenerationRequest, int]] = deque()
        """Requests that the engine has not taken, with the number of tokens that each needs room for."""
        self._open: WeakSet[Reply] = WeakSet()
        self._changed = threading.Condition()
        self._computing: int | None = None
        """Identifier of the thread that computes; None while no thread does."""
        self._closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all requests; the session takes no others.

        Examples
        --------
        >>> other = gf.Session(llm)
        >>> other.close()
        """
        with self._changed:
            self._closed = True
            for one in (*self._engine.requests, *(asked for asked, _ in self._inbox)):
                one.cancel()
            if self._computing is None:
                self._settle()
            self._changed.notify_all()

    # What is asked

    def submit(
        self,
        prompt: Prompt = "",
        options: GenerationOptions | None = None,
        *,
        source: Source | None = None,
        sample: int | None = None,
        proposer: Proposer | None = None,
        scores: PromptScores | None = None,
        grammar: Grammar | None = None,
        observer: Observer | None = None,
        **given: Unpack[GenerationKeywords],
    ) -> Reply:
        """Returns a request, which is computed when a thread waits for its text, or for that of another request.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a chat, which the model's chat template turns into a text.
        options
            How the prompt is continued; if None, as the model's folder says (`GenerationOptions.of`).
        source
            Text or token ids that the encoder of an encoder-decoder reads.
        sample
            Index of the sample among the `options.n` of one prompt: each draws from a separate generator.
        proposer
            Guesses several tokens ahead (`PromptLookup`, `Draft`): the same distribution in fewer passes.
        scores
            Takes the log-probabilities of the prompt's tokens (`PromptScores`).
        grammar
            Texts that the answer may be (`generation.grammar.Grammars`).
        observer
            Reader of values inside the model while this text is computed (`generation.observed.Observer`).
        **given
            Single options, such as max_new_tokens, in place of those of `options`.

        Returns
        -------
        Reply
            The request: iterating yields its pieces, `.result()` waits for its text.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.

        Examples
        --------
        >>> session = gf.Session(llm)
        >>> session.submit("Once", max_new_tokens=4).result().finish_reason
        'length'
        """
        options = self.options(**given) if options is None else options.replace(**given)
        options.check_draws()
        if sample is None and options.n > 1:
            raise RequestError(
                f"this makes one text, not n={options.n}; session.complete and generate take n",
                code="conflict", field="n", value=options.n,
            )  # fmt: skip
        sampling = Sampling.of(options)
        ids, source_row = self.read(prompt, source)
        new = self.new_tokens(len(ids), options.max_new_tokens)
        need = len(ids) + new
        if scores is not None and (options.repetition_penalty != 1 or options.n > 1 or proposer or source_row):
            raise RequestError(
                "the log-probabilities of a prompt do not go with repetition_penalty, n > 1, a proposer or a source",
                code="conflict", field="logprobs",
            )  # fmt: skip
        if source_row is not None and proposer is not None:
            raise RequestError("a source does not go with a proposer; leave one out", code="conflict", field="source")
        if grammar is not None and (scores or proposer or source_row or not options.stop_at_eos):
            raise RequestError(
                "a grammar does not go with log-probabilities of a prompt, a proposer, a source or stop_at_eos=False",
                code="conflict", field="grammar",
            )  # fmt: skip
        if observer is not None and (scores or proposer or source_row or self.model.takes_prefix):
            raise RequestError(
                "an observer does not go with log-probabilities of a prompt, a proposer, a source or a prefix",
                code="conflict", field="observer",
            )  # fmt: skip
        if source_row is not None and options.n > 1:
            raise RequestError("a source has one text; give n=1", code="conflict", field="n", value=options.n)
        if proposer is not None and options.logprobs is not None:
            raise RequestError(
                "a proposer does not go with logprobs; leave one out",
                code="conflict", field="logprobs", value=options.logprobs,
            )  # fmt: skip
        rules = Rules.of(self.loaded.generation)
        if not options.stop_at_eos:
            rules = replace(rules, forced_eos_token_id=None)

        def translated(asked: GenerationRequest) -> Iterator[Any]:
            assert source_row is not None
            return stream(
                self.model, rows_of(self.model, ids), asked.max_new_tokens, seed=options.seed, logprobs=asked.top,
                state=new_state(self.model, 1, need, self.dtype, memory_len=len(source_row)), source=[source_row],
                rules=rules, eos_id=asked.ends, **sampling.model_dump(),
            )  # fmt: skip

        def scored(asked: GenerationRequest) -> Iterator[Any]:
            assert scores is not None
            state = new_state(self.model, 1, need, self.dtype)
            yield from scores.read(self.model, ids, state, self._engine.piece)
            if not scores.only:
                yield from stream(
                    self.model, rows_of(self.model, ids[-1:]), asked.max_new_tokens, seed=options.seed,
                    logprobs=asked.top, state=state, rules=rules, eos_id=asked.ends, **sampling.model_dump(),
                )  # fmt: skip

        def guessed(asked: GenerationRequest) -> Iterator[Any]:
            assert proposer is not None
            asked.speculation = speculate(
                self.model, rows_of(self.model, ids), proposer, asked.max_new_tokens, sampling, options.seed,
                AHEAD, new_state(self.model, 1, need, self.dtype, rewind=AHEAD),
            )  # fmt: skip
            return iter(asked.speculation)

        def watched(asked: GenerationRequest) -> Iterator[Any]:
            assert observer is not None
            state = new_state(self.model, 1, need, self.dtype)
            return observed(self.model, asked, state, self._engine.piece, observer)

        asked = self._engine.request(
            ids, new, options.seed, sample or 0, options.stop, options.logprobs or 0, options.stop_at_eos,
            options.logprobs is not None, rules,
            translated if source_row else guessed if proposer else scored if scores else watched if observer else None,
            context=need if self._grows else None, constraint=None if grammar is None else grammar.start(),
            **sampling.model_dump(),
        )  # fmt: skip
        request = Reply(self, asked)
        with self._changed:
            self._check_open()
            self._inbox.append((asked, need if asked.own is None else 0))
            self._open.add(request)
        return request

    def options(self, **given: Any) -> GenerationOptions:
        """Returns generation options: the given ones, and for the others those of the model's folder.

        Parameters
        ----------
        **given
            Fields of `GenerationOptions`.

        Returns
        -------
        GenerationOptions
            The options of a request.

        Raises
        ------
        RequestError
            For an unknown or wrong option.

        Examples
        --------
        >>> session.options(top_p=0.9).temperature
        0.0
        """
        return GenerationOptions.of(self.loaded.generation, **given)

    def stream(
        self,
        prompt: Prompt = "",
        options: GenerationOptions | None = None,
        *,
        source: Source | None = None,
        **given: Unpack[GenerationKeywords],
    ) -> Iterator[TextPiece]:
        """Generates one text; returns an iterator over its pieces, which are computed as they are read.

        An iterator that is closed or no longer held cancels its request, as leaving a `for` loop over this call does.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a chat.
        options
            How the prompt is continued; if None, as the model's folder says.
        source
            Text or token ids that the encoder of an encoder-decoder reads.
        **given
            Single options in place of those of `options`.

        Returns
        -------
        iterator of TextPiece
            Pieces with a token's id, text and log-probability.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.

        Examples
        --------
        >>> text = "".join(piece.text for piece in session.stream("Once", max_new_tokens=3))
        """
        return iter(self.submit(prompt, options, source=source, **given))

    def complete(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions | None = None,
        *,
        sources: Sequence[Source] | None = None,
        n: int | None = None,
        **given: Unpack[GenerationKeywords],
    ) -> list[Completion]:
        """Returns the completions of several prompts, decoded in one batch.

        Parameters
        ----------
        prompts
            Texts, rows of token ids, or lists of chat messages.
        options
            How the prompts are continued; if None, as the model's folder says.
        sources
            Source of each prompt, for an encoder-decoder.
        n
            Number of texts for each prompt; by default that of `options`.
        **given
            Single options in place of those of `options`.

        Returns
        -------
        list of Completion
            The texts of the first prompt come first.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.

        Examples
        --------
        >>> [one.finish_reason for one in session.complete(["Once", "Twice"], max_new_tokens=3)]
        ['length', 'length']
        """
        if not isinstance(prompts, Sequence | Tensor | np.ndarray) or isinstance(prompts, str):
            raise RequestError(code="type", field="prompts", value=prompts, expected="a list of prompts")
        options = (self.options() if options is None else options).replace(**({} if n is None else {"n": n}), **given)
        read = [None] * len(prompts) if sources is None else list(sources)
        if len(read) != len(prompts):
            raise RequestError(
                f"there are {len(read)} sources for {len(prompts)} prompts; give one for each",
                code="conflict", field="source", value=len(read),
            )  # fmt: skip
        requests = [
            self.submit(prompt, options, source=source, sample=sample)
            for prompt, source in zip(prompts, read, strict=True)
            for sample in range(options.n)
        ]
        return [request.result() for request in requests]

    def search(
        self,
        prompt: Prompt,
        width: int,
        options: GenerationOptions | None = None,
        *,
        source: Source | None = None,
    ) -> list[Completion]:
        """Returns the most likely texts that a beam search finds.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a chat.
        width
            Number of beams.
        options
            Length, ends, and the number n of texts.
        source
            Text or token ids that the encoder of an encoder-decoder reads.

        Returns
        -------
        list of Completion
            The n best texts, best first, with their scores.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.
        WorkError, KeyboardInterrupt
            If the search ends early, with the n best texts so far, whole or not, as `error.so_far`.

        Examples
        --------
        >>> [one.score < 0 for one in session.search("Once", 2, session.options(max_new_tokens=3))]
        [True]
        """
        options = options or GenerationOptions()
        ids, source_row = self.read(prompt, source)
        new = self.new_tokens(len(ids), options.max_new_tokens)
        ends = self._engine.ends if options.stop_at_eos else frozenset[int]()
        rules = Rules.of(self.loaded.generation)
        if not options.stop_at_eos:
            rules = replace(rules, forced_eos_token_id=None)

        def spelled(beam: Beam, cut: str = "", error: str | None = None) -> Completion:
            """Returns the completion of a beam; `cut` is the finish reason of one that is still open."""
            text = GrowingText(self.tokenizer, ends, options.stop)
            for token in beam.tokens:
                text.take(token)
                if text.finish:
                    break
            text.close()
            finish = text.finish or ("length" if len(beam.tokens) == new else cut)
            return Completion(text.text, text.tokens, finish, prompt_tokens=len(ids), error=error, score=beam.score)

        try:
            with self._turn():
                found = beams(
                    self.model, rows_of(self.model, ids), width, new, ends, n=options.n, dtype=self.dtype,
                    source=None if source_row is None else [source_row], rules=rules,
                    **search_options(self.loaded.generation),
                )  # fmt: skip
        except (Exception, KeyboardInterrupt) as problem:
            cut, reason = ("failed", str(problem)) if isinstance(problem, Exception) else ("cancelled", None)
            vars(problem)["so_far"] = [spelled(beam, cut, reason) for beam in so_far(problem) or []] or None
            raise
        return [spelled(beam) for beam in found]

    def keep(self, prompt: Prompt, path: str | Path) -> bool:
        """Loads the decode state of a prompt from a file; without a state that fits, prefills it and writes the file.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a chat.
        path
            The file (prompt cache). It holds all tokens of the prompt except the last.

        Returns
        -------
        bool
            False if the file held another prompt, and was replaced.

        Raises
        ------
        RequestError
            For a file that is not a decode state of this model.
        WorkError
            For a disk that refuses the file.

        Examples
        --------
        >>> session.keep("Once upon a time", "prompt.state")
        True
        """
        check_keeps(self.model)
        ids, path = self.read(prompt)[0], Path(path)
        kept = kept_tokens(path, self.model) if path.exists() else []
        with self._turn():
            if kept and len(kept) < len(ids) and ids[: len(kept)] == kept:
                state = load_state(path, self.model, self._engine.context, self.dtype)[0]
            elif len(ids) == 1:  # nothing would be saved
                return not kept
            else:
                state = new_state(self.model, 1, self._engine.context, self.dtype)
                with torch.inference_mode(), at_rest(self.model):
                    prefill(self.model, rows_of(self.model, ids[:-1]), state)
                save_state(path, state, ids[:-1], self.model)
            self._engine.remember(ids[: state.length], state)
        return not kept or kept == ids[: len(kept)]

    def cancel(self, request: Reply) -> None:
        """Ends a request; its text so far is complete.

        Parameters
        ----------
        request
            A request of this session.

        Examples
        --------
        >>> request = session.submit("Once", max_new_tokens=4)
        >>> session.cancel(request)
        >>> request.result().finish_reason
        'cancelled'
        """
        with self._changed:
            request._asked.cancel()
            if self._computing is None:
                self._settle()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[Reply, TextPiece]]:
        """Yields (request, piece of its text) as pieces are computed, until all open requests are complete."""
        while True:
            with self._changed:
                pending = [one for one in self._open if one._asked.pieces or not one._asked.closed]
            if not pending:
                return
            self._advance(partial(_any_changed, pending))
            for one in pending:
                while one._asked.pieces:
                    yield one, one._asked.pieces.popleft()

    def step(self) -> bool:
        """Computes one step for all requests, for a caller that serves several sessions in turn.

        Returns
        -------
        bool
            False if there was nothing to compute.

        Examples
        --------
        >>> reply = session.submit("Once", max_new_tokens=2)
        >>> while session.step():
        ...     pieces = reply.take()
        >>> reply.finish_reason
        'length'
        """
        with self._turn():
            return self._compute()

    # Text to ids

    def read(self, prompt: Prompt = "", source: Source | None = None) -> tuple[list[int], list[int] | None]:
        """Returns the token ids of a prompt and of its source.

        A text is read as the published tokenizer reads it: with the special tokens in it, and those that the tokenizer
        adds. In a chat only the template's special tokens count. A text that is generated from a source starts with the
        token that the folder names, or in a run with the one that ends a text.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a chat.
        source
            Text or token ids that the encoder of an encoder-decoder reads.

        Returns
        -------
        tuple of list of int and list of int or None
            Ids of the prompt, and of the source.

        Raises
        ------
        RequestError
            For a prompt that this model cannot read.

        Examples
        --------
        >>> session.read("abc")
        ([97, 98, 99], None)
        """
        read = source_of(self.model, self.tokenizer, source)
        if isinstance(prompt, str):
            ids = self._tokens(prompt) if read is None else [self._start(), *self._tokens(prompt, bare=True)]
        elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            template = self.template  # raises RequestError without a tokenizer
            ids = chat_ids(self.tokenizer, template, list(prompt))  # type: ignore[arg-type]
        elif not isinstance(prompt, Sequence | Tensor | np.ndarray) or (len(prompt) and isinstance(prompt[0], str)):
            raise RequestError(code="type", field="prompt", value=prompt, expected="a text, token ids or messages")
        else:
            rows = rows_of(self.model, prompt)
            if len(rows) != 1:
                raise RequestError(
                    f"the prompt has {len(rows)} rows; give a prompt for each",
                    code="range", field="prompt", value=len(rows),
                )  # fmt: skip
            ids = rows[0].tolist()
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", code="missing", field="prompt")
        check_tokens(self.model, rows_of(self.model, ids))
        return ids, read

    @property
    def template(self) -> ChatTemplate:
        """Chat template of the model. Raises RequestError for a model without one."""
        if self._template is None:
            self._template = None if self.tokenizer is None else ChatTemplate.of(self.tokenizer)
        if self._template is None:
            raise RequestError(
                "this model has no chat template: it continues texts and answers no messages; give it a text "
                "(glassformer generate MODEL --prompt TEXT), or chat with a model that was trained to, such as smollm2",
                code="missing", field="tokenizer.chat_template",
            )  # fmt: skip
        return self._template

    def _start(self) -> int:
        own = None if self.tokenizer is None else self.tokenizer.eos_id
        start = self.loaded.generation.get(START, own)
        if start is None:
            raise RequestError(
                f"the first token of this model's texts is unknown; name it in its folder's config.json as {START}",
                code="missing", field=START, expected="a token id",
            )  # fmt: skip
        return int(start)

    def _tokens(self, prompt: str, bare: bool = False) -> list[int]:
        """Returns the ids of a text; if `bare`, without the special tokens that the tokenizer adds."""
        tokenizer = check_text(self.tokenizer, prompt)
        if len(prompt) > CHARACTERS * self.longest:
            read = len(tokenizer.encode(prompt[: CHARACTERS * self.longest]))
            if read > 2 * self.longest:  # the cut may split a few tokens
                self._refuse(f"over {read // 2:,}")
        return (tokenizer.encode(prompt) if bare else tokenizer.encode_prompt(prompt)).tolist()

    def new_tokens(self, prompt: int, most: int | None) -> int:
        """Returns the largest number of new tokens after a prompt.

        Parameters
        ----------
        prompt
            Number of tokens of the prompt.
        most
            Largest number of new tokens that is asked for. If None, 200, or fewer if learned positions end earlier.

        Returns
        -------
        int
            Number of tokens.

        Raises
        ------
        RequestError
            For a prompt that is too long, past learned positions, and for over 200 tokens that go past the context.

        Examples
        --------
        >>> session.new_tokens(10, None)
        200
        """
        if prompt > self.longest or prompt == self.limit:
            self._refuse(f"{prompt:,}")
        new = most or min(NEW_TOKENS, self.limit - prompt if self.limit else NEW_TOKENS)
        if self.limit and prompt + new > self.limit:
            raise RequestError(
                f"max_new_tokens={new} after a prompt of {prompt:,} go past this model's learned positions, which end "
                f"at {self.limit:,}",
                code="range", field="max_new_tokens", value=new,
            )  # fmt: skip
        if self._grows and new > max(self.longest - prompt, NEW_TOKENS):  # a context that was given ends texts
            raise RequestError(
                f"max_new_tokens={new:,} after a prompt of {prompt:,} go past the {self.longest:,} tokens that this "
                "model reads; give fewer, or add +context=TOKENS to the name of the model to go further",
                code="range", field="max_new_tokens", value=new, expected=f"at most {self.longest - prompt:,}",
            )  # fmt: skip
        return new

    def reserve(self, tokens: int, *, rows: int | None = None, source: int = 0) -> int:
        """Bounds prompts and their answers by `tokens` from now on, while no request is open.

        Parameters
        ----------
        tokens
            Tokens of a prompt and its answer together.
        rows
            Texts decoded in one batch; if None, the slots of the session.
        source
            Tokens that the encoder of an encoder-decoder reads.

        Returns
        -------
        int
            Bytes of the decode state.

        Raises
        ------
        RequestError
            If the state does not fit into free memory.

        Examples
        --------
        >>> gf.Session(llm).reserve(64, rows=1) == llm.config.state_bytes(64, torch.float32)
        True
        """
        rows, device = rows or self._engine.slots, self.model.device
        spare = self.model.init_state(rows + (rows > 1), tokens, self.dtype, device="meta").nbytes
        free = machine.free_memory(device)
        if free is not None and spare > free:
            where = "this machine" if device.type == "cpu" else str(device)
            raise RequestError(
                f"the state of {plural(tokens, 'token')} in {plural(rows, 'row')} takes {size(spare)}, and {where} has "
                f"{size(free)} of memory free; lower max_new_tokens, n or beams, or the model's +context=TOKENS",
                code="memory", field="context", value=tokens,
            )  # fmt: skip
        self._engine.resize(tokens)
        self._grows = False
        return self.model.init_state(rows, tokens, self.dtype, device="meta", memory_len=source).nbytes

    def room(self, need: int) -> int:
        """Returns the size, in tokens, of the states that are allocated for texts of `need` tokens.

        Parameters
        ----------
        need
            Tokens that must fit.

        Returns
        -------
        int
            512, doubled until they fit; at most the number of learned positions.

        Examples
        --------
        >>> session.room(700)
        1024
        """
        room = SMALLEST
        while room < need:
            room *= 2
        return room if self.limit is None else min(room, self.limit)

    def _refuse(self, tokens: str) -> NoReturn:
        further = "" if self.limit else "; add +context=TOKENS to the name of the model to go further"
        raise RequestError(
            f"the prompt has {tokens} tokens, and this model reads {self.longest:,}{further}",
            code="range", field="prompt", value=tokens,
        )  # fmt: skip

    # Computing: one thread at a time, for all

    def _next_piece(self, asked: GenerationRequest) -> TextPiece | None:
        self._advance(lambda: bool(asked.pieces or asked.closed))
        if asked.pieces:
            return asked.pieces.popleft()
        if asked.failure is not None:
            raise asked.failure
        return None

    def _complete(self, asked: GenerationRequest) -> None:
        self._advance(lambda: asked.closed)
        if asked.failure is not None:
            raise asked.failure

    def _advance(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready()`. Until then this thread waits, or computes steps for all requests if no other does."""
        while not ready():
            with self._turn(ready) as free:
                if free:
                    self._compute()

    def _compute(self) -> bool:
        try:
            self._admit()
            return bool(self._engine.step())
        except Exception as problem:
            self._fail(problem)
            raise

    @contextmanager
    def _turn(self, ready: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Waits until no other thread computes, then yields True and makes the others wait; yields False if `ready()`.

        Raises RequestError if this thread computes already, or the session is closed."""
        me = threading.get_ident()
        with self._changed:
            while self._computing is not None and not ready():
                if self._computing == me:
                    raise RequestError(
                        "a function that a session calls cannot wait for a text of the same session; use another",
                        code="conflict", field="session",
                    )  # fmt: skip
                self._changed.wait()
            if free := not ready():
                self._check_open()
                self._computing = me
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._computing = None
                    self._settle()
                    self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this session is closed; make another", code="stopped", field="session")

    def _admit(self) -> None:
        """Passes submitted requests to the engine. A request that needs a larger state waits until no other runs."""
        engine = self._engine
        with self._changed:
            while self._inbox:
                asked, need = self._inbox[0]
                if need > engine.context and self._grows:
                    if engine.requests:
                        break
                    engine.resize(self.room(need))
                self._inbox.popleft()
                engine.enter(asked)
        if self._compiled and engine.compiled is None:
            step = CompiledStep(self.model, engine.slots, engine.context, self.dtype)
            if not step.ready and self._on_build is not None:
                self._on_build()
            engine.compiled = step.load()

    def _settle(self) -> None:
        """Closes cancelled requests; the caller holds the lock, and no thread computes."""
        self._engine.settle()
        for asked, _ in self._inbox:
            if asked.finish:
                asked._close()
        self._inbox = deque(one for one in self._inbox if not one[0].finish)

    def _fail(self, problem: Exception) -> None:
        """Ends all requests, so that every thread that waits learns of it."""
        why = reason(problem)
        with self._changed:
            for one in (*self._engine.requests, *(asked for asked, _ in self._inbox)):
                failure = WorkError(f"the step of all requests failed: {why}", code="failed")
                failure.__cause__ = problem
                one._fail(why, failure)


def _any_changed(requests: Sequence[Reply]) -> bool:
    return any(one._asked.pieces or one._asked.closed for one in requests)


def check_ready(given: object, field: str) -> None:
    """Raises RequestError unless the value is a model with its tokenizer."""
    if not isinstance(getattr(given, "model", None), Model) or not hasattr(given, "tokenizer"):
        raise RequestError(
            code="type", field=field, value=type(given).__name__,
            expected="a loaded model: gf.load(...), or gf.Loaded(model, config, tokenizer)",
        )  # fmt: skip


def source_of(model: Model, tokenizer: Tokenizer | None, given: Source | None) -> list[int] | None:
    """Returns the ids of a source; None for a model without an encoder. Raises RequestError for a source that is
    missing, that the model does not take, or that its encoder cannot read."""
    encoder = model.config.encoder
    if encoder is None and given is None:
        return None
    if encoder is None:
        raise RequestError(
            "this model has no encoder, so it takes no source; leave --source out",
            code="conflict", field="source", value=given, expected="None",
        )  # fmt: skip
    if given is None:
        raise RequestError(
            "this model reads a source next to its own text: give source=TEXT (--source TEXT)",
            code="missing", field="source", expected="a text",
        )  # fmt: skip
    if not isinstance(given, str):
        try:
            ids = [int(token) for token in given]
        except (TypeError, ValueError):
            raise RequestError(code="type", field="source", value=given, expected="a text or token ids") from None
    elif tokenizer is None:
        raise RequestError(
            "this model has no tokenizer; give the source as token ids", code="missing", field="tokenizer"
        )
    else:
        ids = source_ids(tokenizer, given, encoder.context or model.config.context)
    check_source(model, 1, None, [ids], None)
    return ids
