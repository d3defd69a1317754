"""Finished runs: their results, read from the run folder without loading weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from glassformer.comparison.single import ANSWERS, SingleRun
from glassformer.config import ModelConfig, first_difference, validated
from glassformer.errors import RequestError
from glassformer.parallel.launch import joined
from glassformer.parts.core.base import to_plain
from glassformer.progress import OnProgress
from glassformer.runs.results import Answers, EarlySample
from glassformer.text import load_tokenizer, read_data
from glassformer.training import Run, checkpoint
from glassformer.training.folder import FREE
from glassformer.training.pretrained import origin
from glassformer.training.progress import Progress, read_metrics
from glassformer.training.recipe import Recipe
from glassformer.training.request import as_it_began, settings
from glassformer.training.state import identity
from glassformer.training.trained import reading


def finished(
    ask: Callable[[], SingleRun], out: str | Path | None, pretrained: bool, progress: OnProgress
) -> Run | None:
    """Returns the run that the folder `out` holds, if it is finished and as requested by `ask()`; its model has no
    weights. Returns None if steps are left, if several processes share the run, if the folder is damaged, or if the run
    differs from the request; resuming then raises the error with the reason."""
    try:
        found = None if out is None or joined() is not None else checkpoint.latest(Path(out))
        return None if found is None else _finished(ask(), Path(out or ""), found, pretrained, progress)
    except (RequestError, OSError, ValueError, KeyError, TypeError):  # a damaged folder
        return None


def _finished(asked: SingleRun, folder: Path, found: Path, pretrained: bool, progress: OnProgress) -> Run | None:
    config, recipe = ModelConfig.from_file(folder / "config.yaml"), Recipe.from_file(folder / "recipe.yaml")
    own = asked.config.replace(vocab_size=config.vocab_size, context=config.context)
    changed = first_difference(to_plain(recipe), to_plain(asked.recipe), besides=FREE)
    if changed or own.diff(config) or origin(folder)[0] != (asked.name if pretrained else None):
        return None
    tokenizer = load_tokenizer(folder)
    text = read_data(recipe.objective.data(asked.data), tokenizer if pretrained else asked.tokenizer, recipe.context,
                     progress)  # fmt: skip
    text = recipe.objective.with_tokens(text)
    state = validated(Progress, checkpoint.read_state(found), "state", str(found / "state.json"))
    batches = recipe.objective.batches(text, recipe.batch_size, recipe.context, recipe.seed, config)
    steps = recipe.num_steps(config, batches.tokens_per_step, batches.steps_per_epoch)
    left = state.seconds < 60 * (recipe.minutes or 0) if steps is None else state.step < steps
    if left or state.data != identity(text) or state.validation is None or not checkpoint.is_whole(found):
        return None
    warnings.warn(f"{folder} is finished: all {state.step:,} steps are done")
    read = batches.read(state.step)
    plain = state.model_dump()
    written = [EarlySample(**one) for one in plain["callbacks"].get("Course.0", {}).get("written", ())]
    answers = folder / ANSWERS
    return Run(
        config.outline(), config, reading(config, text.tokenizer), recipe, "ok", state.step, read["tokens"],
        state.seconds, plain["validation"], read_metrics(folder / "metrics.jsonl"),
        settings(config, as_it_began(recipe, found)), folder, None, recipe.peak_learning_rate(config), read,
        Answers.model_validate_json(answers.read_text(encoding="utf-8")) if answers.is_file() else None,
        written[-1] if written else None, pretrained=pretrained,
    )  # fmt: skip
