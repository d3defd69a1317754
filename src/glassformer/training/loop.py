"""The training loop: a straight script over the request, the folder, the state and the callbacks of a run."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.watch import Moment
from glassformer.errors import RequestError, WorkError
from glassformer.figures.terminal import size
from glassformer.files import only_writer
from glassformer.machine.threads import paced
from glassformer.parallel.layout import Layout
from glassformer.parallel.watchdog import watched
from glassformer.text import Batch, DataLike, Tokenizer
from glassformer.training.callbacks import ClipQK, Divergence, Log, SpikePolicy, Watching
from glassformer.training.callbacks.base import Callback, check_callbacks
from glassformer.training.folder import deferred_interrupt, open_folder
from glassformer.training.gradients import clip
from glassformer.training.pretrained import Pretrained
from glassformer.training.recipe import Recipe
from glassformer.training.request import Request, check_alike, check_unchanged, prepare_run
from glassformer.training.state import Training
from glassformer.training.trained import Interrupted, Run

FEWEST, APART = 2, 10
"""Minimum number of evaluations of a short run, and minimum steps between two; longer runs have up to
`run.evaluations`."""


def unheard(words: str) -> None:
    """Ignores the sentence `words`: the default of `say`."""


def train(
    config: ModelConfig,
    data: DataLike,
    recipe: Recipe | dict[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    tokenizer: str | Tokenizer = "auto",
    vocab_size: int | None = None,
    pretrained: Pretrained | None = None,
    layout: Layout | str | None = None,
) -> Run:
    """Trains `config` on `data` by `recipe`; vocabulary and context come from the tokenizer and the recipe.

    config      the model; `gf.preset("llama@10m")`
    data        a text file, a folder, hf:owner/name, python-docs, python-source, or prepared tokens
    recipe      a `Recipe`, or its fields: `{"tokens": 1_000_000, "optimizer": "muon"}`
    out         run folder: config.yaml, recipe.yaml, tokenizer, metrics.jsonl, checkpoints; dynamics.jsonl with
                `recipe.watch`. If None, nothing is written
    resume      resume from the latest checkpoint in `out`, bit for bit as if the run had not stopped; before
                the first, start, with a warning
    callbacks   `training.Callback`s, called at every step; `training.Reporter(f)` calls f with a `Report` of each
    tokenizer   auto, byte, char, word:SIZE, bpe:SIZE, a tokenizer.json, or a Tokenizer
    vocab_size  pads the vocabulary to more than the tokenizer's
    pretrained  initial weights: `training.Pretrained.of(model)`, of a model of this config; if None, drawn from the
                recipe's seed
    layout      how the processes that torchrun or SLURM has started divide the work: fsdp=4,tp=2; by default fsdp. The
                result of `fsdp` and `replicate` is that of one process, bit for bit (docs/clusters.md)

    If the loss diverges, no error is raised: the run ends with `status="diverged"`. Raises RequestError, before
    anything is computed, for a wrong request, and Interrupted on Ctrl-C or SIGTERM, after saving.
    """
    request = prepare_run(
        config, data, recipe, out, resume, tokenizer, vocab_size, pretrained=pretrained, layout=layout
    )
    return run_request(request, callbacks)


def run_request(
    request: Request, callbacks: Sequence[Callback] = (), *, before: bool = False, say: Callable[[str], None] = unheard
) -> Run:
    """Trains a model as a checked request says, and returns the run.

    before   True to evaluate before the first step too
    say      function that receives a sentence when the run is asked to stop, and another one before the last
    checkpoint"""
    machine.apply(request.how)
    check_callbacks(callbacks)
    groups = request.groups
    again = "nothing was saved" if request.folder is None else f"continue with --out {request.folder} --resume"
    with watched(groups, again) as follow:
        check_alike(request)
        with only_writer(request.folder if groups.leads else None) as in_place:
            check_unchanged(request)
            if groups.leads:
                resumes, text = request.found is not None, request.text
                open_folder(request.folder, request.config, request.recipe, text.tokenizer, resumes, request.pretrained)
            run = Training(request)
            run.in_place = in_place
            follow(lambda: run.step)
            begin(run, request, callbacks)
            try:
                run.call("started")
                if run.share < 1 or not run.evaluated:
                    to_the_end(run, before, say)
                run.finish_saving()
            finally:
                if run.background is not None:
                    run.background.close()
                run.call("ended")
        return run.result()


def begin(run: Training, request: Request, callbacks: Sequence[Callback]) -> None:
    """Prepares a run for its first step: makes its callbacks, and restores the checkpoint that it resumes."""
    log, divergence, spikes = Log(), Divergence(), SpikePolicy(run)
    run.own = [log, ClipQK(run), Watching(run), divergence, spikes]
    run.callbacks = [*run.own[:-1], *callbacks, spikes]
    if request.found is not None:
        run.restore(request.found)
        if run.share >= 1:
            warnings.warn(f"{run.folder} is finished: all {run.step:,} steps are done")


def to_the_end(run: Training, before: bool = False, say: Callable[[str], None] = unheard) -> None:
    """Takes steps, evaluates and saves checkpoints until the run is done, has diverged, or is interrupted. `before`:
    True to evaluate before the first step too. Raises Interrupted."""
    if run.share < 1:
        warm_up(run)
    run.spent["loading"] = time.perf_counter() - run.began
    saved = looked = run.beat()[0]

    def heard(number: int) -> None:
        run.asked = number
        if run.groups.leads:
            say(stopping(run))

    with deferred_interrupt(run.interrupted, heard):
        if before and run.step == 0:
            run.evaluate()
        while run.share < 1 and run.error is None:
            with paced(run.model, "training step", free=False):
                one_step(run)
            now, asked = run.beat()
            if run.error is None and evaluation_due(run, now - looked) and not run.evaluated:
                run.evaluate()
                looked = run.beat()[0]
            if run.error is None and asked:
                if run.folder is not None and run.groups.leads:
                    say(f"saving step {run.step:,} ({size(run.nbytes)}) in {run.folder} ...")
                run.save(wait=True)
                raise stopped(run)
            if run.error is None and now - saved > run.recipe.checkpoint_seconds:
                run.save()
                saved = run.beat()[0]
        if run.error is None and not run.evaluated:
            run.evaluate()
        if run.error is None:
            run.save(wait=True)
            if run.beat()[1]:
                raise stopped(run)


def one_step(run: Training) -> None:
    """Takes one optimizer step; a callback may skip the update or end the run before it."""
    began = time.perf_counter()
    rate = set_learning_rate(run)
    batch = run.batches[run.step + run.shift]
    with run.around_backward():
        loss = backward(run, batch)
    norm = gradient_norm(run)
    moment = run.moment = Moment(run.step + 1, loss, norm, rate, batch.inputs, batch.targets, run.model, run.optimizer,
                                 batch.beside)  # fmt: skip
    run.take, run.back = True, False
    for callback in run.callbacks:
        callback.before_update(run, moment)
        if run.error is not None or run.back:
            return
    run.sharing.settle(run.model)
    if run.take:
        clip(run.parameters, run.recipe.clip, norm)
        run.optimizer.step()
        with run.sharing.counted():
            for move in run.moves:
                move()
    run.call("after_update" if run.take else "skipped", moment)
    run.optimizer.zero_grad(set_to_none=True)
    machine.synchronize(run.how.device)
    took = run.groups.numbers(time.perf_counter() - began)[0][0]
    before = run.tokens
    run.step += 1
    run.seconds += took
    run.spent["training"] += took
    if run.take:
        speed = (run.tokens - before) / took
        run.record({"loss": loss, "learning_rate": rate, "grad_norm": norm, "tokens_per_second": speed})
    else:
        run.record({"skipped": loss if moment.finite else str(loss)})


def set_learning_rate(run: Training) -> float:
    """Sets the learning rate of this step in every parameter group, by the schedule; returns it."""
    # In a run bounded by minutes, n is the number of steps estimated from the present speed.
    n = float(run.steps) if run.steps is not None else max(1.0, run.step / run.share) if run.step else 1e6
    rate = run.learning_rate * run.recipe.schedule.factor(run.step, n)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    return rate


def backward(run: Training, batch: Batch) -> float:
    """Computes the gradients of a batch, in microbatches of `micro_batch` sequences, and adds them to `p.grad`; returns
    the mean loss."""
    return run.sums.backward(run, batch)


def gradient_norm(run: Training) -> float:
    """Returns the gradient norm ||g|| over all parameters."""
    return run.sums.norm(run)


def warm_up(run: Training) -> None:
    """Compiles code and touches memory before the clock of a run starts; leaves weights, buffers and optimizer state
    unchanged."""
    kept = [buffer.clone() for buffer in run.model.buffers()]
    try:
        backward(run, run.batches[0])
    except Exception as error:
        if not run.how.compile or isinstance(error, (RequestError, WorkError)):
            raise
        run.how = replace(run.how, compile=False)
        reason = " ".join(str(error).split())[:200]
        warnings.warn(f"compiling failed, so this run is eager: {reason}")
        backward(run, run.batches[0])
    run.optimizer.zero_grad(set_to_none=True)
    for buffer, value in zip(run.model.buffers(), kept, strict=True):
        buffer.copy_(value)


def evaluation_due(run: Training, since: float) -> bool:
    """Returns True if an evaluation is due after this step; `since`: seconds since the previous one."""
    if run.recipe.evaluate_every or run.steps is not None:
        steps = run.steps or 0
        every = run.recipe.evaluate_every or max(1, -(-steps // min(run.evaluations, max(FEWEST, steps // APART))))
        return run.step % every == 0 or run.step == run.steps
    return since > 60 * (run.recipe.minutes or math.inf) / run.evaluations


def stopping(run: Training) -> str:
    """Returns the sentence that is shown at once when Ctrl-C or SIGTERM asks a run to stop."""
    ends = f"stopping once step {run.step + 1:,} or the evaluation under way has ended"
    saves = "nothing is saved, as no folder was named (--out)" if run.folder is None else "then it is saved"
    return f"{ends}; {saves}; Ctrl-C again stops at once, without saving"


def stopped(run: Training) -> Interrupted:
    """Returns the error `Interrupted` for a run that was asked to stop, with the exit status of the signal."""
    error = Interrupted(how_to_go_on(run), code="stopped")
    if run.asked == signal.SIGTERM:
        error.exit_status = 128 + signal.SIGTERM
    return error


def how_to_go_on(run: Training) -> str:
    if run.folder is None:
        return f"stopped at step {run.step}; nothing was saved, as no folder was named (--out)"
    return f"stopped at step {run.step} and saved in {run.folder}; continue with --out {run.folder} --resume"
