"""Requests that join and leave a running batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.generation.compiled import CompiledStep
from glassformer.generation.kept import check_keeps
from glassformer.generation.sampling import Sampling, choose, row_generator
from glassformer.generation.speculate import agreeing
from glassformer.generation.steps import CHUNK, check_tokens, decode, new_state, prefill
from glassformer.generation.text import Detokenizer, Stops
from glassformer.introspection import rows_of, sites
from glassformer.model import Model
from glassformer.parts.state import ModelState

LONGEST_PROMPT = 10_000_000
"""Characters: a text that no model here reads is refused before it is tokenised."""

MOST_READ = 4
"""Prompts whose states are kept for those that begin alike,"""
MOST_READ_BYTES = 1 << 30
"""as long as they fit into this, and one in any case."""

STEP, REST = 128, 32
"""In 16 bits a prompt goes on from so many tokens of another, or from twice, three times as many, and at least `REST`
are read: kernels tile from there on as they would from the beginning, and every bit is as if all had been read."""


class Read(NamedTuple):
    tokens: list[int]
    state: ModelState
    """After them."""
    logits: Tensor | None
    """Of the next, where they are known."""
    any_length: bool = False
    """Whether somebody asked to go on from it wherever it ends."""

    def shared(self, prompt: list[int], step: int, rest: int) -> int:
        """With how many of its tokens a prompt can begin, so as to go on from there."""
        length = agreeing(self.tokens, prompt[:-1])
        return length if self.any_length else min(length, max(0, len(prompt) - rest)) // step * step


@dataclass(eq=False)
class GenerationRequest:
    """What was asked for, and what has come of it so far."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    ends: frozenset[int]
    generator: torch.Generator
    top: int | None = None
    """How many likeliest tokens are told beside the chosen one's log-probability; None: neither is."""
    stops: Stops | None = None
    detokenizer: Detokenizer | None = None
    tokens: list[int] = field(default_factory=list)
    """The new ones, with the one that ended it."""
    text: str = ""
    """Of the new tokens, as far as it can be shown: whole characters, nothing of a stop string."""
    piece: str = ""
    """What was added to `text` since it was last told."""
    logprobs: list[float] = field(default_factory=list)
    """Of the new tokens, where asked for: the model's own, before any warper (`Sampled`)."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Of the likeliest tokens in place of each, best first."""
    finish: str | None = None
    """None while it runs; then stop, length, cancelled or failed."""
    error: str | None = None
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """When its first token was there, as `time.perf_counter`."""

    def cancel(self) -> None:
        """Its row is free at the next step; other rows do not notice."""
        self.finish = self.finish or "cancelled"

    def _take(self, token: int) -> None:
        self.first = self.first or time.perf_counter()
        self.tokens.append(token)
        ended = token in self.ends
        piece = "" if ended or self.detokenizer is None else self.detokenizer.feed(token)
        stopped = False
        if self.stops is not None:
            piece, stopped = self.stops.feed(piece)
        self._show(piece)
        finish = "stop" if ended or stopped else "length" if len(self.tokens) >= self.max_new_tokens else None
        self.finish = self.finish or finish

    def _fail(self, why: str) -> None:
        self.finish, self.error = "failed", why

    def _close(self) -> None:
        """Nothing follows: what was held back can be shown."""
        rest, stopped = "" if self.detokenizer is None else self.detokenizer.flush(), False
        if self.stops is not None:
            rest, stopped = self.stops.feed(rest)
            rest += self.stops.flush()
        self._show(rest)
        if stopped and self.finish == "length":
            self.finish = "stop"

    def _show(self, piece: str) -> None:
        self.piece += piece
        self.text += piece


class Engine:
    """Decodes up to `slots` requests at once; the others wait.

    >>> engine = Engine(loaded.model, loaded.tokenizer)
    >>> one, two = engine.submit("Once upon a time"), engine.submit("The answer is", temperature=1.0, stop="\\n")
    >>> for changed in engine: print([request.piece for request in changed])

    A prompt is read alone and its state put into the batch, so a row's text depends on nothing but its own request.
    `context` bounds a prompt and its answer together; `dtype` is that of the state. `ends` are ids at which a text
    ends; if None, those of the model.
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
    ):
        for name, value, least in (("slots", slots, 1), ("context", context, 2), ("chunk", chunk, 1)):
            check_whole(name, value, least)
        self.model, self.tokenizer, self.ends = model.eval(), tokenizer, frozenset(model.ends if ends is None else ends)
        self.slots, self.context, self.dtype, self.chunk = slots, context, dtype, chunk
        self.compiled = CompiledStep(model, slots, context, dtype).load() if compiled else None
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        """In the order of their rows."""
        self._state = self._new_state(slots)
        self._lengths: list[int] = []
        self._changed: dict[GenerationRequest, None] = {}
        """Requests whose change no step has told yet, in order."""
        self._read: Read | None = None
        """What was read last,"""
        self._earlier: list[Read] = []
        """and before it, the latest first."""
        self._samplings: WeakValueDictionary[str, Sampling] = WeakValueDictionary()
        """Those of requests that anyone still holds."""
        self._sites = list(sites(self.model).values())

    def _new_state(self, batch: int) -> ModelState:
        max_len = self.context if self.compiled is None else self.compiled.max_len
        return new_state(self.model, batch, max_len, self.dtype)

    def submit(
        self,
        prompt: str | Sequence[int] | Tensor,
        max_new_tokens: int = 100,
        seed: int | None = None,
        n: int = 0,
        stop: str | Sequence[str] = (),
        top_logprobs: int = 0,
        stop_at_eos: bool = True,
        logprobs: bool = False,
        **sampling: Any,
    ) -> GenerationRequest:
        """One more request; it starts when a row is free. `n` is which of several samples of one prompt it is.
        `logprobs` asks for those of what is chosen, `top_logprobs` for those of so many likeliest tokens too.

        Raises RequestError, before anything is computed, for what cannot be served."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this model has no tokenizer; give the prompt as token ids", code="missing", field="tokenizer"
                )
            if len(prompt) > LONGEST_PROMPT:
                raise RequestError(
                    f"the prompt has {len(prompt):,} characters; at most {LONGEST_PROMPT:,} are read",
                    code="range", field="prompt", value=len(prompt),
                )  # fmt: skip
            prompt = self.tokenizer.encode(prompt).tolist()
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
                f"the prompt has {len(rows)} rows; submit each as a request of its own",
                code="range", field="prompt", value=len(rows),
            )  # fmt: skip
        check_tokens(self.model, rows)
        ids = rows[0].tolist()
        if len(ids) + 1 > self.context:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens, and prompt and answer may have {self.context:,}",
                code="range", field="prompt", value=len(ids),
            )  # fmt: skip
        rule = Sampling(**sampling)
        rule.check(self.model.vocab_size)
        if stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model has none", code="missing", field="tokenizer"
            )
        request = GenerationRequest(
            ids,
            self._samplings.setdefault(rule.model_dump_json(), rule),  # equal ones warp together
            min(max_new_tokens, self.context - len(ids)),
            self.ends if stop_at_eos else frozenset(),
            row_generator(seed, n, self.model.device),
            top_logprobs if logprobs or top_logprobs else None,
            Stops(stop) if stop else None,
            Detokenizer(self.tokenizer) if self.tokenizer is not None else None,
        )
        self.waiting.append(request)
        return request

    @property
    def requests(self) -> list[GenerationRequest]:
        """Those that run and those that wait."""
        return [*self.running, *self.waiting]

    def remember(self, tokens: Sequence[int], state: ModelState) -> None:
        """A state of one row that has read these tokens: prompts that begin with them, and go on, need not read them
        again. Raises RequestError for a model with a prefix."""
        check_keeps(self.model)
        self._read = Read(list(tokens), state, None, any_length=True)

    def __iter__(self) -> Iterator[list[GenerationRequest]]:
        """Steps until nothing is left to do; each gives the requests that changed."""
        while changed := self.step():
            yield changed

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        """Frees the rows of those cancelled, decodes one token for the others, and lets waiting requests join. What
        ends is told once. Empty: nothing to do.

        An exception, such as an interrupt, loses nobody: the next step reads again what is running, and goes on."""
        try:
            self._step()
        except BaseException:
            self._start_again()
            raise
        changed, self._changed = list(self._changed), {}
        return changed

    def _step(self) -> None:
        self._let_go()
        for one in self.waiting:
            if one.finish:
                self._end(one)
        self.waiting = deque(one for one in self.waiting if not one.finish)
        if self.running:
            tokens = [[one.tokens[-1]] for one in self.running]
            logits = self._decode(torch.tensor(tokens, device=self.model.device))
            self._lengths = [length + 1 for length in self._lengths]
            self._choose(self.running, logits)
            self._let_go()
        for _ in range(min(len(self.waiting), self.slots - len(self.running))):
            self._join(self.waiting[0])
            self.waiting.popleft()
        self._let_go()

    def _start_again(self) -> None:
        """What the rows have read is not known: those that run wait again, before the others."""
        self.waiting = deque(dict.fromkeys([*self.running, *self.waiting]))
        self.running, self._lengths = [], []
        for tensor in self._state.tensors().values():
            tensor.zero_()

    def _note(self, request: GenerationRequest) -> None:
        """The next step that returns tells of it."""
        if request not in self._changed:
            request.piece = ""
            self._changed[request] = None

    def _let_go(self) -> None:
        """Those that have ended leave."""
        for row in reversed(range(len(self.running))):
            if self.running[row].finish:
                self._end(self.running[row])
                self._leave(row)

    def _end(self, request: GenerationRequest) -> None:
        self._note(request)
        request._close()

    def _decode(self, tokens: Tensor) -> Tensor:
        k = len(tokens)
        if self.compiled is None:
            rows = self._state.first(k)
            rows.spread(self._lengths)
            return decode(self.model, tokens, rows)
        self._state.spread(self._lengths + [0] * (self.slots - k))
        filled = torch.cat([tokens, tokens.new_zeros(self.slots - k, 1)])
        return self.compiled(filled, self._state)[:k]

    def _join(self, request: GenerationRequest) -> None:
        text = request.prompt + request.tokens  # it may have run before
        if self.model.takes_prefix:
            alone, logits = self._prompt_and_answer(request)
        else:
            alone, logits = self._prefilled(text)
        self._state.put(len(self.running), alone)
        self.running.append(request)
        self._lengths.append(len(text))
        self._choose([request], logits)
        if request.error:  # what is not a number spreads through all that was read with it
            self._read = None

    def _prefilled(self, prompt: list[int]) -> tuple[ModelState, Tensor]:
        """The state after the prompt. What it shares with one of the last few is not read again."""
        if any(site.edited for site in self._sites):  # this is not what the model itself reads
            state = self._new_state(1)
            return state, self._go_on(prompt, state)
        known = [self._read, *self._earlier] if self._read is not None else self._earlier
        same = next((one for one in known if one.tokens == prompt), None)
        if same is not None and same.logits is not None:
            state, logits = same.state, same.logits
        else:
            state = self._begun(prompt, known)
            logits = self._go_on(prompt, state)
        most = max(1, min(MOST_READ, MOST_READ_BYTES // max(1, state.nbytes)))
        self._read, self._earlier = Read(prompt, state, logits), [one for one in known if one is not same][: most - 1]
        return state, logits

    def _prompt_and_answer(self, request: GenerationRequest) -> tuple[ModelState, Tensor]:
        """The state after both, where a prompt is read as a whole: its beginning tells nothing of another's, and what
        it has written goes on from it."""
        state = self._new_state(1)
        logits = self._go_on(request.prompt, state)
        return state, self._go_on(request.prompt + request.tokens, state) if request.tokens else logits

    def _begun(self, prompt: list[int], known: list[Read]) -> ModelState:
        """One that has read as much of the prompt, short of its last token, as one of these can give."""
        step, rest = (STEP, REST) if self.model.dtype.itemsize < 4 else (1, 1)
        if self.chunk % step:
            step = self.chunk
        shared = [(one.shared(prompt, step, rest), -len(one.tokens), one.state) for one in known]
        for length, _, given in sorted(shared, key=lambda one: one[:2], reverse=True):
            if length == 0:
                break
            state = self._new_state(1)
            state.put(0, given)
            state.seek(given.length)
            try:
                state.truncate(length)
            except ValueError:  # a window or a recurrence has forgotten
                continue
            return state
        return self._new_state(1)

    def _go_on(self, prompt: list[int], state: ModelState) -> Tensor:
        tokens = torch.tensor([prompt[state.length :]], device=self.model.device)
        return prefill(self.model, tokens, state, self.chunk)

    def _leave(self, row: int) -> None:
        """The last row takes its place, and leaves nothing behind."""
        last = len(self.running) - 1
        if row != last:
            for tensor in self._state.tensors().values():
                tensor[row] = tensor[last]
        self._state.clear(last, self._lengths[last])
        self.running[row], self._lengths[row] = self.running[last], self._lengths[last]
        self.running.pop()
        self._lengths.pop()

    def _choose(self, requests: list[GenerationRequest], logits: Tensor) -> None:
        before = [(one, len(one.tokens), one.generator.get_state()) for one in requests]
        try:
            self._draw(requests, logits)
        except BaseException:
            for one, count, state in before:
                if len(one.tokens) == count:  # it may have drawn, and draws again
                    one.generator.set_state(state)
                    del one.logprobs[count:], one.top_logprobs[count:]
            raise

    def _draw(self, requests: list[GenerationRequest], logits: Tensor) -> None:
        empty = torch.empty(0, dtype=torch.long, device=logits.device)
        chosen = choose(
            logits,
            [one.sampling for one in requests],
            [
                torch.tensor(one.prompt + one.tokens, device=logits.device) if one.sampling.penalizes else empty
                for one in requests
            ],
            [len(one.prompt) for one in requests],
            [one.generator for one in requests],
            top=max(one.top or 0 for one in requests),
            logprobs=any(one.top is not None for one in requests),
        )
        bad, tokens = chosen.bad.tolist(), chosen.tokens.tolist()
        for row, one in enumerate(requests):
            if one.finish:  # cancelled while it was computed
                continue
            self._note(one)
            if bad[row]:
                one._fail(f"the model's logits are not numbers after {len(one.prompt) + len(one.tokens)} tokens")
                continue
            if one.top is not None and chosen.logprobs is not None:
                one.logprobs.append(float(chosen.logprobs[row]))
            if one.top and chosen.top_ids is not None and chosen.top_logprobs is not None:
                pairs = zip(chosen.top_ids[row, : one.top].tolist(), chosen.top_logprobs[row].tolist(), strict=False)
                one.top_logprobs.append(dict(pairs))
            try:
                one._take(tokens[row])
            except BaseException as problem:  # its text may be half told; those of others are not
                why = " ".join(str(problem).split()) or type(problem).__name__
                one.detokenizer = None
                one._fail(f"the token {tokens[row]} cannot be shown: {why}")
                if not isinstance(problem, Exception):
                    raise
