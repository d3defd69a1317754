"""Request of a training run, and its checks."""

from __future__ import annotations

import json
import secrets
import warnings
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.qk_clip import refuse_clipping
from glassformer.errors import RequestError
from glassformer.files import refuse_sources
from glassformer.parallel.launch import enlist, joined, leader_first
from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ALONE, ProcessGroups
from glassformer.parts.core.base import to_plain
from glassformer.text import DataLike, OnProgress, Tokenizer, Tokens, read_data
from glassformer.training import checkpoint
from glassformer.training.folder import as_it_began, check_folder, check_same_run
from glassformer.training.pretrained import Pretrained
from glassformer.training.recipe import Recipe
from glassformer.training.shared import check_shared, layout_of, own_device
from glassformer.version import __version__

COMPILE_MINUTES = 2.0
COMPILE_FLOPS = 5e13  # FLOPs of minutes on two cores


@dataclass(frozen=True)
class Request:
    """Training run that is ready to start: checked, with its text read and the model fitted to the text."""

    config: ModelConfig
    recipe: Recipe
    text: Tokens
    how: machine.Settings
    folder: Path | None
    found: Path | None
    """Checkpoint that the run resumes; None for a new run."""
    groups: ProcessGroups = ALONE
    """Processes that share the run."""
    pretrained: Pretrained | None = None
    """Initial weights; None for random ones."""

    def describe(self) -> dict[str, Any]:
        """Returns the model's config and the recipe as plain nested values."""
        return {"model": self.config.to_dict(), "recipe": to_plain(self.recipe)}

    @property
    def steps_done(self) -> int:
        return 0 if self.found is None else checkpoint.read_state(self.found)["step"]


def prepare_run(
    config: ModelConfig,
    data: DataLike,
    recipe: Recipe | dict[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
    tokenizer: str | Tokenizer = "auto",
    vocab_size: int | None = None,
    progress: OnProgress | None = None,
    pretrained: Pretrained | None = None,
    layout: Layout | str | None = None,
) -> Request:
    """Makes the request of a training run: checks it as far as possible, first without the text, and reads the text;
    `progress` receives reports of the reading. Parameters are those of `train`. Writes nothing into `out`. Raises
    RequestError.

    A process that torchrun, SLURM or `--processes` has started joins the others."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.of(**recipe)
    place = joined()
    shape = layout_of(layout, 1 if place is None else place.world)
    with leader_first(place) as store:
        leads = place is None or place.rank == 0
        request = _prepare(config, data, recipe, out, resume, tokenizer, vocab_size, progress, pretrained, shape, leads)
    how = replace(request.how, device=own_device(place, request.how.device))
    return replace(request, how=how, groups=enlist(place, store, shape, how.device))


def check_run(
    config: ModelConfig, data: DataLike, recipe: Recipe, out: str | Path | None, resume: bool,
    tokenizer: str | Tokenizer, vocab_size: int | None, progress: OnProgress | None, pretrained: Pretrained | None,
    layout: Layout,
) -> None:  # fmt: skip
    """Checks a run as `prepare_run` does, before the processes of `layout` that will share it are started, and prepares
    the text for them. Raises RequestError."""
    _prepare(config, data, recipe, out, resume, tokenizer, vocab_size, progress, pretrained, layout)


def _prepare(
    config: ModelConfig, data: DataLike, recipe: Recipe, out: str | Path | None, resume: bool,
    tokenizer: str | Tokenizer, vocab_size: int | None, progress: OnProgress | None, pretrained: Pretrained | None,
    layout: Layout, leads: bool = True,
) -> Request:  # fmt: skip
    refuse_early(config, recipe)
    check_shared(config, recipe, layout, out)
    folder = check_folder(out, resume, try_to_write=leads)
    if folder is not None and isinstance(data, str | Path):
        refuse_sources(folder, Path(data), inside=False)
    found = checkpoint.latest(folder) if folder is not None and resume else None
    if resume and found is None:
        begun = folder is not None and (folder / "recipe.yaml").is_file()
        why = "was started but holds no checkpoint yet: it starts again" if begun else "holds no run yet: one starts"
        warnings.warn(f"{folder} {why}")
    if recipe.on_spike == "roll_back" and folder is None:
        raise RequestError(
            "on_spike=roll_back returns to a checkpoint; name a folder for the run (--out RUN)",
            code="missing", field="out", expected="a run folder",
        )  # fmt: skip
    text = read_data(recipe.objective.data(data), tokenizer, recipe.context, progress)
    text = recipe.objective.with_tokens(text)
    recipe.objective.check_length(text, recipe.context, config)
    recipe.objective.check_batch(text, recipe.batch_size)
    config = recipe.objective.fitted(fit(config, text.tokenizer.vocab_size, recipe.context, vocab_size), text)
    how = settings(config, as_it_began(recipe, found))
    config.check()
    if pretrained is not None:
        pretrained.check(config)
    if resume and folder is not None and (folder / "config.yaml").is_file() and (folder / "recipe.yaml").is_file():
        check_same_run(folder, config, recipe, pretrained)
    return Request(config, recipe, text, how, folder, found, pretrained=pretrained)


def check_unchanged(request: Request) -> None:
    """Raises RequestError if another process has saved a checkpoint in the folder since the request was checked, as a
    job does that is being stopped while its successor starts. Call it once this process holds the folder's lock."""
    if request.folder is not None and checkpoint.latest(request.folder) != request.found:
        raise RequestError(
            f"{request.folder}: another process has saved a checkpoint there; repeat the command with --resume",
            code="conflict", field="out", value=str(request.folder), expected="--resume",
        )  # fmt: skip


def settings(config: ModelConfig, recipe: Recipe) -> machine.Settings:
    """Returns the machine settings of a run: device, dtype, threads and compilation; by default compiles only if
    `worth_compiling`."""
    compile = False if recipe.compile is None and not worth_compiling(config, recipe) else recipe.compile
    return machine.settings(recipe.device, recipe.dtype, recipe.threads, compile)


def worth_compiling(config: ModelConfig, recipe: Recipe) -> bool:
    """Returns True if a run is long enough to save the tens of seconds that the elementwise regions take to compile."""
    if not recipe.objective.one_length:
        return False
    if recipe.minutes is not None:
        return recipe.minutes >= COMPILE_MINUTES
    work = 3 * config.flops(recipe.context) * (recipe.num_steps(config) or 0) * recipe.tokens_per_step
    return work >= COMPILE_FLOPS


def fit(config: ModelConfig, vocab_size: int, context: int, padded: int | None = None) -> ModelConfig:
    """Returns the model's config with the training context and the vocabulary size of the text, or `padded` if given.
    Raises RequestError if `padded`, or the encoder's vocabulary, is smaller than the text's."""
    own = None if config.encoder is None else config.encoder.vocab_size
    for field, size in (("vocab_size", padded), ("encoder.vocab_size", own)):
        if size is not None and size < vocab_size:
            raise RequestError(
                f"{field}={size} is less than the {vocab_size} tokens of the text's tokenizer; leave it out, or give "
                f"{vocab_size} or more",
                code="range", field=field, value=size, expected=f">= {vocab_size}",
            )  # fmt: skip
    return config.replace(vocab_size=padded or vocab_size, context=context)


def refuse_early(config: ModelConfig, recipe: Recipe) -> None:
    """Raises RequestError for faults of a run that are known before the text is read, which may take minutes."""
    recipe.objective.check(config)
    config = config.replace(context=recipe.context)
    config.check()
    refuse_short(config)
    if recipe.flops is not None and not recipe.objective.continues:
        raise RequestError(
            f"flops={recipe.flops:g} is a budget for a text that is read on, and objective={recipe.objective.kind} "
            "gives a model pairs or rows; give tokens, steps or minutes",
            code="conflict", field="flops", value=recipe.flops, expected="tokens",
        )  # fmt: skip
    if recipe.epochs is not None and not recipe.objective.repeats:
        raise RequestError(
            f"epochs={recipe.epochs:g} counts passes over a text, and objective={recipe.objective.kind} draws its rows "
            "without end; give steps or tokens",
            code="conflict", field="epochs", value=recipe.epochs, expected="steps",
        )  # fmt: skip
    refuse_clipping(config, recipe.qk_clip)
    recipe.optimizer.check(config)
    refuse_untrained(config, settings(config, recipe).device)


def refuse_untrained(config: ModelConfig, device: str) -> None:
    """Raises RequestError for a model with a kernel that has no backward pass on the device."""
    for block in config.layers():
        block.mixer.check_training(config.ctx, device)


def refuse_short(config: ModelConfig) -> None:
    """Raises RequestError if the model's decoder or encoder has fewer positions than the context: a source may be as
    long as a target."""
    limits = {"embedding.position.length": config.embedding.limit(config.ctx)}
    if (encoder := config.encoder) is not None:
        limits["encoder.context"] = encoder.context
        limits["encoder.embedding.position.length"] = encoder.embedding.limit(config.encoder_ctx)
    for field, length in limits.items():
        if length is not None and length < config.context:
            raise RequestError(
                f"{field}={length} is shorter than context={config.context}; use {config.context}",
                code="range", field=field, value=length, expected=f">= {config.context}",
            )  # fmt: skip


def check_alike(request: Request) -> None:
    """Raises RequestError, on all ranks, if the ranks' requests differ in something that decides the run, or if they do
    not share the folder."""
    groups = request.groups
    if groups.world == 1:
        return
    groups.alike("glassformer", __version__)
    groups.alike("torch", torch.__version__)
    groups.alike("the model and recipe", _digest(request.describe()))
    groups.alike("the text", request.text.tokenizer.fingerprint() + request.text.train.folder.name)
    groups.alike("dtype", request.how.dtype)
    groups.alike("step to continue from", request.steps_done)
    _check_folder(groups, request.folder)


def _check_folder(groups: ProcessGroups, folder: Path | None) -> None:
    """Raises RequestError on all ranks if a rank cannot read what rank 0 writes into the folder, a sign that it is not
    shared."""
    assert folder is not None
    path, word = folder / ".groups", secrets.token_hex(8)
    if groups.leads:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(word, encoding="utf-8")
    word = groups.gather(word)[0]
    try:
        seen = path.read_text(encoding="utf-8") == word
    except OSError:
        seen = False
    blind = [rank for rank, sees in enumerate(groups.gather(seen)) if not sees]
    if groups.leads:
        path.unlink(missing_ok=True)
    if blind:
        raise RequestError(
            f"rank {blind[0]} does not see the folder {folder} that rank 0 has written; name one on a disk that all "
            "machines share",
            code="conflict", field="out", value=str(folder), expected="a shared folder",
        )  # fmt: skip


def _digest(value: Any) -> str:
    return blake2b(json.dumps(to_plain(value), sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
