"""How fast models train beside each other: in turn, in one process, so that what slows a machine slows them all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.runs.request import place_of, read_request
from glassformer.runs.results import RunResult
from glassformer.text import Tokens
from glassformer.training import Recipe, prepare_run
from glassformer.training.loop import one_step, warm_up
from glassformer.training.state import Training

ROUNDS, STEPS = 5, 2
"""In each round every model takes so many steps; the median of the rounds counts."""


def paces(models: Mapping[str, tuple[ModelConfig, Recipe]], text: Tokens) -> dict[str, float]:
    """Tokens a second of training of each model, with all cores."""
    runs: dict[str, Training] = {}
    for name, (config, recipe) in models.items():
        request = prepare_run(config, text, recipe.vary(threads=None), vocab_size=config.vocab_size)
        machine.apply(request.how)
        runs[name] = Training(request)
        warm_up(runs[name])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                one_step(run)
            taken[name].append(STEPS * run.batches.tokens_per_step / (time.perf_counter() - began))
    return {name: median(rates) for name, rates in taken.items()}


def paces_of(runs: Sequence[RunResult], folder: Path) -> dict[str, float]:
    """Of the models of a comparison in `folder`, each as its first run was trained."""
    firsts: dict[str, RunResult] = {}
    for run in runs:
        firsts.setdefault(run.name, run)
    models = {name: (ModelConfig.from_dict(run.config), Recipe.of(**run.recipe)) for name, run in firsts.items()}
    one = next(iter(firsts.values()))
    return paces(models, Tokens.open(**read_request(place_of(folder, *one.key))["text"]))
