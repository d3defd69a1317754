"""One comparison, from its request to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glassformer import machine
from glassformer.comparison.command import command_of
from glassformer.comparison.folder import (
    check_comparison,
    check_looks,
    check_runs,
    compiled_before,
    seeds_before,
)
from glassformer.comparison.pretrained import adapted_notes, beginnings, loaded_arms, tokenizer_of
from glassformer.comparison.request import (
    Match,
    arms,
    check_seeds,
    common_context,
    compiled_alike,
    fairness,
    given_budget,
    likeness,
    recipe_defaults,
    recipes,
    spending,
    threads_of,
    tokens_of_steps,
    unequal,
)
from glassformer.comparison.summary import so_far, write
from glassformer.errors import RequestError
from glassformer.files import only_writer
from glassformer.naming import own_value
from glassformer.parts.core.base import part_classes
from glassformer.parts.core.outside import modules_of
from glassformer.runs.events import Begin, Notify, silent
from glassformer.runs.executor import Executor, Local, interruptible, kept
from glassformer.runs.power import FIRST_SEED, PILOT, PILOT_SEEDS, check_effect
from glassformer.runs.request import RunRequest, TextPlaces
from glassformer.runs.results import VERSION, Budget, Data, MachineRecord, Results, Tuning
from glassformer.text import OnProgress, TextData, prepare
from glassformer.training import Interrupted, Pretrained, Recipe
from glassformer.training.request import fit, refuse_short, refuse_untrained
from glassformer.training.sinks import check_sinks

__all__ = ["compare"]


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
    on_event: Notify | None = None,
    on_progress: OnProgress | None = None,
    command: str | None = None,
    log_to: Sequence[str] = (),
    executor: Executor | None = None,
    looks: Sequence[int] = (),
    power: float | None = None,
    loss_alone: bool = False,
    tuning: Tuning | None = None,
    pretrained: bool = False,
    **recipe: Any,
) -> dict[str, Any]:
    """Trains every expression on `data` under one budget; writes results.json and report.html to `out`.

    Returns the content of results.json; `runs.results.Results.of` makes typed values of it. All arms of a seed read the
    same text in the same order. If `out` holds an earlier comparison of the same kind, its finished runs are kept and
    the others are trained, failed ones included.

    expressions  models; +recipe.FIELD=VALUE in one changes the recipe of that arm alone, and the report shows it
    tokens, minutes, flops, steps
                 the budget of each run, one of them; `steps` counts as the tokens of so many steps of the common batch
                 size and context
    match        what is equal between arms; "flops" with a budget in tokens gives every arm the FLOPs of the first
    on_event     receives the events of `runs.events`
    executor     trains the runs; the default, `runs.executor.Local`, one after the other
    looks        numbers of seeds at which verdicts will be seen, said before the first is: all together are wrong 5 %
                 of the time
    power        a difference, as a share of the first arm's loss: a pilot of at least three seeds in `out`/pilot is
                 trained, whose `power` says how many seeds and hours showing the difference takes. It shows no
                 verdict, and its seeds are none of the comparison's
    loss_alone   measure only the loss of the trained models, as trials of learning rates and scaling laws need
    tuning       how the rates of the arms were chosen, which stands in the results
    pretrained   whether every arm begins with the weights of the checkpoint that its expression names (a run, a
                 Hugging Face folder, ...), changed as it says: `RUN+gqa:2` has the means of the heads of RUN. The text
                 is read with their tokenizer
    recipe       fields of the recipe of all arms

    A run has status "ok", "diverged" or "failed", with the reason in `error`; a failed run does not raise. The results
    have status "complete" or "N of M runs so far": results.json is rewritten after every run.

    Raises RequestError before anything is trained: for an expression that names no model, models that do not fit
    together, an unfair comparison, and a folder that another process writes. Raises Interrupted on Ctrl-C.
    """
    check_sinks(log_to)
    if not str(out):
        raise RequestError("--out is empty; name a folder", code="missing", field="out", value="", expected="a folder")
    folder, seeds = Path(out), check_seeds(seeds)
    if power is not None:
        check_effect(power, len(expressions))
        folder = folder / PILOT
        seeds = max(seeds, PILOT_SEEDS, seeds_before(folder))
        recipe = {**recipe, "seed": FIRST_SEED + recipe.get("seed", 0)}
    held_looks, planned = check_looks(folder, looks)
    configs = arms(expressions)
    equal: Match | None = match or ("minutes" if minutes is not None else None)
    notes = fairness(configs, allow_unmatched, equal)

    # What can be refused is refused before the text is read, which may take minutes.
    context = common_context(configs, recipe.get("context"))
    tokens = tokens_of_steps(steps, tokens, recipe.get("batch_size"), context)
    amounts = {"tokens": tokens, "minutes": minutes, "flops": flops}
    executor = executor or Local()
    recipe = {**recipe, "threads": threads_of(executor, recipe.get("threads"), equal)}
    fields = {**recipe_defaults(), **recipe, **amounts, "context": context}
    here = machine.settings(fields["device"], fields["dtype"], fields["threads"], fields["compile"])
    for config in configs.values():
        refuse_untrained(config, here.device)
        modules_of(part_classes(config))  # refuses a part that the arm's process cannot import
    recipes(configs, fields, match, vocab_size=1)
    common = Recipe.of(**amounts, batch_size=fields["batch_size"], context=context, objective=fields["objective"])
    if not common.objective.continues and (steps is not None or "flops" in (match, given_budget(amounts))):
        raise RequestError(
            f"objective={common.objective.kind} gives a model pairs or rows, whose tokens and FLOPs are not those of "
            "so many contexts; give the budget of a comparison in --tokens or --minutes",
            code="conflict", field="objective", value=common.objective.kind, expected="--tokens",
        )  # fmt: skip
    fields["objective"] = common.objective.among(configs)
    budget = Budget(
        match=match or given_budget(amounts),
        tokens=common.tokens, minutes=common.minutes, flops=common.flops, seeds=seeds,
        batch_size=common.batch_size, context=common.context,
    )  # fmt: skip
    check_comparison(folder, list(configs), budget)

    loaded = loaded_arms(list(configs), tokenizer) if pretrained else {}
    known = tokenizer_of(loaded) if loaded else None
    text = data if isinstance(data, TextData) else prepare(data, known or tokenizer, context, progress=on_progress)
    if known is not None and text.tokenizer.fingerprint() != known.fingerprint():
        raise RequestError(
            f"{text.name} was prepared with another tokenizer than that of the weights; give the text itself",
            code="conflict", field="data", value=text.name, expected="the text itself",
        )  # fmt: skip
    text = fields["objective"].with_tokens(text)
    size = text.tokenizer.vocab_size
    padded = {n: own_value(n, c, "vocab_size") for n, c in configs.items()}
    padded |= {n: one.config.vocab_size for n, one in loaded.items()}
    configs |= {n: one.config for n, one in loaded.items()}
    configs = {n: fit(c, size, context, padded[n]) for n, c in configs.items()}
    for config in configs.values():
        config.check()
        refuse_short(config)
    plans = recipes(configs, fields, match, size)
    plans, how = compiled_alike(configs, plans, compiled_before(folder))
    places = TextPlaces.of(text, folder / "tokenizer")
    begins = beginnings(loaded, folder)
    for name, (weights, _) in begins.items():
        weights.check(configs[name])
    requests = [
        RunRequest(
            name,
            configs[name],
            plans[name].vary(seed=seed),
            places,
            tuple(log_to),
            loss_alone,
            begins[name][1] if name in begins else None,
        )
        for seed in range(fields["seed"], fields["seed"] + seeds)  # when stopped early, every arm has the same seeds
        for name in configs
    ]
    check_runs(folder, requests, Data(text.describe()))

    spent = spending(configs, plans, str(budget.match))
    notes += text.notes + unequal(spent, str(budget.match))
    notes += adapted_notes(loaded) if loaded else likeness(configs, plans)
    rates = {name: plan.learning_rate for name, plan in plans.items()}
    given = {**amounts, "match": match, "tokenizer": tokenizer, "allow_unmatched": allow_unmatched, **recipe}
    given |= {"pretrained": pretrained, "power": power, "looks": list(looks)}
    results = Results(
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        status="",
        command=command or command_of(expressions, data, given, seeds=seeds, out=str(out)),
        data=Data(text.describe()),
        budget=budget.changed(spent=spent, learning_rates=rates, notes=notes),
        machine=MachineRecord(how.describe()),
        asked=[request.key for request in requests],
        runs=[],
        verdicts=[],
        looks=held_looks,
        planned_looks=planned,
    )
    if tuning is not None:
        results = results.changed(tuning=tuning)
    notify, files = on_event or silent, {place.path: weights for weights, place in begins.values()}
    return _trained(results, requests, text, folder, files, executor, notify, how.why, power).to_dict()


def _trained(
    results: Results,
    requests: Sequence[RunRequest],
    text: TextData,
    folder: Path,
    files: Mapping[Path, Pretrained],
    executor: Executor,
    notify: Notify,
    how: str,
    effect: float | None,
) -> Results:
    """Trains the runs that are missing; results.json and the report are rewritten after each."""
    begun, found = results, {}
    try:
        with only_writer(folder), interruptible():
            notify(Begin(runs=results.asked, how=how, notes=results.budget.notes))
            found = kept(requests, folder, notify)
            results = so_far(begun, found, effect)
            write(results, folder)  # first of all: it says whose folder this is
            missing = [request for request in requests if request.key not in found]
            if missing:
                text.tokenizer.save(folder / "tokenizer")
                for path, weights in files.items():
                    weights.save(path)
            for result in executor.run(missing, folder, notify):
                found[result.key] = result
                results = so_far(begun, found, effect)
                write(results, folder)
    except (KeyboardInterrupt, Interrupted):
        ended = sum(run.status != "failed" for run in found.values())
        raise Interrupted(
            f"stopped; {ended} of {len(requests)} runs are finished, in {folder}; the same command goes on from here",
            code="stopped",
        ) from None  # fmt: skip
    return results
