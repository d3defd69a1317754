"""Program `glassformer`: its verbs, and the output and exit status of a call. Only the called verb is imported."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cyclopts import App, CycloptsError, Group, MissingArgumentError, UnknownCommandError, UnknownOptionError

from glassformer.cli import waiting
from glassformer.cli.parsing import parse
from glassformer.cli.start import Terminated
from glassformer.errors import NO_MEMORY, Code, RequestError, WorkError, no_memory, printable, so_far, system_error
from glassformer.version import __version__


class Verb(NamedTuple):
    """Entry in the list of verbs: file in `verbs`, first line of the docstring, an example to copy, and synonyms from
    other programs, such as `fit` for `train`; the error for an unknown verb proposes the verb whose synonym was
    typed."""

    file: str
    line: str
    example: str
    others: tuple[str, ...] = ()


GROUPS: dict[str, dict[str, Verb]] = {
    "Start here": {
        "train": Verb(
            "training",
            "Train one model and leave a run folder: config, recipe, metrics, checkpoints, report.",
            "train gpt2@1m --data python-docs --minutes 1 --out my_run",
            ("fit", "finetune", "fine-tune", "pretrain"),
        ),
        "generate": Verb(
            "writing",
            "Generate text from one or more prompts.",
            'generate smollm2 "Once upon a time"',
            ("sample", "complete", "predict", "infer", "write", "prompt"),
        ),
        "chat": Verb(
            "writing",
            "Talk with a model that has a chat template.",
            "chat smollm2",
            ("talk",),
        ),
        "inspect": Verb(
            "checkpoints",
            "Show the parts and the costs of a model; with --text, the activations inside it on that text.",
            'inspect smollm2 "The cat sat on the mat"',
            ("eval", "evaluate", "show", "info", "perplexity", "visualize", "summary"),
        ),
        "compare": Verb(
            "training",
            "Train several models side by side under one budget and write a report.",
            "compare gpt2@1m llama@1m --data python-docs --minutes 1",
            ("benchmark", "bench", "sweep", "race"),
        ),
    },
    "Models and their costs": {
        "presets": Verb(
            "planning",
            "List the names, sizes and changes that a model expression is made of.",
            "presets rope",
            ("list", "ls", "models", "names", "zoo"),
        ),
        "explain": Verb(
            "planning",
            "Explain a word: what it is for, its formula, models that have it, its cost, what was measured.",
            "explain rope",
            ("man", "what", "define"),
        ),
        "tokens": Verb(
            "planning",
            "Cut a text into tokens by several tokenizers: pieces, ids, unknown tokens, bytes per token.",
            'tokens "The cat sat" --with byte,word,smollm2',
        ),
        "plan": Verb(
            "planning",
            "Compute parameters, FLOPs, memory and cache of models exactly; with --machine, also time and cost.",
            "plan llama-3-8b qwen3-8b --machine h100",
            ("count", "estimate", "cost", "flops", "memory", "params"),
        ),
        "convert": Verb(
            "checkpoints",
            "Turn one checkpoint into another: a folder that transformers loads, or a GGUF that llama.cpp runs.",
            "convert smollm2 smollm2.gguf",
            ("export", "quantize", "save", "download", "pull"),
        ),
        "check": Verb(
            "checkpoints",
            "Verify a model numerically: decoding with and without cache, save and load, the published implementation.",
            "check llama@1m",
            ("verify", "test", "validate"),
        ),
        "serve": Verb(
            "serving",
            "Serve models over HTTP to programs that speak OpenAI's API.",
            "serve smollm2 --port 8000",
            ("server", "api", "host"),
        ),
        "mcp": Verb(
            "serving",
            "Offer verbs as tools to an agent over standard input and output (Model Context Protocol).",
            "mcp --dry",
            ("agent", "agents", "tools"),
        ),
        "studio": Verb(
            "serving",
            "Open the pages in a browser: compose a model and see its costs, train and compare, write, look inside.",
            "studio llama@10m+gqa:2",
            ("ui", "gui", "web", "browser"),
        ),
    },
    "Your own texts": {
        "embed": Verb(
            "writing",
            "Turn texts into vectors, pooled and normalised as the model's folder says.",
            'embed minilm "a text" "another text"',
            ("encode", "vectors"),
        ),
        "classify": Verb(
            "writing",
            "Name the class of each text by a model that was trained on labels.",
            'classify my_run "a text" "another text"',
        ),
        "index": Verb(
            "writing",
            "Split texts into passages and embed them into an index for glassformer ask.",
            "index python-docs --out my_index",
        ),
        "ask": Verb(
            "writing",
            "Answer a question from an index of your texts: print the passages found with their scores, then "
            "the answer.",
            'ask "How do I read a file?" --index my_index',
        ),
    },
    "Experiments": {
        "ablate": Verb(
            "laboratory",
            "Turn one model into another, one change at a time, and measure the effect of each change on "
            "loss and cost.",
            "ablate gpt2@1m --to llama@1m --data python-docs --tokens 1M",
        ),
        "scale": Verb(
            "laboratory",
            "Fit scaling laws: train models over a grid of sizes and budgets, or read a table of finished runs.",
            "scale gpt2 --data python-docs --sizes 0.3m,0.6m,1m --budgets 250k,1M",
        ),
        "run": Verb(
            "laboratory",
            "Run an experiment from a file, such as recipes/gpt2-to-llama.yaml.",
            "run recipes/gpt2-to-llama.yaml",
            ("experiment",),
        ),
        "claims": Verb(
            "laboratory",
            "Test published claims about transformers by experiment; without names, list all claims and "
            "their verdicts.",
            "claims gqa-cache",
        ),
        "guides": Verb(
            "laboratory",
            "List the items of five guides to the transformer, each with the command that shows it, and corrections "
            "of their figures.",
            "guides first-lesson",
        ),
        "advise": Verb(
            "laboratory",
            "Recommend a model for a goal: the cost, the evidence and the open questions of each option, then "
            "the model.",
            "advise --goal chat",
        ),
        "why": Verb(
            "training",
            "Diagnose a failed run: the first statistic to deviate, the known failure that matches, and remedies.",
            "why my_run",
            ("diagnose", "debug"),
        ),
        "schema": Verb(
            "planning",
            "Print the JSON Schema of the config files.",
            "schema",
        ),
    },
}
"""Heading of the list of verbs -> name -> verb; those that a beginner needs come first."""
VERBS: dict[str, Verb] = {name: verb for some in GROUPS.values() for name, verb in some.items()}

app = App(
    name="glassformer",
    help="Transformers under glass: compose any of them, train it, run it, look inside it, and know what it costs.",
    help_epilogue="glassformer help VERB explains a verb; glassformer train --help does so too. Every verb takes "
    "--import FILE.py, which makes the parts in that file known.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main says that it has stopped
)
for _at, (_heading, _verbs) in enumerate(GROUPS.items()):
    _group = Group(_heading, sort_key=_at)
    for _name, _verb in _verbs.items():
        app.command(
            f"glassformer.cli.verbs.{_verb.file}:{_name}", name=_name, help=_verb.line, help_format="markdown",
            help_epilogue=f"Example: `glassformer {_verb.example}`", group=_group, sort_key=len(app._commands),
            synonym=_verb.others,
        )  # fmt: skip
_options = Group("Options", sort_key=len(GROUPS))
app["--help"].group = app["--version"].group = (_options,)


MOST_WORDS = 1000
"""Largest number of words of a command line, because the parser takes minutes for more."""


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Prints warnings of this package, inside the context, in one line without the line of code that raised them."""
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
    """Makes the help of the verb in `arguments`, inside the context, its whole docstring, not its line in the list."""
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
    """Calls `refuse_ranks` if the environment shows that torchrun or srun started this process."""
    several = {"RANK", "WORLD_SIZE"} <= os.environ.keys() or "SLURM_PROCID" in os.environ
    if several and arguments and not arguments[0].startswith("-"):
        from glassformer.cli.ranks import refuse_ranks

        refuse_ranks(arguments)


def _import_parts(arguments: list[str]) -> list[str]:
    """Imports the file after each --import, which makes its parts known; returns the other arguments.

    Raises RequestError for a file that cannot be imported."""
    files: list[str] = []
    others: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, file = argument.partition("=")
        if name == "--import":
            files.append(file if equals else next(left, ""))
        else:
            others.append(argument)
    if files:
        from glassformer.parts.core.outside import import_files

        import_files(files)
    return others


def _call_verb(arguments: list[str]) -> None:
    _refuse_ranks(arguments)
    arguments = _import_parts(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    verb = VERBS.get(arguments[0]) if arguments else None
    with described(arguments):
        call = parse(app, arguments, verb.example if verb else "")
        if verb and not {"--help", "-h"} & {*arguments}:
            waiting.begin(f"{arguments[0]} starts")
        call()


@contextmanager
def sigterm_interrupts() -> Iterator[list[int]]:
    """Makes SIGTERM, inside the context, end a command as Ctrl-C does, so that unfinished files are removed and results
    so far are shown. Yields a list to which the handler adds the signal."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield asked
        return

    def interrupt(number: int, frame: Any) -> None:
        asked.append(number)
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_status(program: Callable[[list[str]], object], arguments: Sequence[str]) -> int:
    """Calls `program` with `arguments`, prints an error as one line on stderr (with --traceback, as its traceback), and
    returns the exit status. Exceptions that are defects of the program are raised.

    Exit status: 0 done; 1 the work failed; 2 the request was wrong; 130 Ctrl-C, 143 SIGTERM, even if a run was saved.
    """
    with sigterm_interrupts() as asked:
        status = _exit_status(program, arguments, asked)
    return 128 + signal.SIGTERM if asked and status == 128 + signal.SIGINT else status


def _exit_status(program: Callable[[list[str]], object], arguments: Sequence[str], terminated: list[int]) -> int:
    trace, as_json = "--traceback" in arguments, "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        if len(arguments) > MOST_WORDS:
            raise RequestError(
                f"the command has {len(arguments):,} words; give at most {MOST_WORDS:,}",
                code="range", field="arguments", value=len(arguments),
            )  # fmt: skip
        with warnings_in_one_line():
            program(arguments)
            sys.stdout.flush()
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:  # `glassformer ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt as problem:
        notes = "".join(f"; {note}" for note in getattr(problem, "__notes__", ()))
        stopped = WorkError(f"stopped{' by SIGTERM' if terminated else ''}{notes}", code="stopped")
        _print_results(problem, stopped, as_json)
        print(stopped, file=sys.stderr)
        status = 128 + signal.SIGINT
    except Exception as error:
        told = _told(error)
        _print_results(error, told, as_json)
        if told is None:
            raise  # a defect of ours: its traceback is what helps
        if trace:
            traceback.print_exc()
        else:
            print(f"glassformer: {printable(' '.join(str(told).split()))}", file=sys.stderr)
        status = told.exit_status
    finally:
        waiting.end()
    return status


def _print_results(error: BaseException, told: RequestError | WorkError | None, as_json: bool) -> None:
    """Prints the results that a verb had before an error ended it, and with --json the error, in one object."""
    waiting.end()
    reason = {} if told is None else {"error": told.to_dict()}
    if (found := so_far(error)) is not None:
        from glassformer.cli.show import print_result

        print_result(found, as_json, **reason)
    elif as_json and reason and not getattr(told, "reported", False):
        print(json.dumps(reason), flush=True)


def _told(error: Exception) -> RequestError | WorkError | None:
    """Returns the RequestError or WorkError for an exception, also of the parser, the disk or memory; None for a
    defect."""
    if isinstance(error, RequestError | WorkError):
        return error
    if isinstance(error, CycloptsError):
        code: Code = "type"
        if isinstance(error, MissingArgumentError):
            code = "missing"
        elif isinstance(error, UnknownOptionError | UnknownCommandError):
            code = "unknown"
        argument = getattr(error, "argument", None)
        field = "arguments" if argument is None else argument.name.lstrip("-").lower().replace("-", "_")
        return RequestError(str(error), code=code, field=field)
    if isinstance(error, OSError):
        return system_error(error)
    return WorkError(NO_MEMORY, code="memory") if no_memory(error) else None


def main(arguments: list[str] | None = None) -> int:
    """Runs `glassformer` with the arguments (if None, those of the process); returns the exit status."""
    return exit_status(_call_verb, sys.argv[1:] if arguments is None else arguments)
