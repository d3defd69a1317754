"""Verbs of many runs: ablate, scale, run, advise, claims, guides.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer.cli import waiting
from glassformer.cli.options import (
    HERE,
    TRAINED,
    ChoiceName,
    Count,
    Data,
    Executed,
    Expression,
    Field,
    Flag,
    Json,
    Named,
    Trained,
    amounts,
    command_line,
    of_field,
    pairs,
    watch_interval,
)
from glassformer.names.checks import check_claim, check_data, check_experiment, check_guide, check_table


def ablate(
    base: Named,
    /,
    *,
    data: Data,
    field: Field = None,
    to: Named | None = None,
    changes: str | None = None,
    design: Literal["ladder", "factorial"] = "ladder",
    tokens: Count | None = None,
    minutes: float | None = None,
    seeds: int = 3,
    tune: Flag = False,
    within: float | None = None,
    out: str = "ladder",
    training: Trained = TRAINED,
    allow_unmatched: Flag = False,
    trains: Executed = HERE,
    json: Json = False,
) -> None:
    """Turn one model into another, one change at a time, and measure the effect of each change on loss and cost.

    Parameters
    ----------
    base
        Model to start from, for example: glassformer ablate gpt2@1m --to llama@1m --data python-docs --tokens 1M
    to
        Target model; the changes from BASE to it are derived.
    changes
        Changes in order, for example rope,rmsnorm,swiglu; without --to, BASE with all of them is the target.
    design
        ladder: changes are added to BASE one by one, then each one is removed from the target (leave-one-out).
        factorial: all combinations of up to four changes, or a half fraction for five; gives main effects and two-way
        interactions.
    tokens
        Training budget of a run in tokens (200k, 5M); or give --minutes.
    minutes
        Training budget of a run in minutes.
    seeds
        Runs of each model, two or more.
    tune
        First choose the learning rate of each model, as in compare.
    within
        With --tune, time limit in minutes: if the estimate exceeds it, nothing is trained.
    out
        Output folder. Rerun the same command to resume it; with more seeds, to extend it.
    allow_unmatched
        Allow models of different size.
    """
    trains.prepare()
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import ladder

    call_and_show(
        ladder.ablate, base, of_field(data, field), to=to, changes=changes, design=design, tokens=tokens,
        minutes=minutes, seeds=seeds, tune=tune, within=within, out=out, allow_unmatched=allow_unmatched,
        **vars(training), executor=trains.made(training.device), command=command_line(), as_json=json,
    )  # fmt: skip


def scale(
    models: Annotated[list[Named] | None, Parameter(negative="")] = None,
    /,
    *,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)],
    field: Field = None,
    sizes: str | None = None,
    budgets: str | None = None,
    isoflop: str | None = None,
    seeds: int = 1,
    hours: float | None = None,
    form: Literal[
        "chinchilla", "kaplan", "kaplan_params", "overtraining", "params", "tokens", "compute"
    ] = "chinchilla",
    columns: Annotated[list[str] | None, Parameter(negative="")] = None,
    where: Annotated[list[str] | None, Parameter(negative="")] = None,
    without_worst: int = 0,
    predict: Annotated[list[str] | None, Parameter(negative="")] = None,
    flops: Annotated[list[float] | None, Parameter(negative="", converter=amounts)] = None,
    far: Flag = False,
    out: str | None = None,
    training: Trained = TRAINED,
    trains: Executed = HERE,
    json: Json = False,
) -> None:
    """Fit scaling laws: train models over a grid of sizes and budgets, or read a table of finished runs.

    Parameters
    ----------
    models
        Model expressions without @SIZE, for example gpt2 llama+gqa:2; each is trained at every size of --sizes. Leave
        them out to fit a law to the table in --data.
    data
        Text to train on. Without models: a .csv file with a header row and the columns params (N), tokens (D; or flops,
        taken as 6 N D) and loss, and optionally run (the bootstrap draws whole runs); or the output folder of an
        earlier scale or compare command.
    sizes
        Model sizes, for example 0.3m,0.6m,1m..10m: named sizes or numbers of parameters without embeddings. A..B is a
        geometric grid of ratio about 2, A..B:N a grid of N sizes.
    budgets
        Training budgets of a run in tokens, for example 250k,1M..4M; each size is trained with each.
    isoflop
        Training budgets of a run in FLOPs instead of tokens, for example 1e13,3e13 (isoFLOP curves).
    seeds
        Runs of each model, size and budget. Rerun the same command to resume; seeds, sizes, budgets and models can be
        added.
    hours
        Time limit in hours for all runs together: if the estimate exceeds it, nothing is trained.
    form
        Form of the law, with N parameters, D tokens, C compute. chinchilla: E + A N^-alpha + B D^-beta; kaplan: power
        law in N and D jointly, without E; kaplan_params: power law in N, without E; overtraining: law in C and D / N;
        params, tokens, compute: E and a power law in one of them.
    columns
        Names of the columns of a table: --columns loss=val_c4 --columns params="Model Size".
    where
        Filter of rows, COLUMN=TEXT, repeatable: --where dataset=c4, or for a folder --where model=gpt2.
    without_worst
        Drop the N runs of highest loss.
    predict
        PARAMETERS,TOKENS whose loss is predicted: --predict 7b,140b.
    flops
        Compute budgets to split optimally into N and D: --flops 1e21.
    far
        Predict more than ten times beyond the largest run, too.
    out
        Output folder of the runs; by default scaling. For a table, the HTML page to write.
    """
    (check_data if models else check_table)(data)
    if models:
        trains.prepare()

    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import scaling

    usual = {} if models else vars(TRAINED) | {"seeds": 1}
    options: dict[str, Any] = vars(training) | {"seeds": seeds}
    options = {name: value for name, value in options.items() if name not in usual or value != usual[name]}
    call_and_show(
        scaling.scale, models, of_field(data, field), sizes=sizes, budgets=budgets, isoflop=isoflop, hours=hours,
        form=form, columns=pairs(columns, "columns"), where=pairs(where, "where"), without_worst=without_worst,
        predict=scaling.pairs(predict or []), flops=flops, far=far, out=out or ("scaling" if models else None),
        executor=trains.made(training.device) if models else None, command=command_line(), as_json=json, **options,
    )  # fmt: skip


def run(
    file: Annotated[str, ChoiceName(check_experiment)],
    /,
    *,
    seeds: int | None = None,
    tune: Flag = False,
    watch: Flag = False,
    out: str | None = None,
    trains: Executed = HERE,
    json: Json = False,
) -> None:
    """Run an experiment from a file, such as recipes/gpt2-to-llama.yaml.

    Parameters
    ----------
    file
        Experiment file: the design.yaml of an experiment, which is resumed in its folder; or a recipe with the fields
        "about:" (a sentence) and "steps:" (a list; each step has "verb:", one of train, compare, ablate, scale, and a
        folder, "out:"). All steps are checked before the first one starts. Rerun the same command to resume.
    seeds
        Override the seeds of the file; finished ones are kept.
    tune
        First choose the learning rate of each model, as in compare.
    watch
        Record statistics while the models train, as in compare.
    out
        Output folder, which overrides that of the file.
    json
        Print each step's result as a line of JSON.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory.experiments import steps_of
    from glassformer.runs.live import ComparisonView

    about, steps = steps_of(file, out, seeds=seeds, tune=tune or None, watch=watch_interval(watch, None))
    executor = trains.made()
    waiting.end()
    for words in [about] if about else []:
        print(words, file=sys.stderr)
    for step in steps:
        print(f"{step.verb}, in {step.out}", file=sys.stderr)
        with ComparisonView(quiet=json) as view:
            found = step.carry_out(view.event, executor)
        show(found, json)


def advise(
    *,
    goal: Literal["chat", "long", "train", "fast", "simple", "balanced"],
    context: Count = 8192,
    memory: str = "16GB",
    model: Expression = "llama-3-8b",
    claims: str | None = None,
    json: Json = False,
) -> None:
    """Recommend a model for a goal: the cost, the evidence and the open questions of each option, then the model.

    Parameters
    ----------
    goal
        Use case. chat: decoding with a KV cache; long: texts longer than the training context; train: training from
        scratch; fast: few FLOPs and little memory; simple: plain parts unless a claim favours another; balanced:
        all of these.
    context
        Tokens held in the KV cache, for example 8k.
    memory
        Memory of the machine, for example 16GB; weights and decode state must fit.
    model
        The model that the options change.
    claims
        Results folder of glassformer claims --out; by default the results shipped with the package.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory import advice

    show(advice.advise(model, goal=goal, context=context, memory=memory, claims=claims), json)


def claims(
    names: Annotated[list[Annotated[str, ChoiceName(check_claim)]] | None, Parameter(negative="")] = None,
    /,
    *,
    all: Flag = False,
    quick: Flag = False,
    out: str | None = None,
    data: Data | None = None,
    seeds: int | None = None,
    again: Flag = False,
    json: Json = False,
) -> None:
    """Test published claims about transformers by experiment; without names, list all claims and their verdicts.

    Parameters
    ----------
    names
        Claims to measure: glassformer claims gqa-cache switch-loss.
    all
        Measure all claims (hours), except those that need a --data that is not given. Rerun the same command to resume.
    quick
        Measure only claims that need no training (counts, identities): one to two minutes.
    out
        Results folder, by default ./claims: NAME.json per claim, and a page of all. Finished results are reused.
        Without --out, claims that have no result in ./claims are listed with the verdicts shipped with this release.
    data
        Training text, by default python-docs; a claim about a particular text needs it. Results from another text are
        refused.
    seeds
        Number of seeds per model; by default that of the claim. Stored results with another number are refused.
    again
        Re-measure claims in --out. Finished training runs are reused; to train again, name another folder.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import evidence as measured

    call_and_show(
        measured.claims, names or (), all=all, quick=quick, out=out or "claims", released=out is None, data=data,
        seeds=seeds, again=again, command=command_line(), as_json=json,
    )  # fmt: skip


def guides(guide: Annotated[str | None, ChoiceName(check_guide)] = None, /, *, json: Json = False) -> None:
    """List the items of five guides to the transformer, each with the command that shows it, and corrections of their
    figures.

    Parameters
    ----------
    guide
        Name of one guide: in-depth, mathematics, first-lesson, architecture or core; by default all.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory import guide_table

    show(guide_table.guides(guide), json)
