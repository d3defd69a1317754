"""Process that trains runs, one after the other; a failed run ends only this process.

`python -m glassformer.runs.arm` reads the folder of a run from each line of standard input, a string of JSON. It reads
request.json in that folder, prints one event per line while it works, and writes result.json. Its standard error goes
to stderr.txt in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.summary import event_words
from glassformer.errors import NO_MEMORY, RequestError, WorkError, no_memory
from glassformer.files import only_writer
from glassformer.machine.others import CoreTimes
from glassformer.parts.core.outside import check_sources, import_modules
from glassformer.parts.region import forget_compiled
from glassformer.runs import events
from glassformer.runs.events import Notify
from glassformer.runs.files import write_result
from glassformer.runs.measure import describe, measured
from glassformer.runs.request import REQUEST, RUN
from glassformer.runs.results import COMPANY, MachineRecord, RunResult
from glassformer.runs.workers import BEGUN, COMPLAINTS, ENDED
from glassformer.text import Tokens
from glassformer.training import Callback, Interrupted, Pretrained, Recipe, Report, Reporter, train
from glassformer.training.checkpoint import latest, read_state
from glassformer.training.pace import spared
from glassformer.training.sinks import open_sinks
from glassformer.training.state import Training

BETWEEN_STEPS = 0.25
"""Minimum seconds between two events `step`."""
SECONDS_IDLE = 60
"""Seconds that the process waits for another run before it ends."""
STOPPED = 75
"""Exit status of a run that was asked to stop; it is saved, and resumes when it is requested again."""


def main() -> int:
    """Trains the runs named on standard input until no name comes for a while; returns 0, or the exit status of the
    first run that failed or was stopped."""
    settle()
    asked: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        try:
            line = asked.get(timeout=SECONDS_IDLE)
        except Empty:
            return 0
        if not line:
            return 0
        print(BEGUN, flush=True)
        folder = Path(json.loads(line))
        forget_compiled()
        _complain_to(folder / COMPLAINTS)
        status = train_one(folder)
        if status or not machine.forget_peak():
            return status
        print(ENDED, flush=True)


def settle() -> None:
    """Takes the memory that the first training step of a process would take, so that the memory of the first run is
    measured like that of later ones."""
    x = torch.ones(64, 64, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            (x @ x).sum().backward()
    machine.forget_peak()


def load_compiler(config: ModelConfig, recipe: Recipe, outside: bool) -> None:
    """Imports torch's compiler, which takes a second, if training imports it: compiled regions do, operators, which
    mixers without dot products are, and perhaps parts from `outside` the package."""
    mixers: list[Any] = [layer.mixer for layer in config.outline().layers]
    if recipe.compile or outside or any(mixer.dot_product is None for mixer in mixers):
        import_module("torch._dynamo")


def _listen(asked: SimpleQueue[bytes]) -> None:
    """Puts every line of standard input into the queue, and an empty one at its end."""
    with open(0, "rb", buffering=0, closefd=False) as lines:  # a buffer's lock, held here, would break the exit
        while line := lines.readline():
            asked.put(line)
    asked.put(b"")


def _complain_to(path: Path) -> None:
    """Redirects the standard error of this process, also that of libraries, to a file."""
    with path.open("wb") as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)


def say(event: events.Event) -> None:
    print(events.encode(event), flush=True)


def train_one(folder: Path, say: Notify = say, callbacks: Sequence[Callback] = ()) -> int:
    """Trains the run of a folder and writes its result; returns the exit status. `say` receives its events."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    who = {"name": request["name"], "seed": request["recipe"]["seed"]}
    try:
        with only_writer(folder, shared=True):
            write_result(measure(folder, request, say, callbacks), folder)
    except Interrupted as error:
        say(events.Error(**who, error=str(error)))
        return STOPPED
    except (RequestError, WorkError) as error:
        say(events.Error(**who, error=str(error)))
        return error.exit_status
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise  # a defect of the program: its traceback goes to stderr.txt
        traceback.print_exc()
        say(events.Error(**who, error=NO_MEMORY))
        return WorkError.exit_status
    return 0


def measure(folder: Path, request: dict[str, Any], say: Notify, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Trains the run, from its latest checkpoint if any, and returns its result with all measures."""
    import_modules(request.get("imports", {}))
    check_sources(request.get("sources", {}), "the start of the experiment")
    config, recipe = ModelConfig.from_dict(request["config"]), Recipe.of(**request["recipe"])
    text = Tokens.open(**request["text"])
    load_compiler(config, recipe, bool(request.get("imports")))
    before = machine.peak_memory("cpu" if recipe.device == "auto" else recipe.device) - machine.file_pages()
    who = {"name": request["name"], "seed": recipe.seed}
    said, trained = 0.0, False
    busy = CoreTimes()
    began = busy.counted()

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
        begins = "pretrained" in request
        first = Pretrained.read(request["pretrained_file"], request["pretrained"]) if begins else None
        run = train(
            config, text, recipe, run_folder, found is not None, [*callbacks, Reporter(watch), Sparing()],
            vocab_size=config.vocab_size, pretrained=first,
        )  # fmt: skip
    peak = machine.peak_memory(run.how.device)
    say(events.Measuring(**who))
    # without the pages of libraries, which the first run of a process touches for all
    added = None if not trained else peak - machine.file_pages() - before if run.how.device == "cpu" else peak
    result = describe(request["name"], run, added)
    if first is not None:
        result = result.changed(pretrained=first.fingerprint)
    if request.get("shared"):
        result = result.changed(machine=MachineRecord({**result.machine.root, "shared": True}))
    if run.status == "ok":
        result = measured(result, run, text, request.get("loss_alone", False))
    return result.changed(machine=MachineRecord({**result.machine.root, **company(began, busy.counted())}))


class Sparing(Callback):
    """Callback that lowers the number of evaluations in the course of a compared run, to at least `FEWEST`, so that
    they take at most a tenth of its training time; the verdict reads only the evaluation after training, on more
    text."""

    def started(self, run: Training) -> None:
        run.evaluations = spared(run)


def company(began: tuple[float, float] | None, ended: tuple[float, float] | None) -> dict[str, float]:
    """Returns {`COMPANY`: mean number of cores that other programs used between two counts of `CoreTimes`}; {} if the
    system does not count."""
    if began is None or ended is None or ended[0] <= began[0]:
        return {}
    return {COMPANY: round(max(0.0, ended[1] - began[1]) / (ended[0] - began[0]), 2)}


if __name__ == "__main__":
    sys.exit(main())
