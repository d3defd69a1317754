"""The command line: parses, calls the library, prints. Torch is imported only by the verb that computes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from glassformer.cli.options import Asking, Chatting, Flag, Writing
from glassformer.errors import NO_MEMORY, RequestError, WorkError, no_memory, printable
from glassformer.units import quantity
from glassformer.version import __version__

app = App(
    name="glassformer",
    help="Transformers under glass: compose any of them, train it, run it, look inside it, and know what it costs.",
    version=__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # main says that it has stopped
)

Expression = Annotated[str, Parameter(help="An expression: NAME[@SIZE][+CHANGE...].")]
Data = Annotated[
    str,
    Parameter(
        help="A text file, a folder, - for stdin, hf:owner/name, python-docs or python-source.",
        allow_leading_hyphen=True,
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on standard output.")]


def counts(type_: Any, tokens: Any) -> list[float]:
    """1e21, 5M, each a number."""
    return [quantity(token.value, field="count") for token in tokens]


def count(type_: Any, tokens: Any) -> float:
    """200k, 5M, 1.5B -> a number."""
    return quantity(tokens[0].value, field="count")


Count = Annotated[float, Parameter(converter=count)]
LearningRate = Annotated[float | None, Parameter(name=["--lr", "--learning-rate"])]
Optimizer = Annotated[
    str, Parameter(help="adamw, muon, lion, adafactor or sgd; +recipe.optimizer.FIELD=VALUE sets its fields.")
]
Objective = Annotated[
    str,
    Parameter(
        help="next_token, masked:P (encoders), seq2seq (pairs), span:DENSITY:MEAN, infill:P:MEAN, prefix, "
        "contrastive:TEMPERATURE; +recipe.objective.FIELD=VALUE sets its fields."
    ),
]
Steps = Annotated[int | None, Parameter(converter=count, help="Budget of a run in optimizer steps.")]
Minutes = Annotated[float | None, Parameter(help="Budget of a run in minutes of training.")]
Flops = Annotated[float | None, Parameter(converter=count, help="Budget of a run in training FLOPs.")]
TokenizerName = Annotated[str, Parameter(help="auto, byte, char, bpe:SIZE, or a tokenizer.json.")]
BatchSize = Annotated[int, Parameter(help="Sequences of one optimizer step.")]
Context = Annotated[
    int | None, Parameter(help="Tokens of one sequence; by default what the expression says (+context=N), or 256.")
]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, mps.")]
DType = Annotated[str, Parameter(help="auto, float32, bfloat16.")]
Threads = Annotated[
    int | None,
    Parameter(help="Threads of the processor; by default as many as it has cores, which give way to other processes."),
]
Workers = Annotated[
    int,
    Parameter(help="Runs to train side by side, each with its share of the cores; more than one for small runs alone."),
]
Benchmark = Literal[
    "train",
    "kernels",
    "load",
    "parity",
    "generate",
    "quality",
    "watch",
    "mixers",
    "neighbours",
    "plan",
    "embed",
    "retrieval",
    "masked",
    "translate",
    "checkpoint",
    "sums",
    "claims",
]
Compile = Annotated[
    bool | None,
    Parameter(help="Compile the layers; by default where there is a compiler and the run is long enough to pay."),
]


ExecutorName = Annotated[
    str,
    Parameter(
        help="here; or slurm, slurm:partition=NAME,time=MINUTES,gpus=1 and other options of sbatch: every run is a job "
        "of a cluster."
    ),
]
SlotNames = Annotated[
    str | None, Parameter(help="Train several runs at once on this machine, one on each device: cuda:0,cuda:1.")
]
WatchEvery = Annotated[int | None, Parameter(help="Steps between looks with --watch; by default 25.")]
LogTo = Annotated[
    list[str] | None,
    Parameter(
        help="Send the numbers to tensorboard, wandb or trackio as well; files in the run folder hold them anyway."
    ),
]
OnSpike = Annotated[
    Literal["go_on", "skip", "roll_back"],
    Parameter(help="A step whose loss or gradient spikes: take it, leave it out, or return to the last checkpoint."),
]


@app.command
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
    from json import dumps

    from glassformer.cli.show import ComparisonView
    from glassformer.comparison import compare as run
    from glassformer.laboratory.tuning import tune as run_tuned
    from glassformer.runs.power import PILOT
    from glassformer.runs.results import Results
    from glassformer.runs.slurm import executor_of
    from glassformer.units import share, whole_numbers

    if within is not None and not tune:
        message = "--within is for --tune, which is not given"
        raise RequestError(message, code="conflict", field="within", value=within, expected="--tune beside it")
    if tune and power is not None:
        message = "--power is for a comparison without --tune; tune first, then compare at the chosen rates"
        raise RequestError(message, code="conflict", field="power", value=power, expected="no --tune")
    if tune and pretrained:
        message = "--pretrained is for a comparison without --tune; give the rate in --lr"
        raise RequestError(message, code="conflict", field="pretrained", value=True, expected="no --tune")
    spread = None if power is None else share(power, "power")
    once = partial(run, power=spread, pretrained=pretrained)
    work, own = (partial(run_tuned, within=within), 3) if tune else (once, 1)
    seeds = own if seeds is None else seeds
    with ComparisonView(quiet=json) as view:
        written = work(
            models, data, tokens=_as_int(tokens, "tokens"), minutes=minutes, flops=flops, steps=_as_int(steps, "steps"),
            match=match,
            seeds=seeds, out=out,
            tokenizer=tokenizer, allow_unmatched=allow_unmatched, on_event=view.event, on_progress=view.progress,
            command=_command_line(), batch_size=batch_size, context=context, learning_rate=lr,
            optimizer=optimizer, objective=objective, device=device, dtype=dtype, threads=threads, compile=compile,
            watch=_interval(watch, watch_every), on_spike=on_spike, log_to=log_to or (),
            looks=[] if looks is None else whole_numbers(looks, "looks"),
            executor=executor_of(executor, slots, workers, device),
        )  # fmt: skip
    results = Results.of(written)
    place = Path(out) if power is None else Path(out) / PILOT
    if json:
        print(dumps(written))
    else:
        view.finish(results, str(place))
    if failed := [one for one in results.runs if one.status == "failed"]:
        first = failed[0]
        name = first.name if seeds == 1 else f"{first.name} seed {first.seed}"
        raise WorkError(
            f"{len(failed)} of {len(results.runs)} runs failed: {name}: {first.error}; "
            f"the report is at {place / 'report.html'}",
            code="failed",
        )  # fmt: skip


@app.command
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
        Go on from the latest checkpoint in --out; begin where there is none yet.
    pretrained
        Begin with the weights of the run or checkpoint that the expression names, changed as it says: RUN+gqa:1.
    seed
        Of the first weights and of the order of the text.
    lr
        Peak learning rate; by default a rule by size and optimizer.
    schedule
        cosine, wsd, noam or constant, after a warm-up.
    warmup
        Steps if 1 or more, else a share of the run.
    weight_decay
        AdamW's, on weights of matrices; other optimizers scale it with their learning rate.
    clip
        Largest gradient norm.
    betas
        Decay rates of the optimizer's moving averages; by default 0.9 0.95 for adamw.
    adam_eps
        Of AdamW's denominator; by default 1e-8.
    qk_clip
        Largest attention logit: W_q and W_k of heads that passed it shrink after the step (100, say).
    micro_batch
        Sequences at once; gradients accumulate to --batch-size.
    evaluate_every
        Steps between evaluations on held-out text.
    checkpoint_seconds
        Time between checkpoints.
    async_save
        Write checkpoints in the background, from a copy in memory, while training goes on.
    watch
        Look inside while it trains: statistics by layer and head in dynamics.jsonl, for the report and for `why`.
    layout
        How processes share the work: fsdp=4, replicate=2, tp=2, or several of them; by default fsdp.
    processes
        So many on this machine, or auto; torchrun and srun start their own.
    """
    from glassformer.cli.ranks import begin_processes, one_voice
    from glassformer.cli.show import TrainingView
    from glassformer.comparison.pretrained import trained_arm
    from glassformer.naming import own_value, preset, split_recipe
    from glassformer.report import write_run
    from glassformer.runs.answers import answers
    from glassformer.runs.measure import describe
    from glassformer.training import Recipe, Report, Reporter, prepare_run, run_request
    from glassformer.training.overrides import with_recipe
    from glassformer.training.sinks import check_sinks, open_sinks

    model, wishes = split_recipe(model)
    begins = trained_arm(model, tokenizer) if pretrained else None
    config = preset(model) if begins is None else begins[0]
    contexts = [c for c in (context, own_value(model, config, "context")) if c is not None]
    plan: dict[str, Any] = {"kind": schedule, **({} if warmup is None else {"warmup": warmup})}
    adam = {name: value for name, value in (("betas", betas), ("adam_eps", adam_eps)) if value is not None}
    recipe = Recipe.of(
        tokens=_as_int(tokens, "tokens"), minutes=minutes, flops=flops, steps=_as_int(steps, "steps"),
        seed=seed, learning_rate=lr, optimizer=optimizer, objective=objective,
        schedule=plan, weight_decay=weight_decay, clip=clip, **adam, qk_clip=qk_clip,
        batch_size=batch_size, micro_batch=micro_batch, **({"context": contexts[0]} if contexts else {}),
        evaluate_every=evaluate_every, checkpoint_seconds=checkpoint_seconds, async_save=async_save,
        device=device, dtype=dtype, threads=threads, compile=compile,
        watch=_interval(watch, watch_every), on_spike=on_spike,
    )  # fmt: skip
    recipe = with_recipe(recipe, wishes)
    for asked in contexts:
        if asked != recipe.context:
            raise RequestError(
                f"context={asked} and context={recipe.context} are both asked for; give one of them",
                code="conflict", field="context", value=asked,
            )  # fmt: skip
    check_sinks(log_to or ())
    vocab_size = own_value(model, config, "vocab_size") if begins is None else config.vocab_size
    known, weights = (tokenizer, None) if begins is None else begins[1:]
    asked = (config, data, recipe, out, resume, known, vocab_size)
    if begin_processes(processes, layout, *asked, weights, quiet=json):
        return
    leads = one_voice()
    with TrainingView(quiet=json or not leads) as view:
        request = prepare_run(*asked, view.progress, weights, layout)
        view.begin(model, request)
        sinks = log_to or () if leads else ()
        with open_sinks(sinks, Path(out), model, request.describe(), request.steps_done) as log:

            def tell(report: Report) -> None:
                log(report)
                view.step(report)

            done = run_request(request, [Reporter(tell)])
    if not leads:
        return
    if recipe.watch:
        write_run(describe(model, done, None).to_dict(), Path(out) / "dynamics.html")
    found = answers(done.model, request.text, recipe.objective, recipe.context) if done.status == "ok" else None
    if found is not None:
        (Path(out) / "answers.json").write_text(found.model_dump_json(indent=1), encoding="utf-8")
    view.finish(done, json, found)
    if done.status != "ok":
        raise WorkError(f"the run diverged: {done.error}", code="diverged")


@app.command
def generate(
    model: str,
    /,
    *,
    how: Annotated[Writing, Parameter(name="*")] = Writing(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Write on from a prompt with a trained model, or from several at once.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2; changes may follow (smollm2+window:256).
    """
    from glassformer.cli.generate import write

    with standard_input():
        write(model, how, json)


@app.command
def embed(
    model: str,
    /,
    *,
    text: Annotated[list[str] | None, Parameter(negative="")] = None,
    file: str | None = None,
    out: str | None = None,
    json: Json = False,
) -> None:
    """Turn texts into vectors, pooled and normalised as the model's folder says.

    Parameters
    ----------
    model
        An encoder with weights: minilm, a run, a Hugging Face or sentence-transformers folder, hf:owner/name.
    text
        Texts, each an option: --text "..." --text "...".
    file
        A text in each line, or in the field `text` of each line of a .jsonl file.
    out
        Where the vectors go: a .npy file (n, d) in fp32, or .jsonl lines; by default they are printed as lines.
    """
    from glassformer.cli.vectors import embed_texts

    embed_texts(model, text or [], file, out, json)


@app.command
def index(
    data: Data,
    /,
    *,
    out: str,
    encoder: str = "minilm",
    passage_tokens: Annotated[int | None, Parameter(converter=count)] = None,
    json: Json = False,
) -> None:
    """Cut texts into passages and embed them, for `ask`; the same command goes on where it was broken off.

    Parameters
    ----------
    out
        The folder of the index.
    encoder
        An encoder with weights: minilm, a run, a Hugging Face or sentence-transformers folder, hf:owner/name.
    passage_tokens
        Tokens of a passage, at most; by default as many as the encoder reads.
    """
    from glassformer.cli.retrieval import index_data

    index_data(data, out, encoder, _as_int(passage_tokens, "passage_tokens"), json)


@app.command
def ask(
    question: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    index: str,
    model: str = "smollm2",
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 4,
    encoder: str | None = None,
    how: Annotated[Asking, Parameter(name="*")] = Asking(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Answer a question from an index: the sources with their scores, then the answer as it is written.

    Parameters
    ----------
    index
        A folder that `glassformer index` made.
    model
        What answers: a Hugging Face folder, a run, a .gguf file, hf:owner/name, or smollm2.
    k
        Passages to retrieve.
    encoder
        Where the encoder of the index is now; by default what `glassformer index` was given.
    """
    from glassformer.cli.retrieval import answer

    answer(question, index, model, k, encoder, how, json)


@app.command
def chat(
    model: str,
    /,
    *,
    how: Annotated[Chatting, Parameter(name="*")] = Chatting(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Talk with a model that has a chat template.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, hf:owner/name, or smollm2.
    """
    from glassformer.cli.chat import converse

    with standard_input():
        converse(model, how, json)


@app.command
def convert(
    source: str,
    out: str,
    /,
    *,
    to: Literal["hf", "gguf"] | None = None,
    dtype: Literal["float32", "float16", "bfloat16", "q8_0"] | None = None,
    json: Json = False,
) -> None:
    """Turn one checkpoint into another: a folder that transformers loads, or a GGUF that llama.cpp runs.

    Parameters
    ----------
    source
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2; changes may follow.
    out
        The folder, or the .gguf file.
    to
        hf or gguf; by default gguf where OUT ends in .gguf.
    dtype
        Of the matrices; by default as they are (gguf: float16). q8_0 is for gguf.
    """
    from glassformer.cli.checkpoints import convert_checkpoint

    convert_checkpoint(source, out, to, dtype, json)


@app.command
def check(
    model: str,
    /,
    *,
    reference: str | None = None,
    text: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    largest: Count | None = None,
    json: Json = False,
) -> None:
    """Prove a model: cached equals uncached, saved equals loaded, and it equals the published implementation.

    Where it does not, every layer and site that differs by its own doing is named. Exit status 1 if something is wrong.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2; or an expression, with random weights.
    reference
        Another folder, run or .gguf file to compare with; by default the checkpoint itself, read by transformers.
    text
        What to read; by default random tokens of the seed.
    tolerance
        Largest difference, relative to the largest value; by default what arithmetic in fp32 leaves.
    largest
        Bytes of weights (500M, 10G) above which nothing is written to disk; by default a few gigabytes.
    """
    from glassformer.cli.checkpoints import show_check

    limits = {"tolerance": tolerance, "largest": _as_int(largest, "largest")}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    show_check(model, json, seed, reference=reference, text=text, **given)


@app.command
def inspect(
    model: Expression,
    /,
    *,
    text: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    reading: Annotated[list[str] | None, Parameter(negative="")] = None,
    against: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    ablate: Annotated[list[str] | None, Parameter(negative="")] = None,
    out: str | None = None,
    diff: str | None = None,
    doors: Flag = False,
    quality: Flag = False,
    coord_check: Flag = False,
    data: Data | None = None,
    tokens: Count | None = None,
    json: Json = False,
) -> None:
    """Show what a model is made of and what it costs; with --text, look inside while it reads.

    Parameters
    ----------
    text
        Read this (@FILE: a file's text, -: standard input) and show attention, predictions by depth and surprise, here
        and on a page that opens offline.
    source
        With --text, what the encoder of a model of two towers reads (@FILE or - as well), and what the text takes from
        it.
    reading
        With --text, one reading more, printed and drawn in the folder as NAME.png: attention_rollout, side_by_side,
        logit_attribution, head_ablation (of the last 256 tokens), activation_patching, head_scores, attention_sinks,
        massive_activations, token_similarity, position_picture, embedding_neighbours, expert_routing, or all. Give it
        several times.
    against
        For activation_patching: a text of as many tokens that ends otherwise, instead of its own task.
    ablate
        With --text, what is taken away from the model meanwhile: layers.2, layers.2.mixer, layers.2.ffn,
        layers.2.heads.1,3, neurons or experts alike. Give it several times.
    out
        Folder of the page (inspect.html) and the figures; by default `inspection`.
    diff
        Another expression: show where it differs.
    doors
        Which tools can load the model, and which part closes the others.
    quality
        What fewer bits cost a checkpoint: its perplexity on held-out text as it is, in bf16, 8 and 4 bits.
    coord_check
        Whether activations move as far in a wide model as in a narrow one, so that the learning rate holds (see +mup).
    data
        Text for --quality; by default python-docs.
    tokens
        Tokens of it to measure on; by default 20k.
    """
    asked = {"--text": text is not None, "--quality": quality, "--doors": doors, "--coord-check": coord_check,
             "--diff": diff is not None}  # fmt: skip
    if sum(asked.values()) > 1:
        raise RequestError(
            f"give one of {' and '.join(name for name, given in asked.items() if given)} at a time",
            code="conflict", field=next(name for name, given in asked.items() if given)[2:],
        )  # fmt: skip
    for option, given in (
        ("--source", source), ("--reading", reading), ("--against", against), ("--ablate", ablate)
    ):  # fmt: skip
        if given is not None and text is None:
            raise RequestError(f"{option} is for --text: give what is to be read", code="missing", field="text")
    if not quality and (data is not None or tokens is not None):
        raise RequestError("--data and --tokens are for --quality", code="conflict", field="quality")
    if out is not None and text is None and not coord_check:
        raise RequestError(
            "--out is for --text and --coord-check: nothing else is written", code="conflict", field="out", value=out
        )
    if out == "":
        raise RequestError(
            "--out is empty; give a folder, or leave it out for the usual one", code="missing", field="out", value=out
        )
    if text is not None:
        from glassformer.cli.look import show_inspection

        with standard_input():
            show_inspection(
                model, text, out, json, readings=reading or (), against=against, ablate=ablate or (), source=source
            )
        return
    if coord_check:
        from glassformer.cli.coords import show_coord_check

        show_coord_check(model, out, json)
        return
    from glassformer.naming import preset

    if quality:
        from glassformer.cli.checkpoints import show_quality

        show_quality(model, data, _as_int(tokens, "tokens"), json)
        return
    if doors:
        from glassformer.cli.checkpoints import show_doors

        show_doors(model, preset(model), json)
        return
    from glassformer.cli.show import show_config

    show_config(model, preset(model), diff, preset(diff) if diff else None, json)


@app.command
def why(run: str, /, *, json: Json = False) -> None:
    """Say what a run died of: what moved first, which known failure that is, and what to try.

    Parameters
    ----------
    run
        The folder of a run (best of one trained with --watch), or of a comparison's arm.
    """
    from glassformer.cli.why import show_why

    show_why(run, json)


@app.command
def plan(
    models: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    context: Annotated[Count | None, Parameter(converter=count)] = None,
    batch: int = 1,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None,
    machine: Annotated[str | None, Parameter(name=["--machine", "--gpu"])] = None,
    nodes: int = 1,
    machines: str | None = None,
    price: str | None = None,
    explain: Flag = False,
    generate: Flag = False,
    train: Flag = False,
    tokens: Annotated[Count | None, Parameter(converter=count)] = None,
    optimizer: Optimizer = "adamw",
    recompute: Literal["none", "selective", "alternate", "full"] = "none",
    layout: str | None = None,
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None,
    loss: Literal["chunked", "in_place", "fused", "whole"] = "chunked",
    find: Flag = False,
    finetune: str | None = None,
    here: Flag = False,
    again: Flag = False,
    out: str | None = None,
    json: Json = False,
) -> None:
    """What generating with these models takes: weights, decode state and FLOPs, exactly, before anything is built.

    Parameters
    ----------
    models
        Expressions: NAME[@SIZE][+CHANGE...].
    context
        Tokens of a sequence; by default all that the model is trained to read.
    batch
        Sequences at once.
    dtype
        Of products, and in generation of the weights.
    state_dtype
        What the state is kept in; by default as the weights.
    machine
        Accelerators, h100 or h100:8: how many sequences, and how long a context, fit; the time of a token, or with
        --train of a step, as an interval; and what it costs.
    nodes
        Of as many accelerators each as --machine says.
    machines
        A file of machines of your own, beside ours (planning/machines.yaml shows the fields).
    price
        Of an hour of one accelerator, 2.5USD; by default those of the machine's file.
    explain
        Show every figure with its formula: parameters by component, and what the FLOPs of training are spent on.
    generate
        Generation, as without --train.
    train
        A training step instead, of --batch sequences over all ranks: memory of one rank, and on a --machine its time.
    tokens
        With --train or --find on a --machine, those to train on, 15T: days, energy, and cost.
    recompute
        With --train, what the backward pass computes again.
    layout
        With --train, how ranks share the work: dp=8,tp=2,zero=3,micro=1,recompute=full.
    weights
        What weights are kept in, by default as --dtype says: packed in int8 or int4, products in --dtype. With --train
        float32, or bfloat16 with masters in float32 beside them.
    loss
        With --train, what the loss holds of logits: ours a chunk; in_place and fused those of all tokens once and
        twice in --dtype; whole as eager torch does, three times in float32 besides.
    find
        Search the layouts of a --machine, h100:8, that a training step fits, the fastest first; --tokens, --explain
        and --out are of the fastest.
    finetune
        A training step of adapters on every linear map, lora:16, all else frozen.
    here
        Measure this processor once, and plan a training step and a token of decoding on it.
    again
        With --here, measure anew.
    out
        A page to write: where parameters, memory and time go, every figure with its formula.
    """
    from glassformer.cli.costs import show_plan

    modes = {"generate": generate, "train": train or finetune is not None, "find": find, "here": here}
    flags = {
        "context": _as_int(context, "context"), "batch": batch, "dtype": dtype, "state_dtype": state_dtype,
        "machine": machine, "nodes": nodes, "machines": machines, "price": price, "explain": explain, "tokens": tokens,
        "optimizer": optimizer, "recompute": recompute, "layout": layout, "weights": weights, "loss": loss,
        "finetune": finetune, "again": again, "out": out,
    }  # fmt: skip
    show_plan(models, [mode for mode, asked in modes.items() if asked], flags, json)


@app.command
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
    from glassformer.cli.ladder import show_ladder
    from glassformer.runs.slurm import executor_of

    fields = {
        "to": to, "changes": changes, "design": design, "tokens": _as_int(tokens, "tokens"), "minutes": minutes,
        "seeds": seeds, "tune": tune, "within": within, "out": out, "tokenizer": tokenizer, "batch_size": batch_size,
        "context": context, "learning_rate": lr, "optimizer": optimizer, "device": device, "dtype": dtype,
        "threads": threads, "compile": compile, "allow_unmatched": allow_unmatched,
        "executor": executor_of(executor, slots, workers, device),
    }  # fmt: skip
    show_ladder(base, data, fields, _command_line(), json)


@app.command
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
        from glassformer.cli.scale import show_law

        show_law(data, form, columns, where, without_worst, predict, flops, far, out, _command_line(), json)
        return
    if columns or where or without_worst:
        raise RequestError(
            "--columns, --where and --without-worst are for a table of runs; leave the models out",
            code="conflict", field="columns" if columns else "where" if where else "without_worst",
        )  # fmt: skip
    if sizes is None:
        raise RequestError("give the sizes of the models: --sizes 0.3m,1m..10m", code="missing", field="sizes")
    from glassformer.cli.scale import train_laws
    from glassformer.runs.slurm import executor_of

    train_laws(
        models, data, sizes, budgets, isoflop, predict, out or "scaling", json, form=form, seeds=seeds, hours=hours,
        flops=flops or (), far=far, tokenizer=tokenizer, command=_command_line(), batch_size=batch_size,
        context=context, learning_rate=lr, optimizer=optimizer, device=device, dtype=dtype, threads=threads,
        compile=compile, executor=executor_of(executor, slots, workers, device),
    )  # fmt: skip


@app.command
def run(experiment: str, /, *, seeds: int | None = None) -> None:
    """Run an experiment that a file describes: glassformer run recipes/gpt2-to-llama.yaml

    Parameters
    ----------
    experiment
        A .yaml file with a sentence `about` it and `steps`, each a `verb` (train, compare, ablate, scale) with its
        options as the command line has them. All are checked before the first begins. The same command goes on where
        it stopped.
    seeds
        In the place of those in the file: more are added to those that are there.
    """
    from glassformer.cli.recipes import run_experiment

    run_experiment(app, experiment, seeds, lambda words: print(words, file=sys.stderr))


@app.command
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
    from glassformer.cli.advise import show_advice

    tokens = _as_int(context, "context")
    assert tokens is not None
    show_advice(goal, tokens, quantity(memory, "B", "memory"), claims, model, json)


@app.command
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
    from glassformer.cli.claims import show_claims

    show_claims(names or [], all, quick, out, data, seeds, again, _command_line(), json)


@app.command
def presets(*, json: Json = False) -> None:
    """List the published models, the sizes, and the changes."""
    from glassformer.cli.show import show_presets

    show_presets(json)


@app.command
def schema(*, json: Json = False) -> None:
    """Print the JSON Schema of the config files, which is JSON with --json and without."""
    from json import dumps

    from glassformer.config import ModelConfig

    print(dumps(ModelConfig.json_schema(), indent=2))


@app.command
def bench(
    what: Benchmark = "train",
    /,
    *,
    rounds: int = 5,
    threads: Threads = None,
    quick: Flag = False,
    only: str | None = None,
    out: str | None = None,
    json: Json = False,
) -> None:
    """Measure this machine: us and the peers side by side in one process, medians and ratios.

    Parameters
    ----------
    what
        train: a training step of llama@10m and gpt2@10m against Hugging Face transformers; kernels: the attention
        kernels against each other; load: from a file to a ready model, beside transformers and safetensors; parity:
        every family against its published implementation; generate: SmolLM2 writing, beside transformers and
        llama.cpp; quality: SmolLM2's perplexity in fewer bits, over 4,000 tokens for each round; watch: what --watch
        costs a training step; mixers: every way to mix tokens against the length of the text; neighbours: decoding,
        prompts, training and loading beside busy processes; plan: what `plan --here` says beside sampled models; embed:
        vectors of 10,000 sentences beside sentence-transformers; retrieval: how often an index finds what belongs to a
        question, beside BM25; masked: a training step
        of bert@10m beside transformers' BERT; translate: a translator of Marian's shape beside theirs;
        checkpoint: saving and loading 1 GB beside torch.distributed.checkpoint; sums: gradients added up in a fixed
        order over processes, beside the engine's own sums; claims: what guides say of speed, with a verdict.
    rounds
        Measurements of each, taken in turn.
    quick
        generate, mixers, embed, retrieval, checkpoint, sums: with few tokens and nothing compiled, to see that it runs.
    only
        mixers, neighbours, claims: these rows or tasks alone, by the beginnings of their names and with commas between;
        of the first two the others stay as `--out` has them.
    out
        A Markdown file to write the table to, with machine and date.
    """
    from glassformer.cli.show import show_bench

    show_bench(what, rounds, threads, quick, only, out, json)


def _interval(watch: bool, every: int | None) -> int | None:
    """Steps between looks, None for a run that is not watched."""
    if every is None and not watch:
        return None
    from glassformer.training.recipe import WATCH

    if every is not None and every < 1:
        raise RequestError(
            f"watch_every={every} must be at least 1: it is the number of steps between looks",
            code="range", field="watch_every", value=every,
        )  # fmt: skip
    return every or WATCH


def _as_int(value: float | None, field: str) -> int | None:
    """A count as an int. Raises RequestError for a part of one."""
    if value is not None and value != int(value):
        raise RequestError(code="type", field=field, value=value, expected="a whole number")
    return None if value is None else int(value)


@contextmanager
def standard_input() -> Iterator[None]:
    """Around what reads it as text. Raises RequestError where it is none."""
    try:
        yield
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise RequestError(
            f"standard input holds the byte {byte:#04x}; {problem.encoding} text is right",
            code="damaged", field="stdin",
        ) from None  # fmt: skip


def _command_line() -> str:
    import shlex

    return shlex.join(["glassformer", *sys.argv[1:]])


MOST_WORDS = 1000
"""On a command line: beyond them its parser takes minutes."""


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Inside, a warning of ours is printed as errors are, without the line of code that gave it."""
    usual, here = warnings.formatwarning, str(Path(__file__).parents[1])

    def plain(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        ours = filename.startswith(here)
        return f"glassformer: {message}\n" if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _refuse_ranks(arguments: list[str]) -> None:
    """`refuse_ranks` for a command, where it may be one of several processes."""
    several = {"RANK", "WORLD_SIZE"} <= os.environ.keys() or "SLURM_PROCID" in os.environ
    if several and arguments and not arguments[0].startswith("-"):
        from glassformer.cli.ranks import refuse_ranks

        refuse_ranks(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done; 1 the work failed, or a run was stopped and saved; 2 the request was wrong; 130 Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    trace = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        if len(arguments) > MOST_WORDS:
            raise RequestError(
                f"the command has {len(arguments):,} words; give at most {MOST_WORDS:,}",
                code="range", field="arguments", value=len(arguments),
            )  # fmt: skip
        with warnings_in_one_line():
            _refuse_ranks(arguments)
            app(arguments, exit_on_error=False, print_error=False)
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:  # `glassformer ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:
        stands = "; the step that was saved before stands" if "--resume" in arguments else ""
        print(f"stopped{stands}", file=sys.stderr)
        status = 128 + signal.SIGINT
    except (RequestError, WorkError, CycloptsError) as error:
        if trace:
            traceback.print_exc()
        else:
            print(f"glassformer: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        status = getattr(error, "exit_status", 2)
    except (OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, OSError) and not no_memory(error):
            raise  # a defect of ours: its traceback is what helps
        if trace:
            traceback.print_exc()
        else:
            reason = str(error) if isinstance(error, OSError) else NO_MEMORY
            print(f"glassformer: {' '.join(reason.split())}", file=sys.stderr)
        status = 1
    return status
