"""Verbs that train: compare, train; and why, which says what a run died of.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    Flops,
    Json,
    LearningRate,
    LogTo,
    Minutes,
    Objective,
    OnSpike,
    Optimizer,
    SlotNames,
    Steps,
    Threads,
    TokenizerName,
    WatchEvery,
    Workers,
    command_line,
    watch_interval,
    whole,
)


def compare(
    models: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    data: Data,
    tokens: Count | None = None,
    minutes: Minutes = None,
    flops: Flops = None,
    steps: Steps = None,
    match: Literal["tokens", "flops", "minutes"] | None = None,
    seeds: int | None = None,
    out: str = "comparison",
    tokenizer: TokenizerName = "auto",
    batch_size: BatchSize = 16,
    context: Context = None,
    lr: LearningRate = None,
    tune: Flag = False,
    within: float | None = None,
    optimizer: Optimizer = "adamw",
    objective: Objective = "next_token",
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    workers: Workers = 1,
    slots: SlotNames = None,
    executor: ExecutorName = "here",
    compile: Compile = None,
    allow_unmatched: Flag = False,
    pretrained: Flag = False,
    watch: Flag = False,
    watch_every: WatchEvery = None,
    on_spike: OnSpike = "go_on",
    log_to: LogTo = None,
    power: str | None = None,
    looks: str | None = None,
    json: Json = False,
) -> None:
    """Train several models side by side under one budget and write a report.

    Parameters
    ----------
    models
        Expressions: NAME[@SIZE][+CHANGE...], such as gpt2@10m llama@10m gpt2@10m+rope+rmsnorm+swiglu;
        +recipe.FIELD=VALUE changes how one of them is trained.
    tokens
        Budget of each run in tokens (200k, 5M); or give --minutes, --flops or --steps.
    match
        What is equal between the runs; with --tokens N --match flops the first model takes N tokens and the others
        as many FLOPs.
    seeds
        Runs of each model, with the same text in the same order for all models of a seed; by default 1, with --tune 3.
    out
        Folder of the comparison. The same command goes on where it stopped; more models or seeds are added.
    lr
        Peak learning rate of every run; by default a rule by size and optimizer.
    tune
        Choose the learning rate of each model first, on two seeds of its own at each of three or more rates, the same
        for all; the verdict is then of fresh seeds, beside the one at the usual rates.
    within
        With --tune, minutes that it may take: refused where it would take longer.
    allow_unmatched
        Compare models of different size all the same. With --minutes they are: size costs steps there.
    pretrained
        Begin with the weights of the runs or checkpoints that the expressions name, changed as they say: RUN RUN+gqa:2.
    watch
        Look inside while it trains: statistics by layer and head in dynamics.jsonl, for the report and for `why`.
    power
        Instead of a verdict, say how many seeds and hours it takes to show a difference of this size, such as 1%, from
        a pilot of three seeds (or --seeds) in OUT/pilot; its seeds are none of the comparison's.
    looks
        Numbers of seeds at which you will look at the verdicts, such as 3,5,8: they stay honest for all of these.
    """
    from glassformer.cli.show import compare_and_show
    from glassformer.comparison import Design
    from glassformer.runs.slurm import executor_of
    from glassformer.units import share, whole_numbers

    design = Design.of(
        models, data, tokens=whole(tokens, "tokens"), minutes=minutes, flops=flops, steps=whole(steps, "steps"),
        match=match, seeds=seeds, tune=tune, within=within, power=None if power is None else share(power, "power"),
        looks=[] if looks is None else whole_numbers(looks, "looks"), tokenizer=tokenizer,
        allow_unmatched=allow_unmatched, pretrained=pretrained, log_to=log_to, batch_size=batch_size, context=context,
        learning_rate=lr, optimizer=optimizer, objective=objective, device=device, dtype=dtype, threads=threads,
        compile=compile, watch=watch_interval(watch, watch_every), on_spike=on_spike,
    )  # fmt: skip
    compare_and_show(design, out, command_line(), executor_of(executor, slots, workers, device), json)


def train(
    model: Expression,
    /,
    *,
    data: Data,
    out: str,
    tokens: Count | None = None,
    minutes: Minutes = None,
    flops: Flops = None,
    steps: Steps = None,
    resume: Flag = False,
    pretrained: Flag = False,
    seed: int = 0,
    lr: LearningRate = None,
    optimizer: Optimizer = "adamw",
    objective: Objective = "next_token",
    schedule: str = "cosine",
    warmup: float | None = None,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    betas: tuple[float, float] | None = None,
    adam_eps: float | None = None,
    qk_clip: float | None = None,
    tokenizer: TokenizerName = "auto",
    batch_size: BatchSize = 16,
    micro_batch: int | None = None,
    context: Context = None,
    evaluate_every: int | None = None,
    checkpoint_seconds: float = 60.0,
    async_save: Flag = False,
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    compile: Compile = None,
    watch: Flag = False,
    watch_every: WatchEvery = None,
    on_spike: OnSpike = "go_on",
    layout: str | None = None,
    processes: str | None = None,
    log_to: LogTo = None,
    json: Json = False,
) -> None:
    """Train one model and leave a run folder: config, recipe, metrics, checkpoints.

    Parameters
    ----------
    model
        An expression: NAME[@SIZE][+CHANGE...]; +recipe.FIELD=VALUE changes the recipe.
    out
        The run folder.
    tokens
        Length of the run in tokens (200k, 5M); or give --minutes, --flops or --steps.
    resume
        Continue from the latest checkpoint in --out; without a checkpoint, start from scratch.
    pretrained
        Start from the weights of the run or checkpoint in the expression, after its changes: RUN+gqa:1.
    seed
        Seed for weight initialisation and data order.
    lr
        Peak learning rate; by default a rule by size and optimizer.
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
        Look inside while it trains: statistics by layer and head in dynamics.jsonl, for the report and for `why`.
    layout
        How processes share the work: fsdp=4, replicate=2, tp=2, or several of them; by default fsdp.
    processes
        Processes to start on this machine, or auto; leave it out under torchrun and srun.
    """
    from glassformer.cli.ranks import begin_processes
    from glassformer.cli.show import train_and_show
    from glassformer.comparison.single import SingleRun

    plan: dict[str, Any] = {"kind": schedule, **({} if warmup is None else {"warmup": warmup})}
    adam = {name: value for name, value in (("betas", betas), ("eps", adam_eps)) if value is not None}
    asked = SingleRun.of(
        model, data, out=out, resume=resume, pretrained=pretrained, tokenizer=tokenizer, layout=layout,
        log_to=log_to or (),
        tokens=whole(tokens, "tokens"), minutes=minutes, flops=flops, steps=whole(steps, "steps"),
        seed=seed, learning_rate=lr, optimizer={"kind": optimizer, **adam}, objective=objective,
        schedule=plan, weight_decay=weight_decay, clip=clip, qk_clip=qk_clip,
        batch_size=batch_size, micro_batch=micro_batch, context=context,
        evaluate_every=evaluate_every, checkpoint_seconds=checkpoint_seconds, async_save=async_save,
        device=device, dtype=dtype, threads=threads, compile=compile,
        watch=watch_interval(watch, watch_every), on_spike=on_spike,
    )  # fmt: skip
    if not begin_processes(processes, asked, quiet=json):
        train_and_show(asked, json)


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
