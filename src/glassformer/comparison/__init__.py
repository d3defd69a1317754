"""Trains several architectures side by side under one budget and reports what can be said of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from glassformer import machine
from glassformer.comparison.command import command_of
from glassformer.comparison.folder import check_comparison, check_runs, compiled_before, place_of
from glassformer.comparison.request import (
    Match,
    arms,
    common_context,
    fairness,
    likeness,
    recipes,
    spending,
    tokens_of_steps,
    unequal,
)
from glassformer.comparison.result import read_result
from glassformer.comparison.statistics import stand_in, verdicts
from glassformer.config import ModelConfig
from glassformer.dynamics.summary import summary_of
from glassformer.errors import RequestError, check_whole
from glassformer.naming import own_value
from glassformer.parts.base import to_plain
from glassformer.report import write_report
from glassformer.text import OnProgress, TextData, prepare
from glassformer.training import Interrupted, Recipe
from glassformer.training.checkpoint import disk_errors, replace_text
from glassformer.training.loop import fit, only_writer, refuse_short, refuse_untrained, settings
from glassformer.training.recipe import BUDGETS
from glassformer.training.sinks import check_sinks

__all__ = ["compare"]

MOST_SEEDS = 1000
"""Intervals narrow with the root of it: ten are many."""

START = """
import sys
if (root := sys.argv.pop(1)) not in sys.path:
    sys.path.insert(0, root)
from glassformer.comparison.arm import main
sys.exit(main())
"""
"""An arm runs the code that its parent runs, wherever that was imported from."""

Event = Callable[[dict[str, Any]], None]


def compare(
    expressions: Sequence[str],
    data: str | Path | TextData,
    tokens: int | None = None,
    minutes: float | None = None,
    flops: float | None = None,
    steps: int | None = None,
    match: Match | None = None,
    seeds: int = 1,
    out: str | Path = "comparison",
    tokenizer: str = "auto",
    allow_unmatched: bool = False,
    on_event: Event | None = None,
    on_progress: OnProgress | None = None,
    command: str | None = None,
    log_to: Sequence[str] = (),
    **recipe: Any,
) -> dict[str, Any]:
    """Trains every EXPR on DATA under one budget; writes OUT/results.json and OUT/report.html; returns the results.

    All arms of a seed read the same text in the same order. Arms run one after the other, each with all cores, so
    that speeds are comparable; each in a process of its own, so that one failing leaves the others alone. With the same
    `out`, what is finished is kept and what is not goes on. Other keywords are fields of the recipe, of all arms;
    +recipe.FIELD=VALUE in an EXPR is for that arm alone, and the report says what differs. `steps` is a budget of as
    many tokens as so many steps of the common batch size and context take.

    The `status` of a run is "ok", "diverged", or "failed" with the reason in `error`: what failed is returned among the
    others, even where nothing else is, and tried again when the same is asked again. The `status` of the results is
    "complete", or says how many runs there are so far: those of `asked` that finished are in results.json at any time.

    Raises RequestError before anything is trained: for what names no model, does not fit together, or is unfair, and
    where another process writes the same folder. Raises Interrupted on Ctrl-C.
    """
    notify = on_event or (lambda event: None)
    check_sinks(log_to)
    if not str(out):
        raise RequestError("--out is empty; name a folder")
    check_whole("seeds", seeds)
    if seeds > MOST_SEEDS:
        raise RequestError(f"seeds={seeds} is more than the {MOST_SEEDS:,} runs of a model that one comparison takes")
    seeds = int(seeds)
    configs = arms(expressions)
    notes = fairness(configs, allow_unmatched)
    context = common_context(configs, recipe.get("context"))
    tokens = tokens_of_steps(steps, tokens, recipe.get("batch_size"), context)
    budgets = {"tokens": tokens, "minutes": minutes, "flops": flops}
    usual = {**_recipe_defaults(), "match": None, "tokenizer": "auto", "allow_unmatched": False}
    given = {**budgets, "match": match, "tokenizer": tokenizer, "allow_unmatched": allow_unmatched, **recipe}
    given = {name: value for name, value in given.items() if value != usual.get(name)}
    given |= {"seeds": seeds, "out": str(out)}
    fields = {**_recipe_defaults(), **recipe, **budgets}
    fields["context"] = context
    here = machine.settings(fields["device"], fields["dtype"], fields["threads"], fields["compile"])  # refuses early
    for config in configs.values():
        refuse_untrained(config, here.device)
    recipes(configs, fields, match, vocab_size=1)  # refuses a wrong recipe before the text is read
    matched: str = match or next(name for name, amount in budgets.items() if amount is not None)
    budget = {
        "match": matched, **budgets, "seeds": seeds, "batch_size": fields["batch_size"], "context": fields["context"],
    }  # fmt: skip
    check_comparison(Path(out), list(configs), budget)
    text = data if isinstance(data, TextData) else prepare(data, tokenizer, fields["context"], progress=on_progress)
    configs = {
        name: fit(config, text.tokenizer.vocab_size, fields["context"], own_value(name, config, "vocab_size"))
        for name, config in configs.items()
    }
    for config in configs.values():
        config.check()
        refuse_short(config)
    plans = recipes(configs, fields, match, text.tokenizer.vocab_size)
    notes += text.notes + likeness(configs, plans)
    spent = spending(configs, plans, matched)
    notes += unequal(spent, matched)
    # All arms compile or none does: as those here did, else by the longest. What an arm asks for itself, it gets.
    before = compiled_before(Path(out))
    plans = {n: plan.vary(compile=before) if plan.compile is None else plan for n, plan in plans.items()}
    made = [settings(config, plans[name]) for name, config in configs.items()]
    how = next((one for one in made if one.compile), made[0])
    plans = {n: plan.vary(compile=how.compile) if plan.compile is None else plan for n, plan in plans.items()}
    seeded = range(fields["seed"], fields["seed"] + seeds)
    requests = {
        (name, seed): _request(name, configs[name], plans[name].vary(seed=seed), text)
        for seed in seeded  # seed by seed: when stopped early, every arm has the same seeds
        for name in configs
    }
    check_runs(Path(out), requests.values(), text.describe())
    folder = _folder(Path(out))
    budget |= {
        "spent": spent, "learning_rates": {name: plan.learning_rate for name, plan in plans.items()}, "notes": notes,
    }  # fmt: skip
    results: dict[str, Any] = {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": "",
        "command": command or command_of(expressions, data, given),
        "data": text.describe(),
        "budget": budget,
        "machine": how.describe(),
        "asked": [[name, seed] for name, seed in requests],
    }
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    try:
        with only_writer(folder), _terminated_as_interrupted():
            notify({"event": "begin", "runs": results["asked"], "how": how.why, "notes": notes})
            for (name, seed), request in requests.items():
                if (done := read_result(place_of(folder, name, seed), request)) is not None:
                    runs[name, seed] = done
                    notify({"name": name, "seed": seed, "event": "kept"})
            _write(folder, results, runs, notes, how)  # first of all: it says whose folder this is
            for (name, seed), request in requests.items():
                if (name, seed) not in runs:
                    besides = {"text": text.places(folder / "tokenizer"), "log_to": list(log_to)}
                    runs[name, seed] = _arm(place_of(folder, name, seed), request, configs[name], besides, notify)
                    _write(folder, results, runs, notes, how)
    except (KeyboardInterrupt, Interrupted):
        finished = sum(run["status"] != "failed" for run in runs.values())
        raise Interrupted(
            f"stopped; {finished} of {len(requests)} runs are finished, in {folder}; the same command goes on from here"
        ) from None
    return results


def _recipe_defaults() -> dict[str, Any]:
    names = set(Recipe.model_fields)
    return {name: Recipe.model_fields[name].get_default() for name in names - set(BUDGETS)}


def _folder(folder: Path) -> Path:
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _request(name: str, config: ModelConfig, recipe: Recipe, text: TextData) -> dict[str, Any]:
    """What decides a run: with another one, it is another run."""
    tokens = [text.train.folder.name, text.validation.folder.name, text.tokenizer.fingerprint()]
    return {"name": name, "config": config.to_dict(), "recipe": to_plain(recipe), "tokens": tokens}


def _other_machine(run: dict[str, Any], how: machine.Settings) -> list[str]:
    """A note where a kept run was measured elsewhere."""
    here, there = how.describe(), run.get("machine") or {}
    keys = ("processor", "device", "dtype", "threads", "torch")
    if all(key not in there or there[key] == here[key] for key in keys):
        return []
    return [f"{run['name']} seed {run['seed']} was measured on another machine or setting: speeds do not compare."]


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM stops a comparison as Ctrl-C does: the arm at work is saved. SIGINT too where the shell had it ignored,
    as it does for what runs in the background."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arm(
    place: Path, request: dict[str, Any], config: ModelConfig, besides: dict[str, Any], notify: Event
) -> dict[str, Any]:
    """The result of one arm, trained from where it stopped. `besides` is what the arm needs to know and does not make
    it another."""
    who = {"name": request["name"], "seed": request["recipe"]["seed"]}
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        replace_text(place / "request.json", json.dumps({**request, **besides}))
    notify({**who, "event": "start"})
    error, status = _spawn(place, lambda message: notify({**who, **message}))
    result = read_result(place, request)
    if result is None:
        if status in (-signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        if status == 0:
            error = f"{place / 'result.json'} is not what a trained arm leaves"
        error = error or f"the process ended with status {status}" + (" (out of memory?)" if status == -9 else "")
        result = {
            **who,
            "parameters": config.num_params(),
            "config": config.to_dict(),
            "recipe": request["recipe"],
            "dynamics": summary_of(place / "run"),
            "status": "failed",
            "error": error,
        }
    notify({**who, "event": "end", "status": result["status"], "result": result})
    return result


def _spawn(place: Path, notify: Event) -> tuple[str | None, int]:
    """Runs the arm; (its last error sentence, exit status).

    Its session is its own, so that Ctrl-C in a terminal comes here alone: it is passed on once, and the arm saves."""
    # -P: the folder one happens to be in holds the user's files, and one may be called as a module is, random.py say.
    command = [sys.executable, "-P", "-c", START, str(Path(machine.__file__).parents[1]), str(place)]
    error, stopped = None, False
    with (place / "stderr.txt").open("wb") as complaints:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            while True:
                try:
                    for line in process.stdout:
                        message = _message(line)
                        if message.get("event") == "error":
                            error = str(message["error"])
                        if message:
                            notify(message)
                    status = process.wait()
                    break
                except KeyboardInterrupt:
                    if stopped:  # a second one does not wait
                        raise
                    stopped = True
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                process.kill()
    if stopped:
        raise Interrupted("stopped")
    if error is None and status > 0:
        tail = (place / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        error = tail[-1][:500] if tail else None
    return error, status


def _message(line: str) -> dict[str, Any]:
    """What the arm said; other prints on its output are nothing."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) and "event" in message else {}


def _write(
    folder: Path,
    results: dict[str, Any],
    found: dict[tuple[str, int], dict[str, Any]],
    notes: list[str],
    how: machine.Settings,
) -> None:
    """Puts the runs `found` so far into the results, in the order in which they were asked for, and what follows from
    them; writes the results and the report."""
    asked, budget = results["asked"], results["budget"]
    runs = [found[name, seed] for name, seed in asked if (name, seed) in found]
    given = verdicts(runs)
    late = stand_in(runs, given)
    if budget["match"] == "minutes":
        seconds: dict[str, list[float]] = {}
        for run in runs:
            if run["status"] == "ok":
                seconds.setdefault(run["name"], []).append(run["train"]["seconds"])
        budget["spent"] = {name: fmean(values) / 60 for name, values in seconds.items()}
        late += unequal(budget["spent"], "minutes")
    late += [note for run in runs for note in _other_machine(run, how)]
    budget["notes"] = [*notes, *late]
    status = "complete" if len(runs) == len(asked) else f"{len(runs)} of {len(asked)} runs so far"
    results |= {"status": status, "runs": runs, "verdicts": given}
    with disk_errors(folder):
        replace_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False))
        write_report(results, folder / "report.html")
