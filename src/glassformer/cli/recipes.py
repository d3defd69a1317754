"""Experiments as files of plain data, which one command runs, resumes and adds seeds to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError
from pydantic import ConfigDict, Field

from glassformer.config import read_tree, validated
from glassformer.errors import RequestError, did_you_mean
from glassformer.parts.core.base import Value

VERBS = ("train", "compare", "ablate", "scale")
BESIDES = ("json",)
"""Options of a verb that are not of an experiment."""


class Experiment(Value):
    """One or more commands, in their order. Each step has a `verb`, and its options as the command line calls
    them; what stands without an option there, the models, goes by the name it has in the verb's help."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str = Field(max_length=2000)
    """What it asks, in a sentence."""
    steps: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=100)


def commands(app: App, path: str, seeds: int | None = None) -> list[list[str]]:
    """The command lines of an experiment, all of them checked; `seeds` in the place of its own. Raises RequestError
    that names the file, the step and the option."""
    experiment: Experiment = validated(Experiment, read_tree(path), "experiment", str(path))
    found = []
    for number, step in enumerate(experiment.steps, 1):
        where = f"{path}, step {number}"
        words = _words(app, dict(step), seeds, where)
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except (CycloptsError, RequestError) as error:
            raise RequestError(f"{where}: {' '.join(str(error).split())}", code="type", field="steps") from None
        found.append(words)
    if seeds is not None and not any("--seeds" in words for words in found):
        raise RequestError(f"{path} has no step that takes --seeds", code="conflict", field="seeds", value=seeds)
    return found


def _words(app: App, step: dict[str, Any], seeds: int | None, where: str) -> list[str]:
    verb = str(step.pop("verb", ""))[:80]
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS) or f"; use {', '.join(VERBS)}"
        raise RequestError(
            f"{where}: verb={verb!r} is none of an experiment{near}", code="unknown", field="verb", value=verb
        )
    function: Callable[..., None] = app[verb].default_command  # type: ignore[assignment]
    parameters = inspect.signature(function).parameters
    known = {name: one.kind for name, one in parameters.items() if name not in BESIDES}
    if seeds is not None and "seeds" in known:
        step["seeds"] = seeds
    words = [verb]
    options: list[str] = []
    for key, value in step.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise RequestError(
                f"{where}: {verb} has no option {str(key)[:80]!r}{did_you_mean(name, known)}",
                code="unknown", field=str(key)[:80], value=str(value)[:80],
            )  # fmt: skip
        told = _told(value, f"{where}: {key}")
        if known[name] is inspect.Parameter.POSITIONAL_ONLY:
            words += told
        elif value is True:
            options.append(f"--{name.replace('_', '-')}")
        elif value is not False:
            options += [word for one in told for word in (f"--{name.replace('_', '-')}", one)]
    return words + options


def _told(value: Any, where: str) -> list[str]:
    """A value as words of a command line. Raises RequestError for what is neither text, number, nor a list of them."""
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        raise RequestError(
            f"{where} is a text, a number, true or false, or a list of these", code="type", field="steps"
        )
    return [str(one) for one in values]


def run_experiment(app: App, path: str, seeds: int | None, say: Callable[[str], None]) -> None:
    """Runs the commands of an experiment one after the other; each goes on where it stopped."""
    import shlex

    lines = commands(app, path, seeds)
    say(f"{Path(path).name}: {read_tree(path)['about']}")
    for words in lines:
        say(shlex.join(["glassformer", *words]))
        app(words, exit_on_error=False, print_error=False)
