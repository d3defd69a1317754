"""Training of one model, shared by `gf.train` and `glassformer train`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

from glassformer import machine
from glassformer.comparison.arms import recipe_fields
from glassformer.comparison.pretrained import trained_arm
from glassformer.config import ModelConfig
from glassformer.dynamics.summary import event_words
from glassformer.errors import RequestError, WorkError
from glassformer.files import replace_text
from glassformer.naming import own_value, split_recipe
from glassformer.naming.resolve import ModelLike, has_weights, resolve
from glassformer.options import RunKeywords
from glassformer.parallel.launch import one_voice
from glassformer.parallel.layout import Layout
from glassformer.report import write_run
from glassformer.runs import events
from glassformer.runs.answers import answers
from glassformer.runs.events import Notify, reading, silent
from glassformer.runs.live import shown
from glassformer.runs.measure import GENERATED, describe, generation, write_sample
from glassformer.runs.results import EarlySample
from glassformer.text import DataLike, Tokenizer
from glassformer.training import (
    Callback,
    Interrupted,
    Pretrained,
    Recipe,
    Report,
    Reporter,
    Request,
    Run,
    prepare_run,
    run_request,
)
from glassformer.training.folder import COMMAND
from glassformer.training.objectives import usual_objective
from glassformer.training.overrides import with_recipe
from glassformer.training.pace import DECIDED, decided, outlook
from glassformer.training.repeats import passes, repeat_notes, shared_notes
from glassformer.training.sinks import check_sinks, open_sinks
from glassformer.training.state import Training
from glassformer.typed import typed

PAGE, ANSWERS = "report.html", "answers.json"
"""Files of a run folder that training does not write: the page of the run, and answers to held-out sources"""
STOPPED = "stopped; resume with --resume"
"""Reason on the page of a run that Ctrl-C ended"""
SHOWN = 48
"""Length in tokens of a sample that is generated during training"""
BRIEF = 1.0
"""Seconds that a sample at an evaluation may take. If the previous sample took longer than this and than the training
since, the next one is skipped, unless the run is at its end."""


class Course(Callback):
    """Callback that generates a text at each evaluation after the first step, shows the text and keeps it for the
    report. The run's weights, batches and clock are not changed."""

    def __init__(self, name: str, notify: Notify):
        self.name, self.notify = name, notify
        self.seconds, self.took, self.since = 0.0, 0.0, 0.0
        """Seconds spent on all texts, on the last text, and on training before the last text"""
        self.written: list[EarlySample] = []
        self.run: Training | None = None
        """The run, set when it has ended"""

    def evaluated(self, run: Training) -> None:
        if run.step == 0 and run.validation is not None:
            self.notify(events.StageEvent(words=f"before training: held-out loss {run.validation['loss']:.4f}"))
        if run.groups.world > 1 or run.error is not None or run.step == 0:
            return
        if run.share < 1 and self.took > max(BRIEF, run.seconds - self.since):
            return
        self.since, began = run.seconds, time.perf_counter()
        run.model.eval()
        try:
            found = write_sample(run.model, run.recipe, run.text, SHOWN)
        except WorkError:  # non-finite logits end the run by themselves
            found = None
        finally:
            run.model.train()
        self.took = time.perf_counter() - began
        self.seconds += self.took
        if found is not None:
            sample = found[0]
            self.written.append(EarlySample(step=run.step, tokens=run.tokens, prompt=sample.prompt, text=sample.text))
            seed = run.recipe.seed
            self.notify(events.Wrote(name=self.name, seed=seed, step=run.step, prompt=sample.prompt, text=sample.text))

    def rolled_back(self, run: Training, step: int) -> None:
        self.written = [one for one in self.written if one.step <= step]

    def started(self, run: Training) -> None:
        self.since = run.seconds

    def ended(self, run: Training) -> None:
        self.run = run

    def state(self) -> dict[str, Any]:
        return {"written": [one.model_dump() for one in self.written]}

    def restore(self, state: dict[str, Any]) -> None:
        self.written = [EarlySample(**one) for one in state["written"]]


@dataclass(frozen=True, kw_only=True)
class SingleRun:
    """Request to train one model, checked as far as this is possible without reading the text."""

    name: str
    config: ModelConfig
    data: DataLike
    recipe: Recipe
    out: str | Path | None = None
    resume: bool = False
    tokenizer: str | Tokenizer = "auto"
    vocab_size: int | None = None
    """Rows of the embedding, if more than the tokenizer's vocabulary"""
    pretrained: Pretrained | None = None
    """Initial weights; None if they are drawn from the seed"""
    layout: Layout | str | None = None
    log_to: Sequence[str] = ()
    free: tuple[str, ...] = ()
    """Fields of the recipe (of `training.pace.DECIDED`) that are not given and are derived from a budget in minutes"""
    command: str = ""
    """Command that repeats the run; empty if it was started from Python"""
    unused: bool = False
    """True if the expression names weights but the run draws its own"""
    started: float = 0.0
    """Reading of `time.perf_counter` in seconds at the request, before weights were loaded"""

    @classmethod
    def of(
        cls,
        model: ModelLike,
        data: DataLike,
        recipe: Recipe | Mapping[str, Any] | None = None,
        *,
        pretrained: bool | Pretrained = False,
        tokenizer: str | Tokenizer = "auto",
        vocab_size: int | None = None,
        log_to: Sequence[str] = (),
        out: str | Path | None = None,
        resume: bool = False,
        layout: Layout | str | None = None,
        command: str = "",
        **fields: Any,
    ) -> Self:
        """Makes a run from the arguments of `train`. Raises RequestError for an invalid request."""
        began = time.perf_counter()
        if log_to and out is None:
            message = "log_to writes into the run folder; name one in out"
            raise RequestError(message, code="missing", field="out", expected="a run folder")
        check_sinks(log_to)
        fields = recipe_fields(recipe, fields)
        expression = str(model) if isinstance(model, str | Path) else None
        own: list[int] = []
        overrides: dict[str, str] = {}
        if expression is not None:
            expression, overrides = split_recipe(expression)
        if pretrained is True:
            config, tokenizer, pretrained = _begun(model, expression, tokenizer)
            vocab_size = config.vocab_size
        else:
            config = resolve(model if expression is None else expression)
        if "objective" not in overrides:
            fields.setdefault("objective", usual_objective(config))
        if expression is not None:
            own = [asked for asked in (own_value(expression, config, "context"),) if asked is not None]
            vocab_size = vocab_size or own_value(expression, config, "vocab_size")
        asked = [*([] if fields.get("context") is None else [fields["context"]]), *own]
        fields = {**fields, "context": asked[0]} if asked else {n: v for n, v in fields.items() if n != "context"}
        fields = _as_begun(fields, overrides, out) if resume else fields
        made = with_recipe(Recipe.of(**fields), overrides)
        free = tuple(name for name in DECIDED if made.minutes and name not in fields and name not in overrides)
        for context in asked:
            if context != made.context:
                raise RequestError(
                    f"context={context} and context={made.context} are both asked for; give one of them",
                    code="conflict", field="context", value=context,
                )  # fmt: skip
        return cls(
            name=expression or "model", config=config, data=data, recipe=made, out=out, resume=resume,
            tokenizer=tokenizer, vocab_size=vocab_size, pretrained=pretrained or None, layout=layout, log_to=log_to,
            free=free, command=command, started=began, unused=not pretrained and has_weights(model),
        )  # fmt: skip

    @property
    def arguments(self) -> tuple[ModelConfig, Any, Recipe, Any, bool, str | Tokenizer, int | None]:
        """First arguments of `training.prepare_run`."""
        return self.config, self.data, self.recipe, self.out, self.resume, self.tokenizer, self.vocab_size

    def train(self, notify: Notify, callbacks: Sequence[Callback] = ()) -> Run:
        """Trains the model and returns the run. With a run folder, the trained model also generates a sample and, if
        the objective has answers, answers held-out sources. If several processes share the run, only the first reports
        and writes."""
        leads = one_voice()
        notify = notify if leads else silent
        request = prepare_run(*self.arguments, reading(notify), self.pretrained, self.layout)
        request, how = self.decided(request)
        self.note_unused(notify)
        begin(self.name, request, notify, how)
        place = Path(self.out) if self.out is not None else None
        if leads and place is not None and self.command and not self.resume:
            replace_text(place / COMMAND, f"{self.command}\n")
        with open_sinks(
            self.log_to if leads else (), place or Path(), self.name, request.describe(), request.steps_done
        ) as log:
            tell = telling(self.name, request.recipe.seed, notify)
            course = Course(self.name, notify)
            shows = [] if notify is silent and place is None else [course]
            ready = (machine.seconds_since_start() if self.command else None) or time.perf_counter() - self.started
            try:
                done = run_request(
                    request, [*callbacks, Reporter(log), Reporter(tell), *shows], before=self.pretrained is not None,
                    say=lambda words: notify(events.StageEvent(words=words)),
                )  # fmt: skip
            except (Interrupted, KeyboardInterrupt) as stop:
                if leads and place is not None and course.run is not None and course.run.step:
                    result = describe(self.name, course.run.result(), None).changed(written=course.written)
                    write_run(
                        result.changed(validation=None, status="stopped", error=str(stop) or STOPPED), place / PAGE
                    )
                raise
        done.pretrained = self.pretrained is not None
        done.spent |= {"loading": done.spent.get("loading", 0.0) + ready, "sampling": course.seconds}
        if not leads or place is None:
            return done
        result = describe(self.name, done, None).changed(written=course.written)
        write_run(result, place / PAGE)
        if done.status == "ok":
            done.answers = answers(done.model, request.text, self.recipe.objective, self.recipe.context)
            began, most = time.perf_counter(), SHOWN if course.took > BRIEF else GENERATED
            made = generation(done, self.recipe.objective.with_tokens(request.text), most)
            done.spent["sampling"] += time.perf_counter() - began
            result = result.changed(generation=made, answers=done.answers)
            done.sample = None if made is None else made.sample
            write_run(result, place / PAGE)
        if done.answers is not None:
            replace_text(place / ANSWERS, done.answers.model_dump_json(indent=1))
        return done

    def note_unused(self, notify: Notify) -> None:
        """Reports that the run draws its own initial weights although its model's expression names a checkpoint."""
        if self.unused:
            words = f"the weights of {self.name} are not used; --pretrained (pretrained=True) starts from them"
            notify(events.StageEvent(words=words))

    def decided(self, request: Request) -> tuple[Request, str]:
        """Returns (request, sentence on how long the run takes): the fields `self.free`, batch size and evaluation
        tokens, are set to fit the budget in minutes at the measured speed. Without such fields, for a resumed run, and
        with several processes, returns the request unchanged and an empty sentence."""
        if not self.free or request.groups.world > 1 or request.found is not None:
            return request, ""
        models = {self.name: (request.config, request.recipe)}
        fields, speed = decided(models, request.text, self.free)
        request = replace(request, recipe=request.recipe.replace(**fields))
        return request, outlook(request.recipe, speed, machine.seconds_since_start() if self.command else None)


def _as_begun(fields: dict[str, Any], overrides: Mapping[str, str], out: str | Path | None) -> dict[str, Any]:
    """Returns the recipe's `fields`, completed, for a budget in minutes, by the values that the earlier run in `out`
    derived from it, except fields in `overrides`."""
    path = Path(out or "") / "recipe.yaml"
    if out is None or fields.get("minutes") is None or not path.is_file():
        return fields
    held = Recipe.from_file(path)
    return {**{name: getattr(held, name) for name in DECIDED if name not in overrides}, **fields}


def _begun(
    model: ModelLike, expression: str | None, tokenizer: str | Tokenizer
) -> tuple[ModelConfig, Tokenizer | str, Pretrained]:
    """Returns (config, tokenizer, weights) of the model that training starts from. Raises RequestError for a model
    without weights."""
    if expression is not None:
        return trained_arm(expression, tokenizer)
    if has_weights(model):
        loaded = resolve(model, weights=True)
        return loaded.config, loaded.tokenizer or tokenizer, Pretrained.of(loaded.model)
    raise RequestError(
        "pretrained=True starts from weights, and this is a config; give a run, a checkpoint or a loaded model",
        code="missing", field="model", expected="a model with weights",
    )  # fmt: skip


def begin(name: str, request: Request, notify: Notify, how: str = "") -> None:
    """Reports the model that is about to be trained, its size, its text, and the duration in words (`how`)."""
    config, text = request.config, request.text
    params, active = config.num_params(embeddings=False), config.active_params(embeddings=False)
    met = "" if active == params else f" ({active:,} for each token)"
    sizes = f"{config.num_params():,} parameters, {params:,} of them in the layers{met}"
    notify(events.StageEvent(words=f"{name}: {sizes}; {request.how.why}"))
    read, held_out = len(text.train), len(text.validation)
    told = f"{text.name}: {read:,} tokens to train on, {held_out:,} held out ({text.tokenizer_rule})"
    notify(events.StageEvent(words=told))
    notes = [*text.notes, *repeat_notes({name: passes(request.recipe, config, text)}), *shared_notes(text)]
    notify(events.Begin(runs=[(name, request.recipe.seed)], how=how, notes=notes))


def telling(name: str, seed: int, notify: Notify) -> Callable[[Report], None]:
    """Returns a function that turns the progress reports of a run into events for `notify`."""

    def tell(report: Report) -> None:
        for event in report.events:
            notify(events.Watched(name=name, seed=seed, words=event_words(event)))
        notify(
            events.Step(
                name=name, seed=seed, step=report.step, done=report.done, loss=report.loss,
                tokens_per_second=report.tokens_per_second, seconds_left=report.seconds_left,
                learning_rate=report.learning_rate, grad_norm=report.grad_norm, validation=report.validation,
            )
        )  # fmt: skip

    return tell


@typed
def train(
    model: ModelLike,
    data: DataLike,
    recipe: Recipe | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    pretrained: bool | Pretrained = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | Notify = True,
    tokenizer: str | Tokenizer = "auto",
    vocab_size: int | None = None,
    layout: Layout | str | None = None,
    log_to: Sequence[str] = (),
    **fields: Unpack[RunKeywords],
) -> Run:
    """Trains one model.

    Parameters
    ----------
    model
        An expression, a path, a `ModelConfig`, a `Model`, a `Loaded` or a `Run`. An expression may change the recipe:
        `llama@1m+recipe.warmup=0.1`.
    data
        A text file, a folder, "FILE.jsonl,column=FIELD", "hf:owner/name", "shakespeare", "wikitext-2", "python-docs",
        "python-source"; token ids, which `tokenizer` has made, in "train.bin" with "val.bin" next to it, a .npy file,
        an array, a tensor, a list or an iterator; or tokens from `glassformer.text`. See docs/data.md.
    recipe
        A `Recipe`, or a mapping of its fields. Fields may also be given by name, as in `tokens="200k", seed=1`.
    out
        Run folder: config.yaml, recipe.yaml, tokenizer, metrics.jsonl, checkpoints, report.html; dynamics.jsonl if the
        recipe watches the run; answers.json if it was trained on pairs or labels. If None, nothing is written.
    resume
        Continue from the latest checkpoint in `out`, bit for bit as if the run had not stopped. If `out` has no
        checkpoint yet, the run starts with a warning.
    pretrained
        Start from the weights of `model` instead of drawing new ones; or the weights themselves, as a
        `training.Pretrained`.
    callbacks
        `Callback` objects, called at every step.
    progress
        True shows progress on standard error (bars on a terminal and in a notebook, lines elsewhere), False shows
        nothing, and a function receives the events of `glassformer.runs.events`.
    tokenizer
        "auto", "byte", "char", "word:SIZE", "bpe:SIZE", a tokenizer.json, or a `Tokenizer`.
    vocab_size
        Rows of the embedding, if more than the tokenizer's vocabulary.
    layout
        Division of the work between the processes that torchrun or SLURM has started, such as "fsdp=4,tp=2"; by
        default "fsdp". `fsdp` and `replicate` give the bits of one process (docs/clusters.md).
    log_to
        Names of services that receive the numbers of each training step: "tensorboard", "wandb", "trackio".
    **fields
        Fields of the recipe.

    Returns
    -------
    Run
        The trained model with its curve. A run that diverged has `status="diverged"`.

    Raises
    ------
    RequestError
        If the request is wrong, before anything is computed.
    Interrupted
        On Ctrl-C or SIGTERM, after saving.

    Examples
    --------
    >>> run = gf.train("llama@0.1m", "tiny.txt", tokens="2k", context=32, batch_size=4)
    >>> run.validation["loss"] < 6
    True
    """
    asked = SingleRun.of(
        model, data, recipe, out=out, resume=resume, pretrained=pretrained, tokenizer=tokenizer,
        vocab_size=vocab_size, layout=layout, log_to=log_to, **fields,
    )  # fmt: skip
    with shown(progress) as notify:
        return asked.train(notify, callbacks)
