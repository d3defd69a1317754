"""Parser of the command line: finds the verb and its arguments, and refuses what it can before torch is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from glassformer.cli.options import ChoiceName, FileName, ModelName, TextName
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names.grammar import RECIPE
from glassformer.options import Bounds

Mark = ChoiceName | FileName | ModelName | TextName | Bounds
LENGTH = "a length (--minutes 1, or --tokens, --steps, --flops)"


def parse(app: App, arguments: list[str], example: str) -> Callable[[], object]:
    """Returns a function that calls the verb in `arguments`. Raises RequestError, or an error of cyclopts.

    The error for missing arguments names all of them, and `example`."""
    try:
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except MissingArgumentError as problem:
        if problem.keyword is not None or not example:  # an option without its value
            raise
        raise _lacking(arguments[0], [*_missing(app, arguments), *_also_missing(arguments)], example) from None
    except UnknownOptionError as problem:
        raise _unknown_option(arguments[0], problem) from None
    except UnusedCliTokensError as problem:
        raise _unused(app, arguments[0], problem.unused_tokens or [], example) from None
    if example and (names := _also_missing(arguments)):
        raise _lacking(arguments[0], names, example)
    for field, value, mark in _values(command, bound.arguments):
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                mark.check(one, field)
    return partial(command, *bound.args, **bound.kwargs)


def _values(command: Callable[..., object], given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mark]]:
    """Yields (name, value, mark) for each `Mark`, an object whose `check` refuses wrong values, in the annotation of an
    option in `given`, or of a field of an option that is a dataclass."""
    hints = get_type_hints(command, include_extras=True) if inspect.isfunction(command) else {}
    for name, value in given.items():
        yield from ((name, value, mark) for mark in _marks(hints.get(name)))
        if is_dataclass(value) and not isinstance(value, type):
            inner = get_type_hints(type(value), include_extras=True)
            yield from ((one, getattr(value, one), mark) for one, hint in inner.items() for mark in _marks(hint))


def _marks(hint: Any) -> list[Mark]:
    """Returns the marks in a type annotation, those inside lists and unions included."""
    own = [one for one in get_args(hint)[1:] if isinstance(one, Mark)] if get_origin(hint) is Annotated else []
    return [*own, *(mark for one in get_args(hint) for mark in _marks(one))]


def _missing(app: App, arguments: list[str]) -> list[str]:
    """Returns the names of the missing required arguments: gives each one a value until the parser accepts the
    command."""
    found: list[str] = []
    while True:
        try:
            app.parse_args(arguments, exit_on_error=False, print_error=False)
            return found
        except MissingArgumentError as problem:
            assert problem.argument is not None
            name = problem.argument.name
            if name in found:
                return found
            found.append(name)
            value = [f"{name}=x"] if name.startswith("-") else ["x"]
            arguments = [arguments[0], *value, *arguments[1:]]
        except Exception:  # about a given value, which is refused once nothing is missing
            return found


OPTIONS = {
    "max-length": "--max-new-tokens", "length": "--max-new-tokens", "num-samples": "--n", "num-beams": "--beams",
    "output": "--out", "steps": "--tokens", "rate": "--lr", "seq-len": "--context", "block-size": "--context",
    "dataset": "--data", "gpu": "--device", "verbose": "--traceback", "temp": "--temperature",
}  # fmt: skip
"""Name of an option in other programs -> name of the option here."""


def _unknown_option(verb: str, problem: UnknownOptionError) -> RequestError:
    """Returns the error for an option that the verb lacks; it suggests the nearest one that the verb has."""
    typed = (problem.token.keyword or problem.token.value).partition("=")[0]
    known = [name for one in problem.argument_collection if one.parse for name in one.names if name.startswith("-")]
    meant = OPTIONS.get(typed.lstrip("-").replace("_", "-"))
    near = f"; did you mean {meant!r}?" if meant in known else ""
    longer = [name for name in known if len(typed) > 3 and name.startswith(typed)]
    near = near or did_you_mean(typed.lstrip("-"), [name.lstrip("-") for name in longer or known])
    near = near.replace("mean '", "mean '--").replace("or '", "or '--").replace("----", "--")
    return RequestError(
        f"{verb} has no option {shown(typed)}{near or f'; glassformer {verb} --help lists them'}",
        code="unknown", field=typed.lstrip("-").lower().replace("-", "_"), value=typed,
    )  # fmt: skip


def _also_missing(arguments: list[str]) -> list[str]:
    """Returns the names of missing options that the parser does not require: --out of train, a budget of train and
    compare. With --dry or --help both may be missing."""
    typed = {word.partition("=")[0] for word in arguments}
    if arguments[0] not in ("train", "compare") or typed & {"--dry", "--help", "-h"}:
        return []
    place = ["--out"] if arguments[0] == "train" and "--out" not in typed else []
    budgets = {"--minutes", "--tokens", "--steps", "--flops", "--epochs", "--resume"}
    length = [] if typed & budgets or any(f"+{RECIPE}." in word for word in arguments) else [LENGTH]
    return [*place, *length]


def _lacking(verb: str, names: list[str], example: str) -> RequestError:
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    field = "budget" if names[0] == LENGTH else names[0].lstrip("-").lower().replace("-", "_")
    return RequestError(
        f"{verb} needs {listed}; for example: glassformer {example}", code="missing", field=field, expected=listed
    )


def _unused(app: App, verb: str, words: list[str], example: str) -> RequestError:
    collection = app[verb].assemble_argument_collection(parse_docstring=False)
    fields = [word.removeprefix("recipe.").partition("=") for word in words if word.startswith("recipe.")]
    options = {name: one.names[0] for one in collection for name in one.names}
    meant = [(options.get(f"--{field.replace('_', '-')}"), value) for field, _, value in fields]
    typed = " ".join(shown(f"{name} {value}") for name, value in meant if name)
    taken = [one.name for one in collection if one.field_info.is_positional and not one.name.startswith("-")]
    takes = f"{verb} takes {' '.join(taken)}" if taken else f"{verb} takes options only"
    texts = {"PROMPT", "TEXT", "TEXTS", "QUESTION"} & set(taken) and not typed
    quotes = "; a text of several words is put in quotes" if texts else ""
    if typed:
        takes = f"type {typed}"
    message = f"{shown(' '.join(words))} is not used: {takes}{quotes}; for example: glassformer {example}"
    return RequestError(message, code="unknown", field="arguments", value=words, expected=takes)
