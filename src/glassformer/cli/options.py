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
class Drawing:
    """How a model is run, and its tokens are drawn."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; 40 where neither this nor another of the next three is given."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw among tokens at least this times as likely as the likeliest."""
    typical_p: float | None = None
    """Draw among the tokens of most typical surprise that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, what stands in the prompt or the answer becomes less likely."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from a token's logit once it is in the answer."""
    logit_bias: Annotated[list[str] | None, Parameter(negative="")] = None
    """ID=VALUE: added to the logit of this token; may be given several times."""
    seed: int | None = None
    """Of the draws: the same text again."""
    quantize: Literal["bf16", "int8", "int4", "keep"] | None = None
    """Pack the matrices in 8 or 4 bits; keep leaves those of a .gguf file as they are packed there. Weights in bf16 are
    laid out for the processor's products in it, which changes no number, unless a step is compiled."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights and the state; by default as the checkpoint has it, with bf16, int8 and int4 bfloat16."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Of the state alone, which may be narrower than the weights; int8 keeps a scale for each vector."""
    device: str = "auto"
    """auto, cpu, cuda, mps: where the model runs; auto takes the graphics card that is there."""
    threads: int | None = None
    """Threads of the processor; by default as many as it has cores, and fewer while others take them."""
    compile: Flag = False
    """Take each step in machine code, which is built once for a model, in about a minute, and kept."""


@dataclass(frozen=True, kw_only=True)
class Chatting(Drawing):
    """A conversation."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    system: str | None = None
    """What the model is told before the conversation."""
    max_new_tokens: int = 512
    """Of one answer, at most."""


@dataclass(frozen=True, kw_only=True)
class Asking(Drawing):
    """An answer from an index."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    max_new_tokens: int = 200
    """Of the answer, at most."""


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """What is written."""

    prompt: Texts = None
    """The text to go on from; - reads standard input, as does no prompt at all. Several are written on side by side."""
    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The text that a model with an encoder reads; --prompt is then what its own text begins with, or left out."""
    prompt_file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """A file that has the prompt; - is standard input."""
    max_new_tokens: int | None = None
    """By default 200, or as many as the model has positions for."""
    stop: Texts = None
    """End before this text; may be given several times."""
    ignore_eos: Flag = False
    """Go on after the token that ends a text."""
    n: int = 1
    """Texts for each prompt."""
    beams: int | None = None
    """Search for the likeliest text, keeping so many open, in place of drawing."""
    speculate: Flag = False
    """Guess several tokens ahead from what the text has said before: the same distribution, in fewer passes."""
    draft: str | None = None
    """A smaller model of the same vocabulary that guesses ahead."""
    state: str | None = None
    """A file that keeps what the model has of the prompt: read where it has the beginning of this prompt, else
    written."""
    logprobs: int | None = None
    """With --json: the log-probability of each token, and the so many likeliest in its place."""


@dataclass(frozen=True, kw_only=True)
class Writing(Drawing, Prompting):
    """Fields of the last base come first."""


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
