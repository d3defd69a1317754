"""One run in a process of its own: it cannot take others down, and its memory is its own.

`python -m glassformer.runs.arm FOLDER` reads request.json there, prints an event a line while it works, and leaves
result.json.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.summary import event_words
from glassformer.errors import NO_MEMORY, RequestError, WorkError, no_memory
from glassformer.parts.outside import import_modules
from glassformer.runs import events
from glassformer.runs.files import write_result
from glassformer.runs.measure import describe, measured
from glassformer.runs.request import REQUEST, RUN
from glassformer.runs.results import RunResult
from glassformer.text import Tokens
from glassformer.training import Recipe, Report, Reporter, train
from glassformer.training.checkpoint import latest, read_state
from glassformer.training.sinks import open_sinks

BETWEEN_STEPS = 0.25
"""Seconds between two events `step`."""


def main() -> int:
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    who = {"name": request["name"], "seed": request["recipe"]["seed"]}
    try:
        result = measure(folder, request)
    except (RequestError, WorkError) as error:
        say(events.Error(**who, error=str(error)))
        return error.exit_status
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise  # a defect of ours: its traceback goes to stderr.txt
        traceback.print_exc()
        say(events.Error(**who, error=NO_MEMORY))
        return WorkError.exit_status
    write_result(result, folder)
    return 0


def say(event: events.Event) -> None:
    print(events.encode(event), flush=True)


def measure(folder: Path, request: dict[str, Any]) -> RunResult:
    """Trains the run, from its latest checkpoint where it has one, and takes every measure of it."""
    import_modules(request.get("imports", {}))
    config, recipe = ModelConfig.from_dict(request["config"]), Recipe.of(**request["recipe"])
    text = Tokens.open(**request["text"])
    before = machine.peak_memory("cpu" if recipe.device == "auto" else recipe.device)
    who = {"name": request["name"], "seed": recipe.seed}
    said, trained = 0.0, False

    def watch(report: Report) -> None:
        nonlocal said, trained
        trained = True
        logger(report)
        for event in report.events:
            say(events.Watched(**who, words=event_words(event)))
        if time.monotonic() - said > BETWEEN_STEPS or report.done >= 1:
            said = time.monotonic()
            say(
                events.Step(
                    **who, step=report.step, done=report.done, loss=report.loss,
                    tokens_per_second=report.tokens_per_second, seconds_left=report.seconds_left,
                )
            )  # fmt: skip

    run_folder = folder / RUN
    found = latest(run_folder)
    name, step = f"{request['name']}-seed{recipe.seed}", read_state(found)["step"] if found else 0
    what = {"model": request["config"], "recipe": request["recipe"]}
    with open_sinks(request.get("log_to", ()), run_folder, name, what, step) as logger:
        callbacks = [Reporter(watch)]
        run = train(config, text, recipe, run_folder, found is not None, callbacks, vocab_size=config.vocab_size)
    peak = machine.peak_memory(run.how.device)
    say(events.Measuring(**who))
    added = None if not trained else peak - before if run.how.device == "cpu" else peak
    result = describe(request["name"], run, added).changed(weights=request["weights"])
    return measured(result, run, text) if run.status == "ok" else result


if __name__ == "__main__":
    sys.exit(main())
