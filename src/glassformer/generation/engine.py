"""Continuous batching: requests join and leave a running batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from glassformer.errors import RequestError, WorkError, check_whole
from glassformer.generation.compiled import CompiledStep
from glassformer.generation.grammar import Constraint
from glassformer.generation.prompt_cache import check_keeps
from glassformer.generation.rules import Rules
from glassformer.generation.sampling import Sampled, Sampling, choose, row_generator
from glassformer.generation.speculate import Speculation, agreeing
from glassformer.generation.steps import CHUNK, PieceReader, check_tokens, decode, new_state, piece_end, prefill
from glassformer.generation.text import GrowingText, special_stops
from glassformer.introspection import at_rest, rows_of, sites
from glassformer.model import Model
from glassformer.options import LONGEST_PROMPT
from glassformer.parts.state import ModelState
from glassformer.text import Tokenizer
from glassformer.text.documents import utf8

MOST_READ = 4
"""Largest number of prompts whose states are kept, for later prompts that start with the same tokens."""
MOST_READ_BYTES = 1 << 30
"""Bytes that the kept states may take; one state is kept even if it is larger."""

STEP, REST = 128, 32
"""Granularity of the tokens that a prompt in 16 bits takes from a kept one, and the least number that it reads itself:
kernels then tile as they do for the whole prompt, and every bit is the same."""


def check_text(tokenizer: Tokenizer | None, prompt: str) -> Tokenizer:
    """Returns the tokenizer that reads a prompt.

    Raises RequestError for a missing tokenizer, and for a text that is too long or not UTF-8."""
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer; give the prompt as token ids", code="missing", field="tokenizer"
        )
    if len(prompt) > LONGEST_PROMPT:
        raise RequestError(
            f"the prompt has {len(prompt):,} characters; at most {LONGEST_PROMPT:,} are read",
            code="range", field="prompt", value=len(prompt),
        )  # fmt: skip
    utf8(prompt, "the prompt")
    return tokenizer


NOT_READ = torch.empty(0, dtype=torch.int64)
"""Tokens so far of a row whose choice does not depend on them."""
SHARE = 0.9
"""Time that a step may spend on prompts while texts run, as a fraction of its decoding time."""
SMOOTH = 0.25
"""Weight of the latest step in the exponential moving average of the decoding time."""


class Read(NamedTuple):
    """Tokens that were read, with the decode state that is kept for later prompts."""

    tokens: list[int]
    state: ModelState
    """Decode state after the tokens."""
    logits: Tensor | None
    """Logits (1, v) of the next token; None if unknown."""
    any_length: bool = False
    """True if a text that shares any number of these tokens may be continued from here."""

    def shared(self, prompt: list[int], step: int, rest: int) -> int:
        """Returns the number of leading tokens of `prompt` that need not be read again, a multiple of `step` that
        leaves at least `rest` tokens."""
        length = agreeing(self.tokens, prompt[:-1])
        return length if self.any_length else min(length, max(0, len(prompt) - rest)) // step * step


@dataclass(frozen=True)
class TextPiece:
    """Growth of a text by one token.

    >>> for piece in llm.stream("Once upon a time", max_new_tokens=20):
    ...     print(piece, end="")
    """

    id: int | None
    """Token id; None for characters that were held back until the text ended."""
    text: str
    """Characters that the token completed: "" within a character, or while a stop string may follow."""
    logprob: float | None = None
    """Log-probability of the token in nats, before any warper; None unless it was asked for."""
    top_logprobs: dict[int, float] | None = None
    """Log-probabilities of the most likely tokens by id, best first; None unless they were asked for."""

    @property
    def bytes(self) -> bytes:
        """UTF-8 encoding of `text`."""
        return self.text.encode()

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class GenerationRequest:
    """A prompt with its options, and the new tokens so far."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    ends: frozenset[int]
    generator: torch.Generator
    written: GrowingText
    top: int | None = None
    """Number of most likely tokens that are reported at each step; None reports no log-probabilities at all."""
    rules: Rules | None = None
    """Tokens that are forced or banned; None applies no rule."""
    constraint: Constraint | None = None
    """Tokens that may follow in this text; None allows all."""
    own: Iterator[Tensor | Sampled | int | None] | None = None
    """Iterator that computes the new tokens, None for a step without one; if None, the batch computes them."""
    pieces: deque[TextPiece] = field(default_factory=deque)
    """Pieces in order, until a reader removes them."""
    piece: str = ""
    """Characters added to `text` since the last step that returned this request."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the new tokens before any warper, if asked for (`Sampled`)."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log-probabilities of the most likely tokens at each step, best first."""
    finish: str | None = None
    """Reason of the end: stop, length, cancelled or failed; None while the request runs."""
    closed: bool = False
    """True once the text is complete: no piece follows."""
    error: str | None = None
    failure: Exception | None = None
    """Exception that ended the request, such as one of the caller's function; None otherwise."""
    speculation: Speculation | None = None
    """Counts of guessed tokens; None if no tokens are guessed."""
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """`time.perf_counter` at the first new token; None before it."""

    @property
    def tokens(self) -> list[int]:
        """New tokens, with the one that ended the text."""
        return self.written.tokens

    @property
    def text(self) -> str:
        """Text of the new tokens as far as it can be shown: whole characters, without a stop string."""
        return self.written.text

    def cancel(self) -> None:
        """Ends the request; the next step frees its row, and other rows are unaffected."""
        self.finish = self.finish or "cancelled"

    def _take(self, token: int) -> None:
        self.first = self.first or time.perf_counter()
        count = len(self.tokens)
        logprob = self.logprobs[count] if count < len(self.logprobs) else None
        top = self.top_logprobs[count] if count < len(self.top_logprobs) else None
        text = self.written.take(token)
        self._show(TextPiece(token, text, logprob, top))
        self.finish = self.finish or self.written.finish
        if self.constraint is not None and token not in self.ends and self.constraint.take(token):
            self.finish = "stop" if self.finish == "length" else self.finish or "stop"

    def _fail(self, why: str, failure: Exception | None = None) -> None:
        self.finish, self.error, self.failure = "failed", why, failure

    def _close(self) -> None:
        """Adds the last piece, with the characters that were held back, and closes the text."""
        if self.closed:
            return
        if rest := self.written.close():
            self._show(TextPiece(None, rest))
        if self.written.finish == "stop" and self.finish == "length":
            self.finish = "stop"
        self.closed = True

    def _show(self, piece: TextPiece) -> None:
        self.piece += piece.text
        self.pieces.append(piece)


class Engine:
    """Decoder of up to `slots` requests in one batch; further requests wait for a row.

    >>> engine = Engine(loaded.model, loaded.tokenizer)
    >>> one, two = engine.submit("Once upon a time"), engine.submit("The answer is", temperature=1.0, stop="\\n")
    >>> for changed in engine: print([request.piece for request in changed])

    Each prompt is read by itself, and its state is put into the batch, so a row's text depends only on its request.
    `context` bounds the tokens of a prompt and its answer; `dtype` is the dtype of the state. `ends` are ids at which a
    text ends; if None, those of the model.

    A single request decodes in the state into which its prompt was read, exactly as `stream` does; the state of the
    batch is allocated when a second request joins. `kept` is the largest number of prompts whose states are kept for
    prompts that start alike; the weights must not change while they are kept. With `answers`, states are kept after an
    answer instead, for prompts that continue it: tokens decoded one by one are then not read again, so they may round
    differently from a prompt that is read at once.

    `piece` is the largest number of prompt tokens that a step reads; pieces end at its multiples, and have fewer tokens
    in a long prompt (`piece_end`). While other texts run, a piece is read some layers at a time, in at most `SHARE` of
    the time of a decoding step by the time of the layer before (at least one layer), so that a long prompt delays other
    texts by at most one step a token; the bits equal those of a piece that is read at once. A prompt that a model must
    read as a whole is not split.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        ends: Iterable[int] | None = None,
        slots: int = 8,
        context: int = 2048,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
        compiled: bool = False,
        kept: int = MOST_READ,
        answers: bool = False,
        piece: int | None = None,
    ):
        if piece is not None:
            check_whole("piece", piece)
            chunk = piece
        bounds = (("slots", slots, 1), ("context", context, 2), ("chunk", chunk, 1), ("kept", kept, 0))
        for name, value, least in bounds:
            check_whole(name, value, least)
        self.model, self.tokenizer, self.ends = model, tokenizer, frozenset(model.ends if ends is None else ends)
        self.slots, self.context, self.dtype, self.chunk = slots, context, dtype, chunk
        self.kept, self.answers, self.piece = kept, answers, piece
        self.compiled = CompiledStep(model, slots, context, dtype).load() if compiled else None
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        """Requests that are decoded, in the order of their rows."""
        self.guests: deque[GenerationRequest] = deque()
        """Requests outside the batch, whose `own` iterator computes the tokens; each step serves the first."""
        self._reading: tuple[GenerationRequest, ModelState] | None = None
        """First waiting request, with a state that has read a part of its prompt; None before any part is read."""
        self._piece_reader: PieceReader | None = None
        """Reader of the current piece of the prompt in `_reading`; None if pieces are read at once."""
        self.clock: Callable[[], float] = time.perf_counter
        """Clock in seconds, for the division of a step's time between decoding and prompts."""
        self._pace: float | None = None
        """Moving average of the seconds that decoding a token for all running texts takes; None before the first."""
        self._alone: ModelState | None = None
        """State of a single running request; None with several, or without one."""
        self._batch: ModelState | None = None
        """State of all rows of the batch; None until a second request joins."""
        self._used: ModelState | None = None
        """State of the rows in use, which shares the memory of the batch; None after a row was taken or freed."""
        self._lengths: list[int] = []
        self._changed: dict[GenerationRequest, None] = {}
        """Requests that changed since the last step returned, in order (the values mean nothing)."""
        self._reads: list[Read] = []
        """Kept states, the latest first."""
        self._samplings: WeakValueDictionary[str, Sampling] = WeakValueDictionary()
        """Samplings of the living requests, by key, so that equal ones are one object."""
        self._sites = list(sites(self.model).values())

    def _new_state(self, batch: int) -> ModelState:
        max_len = self.context if self.compiled is None else self.compiled.max_len
        return new_state(self.model, batch, max_len, self.dtype)

    def submit(self, *prompt: Any, **options: Any) -> GenerationRequest:
        """Makes a request with the arguments of `request`, adds it to the queue, and returns it."""
        request = self.request(*prompt, **options)
        self.enter(request)
        return request

    def enter(self, request: GenerationRequest) -> None:
        """Appends a request to those that wait for a row."""
        (self.waiting if request.own is None else self.guests).append(request)

    def request(
        self,
        prompt: str | Sequence[int] | Tensor,
        max_new_tokens: int = 100,
        seed: int | None = None,
        n: int = 0,
        stop: str | Sequence[str] = (),
        top_logprobs: int = 0,
        stop_at_eos: bool = True,
        logprobs: bool = False,
        rules: Rules | None = None,
        own: Callable[[GenerationRequest], Iterator[Tensor | Sampled | int | None]] | None = None,
        context: int | None = None,
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        """Returns a request for `enter`. `n` is the index of the sample among several of one prompt. `logprobs` adds
        log-probabilities of the chosen tokens, `top_logprobs` those of this many most likely tokens. `rules` are as for
        `stream`; `constraint` excludes tokens at each step. `own` computes the new tokens of a request that does not
        join the batch. `context` bounds this prompt and its answer; if None, the engine's bound holds.

        Raises RequestError, before anything is computed, for a request that cannot be served."""
        if isinstance(prompt, str):
            prompt = check_text(self.tokenizer, prompt).encode_prompt(prompt).tolist()
            if not prompt:
                raise RequestError(
                    "the prompt is empty; give at least one token", code="range", field="prompt", value=0
                )
        for name, value, least in (
            ("max_new_tokens", max_new_tokens, 1),
            ("n", n, 0),
            ("top_logprobs", top_logprobs, 0),
        ):
            check_whole(name, value, least)
        rows = rows_of(self.model, prompt)
        if len(rows) != 1:
            raise RequestError(
                f"the prompt has {len(rows)} rows; submit a request for each",
                code="range", field="prompt", value=len(rows),
            )  # fmt: skip
        check_tokens(self.model, rows)
        ids = rows[0].tolist()
        context = context or self.context
        if len(ids) + 1 > context:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens, and prompt and answer may have {context:,}",
                code="range", field="prompt", value=len(ids),
            )  # fmt: skip
        rule = Sampling(**sampling)
        rule.check(self.model.vocab_size)
        if stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, which this model lacks", code="missing", field="tokenizer"
            )
        if rules is not None:
            rules.check(self.model.vocab_size)
        most, ends = min(max_new_tokens, context - len(ids)), self.ends if stop_at_eos else frozenset[int]()
        ends |= special_stops(self.tokenizer, stop)
        request = GenerationRequest(
            ids,
            self._samplings.setdefault(rule.key, rule),  # equal samplings share an object, to warp rows together
            most,
            ends,
            row_generator(seed, n, self.model.device),
            GrowingText(self.tokenizer, ends, stop, most),
            top_logprobs if logprobs or top_logprobs else None,
            rules if rules != Rules() else None,
            constraint,
        )
        request.own = None if own is None else own(request)
        return request

    @property
    def requests(self) -> list[GenerationRequest]:
        """Requests that run or wait for a row."""
        return [*self.running, *self.waiting, *self.guests]

    def remember(self, tokens: Sequence[int], state: ModelState) -> None:
        """Keeps a state of one row that has read `tokens`, for prompts that start with them. Raises RequestError for a
        prefix LM, whose state depends on the whole prompt."""
        check_keeps(self.model)
        self._keep(Read(list(tokens), state, None, any_length=True))

    def resize(self, context: int) -> None:
        """Bounds later prompts and their answers by `context`, while no request is open; drops kept states and a
        compiled step."""
        assert not self.requests
        self.context, self.compiled, self._batch, self._used, self._reads = context, None, None, None, []

    def __iter__(self) -> Iterator[list[GenerationRequest]]:
        """Yields the requests that each step changed, until all are complete."""
        while changed := self.step():
            yield changed

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        """Frees the rows of cancelled requests, decodes one token for the others, and lets waiting requests join.

        Returns the requests that changed, a complete one for the last time; empty if there is nothing to do. An
        exception, such as an interrupt, loses no request: the next step reads the running ones again."""
        try:
            with at_rest(self.model) if self.model.training else nullcontext():  # cheap, as each token asks
                self._step()
        except BaseException:
            self._start_again()
            raise
        changed, self._changed = list(self._changed), {}
        return changed

    @torch.inference_mode()
    def settle(self) -> None:
        """Ends cancelled requests without computing anything."""
        self._let_go()
        for one in (*self.waiting, *self.guests):
            if one.finish:
                self._end(one)
        self.waiting = deque(one for one in self.waiting if not one.finish)
        if self._reading is not None and self._reading[0].finish:
            self._reading = self._piece_reader = None
        self.guests = deque(one for one in self.guests if not one.finish)

    def _step(self) -> None:
        self.settle()
        until: float | None = None
        if self.running:
            start = self.clock()
            tokens = [[one.tokens[-1]] for one in self.running]
            logits = self._decode(torch.tensor(tokens, device=self.model.device))
            self._lengths = [length + 1 for length in self._lengths]
            self._choose(self.running, logits)
            now = self.clock()
            self._pace = now - start if self._pace is None else self._pace + SMOOTH * (now - start - self._pace)
            until = now + SHARE * self._pace
            self._let_go()
        left = self.piece
        for _ in range(min(len(self.waiting), self.slots - len(self.running))):
            if left is not None and (left := self._read_piece(self.waiting[0], left, until)) is None:
                break
            self._join(self.waiting[0])
            self.waiting.popleft()
        if self.guests:
            self._serve(self.guests[0], until)
        self.settle()

    def _read_piece(self, request: GenerationRequest, left: int, until: float | None) -> int | None:
        """Reads the next piece of a prompt if it has at most `left` tokens, layer by layer until the time `until`; if
        None, as a whole. The last piece of a prompt is left to `_join` if no text runs.

        Returns the number of tokens that the step may still read, or None if the request cannot join yet."""
        assert self.piece is not None
        self._note(request)  # a step without a token is progress
        text = request.prompt + request.tokens
        settled = self.model.settled
        known = self._keeps and any(one.tokens == text and one.logits is not None for one in self._reads)
        if known or self.model.takes_prefix or (settled is not None and len(text) > settled):
            return left
        if self._reading is None or self._reading[0] is not request:
            self._reading = request, self._begun(text) if self._keeps else self._new_state(1)
            self._piece_reader = None
        state, reader = self._reading[1], self._piece_reader
        end = min(len(text), piece_end(state.length, self.piece))
        if (size := end - state.length) > left:
            return None
        if reader is None and until is not None and self.model.reads_by_layer:
            ids = torch.tensor([text[state.length : end]], device=self.model.device)
            reader = self._piece_reader = PieceReader(self.model, ids, state)
        if reader is not None:
            if not reader.read(self._over(until)):
                return None
            if end == len(text):
                return left - size
            self._piece_reader = None
            return None
        if end == len(text):
            return left - size
        self._go_on(text[:end], state)
        return None

    def _over(self, until: float | None) -> Callable[[], bool]:
        """Returns a function for the end of each layer: True if another one that takes the same time would end after
        the time `until`."""
        latest = self.clock()

        def over() -> bool:
            nonlocal latest
            took, latest = self.clock() - latest, self.clock()
            return until is not None and latest + took > until

        return over

    def _serve(self, guest: GenerationRequest, until: float | None) -> None:
        """Adds the next token of a guest, computed by its iterator `own`: parts of the work, at least one, until the
        token or the time `until`; one part if None. An exception ends only this guest."""
        assert guest.own is not None
        self._note(guest)
        over = self._over(until)
        try:
            while (found := next(guest.own)) is None and until is not None and not over():
                pass
        except StopIteration:
            guest.finish = guest.finish or "length"
        except WorkError as problem:
            guest._fail(str(problem))
        except Exception as problem:
            guest._fail(reason(problem), problem)
        except BaseException:  # a generator that raised cannot be resumed
            guest.cancel()
            raise
        else:
            if found is None:
                return
            if isinstance(found, Sampled):
                self._record(guest, found, 0)
            self._tell(guest, int(found.tokens if isinstance(found, Sampled) else found))

    @torch.inference_mode()
    def _start_again(self) -> None:
        """Moves the running requests to the front of the queue, because the contents of their states are unknown."""
        self.waiting = deque(dict.fromkeys([*self.running, *self.waiting]))
        self.running, self._lengths, self._alone, self._reading = [], [], None, None
        self._piece_reader = self._used = None
        for tensor in () if self._batch is None else self._batch.tensors().values():
            tensor.zero_()

    def _note(self, request: GenerationRequest) -> None:
        """Adds a request to those that the current step returns as changed."""
        if request not in self._changed:
            request.piece = ""
            self._changed[request] = None

    def _let_go(self) -> None:
        """Ends the finished requests and frees their rows."""
        for row in reversed(range(len(self.running))):
            if self.running[row].finish:
                self._end(self.running[row])
                self._leave(row)

    def _end(self, request: GenerationRequest) -> None:
        self._note(request)
        request._close()

    def _decode(self, tokens: Tensor) -> Tensor:
        k = len(tokens)
        if self._alone is not None:
            return decode(self.model, tokens, self._alone) if not self.compiled else self.compiled(tokens, self._alone)
        assert self._batch is not None
        if self.compiled is None:
            self._used = self._used or self._batch.first(k)
            self._used.spread(self._lengths)
            return decode(self.model, tokens, self._used)
        self._batch.spread(self._lengths + [0] * (self.slots - k))
        filled = torch.cat([tokens, tokens.new_zeros(self.slots - k, 1)])
        return self.compiled(filled, self._batch)[:k]

    def _join(self, request: GenerationRequest) -> None:
        text = request.prompt + request.tokens  # tokens: it ran before an exception
        if self.model.takes_prefix:
            state, logits = self._prompt_and_answer(request)
        else:
            state, logits = self._prefilled(text, request)
        self._seat(state)
        self.running.append(request)
        self._lengths.append(len(text))
        self._choose([request], logits)
        if request.error:  # a kept state with NaN would spoil later prompts
            self._reads = [one for one in self._reads if one.tokens != text]

    def _seat(self, state: ModelState) -> None:
        """Puts a state into the next row of the batch; a state of the only request is used as it is."""
        self._used = None
        if not self.running and (self.compiled is None or self.slots == 1):
            self._alone = self._copied(state) if any(one.state is state for one in self._reads) else state
            return
        if self._batch is None:
            self._batch = self._new_state(self.slots)
        if self._alone is not None:
            self._batch.put(0, self._alone)
            self._alone = None
        self._batch.put(len(self.running), state)

    def _copied(self, given: ModelState) -> ModelState:
        state = self._new_state(1)
        state.put(0, given)
        state.seek(given.length)
        return state

    @property
    def _keeps(self) -> bool:
        """True if states are kept. Under an edit they are not, because they differ from the model's own."""
        return self.kept > 0 and not any(site.edited for site in self._sites)

    def _keep(self, read: Read) -> None:
        most = max(1, min(self.kept, MOST_READ_BYTES // max(1, read.state.nbytes)))
        self._reads = [read, *(one for one in self._reads if one.tokens != read.tokens)][:most]

    def _prefilled(self, prompt: list[int], request: GenerationRequest) -> tuple[ModelState, Tensor]:
        """Prefills `prompt`; returns the state after it, and the logits (1, v) of the next token. Leading tokens shared
        with a kept prompt, and those read by earlier steps, are not read again."""
        begun = None if self._reading is None or self._reading[0] is not request else self._reading[1]
        reader = None if begun is None else self._piece_reader
        self._reading = self._piece_reader = None
        if not self._keeps:
            state = begun or self._new_state(1)
            return state, self._go_on(prompt, state) if reader is None else reader.logits()
        same = next((one for one in self._reads if one.tokens == prompt), None)
        if same is not None and same.logits is not None:
            state, logits = same.state, same.logits
        else:
            state = begun or self._begun(prompt)
            logits = self._go_on(prompt, state) if reader is None else reader.logits()
        if not self.answers:
            self._keep(Read(prompt, state, logits))
        return state, logits

    def _prompt_and_answer(self, request: GenerationRequest) -> tuple[ModelState, Tensor]:
        """Returns the state after prompt and answer, and the logits (1, v) of the next token, in a model with a prefix:
        the prompt is read as a whole, because its tokens attend to later ones."""
        state = self._new_state(1)
        logits = self._go_on(request.prompt, state)
        return state, self._go_on(request.prompt + request.tokens, state) if request.tokens else logits

    def _begun(self, prompt: list[int]) -> ModelState:
        """Returns a state that has read the leading tokens which a kept state shares with the prompt, except the last.
        With a single slot, a state that was kept after an answer is taken itself, not copied."""
        step, rest = (STEP, REST) if self.model.dtype.itemsize < 4 else (1, 1)
        if self.chunk % step:
            step = self.chunk
        shared = [(one.shared(prompt, step, rest), -len(one.tokens), one) for one in self._reads]
        settled = self.model.settled
        for length, _, one in sorted(shared, key=lambda found: found[:2], reverse=True):
            if length == 0 or (settled is not None and len(prompt) > settled):  # every position is encoded otherwise
                break
            if self.slots == 1 and one.any_length:
                self._reads = [other for other in self._reads if other is not one]
                state = one.state
            else:
                state = self._copied(one.state)
            try:
                state.truncate(length)
            except ValueError:  # a window or a recurrence cannot go back
                continue
            return state
        return self._new_state(1)

    def _go_on(self, prompt: list[int], state: ModelState) -> Tensor:
        tokens = torch.tensor([prompt[state.length :]], device=self.model.device)
        settled = self.model.settled
        if self.piece is None or self.model.takes_prefix or (settled is not None and len(prompt) > settled):
            return prefill(self.model, tokens, state, self.chunk)
        while (end := piece_end(state.length, self.piece)) < len(prompt):
            size = end - state.length
            prefill(self.model, tokens[:, :size], state, end)
            tokens = tokens[:, size:]
        return prefill(self.model, tokens, state, end)

    def _leave(self, row: int) -> None:
        """Frees a row: moves the last row into its place, and clears the last row."""
        self._used = None
        last, alone, one = len(self.running) - 1, self._alone, self.running[row]
        if self.answers and self._keeps and one.error is None and not self.model.takes_prefix:
            self._keep_answer((one.prompt + one.tokens)[: self._lengths[row]], row)
        if alone is not None or self._batch is None:
            self._alone = None
        else:
            if row != last:
                self._batch.clear(row, self._lengths[row])
                self._batch.move(last, row, self._lengths[last])
            self._batch.clear(last, self._lengths[last])
        self.running[row], self._lengths[row] = self.running[last], self._lengths[last]
        self.running.pop()
        self._lengths.pop()
        if not self.running and self.kept == 0:
            self._batch = None

    def _keep_answer(self, tokens: list[int], row: int) -> None:
        state = self._alone
        if state is None:
            assert self._batch is not None
            state, rows = self._new_state(1), self._batch.first(len(self.running))
            rows.spread(self._lengths)
            state.put(0, rows.row(row))
        state.seek(len(tokens))  # after a compiled step the layers do not know the length
        self._keep(Read(tokens, state, None, any_length=True))

    def _choose(self, requests: list[GenerationRequest], logits: Tensor) -> None:
        before = [
            (one, len(one.tokens), one.generator.get_state() if one.sampling.temperature else None) for one in requests
        ]
        try:
            self._draw(requests, logits)
        except BaseException:
            for one, count, state in before:
                if len(one.tokens) == count:  # its draw was lost, and is repeated
                    if state is not None:
                        one.generator.set_state(state)
                    del one.logprobs[count:], one.top_logprobs[count:]
            raise

    def _draw(self, requests: list[GenerationRequest], logits: Tensor) -> None:
        if any(one.rules is not None for one in requests):
            logits = torch.cat(
                [
                    row if one.rules is None else ruled(one.rules, one, row)
                    for one, row in zip(requests, logits.split(1), strict=True)
                ]
            )
        plain = [row for row, one in enumerate(requests) if one.sampling.logits_processor is None]
        if plain:
            self._draw_rows(requests, plain, logits)
        for row, one in enumerate(requests):
            if one.sampling.logits_processor is None:
                continue
            try:
                self._draw_rows(requests, [row], logits)
            except Exception as problem:  # from the caller's function: other rows are unaffected
                self._note(one)
                one._fail(reason(problem), problem)

    def _draw_rows(self, requests: list[GenerationRequest], rows: list[int], logits: Tensor) -> None:
        """Draws the next token of each row in `rows`, and adds it to the row's request."""
        masks: list[Tensor | None] = []
        for row in rows.copy():
            try:
                constraint = requests[row].constraint
                masks.append(None if constraint is None else constraint.allowed())
            except WorkError as problem:  # from this row's grammar
                rows.remove(row)
                self._note(requests[row])
                requests[row]._fail(str(problem))
        if not rows:
            return
        some = [requests[row] for row in rows]
        chosen = choose(
            logits if len(rows) == len(requests) else logits[rows],
            [one.sampling for one in some],
            [
                torch.tensor(one.prompt + one.tokens, device=logits.device) if one.sampling.penalizes else NOT_READ
                for one in some
            ],
            [len(one.prompt) for one in some],
            [one.generator for one in some],
            top=max(one.top or 0 for one in some),
            logprobs=any(one.top is not None for one in some),
            masks=masks,
        )
        bad, tokens = chosen.bad.tolist(), chosen.tokens.tolist()
        for row, one in enumerate(some):
            if one.finish:  # cancelled while it was computed
                continue
            self._note(one)
            if bad[row]:
                one._fail(f"the model's logits are not numbers after {len(one.prompt) + len(one.tokens)} tokens")
                continue
            self._record(one, chosen, row)
            self._tell(one, tokens[row])

    def _record(self, one: GenerationRequest, chosen: Sampled, row: int) -> None:
        """Adds the requested log-probabilities of the token in row `row` of `chosen` to a request."""
        if one.top is not None and chosen.logprobs is not None:
            one.logprobs.append(float(chosen.logprobs[row]))
        if one.top and chosen.top_ids is not None and chosen.top_logprobs is not None:
            pairs = zip(chosen.top_ids[row, : one.top].tolist(), chosen.top_logprobs[row].tolist(), strict=False)
            one.top_logprobs.append(dict(pairs))

    def _tell(self, one: GenerationRequest, token: int) -> None:
        try:
            one._take(token)
        except Exception as problem:  # only this text may be half decoded
            one._fail(f"the token {token} cannot be shown: {reason(problem)}")
        except BaseException:  # an interrupt, which may have come between a token and its text
            one.cancel()
            raise


def ruled(rules: Rules, one: GenerationRequest, logits: Tensor) -> Tensor:
    """Returns the logits (1, v) of a request under its rules."""
    texts = [torch.tensor(one.prompt + one.tokens)] if rules.reads_text else []
    return rules(logits, [len(one.prompt)], len(one.tokens), one.max_new_tokens, texts, one.ends)


def reason(problem: BaseException) -> str:
    """Returns the message of an exception on one line, or the name of its class."""
    return " ".join(str(problem).split()) or type(problem).__name__
