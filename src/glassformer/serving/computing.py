"""The thread that computes for all requests, and its bounded queue.

Served      a model that answers, with its session
Computer    the thread; `start` returns a ServedTask, `call` the result of a function
ServedTask  the texts of one request, read from an event loop
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassformer.conversion.weights import precision
from glassformer.errors import RequestError
from glassformer.generation.engine import reason
from glassformer.generation.grammar import Grammar
from glassformer.generation.observed import Observer
from glassformer.generation.prompt_scores import PromptScores
from glassformer.generation.session import Completion, Reply, Session, TextPiece
from glassformer.generation.vectors import Embedder
from glassformer.loaded import Loaded
from glassformer.options import GenerationOptions
from glassformer.serving.metrics import Metrics

PIECE = 64
"""Largest number of prompt tokens that are read at once; a layer of them takes about the time of a step of SmolLM2 in
int4, the slowest case of those measured."""
LARGEST_CONTEXT = 4096
"""Default bound on the tokens of a prompt and its answer together."""
WAITING = 64
"""Number of texts that may wait for a row."""


class Busy(Exception):
    """Refusal of a request while the queue is full; `seconds` until a row is likely to be free."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"{WAITING} texts wait already; try again in {seconds} s")
        self.seconds = seconds


@dataclass(eq=False)
class Served:
    """A model that is served, with the name that requests use for it."""

    name: str
    loaded: Loaded
    slots: int = 8
    context: int | None = None
    state_dtype: str | None = None
    choice: str = ""
    """Sentence about the precision that was chosen for the weights."""
    state_bytes: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    session: Session | None = field(init=False, default=None)
    """Session of a model that generates text; None for an encoder."""
    embedder: Embedder | None = field(init=False, default=None)
    """Embedder of a model that turns texts into vectors; None for other models."""

    def __post_init__(self) -> None:
        """Makes session and embedder, without allocating states. Raises RequestError if states do not fit into free
        memory."""
        if self.loaded.model.writes:
            context = self.context or min(self.loaded.config.context, LARGEST_CONTEXT)
            self.session = Session(self.loaded, slots=self.slots, context=context, dtype=self.state_dtype, piece=PIECE)
            self.context = min(context, self.session.limit or context)
            self.state_bytes = self.session.reserve(self.context)
        else:
            self.context = self.loaded.config.context
        if self.loaded.tokenizer is not None and self.loaded.config.encoder is None:
            self.embedder = Embedder(self.loaded)

    @property
    def precision(self) -> str:
        """Name of the precision in which the matrices are held."""
        return precision(self.loaded.model)

    def room(self, prompt: Sequence[int], most: int | None) -> int:
        """Returns the number of new tokens after a prompt, at most `most`. Raises RequestError for a prompt that fills
        the context, because no prompt is cut."""
        assert self.context is not None
        if len(prompt) >= self.context:
            raise RequestError(
                f"the prompt has {len(prompt):,} tokens, and prompt and answer may have {self.context:,} together",
                code="range", field="prompt", value=len(prompt), expected=f"fewer than {self.context:,} tokens",
            )  # fmt: skip
        return min(most or self.context, self.context - len(prompt))


class ServedTask:
    """Texts of one request, whose pieces an event loop reads while another thread computes them."""

    def __init__(self, computer: Computer, served: Served, replies: Sequence[Reply]) -> None:
        self._computer, self.served, self.replies = computer, served, list(replies)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[tuple[int, TextPiece | None]]] = asyncio.Queue()
        self._open = set(range(len(self.replies)))

    @property
    def open(self) -> int:
        """Number of texts that are not complete: they have a row, or wait for one."""
        return len(self._open)

    def cancel(self) -> None:
        """Ends the texts; the next step frees their rows."""
        for reply in self.replies:
            if reply.finish_reason is None:
                reply.cancel()
        self._computer.wake()

    async def pieces(self) -> AsyncIterator[list[tuple[int, TextPiece | None]]]:
        """Yields lists of (index of a text, piece) in the order of computation, with piece None at a text's end."""
        left = len(self.replies)
        while left:
            some = await self._queue.get()
            left -= sum(piece is None for _, piece in some)
            yield some

    def _deliver(self) -> None:
        """Passes new pieces to the event loop; called by the thread that computes."""
        some: list[tuple[int, TextPiece | None]] = []
        for index in sorted(self._open):
            reply = self.replies[index]
            ended = reply.finish_reason is not None
            some += [(index, piece) for piece in reply.take()]
            if ended:
                self._computer.metrics.ended(self.served.name, reply)
                some.append((index, None))
                self._open.discard(index)
        if some:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, some)
            except RuntimeError:  # the loop is closed
                self.cancel()


class Computer:
    """Thread that computes a step of each model with requests, in turn, and runs calls between steps."""

    def __init__(self, models: Sequence[Served], *, waiting: int = WAITING) -> None:
        self.models = {one.name: one for one in models}
        self.waiting = waiting
        self.metrics = Metrics()
        self._tasks: list[ServedTask] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._paces: dict[str, float] = {}
        """Moving average of the seconds of a step, by model."""
        self._thread = threading.Thread(target=self._run, name="computer", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """Number of texts of all models that run or wait."""
        return sum(task.open for task in self._tasks)

    @property
    def calls(self) -> int:
        """Number of calls that wait."""
        return len(self._calls)

    def texts(self) -> dict[str, int]:
        """Returns the number of texts that run or wait, by model."""
        found = dict.fromkeys(self.models, 0)
        for task in list(self._tasks):
            found[task.served.name] += task.open
        return found

    def check_room(self, served: Served, texts: int) -> None:
        """Raises Busy if the queue has no room for `texts` more texts of a model."""
        with self._wake:
            self._check_room(served, texts)

    def _check_room(self, served: Served, texts: int) -> None:
        if self._stopped or self.open + len(self._calls) + texts > served.slots + self.waiting:
            raise Busy(max(1, min(60, round(self._paces.get(served.name, 0.0) * 100))))

    def start(
        self,
        served: Served,
        prompts: Sequence[list[int]],
        options: GenerationOptions,
        scores: Sequence[PromptScores] = (),
        grammar: Grammar | None = None,
        observer: Observer | None = None,
    ) -> ServedTask:
        """Starts `options.n` texts for each prompt, from the event loop's thread. Raises Busy, RequestError."""
        assert served.session is not None
        with self._wake:
            self._check_room(served, len(prompts) * options.n)
            replies = [
                served.session.submit(
                    prompt, options, sample=sample, scores=scores[i] if scores else None, grammar=grammar,
                    observer=observer,
                    max_new_tokens=served.room(prompt, options.max_new_tokens),
                )
                for i, prompt in enumerate(prompts)
                for sample in range(options.n)
            ]  # fmt: skip
            task = ServedTask(self, served, replies)
            self._tasks.append(task)
            self._wake.notify()
        return task

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the thread that computes, between two steps, and returns its result. Raises Busy."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_it(value)

        def run() -> None:
            if future.cancelled():
                return
            try:
                found = function()
            except Exception as problem:
                loop.call_soon_threadsafe(settle, future.set_exception, problem)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, found)

        with self._wake:
            if self._stopped or len(self._calls) >= self.waiting:
                raise Busy(1)
            self._calls.append(run)
            self._wake.notify()
        return await future

    def add(self, served: Served) -> None:
        """Adds a model. The dictionary is replaced, because the thread reads it without a lock."""
        with self._wake:
            self.models = {**self.models, served.name: served}

    def wake(self) -> None:
        """Wakes the thread if it waits for work."""
        with self._wake:
            self._wake.notify()

    def stop(self, seconds: float = 10) -> None:
        """Ends all requests, and waits at most `seconds` for the thread to end."""
        with self._wake:
            self._stopped = True
            tasks = list(self._tasks)
            self._wake.notify()
        for task in tasks:
            task.cancel()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._tasks or self._calls or self._stopped):
                    self._wake.wait()
                if self._stopped and not self._tasks:
                    return
                call = self._calls.popleft() if self._calls else None
                tasks = list(self._tasks)
            if call is not None:
                call()
            for served in self.models.values():
                if served.session is not None:
                    self._step(served)
            for task in tasks:
                task._deliver()
            with self._wake:
                self._tasks = [task for task in self._tasks if task.open]

    def _step(self, served: Served) -> None:
        assert served.session is not None
        begun = time.perf_counter()
        try:
            worked = served.session.step()
        except Exception as problem:  # its requests have failed
            print(f"glassformer: a step of {served.name} failed: {reason(problem)}", flush=True)
            return
        if worked:
            took, before = time.perf_counter() - begun, self._paces.get(served.name)
            self._paces[served.name] = took if before is None else 0.9 * before + 0.1 * took


def failure_of(found: Completion) -> RequestError | str | None:
    """Returns the error, or its message, of a text that failed; None for another text."""
    return found.error or "the request was ended" if found.finish_reason in ("failed", "cancelled") else None
