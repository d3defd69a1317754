"""Options that several verbs take, with converters and checks of their values. Torch is not imported here."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from glassformer import units
from glassformer.errors import RequestError, shown
from glassformer.names.checks import (
    check_data,
    check_device,
    check_model,
    check_optimizer,
    check_path,
    check_tokenizer,
)
from glassformer.names.places import existing, kind_of
from glassformer.options import DecodingOptions, GenerationOptions, ModelOptions, OwnTemperature, Rank, Temperature

COPIES = 4
"""Largest number of processes for runs that start with a command that does not give their number."""
LONGEST_TEXT = 1_000_000
"""Largest number of characters read from a file or from standard input."""

Flag = Annotated[bool, Parameter(negative="")]
Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Texts = Annotated[list[str] | None, Parameter(negative="", allow_leading_hyphen=True)]


@dataclass(frozen=True)
class ModelName:
    """Mark of an option that names a model, which must have weights if `weights`, and read text if `text`."""

    weights: bool = False
    text: bool = False

    def check(self, value: str, field: str) -> None:
        """Raises RequestError for a value that cannot name a model (one with weights if `self.weights`, one that reads
        text if `self.text`); `field` is ignored."""
        check_model(value, self.weights, self.text)


@dataclass(frozen=True)
class TextName:
    """Mark of an option that names texts: a file, a folder, a dataset or a built-in corpus."""

    def check(self, value: str, field: str) -> None:
        """Raises RequestError for a value that cannot name texts; `field` is ignored."""
        check_data(value)


@dataclass(frozen=True)
class FileName:
    """Mark of an option that names a file or folder to read."""

    def check(self, value: str, field: str) -> None:
        """Raises RequestError, for the option `field`, if the file or folder does not exist."""
        check_path(value, field)


@dataclass(frozen=True)
class ChoiceName:
    """Mark of an option that takes one of certain names; `refuse(value)` raises RequestError for any other."""

    refuse: Callable[[str], None]

    def check(self, value: str, field: str) -> None:
        """Raises RequestError for an unknown name; `field` is ignored."""
        self.refuse(value)


ToRead = Annotated[str, FileName()]
"""Path of a file or folder to read."""
Named = Annotated[str, ModelName()]
"""Name of a model, with or without weights."""
NamedWithWeights = Annotated[str, ModelName(weights=True)]

Expression = Annotated[
    str,
    ModelName(),
    Parameter(
        help="A model expression NAME[@SIZE][+CHANGE...], for example gpt2@10m+rope; SIZE counts the parameters of the "
        "layers, without embeddings. glassformer presets lists names."
    ),
]
Data = Annotated[
    str,
    TextName(),
    Parameter(
        help="Text: a file, a folder, - (standard input), a Hugging Face dataset (hf:owner/name), a published text "
        "(shakespeare, wikitext-2), or a built-in corpus (python-docs, python-source); or token ids: train.bin, with "
        "val.bin next to it, or a .npy file.",
        allow_leading_hyphen=True,
    ),
]
Force = Annotated[
    bool,
    Parameter(negative="", help="Replace files that glassformer did not write. The source is never replaced."),
]
Field = Annotated[
    str | None,
    Parameter(
        help="Field of JSON lines, or column of a dataset, that holds the text or the token ids; by default text."
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on standard output.")]


def of_field(data: str, field: str | None) -> str:
    """Returns `data` with the field that holds the text, FILE.jsonl,column=FIELD; unchanged without `field`."""
    return data if field is None else f"{data},column={field}"


def count(type_: Any, tokens: Any) -> int:
    """Converts an option such as 200k, 5M or 1.5B to a whole number. Raises RequestError."""
    return units.count(tokens[0].value, "count")


def amount(type_: Any, tokens: Any) -> float:
    """Converts an option such as 1e21 or 5M to a number. Raises RequestError."""
    return units.quantity(tokens[0].value, field="count")


def amounts(type_: Any, tokens: Any) -> list[float]:
    """Converts the values of a repeatable option, such as 1e21 and 5M, to numbers. Raises RequestError."""
    return [units.quantity(token.value, field="count") for token in tokens]


def pairs(given: list[str] | None, field: str) -> dict[str, str]:
    """Returns name -> text for options NAME=TEXT. Raises RequestError for another form or a name given twice."""
    found: dict[str, str] = {}
    for one in given or []:
        name, equals, text = one.partition("=")
        if not (name and equals and text) or name in found:
            raise RequestError(code="type", field=field, value=one, expected="NAME=TEXT, each name once")
        found[name] = text
    return found


Count = Annotated[int, Parameter(converter=count)]
Optimizer = Annotated[
    str,
    ChoiceName(check_optimizer),
    Parameter(
        help="Optimizer: adamw, muon, lion, adafactor or sgd. +recipe.optimizer.FIELD=VALUE after a model's expression "
        "sets its fields."
    ),
]
Device = Annotated[str, ChoiceName(check_device), Parameter(help="Device: auto, cpu, cuda or mps.")]
Threads = Annotated[
    int | None, Parameter(help="CPU threads; by default one per core, fewer while other processes are busy.")
]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of all verbs that train."""

    learning_rate: Annotated[float | None, Parameter(name=["--lr", "--learning-rate"])] = None
    """Peak learning rate; by default chosen from the size of the model and the optimizer."""
    optimizer: Optimizer = "adamw"
    tokenizer: Annotated[str, ChoiceName(check_tokenizer)] = "auto"
    """Tokenizer: byte, char, word:SIZE or bpe:SIZE (trained on --data), or the path of a tokenizer.json; auto chooses
    by the size of the text."""
    batch_size: int | None = None
    """Sequences per optimizer step; by default 16, or fewer if --minutes would be few steps."""
    context: Count | None = None
    """Tokens per sequence; by default +context=N of the model's expression, or 256."""
    device: Device = "auto"
    dtype: str = "auto"
    """Compute dtype: auto, float32 or bfloat16."""
    threads: Threads = None
    compile: bool | None = None
    """Compile the layers; by default if there is a compiler and the run is long enough to gain from it."""
    seed: int = 0
    """Seed for weight initialisation and data order; with several seeds, the first."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingOptions):
    """Options of train and compare: the budget of a run, its objective, its metrics."""

    tokens: Count | None = None
    """Training budget of a run in tokens (200k, 5M); or give --minutes, --flops or --steps."""
    minutes: float | None = None
    """Training budget of a run in minutes of training: starting, evaluating and measuring are not counted."""
    flops: Annotated[float | None, Parameter(converter=amount)] = None
    """Training budget of a run in FLOPs."""
    steps: Count | None = None
    """Training budget of a run in optimizer steps."""
    objective: str | None = None
    """Training objective: next_token; classes (labels of texts) and spans (answers to questions), the defaults of
    train for models with +classes and +spans; masked:P (masked language modelling, P of the tokens); seq2seq (pairs
    of source and target); span:DENSITY:MEAN (span corruption: share of tokens, mean length of spans); infill:P:MEAN
    (BART: share of tokens, mean length); prefix (prefix language model); contrastive:TEMPERATURE.
    +recipe.objective.FIELD=VALUE
    after a model's expression sets its fields."""
    on_spike: Literal["go_on", "skip", "roll_back"] = "go_on"
    """A step whose loss or gradient spikes: take it, skip it, or return to the last checkpoint."""
    log_to: Annotated[list[str] | None, Parameter(negative="")] = None
    """Also send the metrics to tensorboard, wandb or trackio."""


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Options of verbs that train several runs: the machine or cluster, and the number of runs at once."""

    workers: int | None = None
    """Runs trained at the same time on this machine, each with its share of the cores. By default several for
    small models on a CPU, otherwise 1."""
    slots: str | None = None
    """Train several runs at the same time, one on each device: cuda:0,cuda:1."""
    executor: str = "here"
    """Place of the runs: here (this machine), or slurm (a job for each run), with options of sbatch if needed, for
    example slurm:partition=NAME,time=MINUTES,gpus=1."""

    def prepare(self) -> None:
        """Starts the processes that will train runs on this machine: one imports torch while this one does, several are
        copies of this one after its imports, since theirs would wait for each other's cores. Without a number there are
        up to `COPIES`, which cost nothing until they train."""
        cores = os.cpu_count() or 1
        if self.executor == "here" and self.slots is None and 1 <= (self.workers or 1) <= cores:
            from glassformer.runs.workers import FORKS, POOL

            copied = FORKS and "torch" not in sys.modules  # a process that has used torch has threads and locks
            workers = self.workers or (min(cores, COPIES) if copied else 1)
            main = None
            if copied and workers > 1:
                gc.disable()  # what is imported stays
                from glassformer.runs import arm

                main = arm.main
                gc.freeze()
                gc.enable()
            POOL.prepare(workers, main)

    def made(self, device: str = "auto") -> Any:
        """Returns the executor that trains the runs. Raises RequestError for options that contradict."""
        from glassformer.runs.slurm import executor_of

        return executor_of(self.executor, self.slots, self.workers, device)


Trained = Annotated[TrainingOptions, Parameter(name="*")]
Ran = Annotated[RunOptions, Parameter(name="*")]
Executed = Annotated[ExecutorOptions, Parameter(name="*")]
TRAINED, RAN, HERE = TrainingOptions(), RunOptions(), ExecutorOptions()
"""Options at their defaults."""
WatchEvery = Annotated[int | None, Parameter(help="Steps between observations with --watch; by default 25.")]


@dataclass(frozen=True, kw_only=True)
class TextOptions(GenerationOptions, ModelOptions):
    """Options of verbs that generate text."""

    temperature: Temperature = 0.8
    top_k: Rank = None
    """Top-k sampling: number of most likely tokens; by default 40, or all if --top-p, --min-p or --typical-p is
    given."""
    logit_bias: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()  # type: ignore[assignment]
    """ID=VALUE: amount added to the logit of a token; repeatable."""
    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, show_default=False)] = ()
    stop_at_eos: Annotated[bool, Parameter(negative="--ignore-eos")] = True
    logits_processor: Annotated[Any, Parameter(parse=False)] = None
    n: Annotated[int, Parameter(parse=False)] = 1
    logprobs: Annotated[int | None, Parameter(parse=False)] = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TextOptions):
    temperature: Temperature = 0.7
    max_new_tokens: int = 512
    """Largest number of tokens of one answer."""
    system: str | None = None
    """System message."""
    context: Count | None = None
    """Largest number of tokens of the conversation; by default the model's context."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(TextOptions):
    temperature: Temperature = 0.0
    max_new_tokens: int = 200
    """Largest number of tokens of the answer."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    prompt: Texts = None
    """Prompt; - reads standard input, which is also the default. Repeatable: several are decoded in one batch."""
    prompt_file: Annotated[str | None, FileName(), Parameter(allow_leading_hyphen=True)] = None
    """File that holds the prompt; - is standard input."""
    prompts: Annotated[str | None, FileName(), Parameter(allow_leading_hyphen=True)] = None
    """File of prompts as JSON lines, each {"prompt": TEXT} or a text in quotes. Prints a JSON line for each text, with
    the other fields of its line."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TextOptions, DecodingOptions, PromptOptions):
    """Options of generate. --help lists the fields of the last base class first."""

    temperature: OwnTemperature = None  # type: ignore[assignment]
    """Sampling temperature; 0 takes the most likely token. By default 0.8; --beams takes none."""
    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    draft: NamedWithWeights | None = None
    state: str | None = None
    n: int = 1
    logprobs: int | None = None


def watch_interval(watch: bool, every: int | None) -> int | None:
    """Returns the number of steps between observations, by default `WATCH`; None if neither --watch nor `every` is
    given.

    Raises RequestError for a number below 1."""
    if every is None and not watch:
        return None
    from glassformer.training.recipe import WATCH

    if every is not None and every < 1:
        raise RequestError(
            f"watch_every={every} must be at least 1: it is the number of steps between observations",
            code="range", field="watch_every", value=every,
        )  # fmt: skip
    return every or WATCH


@contextmanager
def standard_input() -> Iterator[None]:
    """Turns a UnicodeDecodeError inside the context, in which standard input is read, into a RequestError."""
    try:
        yield
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise RequestError(
            f"standard input holds the byte {byte:#04x}; it must be {problem.encoding} text",
            code="damaged", field="stdin",
        ) from None  # fmt: skip


def text_of(text: str, field: str) -> str:
    """Returns the text that an option means: the option itself; the content of FILE for @FILE; standard input for -.

    Raises RequestError for a file that cannot be read or is not text."""
    try:
        if text == "-":
            return sys.stdin.read(LONGEST_TEXT)
        if not text.startswith("@"):
            return text
        with Path(text[1:]).expanduser().open(encoding="utf-8", newline="") as file:
            return file.read(LONGEST_TEXT)
    except UnicodeDecodeError as problem:
        byte, source = problem.object[problem.start], "standard input" if text == "-" else text[1:]
        kind = kind_of(problem.object) or f"not {problem.encoding} text: it holds the byte {byte:#04x}"
        raise RequestError(f"{shown(source)} is {kind}", code="damaged", field=field) from None
    except (OSError, ValueError) as problem:  # ValueError: a name with a null byte
        reason = getattr(problem, "strerror", None) or problem
        raise RequestError(
            f"--{field} {text} cannot be read ({reason}); a text that starts with @ comes through --{field} -",
            code="missing", field=field,
        ) from None  # fmt: skip


def no_prompt() -> RequestError:
    """Returns the error for an empty prompt."""
    return RequestError(
        'the prompt is empty; write it in quotes after the model (generate MODEL "TEXT"), or give --prompt-file, or '
        "text on standard input",
        code="missing", field="prompt",
    )  # fmt: skip


def check_context(context: int | None, data: str) -> None:
    """Raises RequestError if the file `data` has no more bytes than `context` tokens: a token takes at least one."""
    path = Path(data)
    size = path.stat().st_size if context is not None and existing(data) and path.is_file() else None
    if context is not None and size and size <= context:  # an empty text is refused by its reader
        raise RequestError(
            f"context={context} needs at least {context + 1} tokens, and {shown(data)} has {size:,} bytes; give a "
            f"shorter context (--context), or more text",
            code="range", field="context", value=context, expected=f"less than {size}",
        )  # fmt: skip


def command_line() -> str:
    """Returns the command line of this process, quoted for a shell."""
    return shlex.join(["glassformer", *sys.argv[1:]])
