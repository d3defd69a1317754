"""State of a training run."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glassformer.config import validated
from glassformer.dynamics.watch import Moment
from glassformer.errors import RequestError, WorkError
from glassformer.files import disk_errors
from glassformer.machine import DTYPES
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.sharing import Sharing
from glassformer.parts.core.base import moves_of
from glassformer.text import Tokens
from glassformer.text.vocabulary import TOKENIZER_FILES
from glassformer.training import checkpoint
from glassformer.training.evaluate import Scored, scored
from glassformer.training.gradients import Order, Sums, sums_of
from glassformer.training.progress import Progress
from glassformer.training.repeats import times_read
from glassformer.training.request import Request
from glassformer.training.trained import Run, load_run, reading

EVALUATIONS = 8
"""Maximum number of evaluations of a run whose recipe names no interval."""


class Hooks(Protocol):
    """Interface of a callback as the training loop calls it; the hooks that report an event are called by name."""

    def around_backward(self, run: Training) -> AbstractContextManager[Any]: ...
    def before_update(self, run: Training, moment: Moment) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Training:
    """State of a run, which the loop advances step by step and callbacks read and change."""

    def __init__(self, request: Request):
        self.config, self.recipe, self.text = request.config, request.recipe, request.text
        self.how, self.folder = request.how, request.folder
        self.groups = request.groups
        self.sharing = sharing(self.groups)
        autocast = None if self.how.dtype == "float32" else DTYPES[self.how.dtype]
        given = None if request.pretrained is None else request.pretrained.tensors
        self.model = self.sharing.build(self.config, self.recipe.seed, self.how.device, autocast, given).train()
        # walks over a small model take a hundredth of its step
        self.parameters, self.moves = list(self.model.parameters()), moves_of(self.model)
        self.learning_rate = self.recipe.peak_learning_rate(self.config)
        self.optimizer = self.recipe.optimizer.create(self.model, self.learning_rate, self.recipe.weight_decay)
        recipe = self.recipe
        self.batches = recipe.objective.batches(self.text, recipe.batch_size, recipe.context, recipe.seed, self.config)
        self.steps = self.recipe.num_steps(self.config, self.batches.tokens_per_step, self.batches.steps_per_epoch)
        """Steps of the whole run; None if the clock bounds it."""
        self.sums: Sums = sums_of("tree" if self.recipe.atoms > 1 or self.groups.world > 1 else "sequence", self.groups)
        self.interrupted = threading.Event()
        """Event that is set when this process is asked to stop."""
        self.asked = 0
        """Number of the signal that asked this process to stop."""
        self.began = time.perf_counter()
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Seconds of this process for each kind of work: loading, training, evaluating, saving."""
        self.evaluations = EVALUATIONS
        """Maximum number of evaluations of this run, if its recipe names no interval."""
        self.step, self.seconds = 0, 0.0
        self.shift = 0
        """Number of batches skipped by rollbacks: step s reads batch s + shift."""
        self.rows: list[dict[str, Any]] = []
        """Rows of metrics.jsonl."""
        self.validation: dict[str, Any] | None = None
        self.scored: Scored | None = None
        """Sums of the latest evaluation of this process."""
        background = self.recipe.async_save and self.folder is not None
        self.background = checkpoint.Background(self.groups) if background else None
        self.in_place: Callable[[], bool] = lambda: True
        """Function that returns False once the run folder was removed, moved or replaced."""
        self.moment: Moment | None = None
        self.events: list[dict[str, Any]] = []
        """Events of this step: spikes, or a value that is not finite."""
        self.seen: dict[str, Any] | None = None
        """Latest row of the watch's statistics by layer; None before the first."""
        self.error: str | None = None
        """Reason why the run has diverged; None if it has not."""
        self.take = self.back = False
        """`take`: True if this step updates the weights. `back`: True if this step has returned to a checkpoint."""
        self.own: list[Hooks] = []
        """Built-in callbacks; their states are fields of state.json."""
        self.callbacks: list[Hooks] = []
        """All callbacks, in the order in which they are called."""

    @property
    def read(self) -> dict[str, int]:
        """Numbers of tokens that the run has read: `tokens`, and for pairs also those of sources and targets."""
        return self.batches.read(self.step)

    @property
    def tokens(self) -> int:
        return self.read["tokens"]

    @property
    def share(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        if self.steps is not None:
            return self.step / self.steps
        assert self.recipe.minutes is not None
        return min(1.0, self.seconds / (60 * self.recipe.minutes))

    def seed_of(self, atom: int) -> int:
        """Returns the seed of torch's generator for a microbatch (`atom`: its number) of this step, uncorrelated with
        the seeds of other steps and microbatches (the finaliser of splitmix64)."""
        z = (self.recipe.seed * 0x9E3779B97F4A7C15 + self.step + 1 + (atom << 40)) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) >> 1

    @property
    def evaluated(self) -> bool:
        """True if the model with its present weights has been evaluated."""
        return bool(self.rows) and "validation" in self.rows[-1]

    # What callbacks may do

    def stop(self, reason: str) -> None:
        """Ends the run as diverged; held-out losses measured before remain in the curve but are not its result."""
        self.error, self.validation = reason, None

    def skip(self) -> None:
        """Skips the weight update of this step."""
        self.take = False

    def notice(self, events: list[dict[str, Any]]) -> None:
        self.events = events
        if events:
            self.call("noticed", events)

    def went_back(self, step: int) -> None:
        """Ends the present step without a weight update, after a callback has restored an earlier checkpoint. `step`:
        the step before the return."""
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

    def beat(self) -> tuple[float, bool]:
        """Returns values on which all ranks agree after a step: rank 0's clock in seconds, and True if any rank is
        asked to stop."""
        told = self.groups.numbers(time.monotonic(), float(self.interrupted.is_set()))
        return told[0][0], any(asked for _, asked in told)

    def record(self, row: dict[str, Any]) -> None:
        """Adds a row of metrics.jsonl to `rows`, and calls the callbacks with it."""
        self.rows.append({"step": self.step, **self.read, "seconds": self.seconds, **row})
        self.call("recorded", self.rows[-1])

    @contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Context manager that adds the seconds spent inside to `spent[work]`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[work] += time.perf_counter() - began

    @property
    def nbytes(self) -> int:
        """Size of the run's checkpoint in bytes: weights and optimizer state."""
        kept = [value for of in self.optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        return sum(value.nbytes for value in (*self.model.state_dict().values(), *kept))

    def evaluate(self) -> None:
        with self.timed("evaluating"):
            self._evaluate()
        self.call("evaluated")

    def _evaluate(self) -> None:
        recipe = self.recipe
        batch = recipe.micro_batch or recipe.batch_size
        windows = recipe.objective.evaluation(
            self.text, recipe.context, recipe.evaluation_tokens, batch, self.model.config
        )
        self.scored = scored(self.model, windows, self.how, recipe.objective, self.groups)
        self.validation = self.scored.measures()
        self.sharing.settle(self.model)
        self.record({"validation": self.validation})

    def result(self) -> Run:
        """Returns the finished `Run`. If several processes shared it, rank 0 has the whole model, as saved last, and
        the others their shards."""
        model = self.model
        if self.groups.world > 1 and self.groups.leads and self.folder is not None and checkpoint.latest(self.folder):
            model = load_run(self.folder).model
        times = times_read(self.tokens, self.recipe, self.text)
        return Run(
            model, self.config, reading(self.config, self.text.tokenizer), self.recipe,
            "diverged" if self.error else "ok", self.step, self.tokens, self.seconds, self.validation, self.rows,
            self.how, self.folder, self.error, self.learning_rate, self.read, spent=dict(self.spent), passes=times,
            scored=self.scored if self.evaluated else None,
        )  # fmt: skip

    # Checkpoints

    def save(self, wait: bool = False) -> None:
        """Saves a checkpoint if the run has a folder. `wait`: returns only when it is written, also if a thread writes
        it."""
        if self.folder is not None:
            checkpoint.together(self.groups, self.check_folder)
            with self.timed("saving"):
                try:
                    self._save(self.folder, wait)
                except WorkError:
                    self.check_folder()  # which gives the reason
                    raise

    def check_folder(self) -> None:
        """Raises WorkError if the run folder was removed, moved or replaced, so that no step is trained for nothing."""
        if not self.in_place():
            raise WorkError(
                f"{self.folder} was removed, moved or replaced while its run trained, which ends after step "
                f"{self.step:,}; train again, or continue in the place it was moved to with --resume",
                code="missing",
            )  # fmt: skip

    def _save(self, folder: Path, wait: bool) -> None:
        state: dict[str, Any] = {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "validation": self.validation,
            "data": identity(self.text),
            "dtype": self.how.dtype,
            "sums": self.sums.order,
        }
        for callback in self.own:
            state |= callback.state()
        if states := {key: kept for key, callback in self._users() if (kept := callback.state())}:
            state["callbacks"] = states
        watch = state.pop("watch", None)  # a separate file, because it may be large
        given = folder, self.step, self.model, self.optimizer, state, watch
        if self.background is None:
            self.call("saved", checkpoint.save(*given, self.groups))
            return
        self.finish_saving()
        self.background.save(*given)
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Waits for the checkpoint that a thread is writing, if any. Raises WorkError if writing failed."""
        if self.background is not None and (path := self.background.wait()) is not None:
            self.call("saved", path)

    def restore(self, found: Path) -> None:
        """Resumes from a checkpoint of this run. Raises RequestError if it is damaged or of other text."""
        state = self._progress(found)
        if state.data != identity(self.text):
            raise RequestError(
                f"{self.folder} was trained on other text or with another tokenizer; name another folder",
                code="changed", field="data",
            )  # fmt: skip
        assert self.folder is not None
        gone = not any((self.folder / name).exists() for name in TOKENIZER_FILES)
        if gone and self.groups.leads:  # equal to the text's, as checked above
            with disk_errors(self.folder):
                self.text.tokenizer.save(self.folder)
        if self.recipe.atoms > 1:
            check_order(state.sums, self.groups, found)
            self.sums = sums_of(state.sums, self.groups)
        checkpoint.load_model(found, self.model, self.groups)
        checkpoint.load_optimizer(found, self.model, self.optimizer, self.groups)
        plain = state.model_dump()
        self.step, self.seconds, self.validation = state.step, state.seconds, plain["validation"]
        self.scored = None  # of weights that are gone
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

    def _users(self) -> Iterator[tuple[str, Hooks]]:
        """Yields (key of its state, callback) for each callback that the user passed to the run."""
        seen: Counter[str] = Counter()
        for callback in self.callbacks:
            if callback not in self.own:
                name = type(callback).__name__
                yield f"{name}.{seen[name]}", callback  # the n-th of its class, whichever callbacks are between
                seen[name] += 1

    def _progress(self, found: Path) -> Progress:
        """Returns the progress that a checkpoint records. Raises RequestError if a run of this recipe cannot have
        reached this progress."""
        path, plain = found / "state.json", checkpoint.read_state(found)
        with checkpoint.way_on(found):
            state = validated(Progress, plain, "state", str(path))
            if self.steps is not None:  # a rollback skips at most the length of a run
                for name, limit in {"step": self.steps, "shift": state.rolled_back * self.steps}.items():
                    if getattr(state, name) > limit:
                        raise RequestError(
                            f"{path}: {name}={getattr(state, name)} is more than the {limit} it can be",
                            code="range", field=f"{path.name}:{name}", value=getattr(state, name),
                        )  # fmt: skip
        return state


def identity(text: Tokens) -> list[str]:
    """Returns values that identify a text: the name of its shards, which is a hash of their content, and its
    tokenizer."""
    return [text.train.folder.name, text.tokenizer.fingerprint()]


def check_order(order: Order, groups: ProcessGroups, found: Path) -> None:
    """Raises RequestError if several ranks share the microbatches (atoms) of a run that sums gradients in sequence."""
    if order != "tree" and groups.world > 1:
        raise RequestError(
            f"{found} is of a run whose gradients are added up one after the other, as was done before there were "
            f"trees, and {groups.world} processes cannot share that; continue in one process",
            code="conflict", field="layout", value=str(groups.layout), expected="one process",
        )  # fmt: skip


def sharing(groups: ProcessGroups) -> Sharing:
    """Returns the object that divides a step among processes; torch.distributed is imported only for more than one
    process."""
    if groups.world == 1:
        return Sharing()
    from glassformer.parallel.apply import Ranks

    return Ranks(groups)
