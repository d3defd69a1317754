"""Options that several verbs take, and how they are read. Torch is not imported here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer.errors import RequestError
from glassformer.options import DecodingOptions, GenerationOptions
from glassformer.units import quantity

LONGEST_TEXT = 1_000_000
"""Characters of a file or of standard input that are read."""

Flag = Annotated[bool, Parameter(negative="")]
Texts = Annotated[list[str] | None, Parameter(negative="", allow_leading_hyphen=True)]

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


@dataclass(frozen=True, kw_only=True)
class TextOptions(GenerationOptions):
    """Options of verbs that generate text: `GenerationOptions`, and how the model is loaded and run."""

    temperature: float = 0.8
    top_k: int | None = None
    """Top-k sampling: the K most likely tokens; 40 without another cut-off."""
    logit_bias: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()  # type: ignore[assignment]
    """ID=VALUE: amount added to the logit of a token; repeatable."""
    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, show_default=False)] = ()
    stop_at_eos: Annotated[bool, Parameter(negative="--ignore-eos")] = True
    logits_processor: Annotated[Any, Parameter(parse=False)] = None
    n: Annotated[int, Parameter(parse=False)] = 1
    logprobs: Annotated[int | None, Parameter(parse=False)] = None
    quantize: Literal["bf16", "int8", "int4", "keep"] | None = None
    """Quantise weights to 8 or 4 bits; keep leaves those of a .gguf file quantised; bf16 prepacks them, with the same
    results."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and decode state; by default the checkpoint's, and bfloat16 with bf16, int8 and int4."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the decode state only; int8 keeps a scale for each vector."""
    device: Device = "auto"
    threads: Threads = None
    compile: bool = False
    """Compile the decode step (about a minute once, then cached)."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TextOptions):
    temperature: float = 0.7
    max_new_tokens: int = 512
    system: str | None = None
    """System message."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(TextOptions):
    temperature: float = 0.0
    max_new_tokens: int = 200


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    prompt: Texts = None
    """Prompt; - reads standard input, which is also the default. Repeatable: several are decoded in one batch."""
    prompt_file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """File that holds the prompt; - is standard input."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TextOptions, DecodingOptions, PromptOptions):
    """Options of generate. Fields of the last base come first."""

    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    n: int = 1
    logprobs: int | None = None


def watch_interval(watch: bool, every: int | None) -> int | None:
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


def whole(value: float | None, field: str) -> int | None:
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


def text_of(text: str, field: str) -> str:
    """Returns the text that an option means: the option itself, the text of a file after an @, or standard input for
    -."""
    try:
        if text == "-":
            return sys.stdin.read(LONGEST_TEXT)
        if not text.startswith("@"):
            return text
        with Path(text[1:]).expanduser().open(encoding="utf-8", newline="") as file:
            return file.read(LONGEST_TEXT)
    except UnicodeDecodeError as problem:
        byte, source = problem.object[problem.start], "standard input" if text == "-" else text[1:]
        raise RequestError(
            f"{source} must be {problem.encoding} text, and holds the byte {byte:#04x}", code="damaged", field=field
        ) from None
    except (OSError, ValueError) as problem:  # ValueError: a name with a null byte
        reason = getattr(problem, "strerror", None) or problem
        raise RequestError(
            f"--{field} {text} cannot be read ({reason}); a text that starts with @ comes through --{field} -",
            code="missing", field=field,
        ) from None  # fmt: skip


def command_line() -> str:
    """Returns the command as it was typed."""
    return shlex.join(["glassformer", *sys.argv[1:]])
