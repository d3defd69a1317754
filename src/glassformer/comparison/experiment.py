"""Execution of one comparison, from its design to its report."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from glassformer import machine
from glassformer.comparison.arms import at_once, compiled_alike, likeness, spending, threads_of, unequal
from glassformer.comparison.design import FILE, Design
from glassformer.comparison.folder import (
    check_comparison,
    check_looks,
    check_runs,
    compiled_before,
    seeds_before,
    speeds_before,
    threads_before,
)
from glassformer.comparison.pretrained import adapted_notes, beginnings, loaded_arms, tokenizer_of
from glassformer.comparison.result import Comparison
from glassformer.comparison.summary import so_far, write
from glassformer.config import read_tree
from glassformer.errors import RequestError
from glassformer.files import only_writer, refuse_sources, replace_text
from glassformer.parts.core.base import PartConfig
from glassformer.parts.core.outside import FILE as SOURCES
from glassformer.parts.core.outside import import_options, modules_of, sources_of
from glassformer.runs.events import Begin, Notify, StageEvent, reading, silent
from glassformer.runs.executor import Executor, Local, interruptible, kept, with_workers
from glassformer.runs.files import read_results
from glassformer.runs.power import FIRST_SEED, PILOT, PILOT_SEEDS
from glassformer.runs.request import RunRequest, TextPlaces, text_of_runs
from glassformer.runs.results import VERSION, Data, Key, MachineRecord, Results, RunResult, Tuning
from glassformer.text import Tokens, read_data
from glassformer.training import Interrupted, Pretrained, Recipe
from glassformer.training.pace import DECIDED, STEPS, decided, outlook, paces
from glassformer.training.repeats import passes, repeat_notes, shared_notes
from glassformer.training.request import fit, refuse_short, refuse_untrained
from glassformer.units import plural

WRITING = 0.01
"""Largest share of the time that results.json and the report take while runs train: the cores are those of the runs."""
TIMED, LEAST_TIMED = 0.01, 3
"""Share of a model's training steps that are timed after runs that shared a device, up to `pace.STEPS`, and their least
number"""
QUANTILES = "scipy.optimize"
"""Module of the quantiles of verdicts, imported while the first runs train."""


class Saved(Protocol):
    """Interface of an experiment that can be saved to a file and run again from it."""

    @property
    def data(self) -> str | None: ...

    @property
    def parts(self) -> Sequence[type[PartConfig]]: ...

    def save(self, folder: Path) -> None: ...


def checked_folder(out: str | Path) -> Path:
    """Returns the output folder `out` as a path. Raises RequestError for an empty name."""
    if not str(out):
        raise RequestError("--out is empty; name a folder", code="missing", field="out", value="", expected="a folder")
    return Path(out)


def command_of(origin: Saved, folder: Path, *options: str) -> str:
    """Returns the `glassformer run` command that repeats an experiment from the design.yaml in `folder`, with further
    `options`."""
    return run_command(folder / FILE, *options, *import_options(origin.parts))


def run_command(file: Path, *options: str) -> str:
    """Returns the command `glassformer run FILE OPTIONS`, quoted for a shell."""
    return shlex.join(["glassformer", "run", str(file), *options])


def again(design: Design, folder: Path) -> dict[str, str]:
    """Returns {purpose: command} for the report page: commands that repeat the comparison with more seeds ("seeds"),
    observed during training ("watch"), or, if it neither sets nor tunes rates nor loads weights, with tuned learning
    rates ("tune"); {} if its text was in memory."""
    if design.data is None:
        return {}
    found = {
        "seeds": command_of(design, folder, "--seeds", "3"),
        "watch": command_of(design, folder, "--watch", "--out", f"{folder}-watched"),
    }
    rates = [design.recipe.get("learning_rate"), *(arm.recipe.get("learning_rate") for arm in design.arms)]
    if not any(rates) and not design.pretrained and not design.tune:
        found["tune"] = command_of(design, folder, "--tune", "--out", f"{folder}-tuned")
    return found


def carry_out(
    design: Design,
    text: Tokens | None,
    out: str | Path,
    *,
    notify: Notify = silent,
    executor: Executor | None = None,
    command: str | None = None,
    tuning: Tuning | None = None,
    origin: Saved | None = None,
) -> Comparison:
    """Trains the runs of a design that `out` does not hold yet, writes results.json, report.html and design.yaml to
    `out` (a pilot's to `out`/pilot), and returns the comparison.

    Runs with the same seed read the same text in the same order. If `out` holds an earlier comparison of the same kind,
    its finished runs are kept and the others are trained, failed ones included. A failed run does not raise.

    text      the prepared text; None if the design names it
    origin    the experiment that this comparison is part of, which is saved instead of the design
    tuning    how the rates of the arms were chosen, for the results

    Raises RequestError before anything is trained, and Interrupted on Ctrl-C.
    """
    folder, executor = checked_folder(out), executor or Local()
    folder = folder if design.power is None else folder / PILOT
    design, free = as_before(design, folder, executor) if origin is None else (design, ())
    asked = design
    if design.power is not None:
        asked = design.replace(
            seeds=max(design.seeds, PILOT_SEEDS, seeds_before(folder)), seed=FIRST_SEED + design.first_seed
        )
    held_looks, planned = check_looks(folder, design.looks)
    fields = asked.all_fields | {"threads": threads_of(executor, asked.all_fields["threads"], asked.equal)}
    here = machine.settings(fields["device"], fields["dtype"], fields["threads"], fields["compile"])
    for config in asked.configs.values():
        refuse_untrained(config, here.device)
    modules_of(asked.parts)  # refuses a part that the arm's process cannot import
    budget = asked.budget
    check_comparison(folder, list(asked.configs), budget)
    if design.data is not None:
        refuse_sources(folder, Path(design.data), inside=False)

    loaded = loaded_arms({arm.name: str(arm.model) for arm in asked.arms}) if asked.pretrained else {}
    known = tokenizer_of(loaded) if loaded else None
    if text is None:
        text = read_text(asked, known or asked.tokenizer, notify, folder)
    if known is not None and text.tokenizer.fingerprint() != known.fingerprint():
        raise RequestError(
            f"{text.name} was prepared with another tokenizer than that of the weights; give the text itself",
            code="conflict", field="data", value=text.name, expected="the text itself",
        )  # fmt: skip
    objective = asked.common.objective.among(asked.configs)
    text = objective.with_tokens(text)
    size = text.tokenizer.vocab_size
    padded = {arm.name: arm.own("vocab_size") for arm in asked.arms}
    padded |= {name: one.config.vocab_size for name, one in loaded.items()}
    configs = asked.configs | {name: one.config for name, one in loaded.items()}
    configs = {name: fit(config, size, asked.context, padded[name]) for name, config in configs.items()}
    for config in configs.values():
        config.check()
        refuse_short(config)
    plans = asked.plans(configs, size, objective=objective, threads=fields["threads"])
    runs = asked.seeds * len(configs)
    if executor.workers is None:
        models, before = {name: (config, plans[name]) for name, config in configs.items()}, threads_before(folder)
        cores = machine.available_cores()
        workers, threads = at_once(models, runs, here, cores, machine.all_memory(), before)
        executor, fields["threads"] = with_workers(executor, workers), fields["threads"] or threads
        plans = asked.plans(configs, size, objective=objective, threads=fields["threads"])
    where = "" if asked.minutes is None else duration(asked.minutes, runs)
    if free:
        chosen, speed = decided({name: (config, plans[name]) for name, config in configs.items()}, text, free)
        asked, design = asked.replace(**chosen), design.replace(**chosen)
        budget = asked.budget
        plans = asked.plans(configs, size, objective=objective, threads=fields["threads"])
        starting = machine.seconds_since_start() if command else None
        where = f"{trained(asked.minutes or 0, runs) if starting else where}: "
        where += outlook(next(iter(plans.values())), speed, starting, runs)
    begun_as = origin or design
    plans, how = compiled_alike(configs, plans, compiled_before(folder))
    places = TextPlaces.of(text, folder / "tokenizer")
    begins = beginnings(loaded, folder)
    for name, (weights, _) in begins.items():
        weights.check(configs[name])
    requests = [
        RunRequest(
            name,
            configs[name],
            plans[name].replace(seed=seed),
            places,
            asked.log_to,
            asked.loss_alone,
            begins[name][1] if name in begins else None,
        )
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds)  # outer: arms get equal seeds if stopped
        for name in configs
    ]
    check_runs(folder, requests, Data(text.describe()))

    spent = spending(configs, plans, str(budget.match))
    notes = asked.notes + text.notes + unequal(spent, str(budget.match))
    times = {name: passes(plans[name], config, text) for name, config in configs.items()}
    notes += repeat_notes(times, several=len({*times.values()}) > 1) + shared_notes(text)
    notes += adapted_notes(loaded) if loaded else likeness(asked.named, configs, plans)
    rates = {name: plan.learning_rate for name, plan in plans.items()}
    results = Results(
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        status="",
        command=command or command_of(begun_as, folder),
        again=again(begun_as, folder) if isinstance(begun_as, Design) and asked.power is None else {},
        data=Data(text.describe()),
        budget=budget.changed(spent=spent, learning_rates=rates, notes=notes),
        machine=MachineRecord(how.describe()),
        asked=[request.key for request in requests],
        runs=[],
        speeds=speeds_before(folder, list(configs)),
        verdicts=[],
        looks=held_looks,
        planned_looks=planned,
    )
    if tuning is not None:
        results = results.changed(tuning=tuning)
    files = {place.path: weights for weights, place in begins.values()}
    beside = "" if executor.workers in (None, 1) else f"{executor.workers} runs at once, each "
    told = "\n".join(filter(None, [beside + how.why, where]))
    found = _trained(results, requests, text, folder, files, executor, notify, told, asked.power, begun_as)
    return Comparison(found, design, folder)


def read_text(design: Design, tokenizer: Any, notify: Notify, folder: Path) -> Tokens:
    """Returns the prepared text of a design. A text that was in memory is read from the earlier runs in the folder.
    Raises RequestError if it cannot be read."""
    if design.data is None:
        if (held := text_of_runs(folder)) is not None:
            return held
        message = "this design is of a text in memory; give the text too: gf.compare(design, data)"
        raise RequestError(message, code="missing", field="data", expected="the text")
    return read_data(design.common.objective.data(design.data), tokenizer, design.context, progress=reading(notify))


def duration(minutes: float, runs: int) -> str:
    """Returns words, without a full stop, on how long `runs` runs take that train for `minutes` minutes each.

    >>> duration(1, 2)
    '2 runs train for 1 minute each, and starting and measuring one takes 10 to 30 seconds more'
    """
    return f"{trained(minutes, runs)}, and starting and measuring one takes 10 to 30 seconds more"


def trained(minutes: float, runs: int) -> str:
    """Returns a clause that says that each of `runs` runs trains for `minutes` minutes.

    >>> trained(0.5, 1)
    'the run trains for 0.5 minutes'
    """
    each = plural(minutes, "minute")
    return f"{runs} runs train for {each} each" if runs != 1 else f"the run trains for {each}"


def as_before(design: Design, folder: Path, executor: Executor) -> tuple[Design, tuple[str, ...]]:
    """Returns (design, names of recipe fields still to be derived). With a budget in minutes, the batch size and the
    tokens of an evaluation (`training.pace.DECIDED`) are derived from the machine's speed; values that an earlier
    comparison in the folder derived are put into the returned design. Fields that the design or an arm sets are
    neither replaced nor named."""
    if design.minutes is None or not executor.here or executor.shared:
        return design, ()
    named = {*design.recipe, *(name for arm in design.arms for name in arm.recipe)}
    free = tuple(name for name in DECIDED if name not in named)
    if not free or read_results(folder) is None:
        return design, free
    held = read_tree(folder / FILE) if (folder / FILE).is_file() else {}
    defaults = Recipe.model_fields
    return design.replace(**{name: held.get(name, defaults[name].get_default()) for name in free}), ()


def _trained(
    results: Results,
    requests: Sequence[RunRequest],
    text: Tokens,
    folder: Path,
    files: Mapping[Path, Pretrained],
    executor: Executor,
    notify: Notify,
    how: str,
    effect: float | None,
    origin: Saved,
) -> Results:
    """Trains the requested runs that the folder does not hold, rewriting results.json and the report after each, as
    far as that takes little of the time, and returns `results` with all runs. Raises Interrupted on Ctrl-C."""
    begun = results
    found: dict[tuple[str, int], RunResult] = {}
    took, written = 0.0, 0.0

    def rewrite() -> None:
        nonlocal results, took, written
        began = time.monotonic()
        results = so_far(begun, found, effect)
        write(results, folder)
        written = time.monotonic()
        took = written - began

    try:
        with only_writer(folder), interruptible():
            notify(Begin(runs=results.asked, how=how, notes=results.budget.notes))
            found = kept(requests, folder, notify)
            rewrite()  # first of all, so that the folder is marked as this comparison's
            origin.save(folder)
            if sources := sources_of(origin.parts):
                replace_text(folder / SOURCES, json.dumps(sources))
            missing = [request for request in requests if request.key not in found]
            if missing:
                text.tokenizer.save(folder / "tokenizer")
                for path, weights in files.items():
                    weights.save(path)
                threading.Thread(target=import_module, args=(QUANTILES,), daemon=True).start()
            try:
                for result in executor.run(missing, folder, notify):
                    found[result.key] = result
                    if len(found) < len(requests) and WRITING * (time.monotonic() - written) >= took:
                        rewrite()
                spoilt = any(run.machine.shared for run in found.values()) and begun.budget.match != "minutes"
                if spoilt and not begun.speeds and effect is None and not requests[0].loss_alone:
                    begun = begun.changed(speeds=_speeds(requests, found, text, notify))
            finally:
                if missing or begun.speeds != results.speeds:
                    rewrite()
    except (KeyboardInterrupt, Interrupted):
        ended = sum(run.status != "failed" for run in found.values())
        raise Interrupted(
            f"stopped; {ended} of {len(requests)} runs are finished, in {folder}; the same command continues from here",
            code="stopped",
        ) from None  # fmt: skip
    return results


def _speeds(
    requests: Sequence[RunRequest], found: Mapping[Key, RunResult], text: Tokens, notify: Notify
) -> dict[str, float]:
    """Returns {model: tokens per second} of models with runs that did not fail: a few steps of each, with all cores
    and in turn."""
    ended = [request for request in requests if found[request.key].status != "failed"]
    models = {request.name: (request.config, request.recipe.replace(threads=None)) for request in ended}
    taken = sum(run.train.steps for run in found.values() if run.train is not None) / max(1, len(models))
    steps = min(STEPS, max(LEAST_TIMED, round(TIMED * taken)))
    notify(StageEvent(words="training speeds, a few steps of each model in turn"))
    return {name: pace.tokens_per_second for name, pace in paces(models, text, steps=steps).items()}
