"""The program: which verbs there are, and how a call of one ends. A verb's file is imported once it is called."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError

from glassformer.errors import NO_MEMORY, RequestError, WorkError, no_memory, printable
from glassformer.version import __version__

VERBS = {
    "compare": ("training", "Train several models side by side under one budget and write a report."),
    "train": ("training", "Train one model and leave a run folder: config, recipe, metrics, checkpoints."),
    "generate": ("writing", "Generate text from one or more prompts."),
    "embed": ("writing", "Turn texts into vectors, pooled and normalised as the model's folder says."),
    "index": (
        "writing",
        "Split texts into passages and embed them into an index for glassformer ask.",
    ),
    "ask": (
        "writing",
        "Answer a question from an index of your texts: print the passages found with their scores, then the answer.",
    ),
    "chat": ("writing", "Talk with a model that has a chat template."),
    "convert": (
        "checkpoints",
        "Turn one checkpoint into another: a folder that transformers loads, or a GGUF that llama.cpp runs.",
    ),
    "check": (
        "checkpoints",
        "Verify a model numerically: decoding with and without cache, save and load, the published implementation.",
    ),
    "inspect": (
        "checkpoints",
        "Show the parts and the costs of a model; with --text, the activations inside it on that text.",
    ),
    "why": (
        "training",
        "Diagnose a failed run: the first statistic to deviate, the known failure that matches, and remedies.",
    ),
    "plan": (
        "planning",
        "Compute parameters, FLOPs, memory and cache of models exactly; with --machine, also time and cost.",
    ),
    "ablate": (
        "laboratory",
        "Turn one model into another, one change at a time, and measure the effect of each change on loss and cost.",
    ),
    "scale": (
        "laboratory",
        "Fit scaling laws: train models over a grid of sizes and budgets, or read a table of finished runs.",
    ),
    "run": ("laboratory", "Run an experiment from a file, such as recipes/gpt2-to-llama.yaml."),
    "advise": (
        "laboratory",
        "Recommend parts of a model for a goal: the cost, the measured evidence and the open questions of each option.",
    ),
    "claims": (
        "laboratory",
        "Test published claims about transformers by experiment; without names, list all claims and their verdicts.",
    ),
    "presets": ("planning", "List the names, sizes and changes that a model expression is made of."),
    "schema": ("planning", "Print the JSON Schema of the config files."),
}
"""Name of each verb -> its file in `verbs`, and its line in the list of them: the first of its docstring."""

app = App(
    name="glassformer",
    help="Transformers under glass: compose any of them, train it, run it, look inside it, and know what it costs.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main says that it has stopped
)
for _name, (_file, _line) in VERBS.items():
    app.command(f"glassformer.cli.verbs.{_file}:{_name}", name=_name, help=_line, help_format="markdown")


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


@contextmanager
def described(arguments: list[str]) -> Iterator[None]:
    """Inside, the verb's own help is its docstring, which says more than its line in the list of verbs."""
    if not arguments or arguments[0] not in VERBS:
        yield
        return
    verb = app[arguments[0]]
    listed, verb.help = verb.help, None
    try:
        yield
    finally:
        verb.help = listed


def _refuse_ranks(arguments: list[str]) -> None:
    """`refuse_ranks` for a command, where it may be one of several processes."""
    several = {"RANK", "WORLD_SIZE"} <= os.environ.keys() or "SLURM_PROCID" in os.environ
    if several and arguments and not arguments[0].startswith("-"):
        from glassformer.cli.ranks import refuse_ranks

        refuse_ranks(arguments)


def _call_verb(arguments: list[str]) -> None:
    _refuse_ranks(arguments)
    with described(arguments):
        app(arguments, exit_on_error=False, print_error=False)


def exit_status(program: Callable[[list[str]], object], arguments: Sequence[str]) -> int:
    """Calls `program` with `arguments`; an error becomes one line on stderr, or with --traceback its traceback.

    0 done; 1 the work failed, or a run was stopped and saved; 2 the request was wrong; 130 Ctrl-C.
    """
    trace = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        if len(arguments) > MOST_WORDS:
            raise RequestError(
                f"the command has {len(arguments):,} words; give at most {MOST_WORDS:,}",
                code="range", field="arguments", value=len(arguments),
            )  # fmt: skip
        with warnings_in_one_line():
            program(arguments)
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


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of `glassformer` with these arguments, or those of the process."""
    return exit_status(_call_verb, sys.argv[1:] if arguments is None else arguments)
