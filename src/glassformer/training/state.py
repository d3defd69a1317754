"""A training run as it goes on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.config import validated
from glassformer.dynamics.watch import Moment
from glassformer.errors import RequestError
from glassformer.text import Tokens
from glassformer.text.vocabulary import TOKENIZER_FILES
from glassformer.training import checkpoint
from glassformer.training.evaluate import evaluate
from glassformer.training.progress import Progress
from glassformer.training.request import Request
from glassformer.training.run import Run, reading

if TYPE_CHECKING:
    from glassformer.training.callbacks.base import Callback


class Training:
    """What the loop moves from step to step, and what callbacks look at and act on."""

    def __init__(self, request: Request):
        self.config, self.recipe, self.text = request.config, request.recipe, request.text
        self.how, self.folder = request.how, request.folder
        self.model = self.config.build(seed=self.recipe.seed).to(self.how.device).train()
        self.learning_rate = self.recipe.peak_learning_rate(self.config)
        self.optimizer = self.recipe.optimizer.create(self.model, self.learning_rate, self.recipe.weight_decay)
        recipe = self.recipe
        self.batches = recipe.objective.batches(self.text, recipe.batch_size, recipe.context, recipe.seed, self.config)
        self.steps = self.recipe.num_steps(self.config, self.batches.tokens_per_step)
        """Of the whole run; None where the clock bounds it."""
        self.step, self.seconds = 0, 0.0
        self.shift = 0
        """Batches left out by rolling back: step s reads batch s + shift."""
        self.rows: list[dict[str, Any]] = []
        """Rows of metrics.jsonl."""
        self.validation: dict[str, Any] | None = None
        self.moment: Moment | None = None
        self.events: list[dict[str, Any]] = []
        """What was found in this step: spikes, or a value that is not finite."""
        self.seen: dict[str, Any] | None = None
        """The latest row of statistics."""
        self.error: str | None = None
        """Why the run has diverged."""
        self.take = self.back = False
        """Whether this step moves the weights; whether it has led back to a checkpoint."""
        self.own: list[Callback] = []
        """Callbacks of the run itself; their states are fields of state.json."""
        self.callbacks: list[Callback] = []
        """All, in the order in which they are called."""

    @property
    def read(self) -> dict[str, int]:
        """The tokens that were read, and of pairs those of either side."""
        return self.batches.read(self.step)

    @property
    def tokens(self) -> int:
        return self.read["tokens"]

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.steps is not None:
            return self.step / self.steps
        assert self.recipe.minutes is not None
        return min(1.0, self.seconds / (60 * self.recipe.minutes))

    @property
    def seed_of_step(self) -> int:
        """Of torch's generator, far from those of the steps beside it (the finaliser of splitmix64)."""
        z = (self.recipe.seed * 0x9E3779B97F4A7C15 + self.step + 1) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) >> 1

    @property
    def evaluated(self) -> bool:
        """Whether the model as it is has been evaluated."""
        return bool(self.rows) and "validation" in self.rows[-1]

    # What callbacks may do

    def stop(self, reason: str) -> None:
        """Ends the run as diverged."""
        self.error = reason

    def skip(self) -> None:
        """Leaves out this step."""
        self.take = False

    def notice(self, events: list[dict[str, Any]]) -> None:
        self.events = events
        if events:
            self.call("noticed", events)

    def went_back(self, step: int) -> None:
        """To be called by what has restored a checkpoint at `step`: the step ends here."""
        self.take, self.back = False, True
        self.optimizer.zero_grad(set_to_none=True)
        self.call("rolled_back", step)

    # What the loop does

    def call(self, hook: str, *about: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *about)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.around_backward(self))
            yield

    def record(self, row: dict[str, Any]) -> None:
        """Adds a row of metrics.jsonl."""
        self.rows.append({"step": self.step, **self.read, "seconds": self.seconds, **row})
        self.call("recorded", self.rows[-1])

    def evaluate(self) -> None:
        recipe = self.recipe
        batch = recipe.micro_batch or recipe.batch_size
        self.validation = evaluate(
            self.model, self.text, recipe.context, self.how, recipe.evaluation_tokens, batch, recipe.objective
        )
        self.record({"validation": self.validation})
        self.call("evaluated")

    def result(self) -> Run:
        return Run(
            self.model, self.config, reading(self.config, self.text.tokenizer), self.recipe,
            "diverged" if self.error else "ok", self.step, self.tokens, self.seconds, self.validation, self.rows,
            self.how, self.folder, self.error, self.learning_rate, self.read,
        )  # fmt: skip

    # Checkpoints

    def save(self) -> None:
        if self.folder is None:
            return
        state: dict[str, Any] = {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "validation": self.validation,
            "data": identity(self.text),
            "dtype": self.how.dtype,
        }
        for callback in self.own:
            state |= callback.state()
        if states := {key: kept for key, callback in self._users() if (kept := callback.state())}:
            state["callbacks"] = states
        watch = state.pop("watch", None)  # a file of its own: it may be large
        self.call("saved", checkpoint.save(self.folder, self.step, self.model, self.optimizer, state, watch))

    def restore(self, found: Path) -> None:
        """Goes on from a checkpoint of this run. Raises RequestError where it is damaged or of other text."""
        state = self._progress(found)
        if state.data != identity(self.text):
            raise RequestError(
                f"{self.folder} was trained on other text or with another tokenizer; name another folder"
            )
        assert self.folder is not None
        if not any((self.folder / name).exists() for name in TOKENIZER_FILES):  # gone; the text's is the same
            with checkpoint.disk_errors(self.folder):
                self.text.tokenizer.save(self.folder)
        checkpoint.load_model(found, self.model)
        checkpoint.load_optimizer(found, self.model, self.optimizer)
        plain = state.model_dump()
        self.step, self.seconds, self.validation = state.step, state.seconds, plain["validation"]
        if checkpoint.WATCH in state.sha256:
            plain["watch"] = checkpoint.read_watch(found)
        for callback in self.own:
            callback.restore(plain)
        users = dict(self._users())
        for key, kept in state.callbacks.items():
            if key in users:
                users[key].restore(kept)
            else:
                warnings.warn(f"{found} keeps the state of a callback {key}, which this run has not: it is dropped")

    def _users(self) -> Iterator[tuple[str, Callback]]:
        """The callbacks that are not the run's own, by the key of their state."""
        seen: Counter[str] = Counter()
        for callback in self.callbacks:
            if callback not in self.own:
                name = type(callback).__name__
                yield f"{name}.{seen[name]}", callback  # the n-th of its class, whatever stands between
                seen[name] += 1

    def _progress(self, found: Path) -> Progress:
        """Where the checkpoint says that the run stands. Raises RequestError for where it cannot have stood."""
        path, plain = found / "state.json", checkpoint.read_state(found)
        with checkpoint.way_on(found):
            state = validated(Progress, plain, "state", str(path))
            if self.steps is not None:  # going back leaves out a run's length at most
                for name, limit in {"step": self.steps, "shift": state.rolled_back * self.steps}.items():
                    if getattr(state, name) > limit:
                        raise RequestError(f"{path}: {name}={getattr(state, name)} is more than the {limit} it can be")
        return state


def identity(text: Tokens) -> list[str]:
    """What names the text: its shards are called by a hash of what they hold."""
    return [text.train.folder.name, text.tokenizer.fingerprint()]
