"""Verbs of many runs: ablate, scale, run, advise, claims.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    HERE,
    TRAINED,
    Count,
    Data,
    Executed,
    Expression,
    Flag,
    Json,
    Trained,
    amounts,
    command_line,
    pairs,
    watch_interval,
)


def ablate(
    base: str,
    /,
    *,
    data: Data,
    to: str | None = None,
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
    """Walk from one model to another, one change at a time: what each change does to the loss, and what it costs.

    Parameters
    ----------
    base
        The first model: glassformer ablate gpt2@1m --to llama@1m --data python-docs --tokens 1M
    to
        The model at the other end; the changes that lead to it are found.
    changes
        The changes in their order, such as rope,rmsnorm,swiglu; without --to they make the other end.
    design
        ladder: the changes added one after the other, and each left out of the target. factorial: every combination of
        up to four changes, or half of those of five, for the effect of each and of two together.
    tokens
        Training budget of a run in tokens (200k, 5M); or give --minutes.
    minutes
        Training budget of a run in minutes.
    seeds
        Runs of each model, two or more.
    tune
        First choose the learning rate of each model, as in compare.
    within
        With --tune: refuse a ladder that would take more minutes.
    out
        Folder of the ladder. The same command continues it; more seeds are added.
    allow_unmatched
        Allow models of different size.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import ladder

    call_and_show(
        ladder.ablate, base, data, to=to, changes=changes, design=design, tokens=tokens, minutes=minutes, seeds=seeds,
        tune=tune, within=within, out=out, allow_unmatched=allow_unmatched, **vars(training),
        executor=trains.made(training.device), command=command_line(), as_json=json,
    )  # fmt: skip


def scale(
    models: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)],
    sizes: str | None = None,
    budgets: str | None = None,
    isoflop: str | None = None,
    seeds: int = 1,
    hours: float | None = None,
    form: Literal["chinchilla", "kaplan", "overtraining", "params", "tokens", "compute"] = "chinchilla",
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
    """Scaling laws: train models at several sizes and budgets and fit one of each, or fit one to a table of runs.

    Parameters
    ----------
    models
        Expressions without a size, gpt2 llama+gqa:2, to train at all of --sizes. Without models, --data is a table.
    data
        Text to train on. Without models: a .csv file with a line of names, params, tokens (or flops, 6 N D) and loss,
        and run if a run has several rows, which are then resampled together; or the folder of an earlier scale or
        compare.
    sizes
        0.3m,0.6m,1m..10m: sizes, or numbers of parameters in the layers; A..B is a ladder of about factor 2, A..B:N
        has N rungs.
    budgets
        Training budgets of a run in tokens: 250k,1M..4M. Each size is trained with each.
    isoflop
        Instead, training budgets of a run in FLOPs: 1e13,3e13. Tokens follow from the FLOPs of the model.
    seeds
        Runs of each model, size and budget. The same command continues; seeds, sizes, budgets and models can be added.
    hours
        Train nothing if all runs would take longer.
    form
        chinchilla: E + A N^-alpha + B D^-beta. kaplan: without E, of N and D together. overtraining: of C and D / N.
        params, tokens, compute: of one of them.
    columns
        Names of the columns of a table: --columns loss=val_c4 --columns params="Model Size".
    where
        Only rows with this text in this column: --where dataset=c4; of a folder, --where model=gpt2.
    without_worst
        Drop the N runs of highest loss.
    predict
        PARAMETERS,TOKENS whose loss is predicted: --predict 7b,140b.
    flops
        Compute budgets to split optimally into N and D: --flops 1e21.
    far
        Predict more than ten times beyond the largest run, too.
    out
        Folder of the runs, scaling by default; of a table, a page to write.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import scaling

    usual = {} if models else vars(TRAINED) | {"seeds": 1}
    options: dict[str, Any] = vars(training) | {"seeds": seeds}
    options = {name: value for name, value in options.items() if name not in usual or value != usual[name]}
    call_and_show(
        scaling.scale, models, data, sizes=sizes, budgets=budgets, isoflop=isoflop, hours=hours, form=form,
        columns=pairs(columns, "columns"), where=pairs(where, "where"), without_worst=without_worst,
        predict=scaling.pairs(predict or []), flops=flops, far=far, out=out or ("scaling" if models else None),
        executor=trains.made(training.device) if models else None, command=command_line(), as_json=json, **options,
    )  # fmt: skip


def run(
    file: str,
    /,
    *,
    seeds: int | None = None,
    tune: Flag = False,
    watch: Flag = False,
    out: str | None = None,
    trains: Executed = HERE,
) -> None:
    """Run an experiment that a file describes: glassformer run recipes/gpt2-to-llama.yaml

    Parameters
    ----------
    file
        The design.yaml of an experiment, which continues in its folder; or a .yaml file with a sentence `about` it and
        `steps`, designs each with a `verb` (train, compare, ablate, scale) and a folder `out`. All are checked before
        the first starts. The same command continues.
    seeds
        Override the seeds of the file; finished ones are kept.
    tune
        First choose the learning rate of each model, as in compare.
    watch
        Record statistics while the models train, as in compare.
    out
        Override the folder of the file.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory.experiments import steps_of
    from glassformer.runs.live import ComparisonView

    about, steps = steps_of(file, out, seeds=seeds, tune=tune or None, watch=watch_interval(watch, None))
    executor = trains.made()
    for words in [about] if about else []:
        print(words, file=sys.stderr)
    for step in steps:
        print(f"{step.verb}, in {step.out}", file=sys.stderr)
        with ComparisonView() as view:
            found = step.carry_out(view.event, executor)
        show(found, False)


def advise(
    *,
    goal: Literal["chat", "long", "train"],
    context: Count = 8192,
    memory: str = "16GB",
    model: Expression = "llama-3-8b",
    claims: str | None = None,
    json: Json = False,
) -> None:
    """Choices for a goal: what each option costs, which measured claims speak for it, and what is not known.

    Parameters
    ----------
    goal
        chat: generate from a cache; long: read texts longer than those of training; train: train from scratch.
    context
        Tokens in the cache: 8k.
    memory
        Memory of the machine: 16GB. Weights and the decode state have to fit.
    model
        The model that the options change.
    claims
        A folder of measured claims, as glassformer claims --out leaves it; by default those of the library.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory import advice

    show(advice.advise(model, goal=goal, context=context, memory=memory, claims=claims), json)


def claims(
    names: Annotated[list[str] | None, Parameter(negative="")] = None,
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
    """Put published claims to the test; without names, list them with what was found.

    Parameters
    ----------
    names
        Claims to measure: glassformer claims gqa-cache switch-loss.
    all
        Measure every claim, except those about a text that is not given: hours; the same command continues.
    quick
        Measure the exact claims: counts and identities, in a minute or two.
    out
        Folder of the results, NAME.json each, and of a page of all claims; by default claims. Its results are not
        measured again. Without this option the list shows the verdicts of this release for claims without a result.
    data
        Training text, by default python-docs; a claim about a text of its own needs it. Results from another text are
        refused.
    seeds
        Runs of each arm; by default as many as the claim takes. Results from other seeds are refused.
    again
        Re-measure claims in --out. Finished training runs are reused; to train again, name another folder.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory import claims as measured

    call_and_show(
        measured.claims, names or (), all=all, quick=quick, out=out or "claims", released=out is None, data=data,
        seeds=seeds, again=again, command=command_line(), as_json=json,
    )  # fmt: skip
