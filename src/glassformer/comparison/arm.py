"""One arm of a comparison, in a process of its own: it cannot take the others down, and its memory is its own.

`python -m glassformer.comparison.arm ARM_FOLDER` reads request.json there, prints one JSON object a line while it
works, and leaves result.json.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.summary import event_words, summary_of
from glassformer.errors import NO_MEMORY, RequestError, WorkError, no_memory
from glassformer.generation import stream
from glassformer.parts.base import to_plain
from glassformer.text import Tokens
from glassformer.training import Recipe, Report, Run, evaluate, extrapolate, train
from glassformer.training.checkpoint import latest, read_state, replace_text
from glassformer.training.sinks import open_sinks

POINTS = 300
GENERATED = 120
PROMPT = 48
TEMPERATURE, TOP_K = 0.8, 40


def main() -> int:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        result = measure(folder, request)
    except (RequestError, WorkError) as error:
        say({"event": "error", "error": str(error)})
        return error.exit_status
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise  # a defect of ours: its traceback goes to stderr.txt
        traceback.print_exc()
        say({"event": "error", "error": NO_MEMORY})
        return WorkError.exit_status
    replace_text(folder / "result.json", json.dumps(without_nan(result), allow_nan=False))
    say({"event": "result"})
    return 0


def without_nan(tree: Any) -> Any:
    """NaN and infinities, which JSON has no words for, as None."""
    if isinstance(tree, dict):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def measure(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Trains the arm and takes every measure of it; the entry of results.json."""
    config, recipe = ModelConfig.from_dict(request["config"]), Recipe.of(**request["recipe"])
    text = Tokens.open(**request["text"])
    before = machine.peak_memory("cpu" if recipe.device == "auto" else recipe.device)
    said, trained = 0.0, False

    def watch(report: Report) -> None:
        nonlocal said, trained
        trained = True
        logger(report)
        for event in report.events:
            say({"event": "watched", "words": event_words(event)})
        if time.monotonic() - said > 0.25 or report.done >= 1:
            said = time.monotonic()
            say(
                {"event": "step", "step": report.step, "done": report.done, "loss": report.loss,
                 "tokens_per_second": report.tokens_per_second, "seconds_left": report.seconds_left}
            )  # fmt: skip

    run_folder = folder / "run"
    found = latest(run_folder)
    name, step = f"{request['name']}-seed{recipe.seed}", read_state(found)["step"] if found else 0
    what = {"model": request["config"], "recipe": request["recipe"]}
    with open_sinks(request.get("log_to", ()), run_folder, name, what, step) as logger:
        run = train(config, text, recipe, run_folder, found is not None, watch, vocab_size=config.vocab_size)
    peak = machine.peak_memory(run.how.device)
    say({"event": "measuring"})
    added = None if not trained else peak - before if run.how.device == "cpu" else peak
    return {**describe(request["name"], run, added), **({} if run.status != "ok" else after(run, text))}


def describe(name: str, run: Run, peak: int | None) -> dict[str, Any]:
    steps = [row for row in run.metrics if "loss" in row]
    checks = [row for row in run.metrics if "validation" in row]
    return {
        "name": name,
        "seed": run.recipe.seed,
        "parameters": run.config.num_params(),
        "parameters_without_embeddings": run.config.num_params(embeddings=False),
        "flops_per_token": 3 * run.config.flops(run.recipe.context),
        "config": run.config.to_dict(),
        "recipe": to_plain(run.recipe),
        "train": {
            "steps": run.steps,
            "tokens": run.tokens,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "peak_memory_bytes": peak,
            "learning_rate": run.learning_rate,
            "curve": curve(steps, "tokens"),
            "curve_seconds": curve(steps, "seconds"),
            "validation_curve": [[row["tokens"], row["validation"]["loss"]] for row in checks],
        },
        "validation": run.validation,
        "generation": None,
        "extrapolation": [],
        "dynamics": {} if run.folder is None else summary_of(run.folder),
        "machine": run.how.describe(),
        "status": run.status,
        "error": run.error,
    }


def after(run: Run, text: Tokens) -> dict[str, Any]:
    """What is measured on the trained model."""
    context = run.recipe.context
    return {
        "validation": evaluate(run.model, text, context, run.how, max_tokens=4 * run.recipe.evaluation_tokens),
        "generation": generation(run, text),
        "extrapolation": extrapolate(run.model, text, context, run.how),
    }


def generation(run: Run, text: Tokens) -> dict[str, Any]:
    """Seconds per token (median, one stream, cached), bytes of state per token, and a sample."""
    context, device = run.recipe.context, run.how.device
    prompt_length = max(1, min(PROMPT, context // 4))
    new = max(1, min(GENERATED, context - prompt_length))
    prompt = torch.from_numpy(text.validation.tokens[:prompt_length].astype("int64"))[None].to(device)
    stamps, ids = [time.perf_counter()], []
    for token in stream(run.model, prompt, new, TEMPERATURE, TOP_K, seed=0):
        ids.append(int(token))
        stamps.append(time.perf_counter())
    gaps = sorted(b - a for a, b in itertools.pairwise(stamps)) or [stamps[1] - stamps[0]]
    per_token = gaps[len(gaps) // 2]
    state = run.model.init_state(1, context)
    decode = text.tokenizer.decode
    return {
        "tokens_per_second": 1 / per_token,
        "seconds_per_token": per_token,
        "state_bytes_per_token": state.nbytes / context,
        "sample": {
            "prompt": decode(prompt[0].tolist()),
            "text": decode([token for token in ids if token < text.tokenizer.vocab_size]),  # not of a padded row
            "temperature": TEMPERATURE,
            "top_k": TOP_K,
        },
    }


def curve(rows: list[dict[str, Any]], axis: str) -> list[list[float]]:
    """[axis, loss] of at most POINTS points: means over equal stretches of steps."""
    size = max(1, -(-len(rows) // POINTS))
    pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [[piece[-1][axis], sum(row["loss"] for row in piece) / len(piece)] for piece in pieces]


if __name__ == "__main__":
    sys.exit(main())
