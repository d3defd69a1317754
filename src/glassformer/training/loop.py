"""The training loop: one straight script over small functions."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor, nn

from glassformer import machine
from glassformer.config import ModelConfig, first_difference, told, validated
from glassformer.dynamics.qk_clip import QKClip, refuse_clipping
from glassformer.dynamics.records import Records
from glassformer.dynamics.watch import Moment, Watch
from glassformer.errors import RequestError, WorkError
from glassformer.model import Model
from glassformer.parts.base import after_step, to_plain
from glassformer.parts.region import compiled_regions
from glassformer.text import Batches, Tokenizer, Tokens, prepare
from glassformer.text.batches import refuse_long
from glassformer.text.vocabulary import TOKENIZER_FILES
from glassformer.thresholds import DIVERGENCE_NATS, DIVERGENCE_WINDOW
from glassformer.training import checkpoint
from glassformer.training.evaluate import evaluate
from glassformer.training.progress import Progress, read_metrics
from glassformer.training.recipe import Recipe

EVALUATIONS = 8
COMPILE_MINUTES = 2.0
COMPILE_FLOPS = 5e13  # minutes on two cores
ROLL_BACKS = 10
LEFT_OUT = 10
HELD = ("config.yaml", "config.json", "*tokenizer*", "metrics.jsonl", "model*.safetensors")
"""What a run would write over, or what would no longer belong together."""


class Interrupted(WorkError):
    """The run was stopped from outside; it is saved and can go on."""


@dataclass
class Report:
    """What a callback sees after a step."""

    step: int
    steps: int | None
    tokens: int
    seconds: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    done: float
    """Share of the run, 0 to 1."""
    validation: dict[str, Any] | None = None
    events: Sequence[dict[str, Any]] = ()
    """What the watch has found in this step: spikes, and what was done about them."""
    statistics: dict[str, Any] | None = None
    """What it has seen, where it has looked in this step."""

    @property
    def seconds_left(self) -> float:
        return self.seconds * (1 - self.done) / self.done if self.done > 0 else math.nan


Callback = Callable[[Report], None]


class Observer(Protocol):
    """Looks at a run from inside, as `dynamics.Watch` does; it may reach in, too."""

    def before_update(self, moment: Moment) -> object:
        """Gradients are there as the loss left them; the weights have not moved."""

    def after_update(self, moment: Moment) -> object:
        """The weights have moved."""


@dataclass
class Run:
    """A finished (or diverged) training run."""

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer
    recipe: Recipe
    status: str
    steps: int
    tokens: int
    seconds: float
    validation: dict[str, Any] | None
    metrics: list[dict[str, Any]] = field(repr=False)
    how: machine.Settings
    folder: Path | None = None
    error: str | None = None
    learning_rate: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps, so that a pause of the machine does not count."""
        rates = sorted(row["tokens_per_second"] for row in self.metrics if "tokens_per_second" in row)
        return rates[len(rates) // 2] if rates else 0.0


def train(
    config: ModelConfig,
    data: str | Path | Tokens,
    recipe: Recipe | dict[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    tokenizer: str = "auto",
    observers: Sequence[Observer] = (),
    vocab_size: int | None = None,
) -> Run:
    """Trains `config` on DATA by `recipe`; vocabulary and context come from the tokenizer and the recipe. `vocab_size`
    pads the vocabulary to more than the tokenizer's.

    With `out` a run folder is written: config.yaml, recipe.yaml, tokenizer, metrics.jsonl, checkpoints. `resume`
    goes on from its latest checkpoint, bit for bit as if it had not stopped. Raises RequestError before anything is
    computed where the request is wrong, Interrupted on Ctrl-C after saving; a diverging loss does not raise, it ends
    the run with `status="diverged"`. `recipe.watch` writes dynamics.jsonl; `observers` are called around every update.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.of(**recipe)
    refuse_early(config, recipe)
    folder = check_folder(out, resume)
    if recipe.on_spike == "roll_back" and folder is None:
        raise RequestError("on_spike=roll_back returns to a checkpoint; name a folder for the run (--out RUN)")
    text = data if isinstance(data, Tokens) else prepare(data, tokenizer, context=recipe.context)
    for name, side in (("training", text.train), ("held-out", text.validation)):
        refuse_long(recipe.context, len(side), f"{name} text")
    config = fit(config, text.tokenizer.vocab_size, recipe.context, vocab_size)
    how = settings(config, _as_it_began(recipe, folder) if resume else recipe)
    config.check()
    machine.apply(how)
    with only_writer(folder):
        _open_folder(folder, config, recipe, text, resume)
        return _Loop(config, recipe, text, how, folder, callback, observers).run(resume)


def settings(config: ModelConfig, recipe: Recipe) -> machine.Settings:
    """How this run will compute; compiling, unless it is asked for, only where it pays."""
    compile = False if recipe.compile is None and not worth_compiling(config, recipe) else recipe.compile
    return machine.settings(recipe.device, recipe.dtype, recipe.threads, compile)


def fit(config: ModelConfig, vocab_size: int, context: int, padded: int | None = None) -> ModelConfig:
    """The config with the text's vocabulary, or one `padded` to more, and the training context. Raises RequestError
    where that is less."""
    if padded is not None and padded < vocab_size:
        raise RequestError(
            f"vocab_size={padded} is less than the {vocab_size} tokens of the text's tokenizer; leave it out, or give "
            f"{vocab_size} or more"
        )
    return config.vary(vocab_size=padded or vocab_size, context=context)


def refuse_early(config: ModelConfig, recipe: Recipe) -> None:
    """What can be refused of a run before the text is read, which may take minutes. Raises RequestError."""
    config = config.vary(context=recipe.context)
    config.check()
    refuse_short(config)
    refuse_blind(config)
    refuse_clipping(config, recipe.qk_clip)
    recipe.optimizer.check(config)
    refuse_untrained(config, settings(config, recipe).device)


def refuse_blind(config: ModelConfig) -> None:
    """A next-token loss means nothing where a token sees what follows it. Raises RequestError."""
    for layer, block in enumerate(config.layers()):
        if not block.mixer.causal(config.ctx):
            raise RequestError(
                f"layer {layer} is not causal ({told(block.mixer)}): it would see the token it is to predict; use a "
                "causal mixer",
                code="not_causal", field=f"layers.{layer}.mixer", value=block.mixer,
            )  # fmt: skip


def refuse_untrained(config: ModelConfig, device: str) -> None:
    """Raises RequestError for a kernel that has no backward pass on the device."""
    for block in config.layers():
        block.mixer.check_training(config.ctx, device)


def refuse_short(config: ModelConfig) -> None:
    """Raises RequestError where positions end before the context does."""
    length = config.embedding.limit(config.ctx)
    if length is not None and length < config.context:
        raise RequestError(
            f"embedding.position.length={length} is shorter than context={config.context}; use {config.context}"
        )


def worth_compiling(config: ModelConfig, recipe: Recipe) -> bool:
    """Whether a run is long enough to win back the time its regions take to compile, some tens of seconds."""
    if recipe.minutes is not None:
        return recipe.minutes >= COMPILE_MINUTES
    work = 3 * config.flops(recipe.context) * (recipe.num_steps(config) or 0) * recipe.tokens_per_step
    return work >= COMPILE_FLOPS


def gradient_norm(model: nn.Module) -> float:
    """||g|| over all parameters."""
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def clip(model: nn.Module, limit: float | None, norm: float) -> None:
    """Scales gradients of norm `norm` down to `limit` where that is less; touches nothing otherwise."""
    if limit is not None and norm > limit:
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, torch.tensor(norm))


class _Loop:
    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        text: Tokens,
        how: machine.Settings,
        folder: Path | None,
        callback: Callback | None,
        observers: Sequence[Observer] = (),
    ):
        self.config, self.recipe, self.text, self.how = config, recipe, text, how
        self.folder, self.callback = folder, callback
        self.model = config.build(seed=recipe.seed).to(how.device).train()
        self.learning_rate = recipe.peak_learning_rate(config)
        self.optimizer = recipe.optimizer.create(self.model, self.learning_rate, recipe.weight_decay)
        self.batches = Batches(text.train, recipe.batch_size, recipe.context, recipe.seed)
        self.steps = recipe.num_steps(config)
        self.step, self.seconds = 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.validation: dict[str, Any] | None = None
        self.first_loss: float | None = None
        self.best = math.inf
        """The lowest mean loss of a window of steps."""
        self.recent: deque[float] = deque(maxlen=DIVERGENCE_WINDOW)
        self.log: IO[str] | None = None
        self.watch = Watch(self.model, recipe.watch, autocast=how.autocast, decode=text.tokenizer.decode)
        self.observers = observers
        self.qk_clip = QKClip(self.model, recipe.qk_clip)
        self.shift = 0
        """Batches left out by rolling back: step s reads batch s + shift."""
        self.rolled_back = 0
        self.moment: Moment | None = None
        self.left_out = 0
        """Steps that were no numbers, one after the other."""

    def run(self, resume: bool) -> Run:
        if resume:
            self._restore()
        self._open_log()
        if resume:
            self._warn_of_gaps()
        error: str | None = None
        try:
            if self.share < 1:
                self._warm_up()
            saved = looked = time.monotonic()
            with _deferred_interrupt() as interrupted:
                while self.share < 1:
                    error = self._one_step()
                    if error:
                        break
                    if self._evaluation_due(looked) and not self.evaluated:
                        self._evaluate()
                        looked = time.monotonic()
                        if error := self._blown_up():
                            break
                    if interrupted.is_set():
                        self._save()
                        raise Interrupted(self._how_to_go_on())
                    if time.monotonic() - saved > self.recipe.checkpoint_seconds:
                        self._save()
                        saved = time.monotonic()
                if error is not None:
                    self.watch.ended(self.step, error)
                if error is None:
                    if not self.evaluated:
                        self._evaluate()
                    error = self._blown_up()
                    if error is None and (error := self._climbed_before_a_window()):
                        self.watch.ended(self.step, error)
                if error is None:
                    self._save()
                    if interrupted.is_set():
                        raise Interrupted(self._how_to_go_on())
        finally:
            if self.log:
                self.log.close()
            if self.watch.records:
                self.watch.records.close()
        return Run(
            self.model, self.config, self.text.tokenizer, self.recipe, "diverged" if error else "ok", self.step,
            self.step * self.recipe.tokens_per_step, self.seconds, self.validation, self.rows, self.how, self.folder,
            error, self.learning_rate,
        )  # fmt: skip

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.steps is not None:
            return self.step / self.steps
        assert self.recipe.minutes is not None
        return min(1.0, self.seconds / (60 * self.recipe.minutes))

    @property
    def evaluated(self) -> bool:
        """Whether the model as it is has been evaluated."""
        return bool(self.rows) and "validation" in self.rows[-1]

    def _one_step(self) -> str | None:
        """One optimizer step; returns why the run has diverged, if it has."""
        began = time.perf_counter()
        recipe = self.recipe
        # Steps follow the clock in a run bounded by minutes: n is then what the present speed promises.
        n = float(self.steps) if self.steps is not None else max(1.0, self.step / self.share) if self.step else 1e6
        rate = self.learning_rate * recipe.schedule.factor(self.step, n)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        torch.manual_seed(_mix(recipe.seed, self.step))  # dropout is a function of the step alone
        inputs, targets = self.batches[self.step + self.shift]
        with self.qk_clip.looking():
            loss = self._backward(inputs, targets)
        norm = gradient_norm(self.model)
        moment = self.moment = Moment(self.step + 1, loss, norm, rate, inputs, targets, self.model, self.optimizer)
        finite = math.isfinite(loss) and math.isfinite(norm)
        found = self.watch.before_update(moment) if finite else [self.watch.not_finite(moment)]
        self._notice(found)
        if not finite and (recipe.on_spike == "go_on" or self.left_out == LEFT_OUT):
            last = f"; last loss {self.recent[-1]:.4f}" if self.recent else ""
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            return f"the {what} became {loss if what == 'loss' else norm} at step {self.step + 1}{last}"
        for observer in self.observers:
            observer.before_update(moment)
        if found and recipe.on_spike == "roll_back" and self._roll_back(moment):
            return None
        taken = not found or recipe.on_spike == "go_on"
        if taken:
            clip(self.model, recipe.clip, norm)
            self.optimizer.step()
            self.qk_clip.after_update()
            after_step(self.model)
            self.watch.after_update(moment)
            for observer in self.observers:
                observer.after_update(moment)
        else:
            self.watch.skipped(moment)
        self.left_out = 0 if finite else self.left_out + 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.how.device != "cpu":
            getattr(torch, self.how.device.split(":")[0]).synchronize()
        took = time.perf_counter() - began
        self.step += 1
        self.seconds += took
        if not taken:
            done = {"step": self.step, "tokens": self.step * recipe.tokens_per_step, "seconds": self.seconds}
            self._record({**done, "skipped": loss if finite else str(loss)})
            return None
        self.recent.append(loss)
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self._record(
            {
                "step": self.step,
                "tokens": self.step * recipe.tokens_per_step,
                "seconds": self.seconds,
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": norm,
                "tokens_per_second": recipe.tokens_per_step / took,
            }
        )
        if len(self.recent) < DIVERGENCE_WINDOW:
            return None
        mean = sum(self.recent) / len(self.recent)
        self.best = min(self.best, mean)
        return self._climbed(mean, len(self.recent))

    def _climbed(self, mean: float, steps: int) -> str | None:
        """Why the run has diverged, if the mean loss of its last `steps` steps says so."""
        assert self.first_loss is not None
        lowest = min(self.best, self.first_loss)
        if mean <= lowest + DIVERGENCE_NATS:
            return None
        return (
            f"the loss diverged: the mean of the last {steps} steps is {mean:.3f}, more than {DIVERGENCE_NATS:g} nat "
            f"above the lowest before, {lowest:.3f}, at step {self.step}"
        )

    def _climbed_before_a_window(self) -> str | None:
        """Why a run that ended before its first whole window has diverged, by the later half of its steps."""
        later = list(self.recent)[len(self.recent) // 2 :]
        if math.isfinite(self.best) or not later:
            return None
        return self._climbed(sum(later) / len(later), len(later))

    def _blown_up(self) -> str | None:
        """Why the run has diverged, if the last evaluation shows it."""
        if self.validation is None or math.isfinite(self.validation["loss"]):
            return None
        found, self.validation = self.validation["loss"], None
        if self.moment is not None:
            self.watch.not_finite(replace(self.moment, loss=found))
        return f"the held-out loss became {found} after step {self.step}"

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Adds the batch's gradients, in pieces of micro_batch sequences; returns the mean loss."""
        recipe, device = self.recipe, self.how.device
        size = recipe.micro_batch or recipe.batch_size
        total = 0.0
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            share = len(x) / recipe.batch_size
            with compiled_regions(self.how.compile):
                with self.how.autocast():
                    loss = self.model.loss(x.to(device), y.to(device))
                (loss * share).backward()
            total += float(loss.detach()) * share
        return total

    def _roll_back(self, moment: Moment) -> bool:
        """Back to the latest checkpoint, from where the batches up to this one are left out (Chowdhery et al. 2022,
        2204.02311, section 5.1). False where that has been done often enough, or there is no checkpoint yet."""
        if self.rolled_back == ROLL_BACKS or self.folder is None or checkpoint.latest(self.folder) is None:
            return False
        batch, times, seconds = self.step + self.shift, self.rolled_back + 1, self.seconds
        self._restore()
        self.shift, self.rolled_back, self.seconds = batch + 1 - self.step, times, seconds
        self._open_log()
        self.optimizer.zero_grad(set_to_none=True)
        self._notice(self.watch.rolled_back(moment.step, self.step))
        return True

    def _notice(self, events: list[dict[str, Any]]) -> None:
        """Tells the callback what the watch found."""
        if events and self.callback and any("loss" in row for row in self.rows):
            self.callback(self._report(events=events))

    def _warm_up(self) -> None:
        """Compiles, and touches memory, before the clock runs; leaves no trace in weights or moments."""
        torch.manual_seed(0)
        kept = [buffer.clone() for buffer in self.model.buffers()]
        try:
            self._backward(*self.batches[0])
        except Exception as error:
            if not self.how.compile or isinstance(error, (RequestError, WorkError)):
                raise
            self.how = replace(self.how, compile=False)
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"compiling failed, so this run is eager: {reason}")
            self._backward(*self.batches[0])
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(value)

    def _evaluation_due(self, last: float) -> bool:
        if self.steps is not None:
            every = self.recipe.evaluate_every or max(1, self.steps // EVALUATIONS)
            return self.step % every == 0 or self.step == self.steps
        if self.recipe.evaluate_every:
            return self.step % self.recipe.evaluate_every == 0
        assert self.recipe.minutes is not None
        return time.monotonic() - last > 60 * self.recipe.minutes / EVALUATIONS

    def _evaluate(self) -> None:
        self.validation = evaluate(
            self.model,
            self.text,
            self.recipe.context,
            self.how,
            self.recipe.evaluation_tokens,
            self.recipe.micro_batch or self.recipe.batch_size,
        )
        row = {"step": self.step, "tokens": self.step * self.recipe.tokens_per_step, "seconds": self.seconds}
        self._record({**row, "validation": self.validation})

    def _record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.log:
            with checkpoint.disk_errors(Path(self.log.name)):
                self.log.write(json.dumps(row) + "\n")
        if self.callback and any("loss" in row for row in self.rows):
            self.callback(self._report(row.get("validation")))

    def _report(self, validation: dict[str, Any] | None = None, events: Sequence[dict[str, Any]] = ()) -> Report:
        last = next(row for row in reversed(self.rows) if "loss" in row)
        return Report(
            self.step, self.steps, self.step * self.recipe.tokens_per_step, self.seconds, last["loss"],
            last["learning_rate"], last["grad_norm"], last["tokens_per_second"], self.share, validation, events,
            looked["statistics"] if (looked := self.watch.latest) and looked["step"] == self.step else None,
        )  # fmt: skip

    # The run folder

    def _save(self) -> None:
        if self.folder is None:
            return
        if self.log:
            with checkpoint.disk_errors(self.folder):
                self.log.flush()
        state = {
            "seconds": self.seconds,
            "tokens": self.step * self.recipe.tokens_per_step,
            "first_loss": self.first_loss,
            "best": self.best if math.isfinite(self.best) else None,
            "recent": list(self.recent),
            "validation": self.validation,
            "data": _identity(self.text),
            "shift": self.shift,
            "rolled_back": self.rolled_back,
            "left_out": self.left_out,
            "dtype": self.how.dtype,
        }
        checkpoint.save(self.folder, self.step, self.model, self.optimizer, state, self.watch.state())

    def _restore(self) -> None:
        found = checkpoint.latest(self.folder) if self.folder else None
        if found is None:
            return
        state = self._progress(found)
        if state.data != _identity(self.text):
            raise RequestError(
                f"{self.folder} was trained on other text or with another tokenizer; name another folder"
            )
        assert self.folder is not None
        if not any((self.folder / name).exists() for name in TOKENIZER_FILES):  # gone; the text's is the same
            with checkpoint.disk_errors(self.folder):
                self.text.tokenizer.save(self.folder)
        checkpoint.load_model(found, self.model)
        checkpoint.load_optimizer(found, self.model, self.optimizer)
        self.step, self.seconds, self.first_loss = state.step, state.seconds, state.first_loss
        self.validation = None if state.validation is None else state.validation.model_dump()
        self.best = math.inf if state.best is None else state.best
        self.recent.clear()
        self.recent.extend(state.recent)
        self.shift, self.rolled_back, self.left_out = state.shift, state.rolled_back, state.left_out
        if checkpoint.WATCH in state.sha256:
            self.watch.restore(checkpoint.read_watch(found))

    def _progress(self, found: Path) -> Progress:
        """Where the checkpoint says that the run stands. Raises RequestError for where it cannot have stood."""
        path, plain = found / "state.json", checkpoint.read_state(found)
        with checkpoint.way_on(found):
            state = validated(Progress, plain, "state", str(path))
            most = {"rolled_back": ROLL_BACKS, "left_out": LEFT_OUT}
            if self.steps is not None:  # going back leaves out a run's length at most
                most |= {"step": self.steps, "shift": state.rolled_back * self.steps}
            for name, limit in most.items():
                if getattr(state, name) > limit:
                    raise RequestError(f"{path}: {name}={getattr(state, name)} is more than the {limit} it can be")
        return state

    def _open_log(self) -> None:
        """The files of a run that grow, cut back to what the checkpoint knows."""
        if self.folder is not None:
            self._open_metrics()
            if self.watch.records:
                self.watch.records.close()
            self.watch.records = Records.open(self.folder, self.step)

    def _open_metrics(self) -> None:
        assert self.folder is not None
        if self.log:
            self.log.close()
        path = self.folder / "metrics.jsonl"
        self.rows = [row for row in read_metrics(path) if row["step"] <= self.step] if self.step else []
        measured = [row["validation"] for row in self.rows if "validation" in row]
        self.validation = measured[-1] if measured else self.validation
        with checkpoint.disk_errors(path):
            checkpoint.replace_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))
            self.log = path.open("a", encoding="utf-8")

    def _warn_of_gaps(self) -> None:
        """Every step leaves one row; where rows are gone, weights and moments are not, but the curves have a gap."""
        lost = self.step - len({row["step"] for row in self.rows if "validation" not in row})
        if self.folder is not None and lost > 0:
            warnings.warn(
                f"{self.folder / 'metrics.jsonl'} lacks {lost:,} of the {self.step:,} steps so far: the run goes on as "
                f"it would have, but its curves have a gap"
            )

    def _how_to_go_on(self) -> str:
        if self.folder is None:
            return f"stopped at step {self.step}; nothing was saved, as no folder was named (--out)"
        return f"stopped at step {self.step} and saved in {self.folder}; go on with --out {self.folder} --resume"


def _mix(seed: int, step: int) -> int:
    """A seed for step `step`, far from those of its neighbours (the finaliser of splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + step + 1) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 1


def _identity(text: Tokens) -> list[str]:
    """What names the text: its shards are called by a hash of what they hold."""
    return [text.train.folder.name, text.tokenizer.fingerprint()]


def check_folder(out: str | Path | None, resume: bool) -> Path | None:
    """Refuses what can be refused before the text is read, and leaves nothing there."""
    if out is None:
        if resume:
            raise RequestError("resume needs the run's folder (--out RUN)")
        return None
    if not str(out):
        raise RequestError("--out is empty; name a folder")
    folder = Path(out)
    new = [place for place in (folder, *folder.parents) if not place.is_dir()]
    for place in new:
        if place.exists():
            raise RequestError(f"--out {folder}: {place} is a file; name a folder")
    found = checkpoint.latest(folder)
    if found is not None and not resume:
        raise RequestError(f"{folder} already holds a run; go on with --resume, or name another folder")
    if found is None and resume:
        raise RequestError(f"{folder} has no checkpoint to resume from; leave out --resume to begin")
    held = sorted(path.name for pattern in HELD for path in folder.glob(pattern))
    begun = (folder / "recipe.yaml").is_file()  # a run, though it may have ended before its first checkpoint
    if found is None and held and not begun:
        raise RequestError(f"{folder} holds {', '.join(held[:5])}, and is no run; name a folder of its own")
    try:
        with checkpoint.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    finally:
        for place in new:
            with suppress(OSError):
                place.rmdir()
    return folder


def _open_folder(folder: Path | None, config: ModelConfig, recipe: Recipe, text: Tokens, resume: bool) -> None:
    """Writes what a run begins with; on resuming, holds it against what is asked and writes nothing."""
    if folder is None:
        return
    if resume:
        _same_run(folder, config, recipe)
        return
    with checkpoint.disk_errors(folder):
        recipe.save(folder / "recipe.yaml")  # first: it says that the others are a run's
        config.save(folder / "config.yaml")
        text.tokenizer.save(folder)


def _as_it_began(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with the dtype that the run has been computed in: what `auto` chose stays, though the machine or what
    it measures may have changed."""
    found = checkpoint.latest(folder) if folder and recipe.dtype == "auto" else None
    begun = None if found is None else checkpoint.read_state(found).get("dtype")
    return recipe.vary(dtype=begun) if isinstance(begun, str) and begun in machine.DTYPES else recipe


def _same_run(folder: Path, config: ModelConfig, recipe: Recipe) -> None:
    """Refuses to go on with another model or recipe than the run began with."""
    if difference := ModelConfig.from_file(folder / "config.yaml").diff(config):
        path, (was, now) = next(iter(difference.items()))
        raise RequestError(f"{folder} holds another model: {path} was {was} and is now {now}")
    free = {"device", "threads", "compile", "checkpoint_seconds", "watch"}
    begun = Recipe.from_file(folder / "recipe.yaml")
    if change := first_difference(to_plain(begun), to_plain(recipe), besides=free):
        path, was, now = change
        raise RequestError(f"{folder} was begun with {path}={was}, and {path}={now} was asked for; name another folder")


@contextmanager
def only_writer(folder: Path | None) -> Iterator[None]:
    """Makes the folder; refuses a second process that would write the same run."""
    if folder is None:
        yield
        return
    with checkpoint.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: the folder is not guarded there
        yield
        return
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"{folder} is being written by another process; wait for it or name another folder"
        ) from None
    finally:
        os.close(handle)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event instead of breaking a step in two; a second Ctrl-C breaks at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
