"""Verbs that train: compare, train; and why, which says what a run died of.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    HERE,
    RAN,
    Data,
    Executed,
    Expression,
    Flag,
    Json,
    Ran,
    WatchEvery,
    command_line,
    watch_interval,
)


def compare(
    models: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    data: Data,
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
        Expressions: NAME[@SIZE][+CHANGE...], such as gpt2@10m llama@10m gpt2@10m+rope+rmsnorm+swiglu;
        +recipe.FIELD=VALUE changes the recipe of one model.
    match
        Quantity that is equal between models; with --tokens N --match flops the first model takes N tokens and the
        others its FLOPs.
    seeds
        Runs of each model; all models of a seed read the same text in the same order. By default 1, with --tune 3.
    out
        Folder of the comparison. The same command continues it; more models or seeds are added.
    tune
        First choose the learning rate of each model, on two other seeds at three or more rates. Verdicts are measured
        on fresh seeds and shown next to those at the usual rates.
    within
        With --tune: refuse a comparison that would take more minutes.
    allow_unmatched
        Allow models of different size (implied by --minutes).
    pretrained
        Start from the weights of the runs or checkpoints that the expressions name, changed as they say: RUN RUN+gqa:2.
    watch
        Record statistics by layer and head in dynamics.jsonl, for the report and for `why`.
    power
        Estimate the seeds and hours needed to detect this difference (1%), from a pilot of three seeds (or --seeds) in
        OUT/pilot. Pilot seeds are not reused.
    looks
        Planned looks at the verdicts, as numbers of seeds: 3,5,8. Intervals are corrected for all of them.
    """
    from glassformer import comparison
    from glassformer.cli.show import show
    from glassformer.runs.live import ComparisonView
    from glassformer.units import share, whole_numbers

    with ComparisonView(quiet=json) as view:
        found = comparison.compare(
            models, data, match=match, seeds=seeds, out=out, tune=tune, within=within,
            allow_unmatched=allow_unmatched, pretrained=pretrained, watch=watch_interval(watch, watch_every),
            power=None if power is None else share(power, "power"),
            looks=None if looks is None else whole_numbers(looks, "looks"), **vars(run),
            executor=trains.made(run.device), progress=view.event, command=command_line(),
        )  # fmt: skip
    show(found if json else found.without_notes(view.noted), json)


def train(
    model: Expression,
    /,
    *,
    data: Data,
    out: str,
    resume: Flag = False,
    pretrained: Flag = False,
    seed: int = 0,
    run: Ran = RAN,
    schedule: str = "cosine",
    warmup: float | None = None,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    betas: tuple[float, float] | None = None,
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
    json: Json = False,
) -> None:
    """Train one model and leave a run folder: config, recipe, metrics, checkpoints.

    Parameters
    ----------
    model
        An expression: NAME[@SIZE][+CHANGE...]; +recipe.FIELD=VALUE changes the recipe.
    out
        The run folder.
    resume
        Continue from the latest checkpoint in --out; without a checkpoint, start from scratch.
    pretrained
        Start from the weights of the run or checkpoint in the expression, after its changes: RUN+gqa:1.
    seed
        Seed for weight initialisation and data order.
    schedule
        cosine, wsd, noam or constant, after a warm-up.
    warmup
        Warm-up steps if 1 or more, else a share of the run.
    weight_decay
        Weight decay of AdamW, on matrices only; other optimizers scale it with their learning rate.
    clip
        Largest gradient norm.
    betas
        Decay rates of the optimizer's moving averages; by default 0.9 0.95 for adamw.
    adam_eps
        Epsilon of AdamW; by default 1e-8.
    qk_clip
        Largest attention logit, such as 100: W_q and W_k of heads that exceed it are scaled down after the step.
    micro_batch
        Sequences per forward pass; gradients accumulate up to --batch-size.
    evaluate_every
        Steps between evaluations on held-out text.
    checkpoint_seconds
        Seconds between checkpoints.
    async_save
        Write checkpoints in the background, from a copy in memory.
    watch
        Record statistics by layer and head in dynamics.jsonl, for the report and for `why`.
    layout
        How processes share the work: fsdp=4, replicate=2, tp=2, or several of them; by default fsdp.
    processes
        Processes to start on this machine, or auto; leave it out under torchrun and srun.
    """
    from glassformer.cli.ranks import begin_processes
    from glassformer.cli.show import show
    from glassformer.comparison.single import SingleRun
    from glassformer.parallel.launch import one_voice
    from glassformer.runs.live import ComparisonView

    plan: dict[str, Any] = {"kind": schedule, **({} if warmup is None else {"warmup": warmup})}
    adam = {name: value for name, value in (("betas", betas), ("eps", adam_eps)) if value is not None}
    fields = {
        **vars(run), "optimizer": {"kind": run.optimizer, **adam}, "schedule": plan, "log_to": run.log_to or (),
        "weight_decay": weight_decay, "clip": clip, "qk_clip": qk_clip, "micro_batch": micro_batch, "seed": seed,
        "evaluate_every": evaluate_every, "checkpoint_seconds": checkpoint_seconds, "async_save": async_save,
        "watch": watch_interval(watch, watch_every),
    }  # fmt: skip
    asked = SingleRun.of(model, data, out=out, resume=resume, pretrained=pretrained, layout=layout, **fields)
    if begin_processes(processes, asked, quiet=json):
        return
    leads = one_voice()
    with ComparisonView(quiet=json or not leads) as view:
        done = asked.train(view.event)
    if leads:
        show(done, json)


def why(run: str, /, *, json: Json = False) -> None:
    """Say what a run died of: what moved first, which known failure that is, and what to try.

    Parameters
    ----------
    run
        The folder of a run (best of one trained with --watch), or of a comparison's arm.
    """
    from glassformer.cli.show import show
    from glassformer.training.post_mortem import why

    show(why(run), json)
