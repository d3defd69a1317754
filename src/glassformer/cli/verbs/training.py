"""Verbs that train, compare and train, and why, which diagnoses a failed run.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer.cli import waiting
from glassformer.cli.options import (
    HERE,
    RAN,
    Data,
    Executed,
    Expression,
    Field,
    Flag,
    Json,
    Named,
    Ran,
    ToRead,
    WatchEvery,
    check_context,
    command_line,
    of_field,
    watch_interval,
)


def compare(
    models: Annotated[list[Named], Parameter(negative="")],
    /,
    *,
    data: Data,
    field: Field = None,
    match: Literal["tokens", "flops", "minutes"] | None = None,
    seeds: int | None = None,
    out: str = "comparison",
    run: Ran = RAN,
    tune: Flag = False,
    within: float | None = None,
    allow_unmatched: Flag = False,
    pretrained: Flag = False,
    watch: Flag = False,
    watch_every: WatchEvery = None,
    power: str | None = None,
    looks: str | None = None,
    trains: Executed = HERE,
    json: Json = False,
) -> None:
    """Train several models side by side under one budget and write a report.

    Parameters
    ----------
    models
        Model expressions NAME[@SIZE][+CHANGE...], for example gpt2@10m llama@10m gpt2@10m+rope+rmsnorm+swiglu;
        +recipe.FIELD=VALUE changes the recipe of one model.
    match
        Quantity held equal between models; by default that of the budget. With --tokens N --match flops the first model
        is trained on N tokens and each other model for the same number of FLOPs.
    seeds
        Number of seeds per model; with the same seed, models read the same text in the same order. By default 1, or 3
        if --tune is given.
    out
        Output folder. Rerun the same command to resume it; with more models or seeds, to extend it.
    tune
        First tune the learning rate of each model: three or more rates on two tuning seeds. Final results use fresh
        seeds, and are reported next to results at the default learning rate.
    within
        With --tune, time limit in minutes: if the estimate exceeds it, nothing is trained.
    allow_unmatched
        Allow models of different size (implied by --minutes).
    pretrained
        Start from the checkpoints named in the expressions, with their changes applied, for example: RUN RUN+gqa:2.
    watch
        Record statistics per layer and head in dynamics.jsonl, for the report and for the command 'glassformer why'.
    power
        Power analysis: the difference of the loss to detect, for example 1%. A pilot of three seeds (or --seeds) in
        OUT/pilot gives the number of seeds and hours required; its seeds are not reused.
    looks
        Numbers of seeds at which results are evaluated, for example 3,5,8; intervals are corrected for the repetition.
    """
    check_context(run.context, data)
    trains.prepare()
    from glassformer import comparison
    from glassformer.cli.show import show
    from glassformer.runs.live import ComparisonView

    waiting.end()
    with ComparisonView(quiet=json) as view:
        found = comparison.compare(
            models, of_field(data, field), match=match, seeds=seeds, out=out, tune=tune, within=within,
            allow_unmatched=allow_unmatched, pretrained=pretrained, watch=watch_interval(watch, watch_every),
            power=power, looks=looks, **vars(run), executor=trains.made(run.device), progress=view.event,
            command=command_line(),
        )  # fmt: skip
    show(found if json else found.without_notes(view.noted), json)


def train(
    model: Expression,
    /,
    *,
    data: Data,
    field: Field = None,
    out: str | None = None,
    resume: Flag = False,
    pretrained: Flag = False,
    run: Ran = RAN,
    epochs: float | None = None,
    schedule: str = "cosine",
    warmup: float | None = None,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    betas: Annotated[tuple[float, float] | None, Parameter(negative="")] = None,
    adam_eps: float | None = None,
    qk_clip: float | None = None,
    micro_batch: int | None = None,
    evaluate_every: int | None = None,
    checkpoint_seconds: float = 60.0,
    async_save: Flag = False,
    watch: Flag = False,
    watch_every: WatchEvery = None,
    layout: str | None = None,
    processes: str | None = None,
    dry: Flag = False,
    json: Json = False,
) -> None:
    """Train one model and leave a run folder: config, recipe, metrics, checkpoints, report.

    Parameters
    ----------
    model
        Model expression NAME[@SIZE][+CHANGE...], for example llama@10m+gqa:2; +recipe.FIELD=VALUE changes the recipe.
    out
        Run folder to write; --dry needs none.
    resume
        Continue from the latest checkpoint in --out; without a checkpoint, start from scratch.
    pretrained
        Start from the checkpoint named in MODEL, with its changes applied, for example RUN+gqa:1.
    epochs
        Training budget in passes over the training text, in place of --tokens, --steps, --minutes or --flops.
    schedule
        Learning-rate schedule after the warm-up: cosine, wsd, noam or constant.
    warmup
        Warm-up steps if 1 or more, else a share of the run.
    weight_decay
        Decoupled weight decay of matrices. The value is for adamw; other optimizers rescale it so that learning rate
        times decay stays the same.
    clip
        Gradient-norm clipping threshold.
    betas
        Decay rates of the optimizer's moving averages; by default 0.9 0.95 for adamw.
    adam_eps
        Epsilon of AdamW; by default 1e-8.
    qk_clip
        Largest attention logit, such as 100: W_q and W_k of heads that exceed it are scaled down after the step.
    micro_batch
        Sequences per forward pass; gradients accumulate up to --batch-size.
    evaluate_every
        Steps between evaluations on held-out text; by default two to eight evaluations in a run.
    checkpoint_seconds
        Seconds between checkpoints.
    async_save
        Write checkpoints in the background, from a copy in memory.
    watch
        Record statistics per layer and head in dynamics.jsonl, for the report and for the command 'glassformer why'.
    layout
        Parallel layout of the processes: fsdp=4, replicate=2, tp=2, or several of them; by default fsdp.
    processes
        Processes to start on this machine, or auto; leave it out under torchrun and srun.
    dry
        Show the plan of the run and write nothing: model, tokens, steps, schedule, memory, files. Without
        a budget, the plan is of one pass over the text.
    """
    check_context(run.context, data)
    with saved_before(out, resume):
        from glassformer.cli.ranks import begin_processes
        from glassformer.cli.running import say
        from glassformer.cli.show import show
        from glassformer.comparison.finished import finished
        from glassformer.comparison.single import PAGE, SingleRun
        from glassformer.parallel.launch import one_voice
        from glassformer.runs.events import silent
        from glassformer.runs.live import ComparisonView
        from glassformer.training import Interrupted
        from glassformer.training.recipe import BUDGETS

        plan: dict[str, Any] = {"kind": schedule, **({} if warmup is None else {"warmup": warmup})}
        given = (run.tokens, run.minutes, run.flops, run.steps, epochs)
        if dry and all(one is None for one in given) and not any(f"+recipe.{name}=" in model for name in BUDGETS):
            say("no length is given: the plan is of one pass over the text")
            epochs = 1.0
        adam = {name: value for name, value in (("betas", betas), ("eps", adam_eps)) if value is not None}
        fields = {
            **vars(run), "epochs": epochs, "optimizer": {"kind": run.optimizer, **adam}, "schedule": plan,
            "log_to": run.log_to or (), "weight_decay": weight_decay, "clip": clip, "qk_clip": qk_clip,
            "micro_batch": micro_batch, "evaluate_every": evaluate_every, "checkpoint_seconds": checkpoint_seconds,
            "async_save": async_save,
            "watch": watch_interval(watch, watch_every),
        }  # fmt: skip
        named = partial(
            SingleRun.of, model, of_field(data, field), out=out, resume=resume, layout=layout, command=command_line(),
            **fields,
        )  # fmt: skip
        if resume and not dry and processes is None and data != "-":
            waiting.end()
            with ComparisonView(quiet=json) as view:
                ended = finished(named, out, pretrained, view.progress)
            if ended is not None:
                show(ended, json)
                return
        asked = named(pretrained=pretrained)
        if dry:
            from glassformer.laboratory.planned_run import planned

            waiting.end()
            with ComparisonView(quiet=json) as view:
                asked.note_unused(view.event)
                plan_of = planned(asked, view.progress)
            show(plan_of, json)
            return
        if begin_processes(processes, asked, quiet=json):
            return
        leads = one_voice()
        waiting.end()
        try:
            with ComparisonView(quiet=json or not leads) as view:
                done = asked.train(silent if json else view.event)
        except Interrupted:
            if leads and not json and out is not None and (page := Path(out) / PAGE).is_file():
                print(f"report: {page}\nnext: {command_line()}{' --resume' * (not resume)}")
            raise
        if leads:
            show(done, json)


@contextmanager
def saved_before(out: str | None, resume: bool) -> Iterator[None]:
    """Adds a note to a KeyboardInterrupt inside the context: the last saved step and the command that resumes the
    run."""
    try:
        yield
    except KeyboardInterrupt as stop:
        step = 0
        with suppress(OSError, ValueError):
            step = int((Path(out or "") / "latest").read_text(encoding="utf-8").strip().removeprefix("step_"))
        kept = f"step {step:,} is saved in {out}" if step else "no step is saved yet"
        stop.add_note(f"{kept}; continue with: {command_line()}{' --resume' * (bool(step) and not resume)}")
        raise


def why(run: ToRead, /, *, json: Json = False) -> None:
    """Diagnose a failed run: the first statistic to deviate, the known failure that matches, and remedies.

    Parameters
    ----------
    run
        Run folder, or the folder of one run inside a comparison. The diagnosis is most precise for a run trained with
        --watch.
    """
    from glassformer.cli.show import show
    from glassformer.training.post_mortem import why

    show(why(run), json)
