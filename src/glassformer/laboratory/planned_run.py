"""The plan of a training run that does not start: model, text, steps, schedule, memory, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from rich.text import Text

from glassformer.comparison.single import ANSWERS, PAGE, SingleRun
from glassformer.errors import RequestError
from glassformer.figures.plain import plain
from glassformer.figures.terminal import Printed, bare, clock, dim, size, sparkline
from glassformer.naming.resolve import ModelLike
from glassformer.options import RunKeywords
from glassformer.parallel.layout import Layout
from glassformer.parts.core.base import to_plain
from glassformer.planning import plan
from glassformer.progress import OnProgress
from glassformer.text import DataLike, Tokenizer
from glassformer.training import Pretrained, Recipe, Request, prepare_run
from glassformer.training.folder import COMMAND, open_folder
from glassformer.typed import typed
from glassformer.units import plural

SHARES = tuple(at / 63 for at in range(64))
"""Shares of a run at which the schedule is shown."""


@dataclass(frozen=True)
class DryRun(Printed):
    """Plan of a training run that is not started: steps, schedule, memory and files.

    Attributes
    ----------
    name, data : str
        Expression of the model, and name of the text.
    parameters, parameters_in_layers, vocab_size : int
        Parameters with and without embeddings, and tokens of the vocabulary.
    train_tokens, held_out_tokens : int
        Tokens of both sides of the text.
    tokenizer : str
        Choice of the tokenizer.
    batch_size, context : int
        Sequences of a step and tokens of a sequence.
    steps, tokens : int or None
        Optimizer steps of the run and tokens that it reads; None for a budget of minutes.
    passes : float or None
        Passes over the training text.
    flops : float or None
        Training FLOPs.
    minutes : float or None
        Budget in minutes; None for any other budget.
    recipe : dict of str to object
        All fields of the recipe.
    learning_rate : float
        Peak learning rate.
    schedule : tuple of (float, float)
        Share of the run and learning rate, from the first step to the last.
    warmup : float or None
        Steps of the warm-up; None for a budget of minutes.
    memory : int or None
        Bytes of memory, estimated; None if the planner does not cover the run.
    device, dtype : str
        Device, and dtype of matmuls.
    out : str
        The run folder; empty without one.
    files : tuple of str
        Files and folders that the run would write.
    """

    name: str
    data: str
    parameters: int
    parameters_in_layers: int
    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    tokenizer: str
    batch_size: int
    context: int
    steps: int | None
    tokens: int | None
    passes: float | None
    flops: float | None
    minutes: float | None
    recipe: Mapping[str, Any]
    learning_rate: float
    schedule: tuple[tuple[float, float], ...]
    warmup: float | None
    memory: int | None
    device: str
    dtype: str
    out: str
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values."""
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> Iterator[Any]:
        """Yields the printed text of the plan, from the model to the files."""
        yield Text(f"{self.name} on {self.data}: a plan, nothing is trained or written", style="bold")
        table = bare()
        for _ in range(2):
            table.add_column()
        for heading, words in self._rows():
            table.add_row(heading, words)
        yield table
        if self.steps is None:
            yield dim("a budget of minutes has the steps that the machine manages; the first ones are timed")
        yield dim("time is not known before steps are timed: glassformer plan MODEL --here")

    def _rows(self) -> Iterator[tuple[str, str]]:
        recipe = self.recipe
        optimizer, schedule = recipe["optimizer"], recipe["schedule"]
        yield "model", f"{self.parameters:,} parameters, {self.parameters_in_layers:,} in the layers"
        yield "text", f"{self.train_tokens:,} tokens to train on, {self.held_out_tokens:,} held out"
        yield "tokenizer", f"{self.vocab_size:,} tokens ({self.tokenizer})"
        step = f"{self.batch_size:,} x {self.context:,} tokens"
        if self.steps is None:
            yield "run", f"{clock(60 * (self.minutes or 0))} of steps of {step}"
        else:
            passes = "" if self.passes is None else f", {100 * self.passes:,.4g} % of the text"
            yield "run", f"{plural(self.steps, 'step')} of {step}: {self.tokens:,} tokens{passes}"
            yield "FLOPs", f"{self.flops:.4g}"
        yield "optimizer", f"{optimizer['kind']}, weight decay {recipe['weight_decay']:g}, clip {recipe['clip']}"
        rates = [rate for _, rate in self.schedule]
        rise = "" if not self.warmup else f" after {self.warmup:,.0f} steps of warm-up"
        yield "schedule", f"{schedule['kind']}: {self.learning_rate:.3g} at most{rise}, {rates[-1]:.3g} at the end"
        yield "learning rate", sparkline(rates)
        yield "memory", "not known" if self.memory is None else f"about {size(self.memory)} ({self.device})"
        if self.files:
            yield f"files in {self.out}", ", ".join(self.files)


@typed
def dry_run(
    model: ModelLike,
    data: DataLike,
    recipe: Recipe | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    pretrained: bool | Pretrained = False,
    tokenizer: str | Tokenizer = "auto",
    vocab_size: int | None = None,
    layout: Layout | str | None = None,
    log_to: Sequence[str] = (),
    **fields: Unpack[RunKeywords],
) -> DryRun:
    """Plans a training run without training: the request is checked, the text is read and cut into tokens.

    Parameters
    ----------
    model
        The model, as `train` takes it.
    data
        The text, as `train` takes it.
    recipe
        A `Recipe`, or a mapping of its fields.
    out
        Run folder, in which nothing is written.
    resume
        Plan the rest of the run in `out`.
    pretrained
        Weights to start from, as `train` takes them.
    tokenizer
        The tokenizer, as `train` takes it.
    vocab_size
        Rows of the embedding, if more than the tokenizer's.
    layout
        Division of the work between processes; the plan's numbers are those of one process.
    log_to
        Names of services, as `train` takes them.
    **fields
        Fields of the recipe.

    Returns
    -------
    DryRun
        Model, tokens, steps, schedule, memory, and the files that the run would write.

    Raises
    ------
    RequestError
        If `train` would refuse the request.

    Examples
    --------
    >>> found = gf.dry_run("llama@0.1m", "tiny.txt", tokens="2k", context=32, batch_size=4)
    >>> found.steps, found.files
    (16, ())
    """
    asked = SingleRun.of(
        model, data, recipe, out=out, resume=resume, pretrained=pretrained, tokenizer=tokenizer,
        vocab_size=vocab_size, layout=layout, log_to=log_to, **fields,
    )  # fmt: skip
    return planned(asked)


def planned(asked: SingleRun, progress: OnProgress | None = None) -> DryRun:
    """Returns the plan of a requested training run, without training. Raises RequestError."""
    request = prepare_run(*asked.arguments, progress, asked.pretrained)
    config, recipe, text = request.config, request.recipe, request.text
    batches = recipe.objective.batches(text, recipe.batch_size, recipe.context, recipe.seed, config)
    steps = recipe.num_steps(config, batches.tokens_per_step, batches.steps_per_epoch)
    tokens = None if steps is None else batches.read(steps)["tokens"]
    peak, schedule = recipe.peak_learning_rate(config), recipe.schedule
    n = float(steps or 1e6)  # a budget of minutes has the schedule of a long run
    return DryRun(
        name=asked.name,
        data=text.name,
        parameters=config.num_params(),
        parameters_in_layers=config.num_params(embeddings=False),
        vocab_size=config.vocab_size,
        train_tokens=len(text.train),
        held_out_tokens=len(text.validation),
        tokenizer=text.tokenizer_rule,
        batch_size=recipe.batch_size,
        context=recipe.context,
        steps=steps,
        tokens=tokens,
        passes=None if steps is None or not batches.steps_per_epoch else steps / batches.steps_per_epoch,
        flops=None if tokens is None else 3.0 * config.flops(recipe.context) * tokens,
        minutes=recipe.minutes,
        recipe=to_plain(recipe),
        learning_rate=peak,
        schedule=tuple((share, peak * schedule.factor(share * (n - 1), n)) for share in SHARES),
        warmup=None if steps is None else schedule.rise(n),
        memory=_memory(request),
        device=request.how.device,
        dtype=request.how.dtype,
        out="" if asked.out is None else str(asked.out),
        files=_files(asked, request),
    )


def _memory(request: Request) -> int | None:
    """Returns the estimated bytes of memory of a training step; None if the planner does not cover it."""
    recipe = request.recipe
    try:
        found = plan(
            request.config, train=True, batch=recipe.batch_size, context=recipe.context, dtype=request.how.dtype,
            optimizer=recipe.optimizer.kind, micro_batch=recipe.micro_batch, weights="float32",
        )  # fmt: skip
    except RequestError:
        return None
    return found.memory["needed"]


def _files(asked: SingleRun, request: Request) -> tuple[str, ...]:
    """Returns the names of the files and folders that the run would write; its initial files are written to a temporary
    folder."""
    if asked.out is None:
        return ()
    recipe, text = request.recipe, request.text
    with TemporaryDirectory() as folder:
        open_folder(Path(folder), request.config, recipe, text.tokenizer, False, request.pretrained)
        begun = sorted(path.name for path in Path(folder).iterdir())
    watched = ["dynamics.jsonl"] if recipe.watch else []
    answered = [ANSWERS] if recipe.objective.asked(text, 1, request.config) else []
    typed_by = [COMMAND] if asked.command and not asked.resume else []
    return (*begun, *typed_by, "metrics.jsonl", *watched, "checkpoints", "latest", PAGE, *answered)
