"""The command line: parses, calls the library, prints. Torch is imported only by the verb that computes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

import glassformer
from glassformer.errors import RequestError, WorkError

app = App(
    name="glassformer",
    help="Transformers under glass: compose any of them, train it, run it, look inside it, and know what it costs.",
    version=glassformer.__version__,
    help_format="markdown",
)

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on standard output.")]


def count(type_: Any, tokens: Any) -> float:
    """200k, 5M, 1.5B -> a number."""
    text = tokens[0].value.replace("_", "").replace(",", "")
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)([kKmMbBgGtT]?)", text)
    if not found:
        raise ValueError(f"{tokens[0].value!r} is not a count; write 200000, 200k, 5M or 1.5B")
    power = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[found[2].lower()]
    return float(found[1]) * 10**power


Count = Annotated[float, Parameter(converter=count)]


@app.command
def compare(
    models: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    data: str,
    tokens: Count | None = None,
    minutes: float | None = None,
    flops: Count | None = None,
    match: Literal["tokens", "flops", "minutes"] | None = None,
    seeds: int = 1,
    out: str = "comparison",
    tokenizer: str = "auto",
    batch_size: int = 16,
    context: int = 256,
    lr: float | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    compile: bool | None = None,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> None:
    """Train several models side by side under one budget and write a report.

    Parameters
    ----------
    models
        Expressions: NAME[@SIZE][+CHANGE...], such as gpt2@10m llama@10m gpt2@10m+rope+rmsnorm+swiglu
    data
        A text file, a folder, - for stdin, hf:owner/name, python-docs or python-source.
    tokens
        Budget of each run in tokens (200k, 5M).
    minutes
        Budget of each run in minutes of training.
    flops
        Budget of each run in training FLOPs.
    match
        What is equal between the runs; with --tokens N --match flops the first model takes N tokens and the others
        as many FLOPs.
    seeds
        Runs of each model, with the same text in the same order for all models of a seed.
    out
        Folder of the comparison. The same command goes on where it stopped.
    tokenizer
        auto, byte, char, bpe:SIZE, or a tokenizer.json.
    lr
        Peak learning rate of every run; by default a rule by size.
    device
        auto, cpu, cuda, mps.
    dtype
        auto, float32, bfloat16.
    compile
        Compile the layers; by default where there is a compiler and the run is long enough to pay.
    allow_unmatched
        Compare models of different size all the same.
    """
    from glassformer.cli.show import ComparisonView
    from glassformer.compare import compare as run

    with ComparisonView(quiet=json) as view:
        results = run(
            models, data, tokens=_whole(tokens), minutes=minutes, flops=flops, match=match, seeds=seeds, out=out,
            tokenizer=tokenizer, allow_unmatched=allow_unmatched, on_event=view.event, on_progress=view.progress,
            command=_command_line(), batch_size=batch_size, context=context, learning_rate=lr, device=device,
            dtype=dtype, threads=threads, compile=compile,
        )  # fmt: skip
    view.finish(results, out, json)


@app.command
def train(
    model: str,
    /,
    *,
    data: str,
    out: str,
    tokens: Count | None = None,
    minutes: float | None = None,
    flops: Count | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    lr: float | None = None,
    schedule: str = "cosine",
    warmup: float | None = None,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    tokenizer: str = "auto",
    batch_size: int = 16,
    micro_batch: int | None = None,
    context: int = 256,
    evaluate_every: int | None = None,
    checkpoint_seconds: float = 60.0,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    compile: bool | None = None,
    json: Json = False,
) -> None:
    """Train one model and leave a run folder: config, recipe, metrics, checkpoints.

    Parameters
    ----------
    model
        An expression: NAME[@SIZE][+CHANGE...].
    data
        A text file, a folder, - for stdin, hf:owner/name, python-docs or python-source.
    out
        The run folder.
    tokens
        Length of the run in tokens (200k, 5M); or give --minutes or --flops.
    resume
        Go on from the latest checkpoint in --out, bit for bit.
    lr
        Peak learning rate; by default a rule by size.
    schedule
        cosine, wsd, noam or constant, after a warm-up.
    warmup
        Steps if 1 or more, else a share of the run.
    micro_batch
        Sequences at once; gradients accumulate to --batch-size.
    evaluate_every
        Steps between evaluations on held-out text.
    checkpoint_seconds
        Time between checkpoints.
    """
    from glassformer.cli.show import TrainingView
    from glassformer.expression import preset
    from glassformer.text import prepare
    from glassformer.train import Recipe
    from glassformer.train import train as run

    plan: dict[str, Any] = {"kind": schedule} if warmup is None else {"kind": schedule, "warmup": warmup}
    recipe = Recipe.of(
        tokens=_whole(tokens), minutes=minutes, flops=flops, seed=seed, learning_rate=lr, schedule=plan,
        weight_decay=weight_decay, clip=clip, batch_size=batch_size, micro_batch=micro_batch, context=context,
        evaluate_every=evaluate_every, checkpoint_seconds=checkpoint_seconds, device=device, dtype=dtype,
        threads=threads, compile=compile,
    )  # fmt: skip
    config = preset(model)
    with TrainingView(quiet=json) as view:
        text = prepare(data, tokenizer, context, progress=view.progress)
        view.begin(model, config, recipe, text)
        done = run(config, text, recipe, out, resume, callback=view.step)
    view.finish(done, json)
    if done.status != "ok":
        raise WorkError(f"the run diverged: {done.error}")


@app.command
def generate(
    model: str,
    /,
    *,
    prompt: str = "-",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int | None = None,
    json: Json = False,
) -> None:
    """Write on from a prompt with a trained model.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2; changes may follow (smollm2+window:256).
    prompt
        The text to go on from; - reads standard input.
    temperature
        0 takes the most likely token.
    """
    from glassformer.cli.show import stream_text
    from glassformer.expression import load

    text = sys.stdin.read() if prompt == "-" else prompt
    stream_text(load(model), text, max_new_tokens, temperature, top_k, seed, json)


@app.command
def chat(
    model: str,
    /,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_k: int | None = 40,
    seed: int | None = None,
    json: Json = False,
) -> None:
    """Talk with a model that has a chat template.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, hf:owner/name, or smollm2.
    system
        What the model is told before the conversation.
    temperature
        0 takes the most likely token.
    """
    from glassformer.cli.chat import converse
    from glassformer.expression import load

    converse(load(model), system, max_new_tokens, temperature, top_k, seed, json)


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
    tolerance: float = 1e-5,
    largest: Count = 4e9,
    json: Json = False,
) -> None:
    """Prove a model: cached equals uncached, saved equals loaded, and it equals the published implementation.

    Where it does not, every layer and site that differs by its own doing is named. Exit status 1 if something is wrong.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2; or an expression, with random weights.
    reference
        Another folder or .gguf file to compare with; by default the checkpoint itself, read by transformers.
    text
        What to read; by default random tokens of the seed.
    tolerance
        Largest difference, relative to the largest value.
    largest
        Bytes of weights above which nothing is written to disk.
    """
    from glassformer.cli.checkpoints import show_check

    show_check(model, reference, text, seed, tolerance, int(largest), json)


@app.command
def inspect(
    model: str,
    /,
    *,
    diff: str | None = None,
    doors: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> None:
    """Show what a model is made of and what it costs; --diff: where another differs; --doors: what can load it.

    Parameters
    ----------
    model
        An expression: NAME[@SIZE][+CHANGE...].
    diff
        Another expression.
    doors
        Which tools can load the model, and which part closes the others.
    """
    from glassformer.expression import preset

    if doors:
        from glassformer.cli.checkpoints import show_doors

        show_doors(model, preset(model), json)
        return
    from glassformer.cli.show import show_config

    show_config(model, preset(model), diff, preset(diff) if diff else None, json)


@app.command
def presets(*, json: Json = False) -> None:
    """List the published models, the sizes, and the changes."""
    from glassformer.cli.show import show_presets

    show_presets(json)


@app.command
def schema() -> None:
    """Print the JSON Schema of the config files."""
    import json

    from glassformer.config import ModelConfig

    print(json.dumps(ModelConfig.json_schema(), indent=2))


@app.command
def bench(
    what: Literal["train", "kernels", "load", "parity"] = "train",
    /,
    *,
    rounds: int = 5,
    threads: int | None = None,
    out: str | None = None,
    json: Json = False,
) -> None:
    """Measure this machine: us and the peers side by side in one process, medians and ratios.

    Parameters
    ----------
    what
        train: a training step of llama@10m and gpt2@10m against Hugging Face transformers; kernels: the attention
        kernels against each other; load: from a file to a ready model, beside transformers and safetensors; parity:
        every family against its published implementation.
    rounds
        Measurements of each, taken in turn.
    out
        A Markdown file to write the table to, with machine and date.
    """
    from glassformer.cli.show import show_bench

    show_bench(what, rounds, threads, out, json)


def _whole(value: float | None) -> int | None:
    if value is None:
        return None
    if not value < 1 << 63:
        raise RequestError(f"{value} is more tokens than anybody has")
    return int(value)


def _command_line() -> str:
    import shlex

    return shlex.join(["glassformer", *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the work failed, 2 the request was wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    trace = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        app(arguments, exit_on_error=False, print_error=False)
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:  # `glassformer ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:
        print("\nglassformer: stopped", file=sys.stderr)
        status = 1
    except (RequestError, WorkError, CycloptsError) as error:
        if trace:
            traceback.print_exc()
        else:
            print(f"glassformer: {' '.join(str(error).split())}", file=sys.stderr)
        status = getattr(error, "exit_status", 2)
    except UnicodeDecodeError:
        print("glassformer: standard input is not UTF-8 text", file=sys.stderr)
        status = 2
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # a defect of ours: its traceback is what helps
        if trace:
            traceback.print_exc()
        else:
            reason = str(error) if isinstance(error, OSError) else "this needs more memory than the machine has"
            print(f"glassformer: {' '.join(reason.split())}", file=sys.stderr)
        status = 1
    return status


def entry() -> None:
    sys.exit(main())
