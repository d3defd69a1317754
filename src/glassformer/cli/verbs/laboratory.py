"""Verbs of many runs: ablate, scale, run, advise, claims.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    BatchSize,
    Compile,
    Context,
    Count,
    Data,
    Device,
    DType,
    ExecutorName,
    Expression,
    Flag,
    Json,
    LearningRate,
    Minutes,
    Optimizer,
    SlotNames,
    Threads,
    TokenizerName,
    Workers,
    command_line,
    count,
    counts,
    watch_interval,
    whole,
)
from glassformer.errors import RequestError
from glassformer.units import quantity


def ablate(
    base: str,
    /,
    *,
    data: Data,
    to: str | None = None,
    changes: str | None = None,
    design: Literal["ladder", "factorial"] = "ladder",
    tokens: Count | None = None,
    minutes: Minutes = None,
    seeds: int = 3,
    tune: Flag = False,
    within: float | None = None,
    out: str = "ladder",
    tokenizer: TokenizerName = "auto",
    batch_size: BatchSize = 16,
    context: Context = None,
    lr: LearningRate = None,
    optimizer: Optimizer = "adamw",
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    workers: Workers = 1,
    slots: SlotNames = None,
    executor: ExecutorName = "here",
    compile: Compile = None,
    allow_unmatched: Flag = False,
    json: Json = False,
) -> None:
    """Walk from one model to another, one change at a time: what each change does to the loss, and what it costs.

    Parameters
    ----------
    base
        The model to begin with: glassformer ablate gpt2@1m --to llama@1m --data python-docs --tokens 1M
    to
        The model at the other end; the changes that lead there are found.
    changes
        The changes in their order, such as rope,rmsnorm,swiglu; without --to they make the other end.
    design
        ladder: the changes added one after the other, and each left out of the target. factorial: every combination of
        up to four changes, or half of those of five, for the effect of each and of two together.
    seeds
        Runs of each model, two or more.
    tune
        Choose the learning rate of each model first, as in compare.
    within
        With --tune, minutes that it may take.
    allow_unmatched
        Compare models of different size all the same.
    """
    from glassformer.cli.laboratory import show_ladder
    from glassformer.laboratory.ladder import LadderDesign
    from glassformer.runs.slurm import executor_of

    ladder = LadderDesign.of(
        base, data, to=to, changes=changes, design=design, tokens=whole(tokens, "tokens"), minutes=minutes,
        seeds=seeds, tune=tune, within=within, tokenizer=tokenizer, batch_size=batch_size, context=context,
        learning_rate=lr, optimizer=optimizer, device=device, dtype=dtype, threads=threads, compile=compile,
        allow_unmatched=allow_unmatched,
    )  # fmt: skip
    show_ladder(ladder, out, command_line(), executor_of(executor, slots, workers, device), json)


def scale(
    models: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    data: Data,
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
    flops: Annotated[list[float] | None, Parameter(negative="", converter=counts)] = None,
    far: Flag = False,
    out: str | None = None,
    tokenizer: TokenizerName = "auto",
    batch_size: BatchSize = 16,
    context: Context = None,
    lr: LearningRate = None,
    optimizer: Optimizer = "adamw",
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    workers: Workers = 1,
    slots: SlotNames = None,
    executor: ExecutorName = "here",
    compile: Compile = None,
    json: Json = False,
) -> None:
    """Scaling laws: train models at several sizes and budgets and fit one of each, or fit one to a table of runs.

    Parameters
    ----------
    models
        Expressions without a size, gpt2 llama+gqa:2, to be trained at all of --sizes. Without any, --data is a table.
    data
        Text to train on; or a .csv file with a line of names: params, tokens (or flops, 6 N D) and loss; and run, where
        a run has several rows, which are then drawn together; or the folder of an earlier `scale` or `compare`.
    sizes
        0.3m,0.6m,1m..10m: sizes, or numbers of parameters in the layers; A..B is a ladder of about factor 2, A..B:N
        has N rungs.
    budgets
        Of each run in tokens: 250k,1M..4M. All sizes have all of them.
    isoflop
        Instead, of each run in training FLOPs: 1e13,3e13. Its tokens follow from the FLOPs of its model.
    seeds
        Runs of each model, size and budget. The same command goes on where it stopped; seeds, sizes, budgets and models
        are added to those there are.
    hours
        What all runs may take: where the estimate is longer, nothing is trained.
    form
        chinchilla: E + A N^-alpha + B D^-beta. kaplan: without E, of N and D together. overtraining: of C and D / N.
        params, tokens, compute: of one of them alone.
    columns
        What this table calls them: --columns loss=val_c4 --columns params="Model Size".
    where
        Only rows that have this text in this column: --where dataset=c4; of a folder, --where model=gpt2.
    without_worst
        So many of the highest losses are left out.
    predict
        PARAMETERS,TOKENS whose loss is asked for: --predict 7b,140b.
    flops
        Budgets of compute to share out best: --flops 1e21.
    far
        Predict more than ten times beyond the largest run, too.
    out
        With models, the folder of their runs, scaling by default; else a page to write.
    lr
        Peak learning rate of every run; by default a rule by size and optimizer.
    """
    if not models:
        trained = {"--sizes": sizes, "--budgets": budgets, "--isoflop": isoflop, "--hours": hours, "--lr": lr,
                   "--context": context}  # fmt: skip
        if given := [name for name, value in trained.items() if value is not None]:
            raise RequestError(
                f"{given[0]} is for training; name the models, such as gpt2 llama", code="missing", field="models"
            )
        from glassformer.cli.laboratory import show_law

        show_law(data, form, columns, where, without_worst, predict, flops, far, out, command_line(), json)
        return
    if columns or where or without_worst:
        raise RequestError(
            "--columns, --where and --without-worst are for a table of runs; leave the models out",
            code="conflict", field="columns" if columns else "where" if where else "without_worst",
        )  # fmt: skip
    if sizes is None:
        raise RequestError("give the sizes of the models: --sizes 0.3m,1m..10m", code="missing", field="sizes")
    from glassformer.cli.laboratory import pair, train_laws
    from glassformer.laboratory.scaling import ScalingDesign
    from glassformer.runs.slurm import executor_of

    asked = ScalingDesign.of(
        models, data, sizes=sizes, budgets=budgets, isoflop=isoflop, predict=[pair(one) for one in predict or []],
        form=form, seeds=seeds, hours=hours, flops=flops or (), far=far, tokenizer=tokenizer, batch_size=batch_size,
        context=context, learning_rate=lr, optimizer=optimizer, device=device, dtype=dtype, threads=threads,
        compile=compile,
    )  # fmt: skip
    train_laws(asked, out or "scaling", command_line(), executor_of(executor, slots, workers, device), json)


def run(
    experiment: str,
    /,
    *,
    seeds: int | None = None,
    tune: Flag = False,
    watch: Flag = False,
    out: str | None = None,
    workers: Workers = 1,
    slots: SlotNames = None,
    executor: ExecutorName = "here",
) -> None:
    """Run an experiment that a file describes: glassformer run recipes/gpt2-to-llama.yaml

    Parameters
    ----------
    experiment
        The design.yaml of an experiment, which its folder holds and which continues there; or a .yaml file with a
        sentence `about` it and `steps`, designs each with a `verb` (train, compare, ablate, scale) and a folder `out`.
        All are checked before the first starts. The same command continues.
    seeds
        Instead of those in the file: more are added to those that are there.
    tune
        Choose the learning rate of each model first, as in compare.
    watch
        Look inside while the models train, as in compare.
    out
        Another folder than that of the file.
    """
    from glassformer.cli.laboratory import show_step
    from glassformer.cli.recipes import run_experiment
    from glassformer.runs.slurm import executor_of

    changes = {"seeds": seeds, "tune": tune or None, "watch": watch_interval(watch, None)}
    changes = {name: value for name, value in changes.items() if value is not None}
    trains = executor_of(executor, slots, workers, "auto")
    run_experiment(experiment, out, changes, partial(show_step, executor=trains), partial(print, file=sys.stderr))


def advise(
    *,
    goal: Literal["chat", "long", "train"],
    context: Annotated[Count, Parameter(converter=count)] = 8192,
    memory: str = "16GB",
    model: Expression = "llama-3-8b",
    claims: str | None = None,
    json: Json = False,
) -> None:
    """Choices for a goal: what each option costs, which measured claims speak for it, and what is not known.

    Parameters
    ----------
    goal
        chat: to answer from a cache; long: to read texts longer than those of training; train: to train from scratch.
    context
        Tokens that are kept: 8k.
    memory
        Of the machine: 16GB. Weights and the decode state have to fit.
    model
        What the options change.
    claims
        A folder of measured claims, as `glassformer claims --out` leaves it; by default those of the library.
    """
    from glassformer.cli.laboratory import show_advice

    tokens = whole(context, "context")
    assert tokens is not None
    show_advice(goal, tokens, quantity(memory, "B", "memory"), claims, model, json)


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
        Every claim, but for those about a text that is not given: hours, which go on where they were broken off.
    quick
        The exact ones: counts and identities, in a minute or two.
    out
        The folder of the results, NAME.json each, and of a page that draws them all, by default claims; what it holds
        is not measured again. Without it the list shows the verdicts of this release where the folder has none.
    data
        The text that models are trained on, by default python-docs; a claim about a text of its own needs it. What the
        folder holds from another text is refused.
    seeds
        For each arm of what is trained; by default as many as the claim takes. What the folder holds from other seeds
        is refused.
    again
        Measure what the folder holds as well; its finished runs are kept, so that to train anew takes another folder.
    """
    from glassformer.cli.laboratory import show_claims

    show_claims(names or [], all, quick, out, data, seeds, again, command_line(), json)
