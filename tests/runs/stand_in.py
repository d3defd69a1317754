"""Tiny runs to ask for, and in place of the processes that train them: results as they leave them, at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glassformer.config import ModelConfig
from glassformer.naming import preset
from glassformer.runs.events import Notify
from glassformer.runs.executor import Local
from glassformer.runs.request import RunRequest, TextPlaces
from glassformer.runs.workers import WorkerRun
from glassformer.training import Recipe
from glassformer.training.request import fit

CONTEXT = 32


def ask(places: TextPlaces, name: str, **recipe: Any) -> RunRequest:
    size = places.open().tokenizer.vocab_size
    fields = {"tokens": 512, "batch_size": 4, "context": CONTEXT, "threads": 1, "dtype": "float32", "compile": False}
    return RunRequest(name, fit(preset(name), size, CONTEXT), Recipe.of(**{**fields, **recipe}), places)


Spawn = Callable[[Path, Notify], tuple[str | None, int]]


class Stand(WorkerRun):
    """A function in place of the process of a run."""

    def __init__(self, function: Spawn, place: Path):
        super().__init__(place)
        self.function = function

    def run(self, notify: Notify) -> tuple[str | None, int]:
        return self.function(self.place, notify)


class Instead(Local):
    """`Local` with another function in place of its processes."""

    def __init__(self, function: Spawn):
        super().__init__()
        self.function = function

    def training(self, place: Path) -> WorkerRun:
        return Stand(self.function, place)


def trained_at_once(place: Path, notify: Any) -> tuple[None, int]:
    """A result with a loss that name and seed decide."""
    request = json.loads((place / "request.json").read_text())
    config = ModelConfig.from_dict(request["config"])
    loss = 1.0 + len(request["name"]) / 100 + (request["recipe"]["seed"] % 100) ** 2 / 1000
    result = {
        "name": request["name"], "seed": request["recipe"]["seed"], "parameters": config.num_params(),
        "parameters_without_embeddings": config.num_params(embeddings=False),
        "flops_per_token": 1.0, "config": request["config"], "recipe": request["recipe"], "dynamics": {}, "machine": {},
        "train": {
            "steps": 1, "tokens": 128, "seconds": 1.0, "tokens_per_second": 128.0, "peak_memory_bytes": None,
            "learning_rate": 1e-3, "curve": [[128, loss]], "curve_seconds": [[1.0, loss]], "validation_curve": [],
        },
        "validation": {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss, "tokens": 5},
        "generation": {
            "tokens_per_second": 1.0, "seconds_per_token": 1.0, "state_bytes_per_token": 1.0, "sample": {"text": "x"},
        },
        "extrapolation": [], "status": "ok", "error": None,
        "pretrained": request.get("pretrained"),
    }  # fmt: skip
    (place / "result.json").write_text(json.dumps(result))
    return None, 0


AT_ONCE = Instead(trained_at_once)


def content(verb: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The verb, returning the content of results.json."""
    return lambda *given, **options: verb(*given, **options).to_dict()
