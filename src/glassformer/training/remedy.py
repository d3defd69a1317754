"""Command that trains again with a remedy: the one that was typed, with a change after the model's expression."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from glassformer.errors import RequestError
from glassformer.names import grammar
from glassformer.names.checks import check_model
from glassformer.training.folder import COMMAND

OUT = "--out"


def remedy(folder: Path, tries: Sequence[str]) -> str:
    """Returns the command that repeats a failed run with the first of the changes `tries`; empty if no command is
    known.

    Parameters
    ----------
    folder
        A run folder, which a verb has written: its command.txt is read, or results.json of the comparison around it. A
        run of `train` is repeated in another folder; a comparison gets one more arm, and its other runs are kept.
    tries
        Changes and fields of the recipe, as `Cause.tries` has them.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RequestError):
        if (folder / COMMAND).is_file():
            words = shlex.split((folder / COMMAND).read_text(encoding="utf-8"))
            at = _model(words)
            return _again(words, at, at, tries[:1])
        request = json.loads((folder.parent / "request.json").read_text(encoding="utf-8"))
        results = json.loads((folder.parents[2] / "results.json").read_text(encoding="utf-8"))
        words = shlex.split(results["command"])
        at = words.index(request["name"], 2)
        return _again(words, at, at + 1, [one for one in tries if not one.startswith("recipe.seed=")][:1])
    return ""


def _again(words: list[str], at: int, end: int, tries: Sequence[str]) -> str:
    """Returns the command `words` as text, with the first of `tries` applied to the model expression `words[at]`. The
    changed expression is inserted before `words[end]`, as one more arm; if end == at it replaces the old one, and the
    output folder changes too. Returns "" without `tries`, and if the text came from standard input."""
    if not tries or "-" in words or "--data=-" in words:
        return ""
    field = tries[0].removeprefix("+").partition("=")[0]
    name, *changes = grammar.CHANGES.split(words[at])
    kept = [one for one in changes if "=" not in one or one.partition("=")[0] != field]
    model = "+".join([name, *kept, tries[0].removeprefix("+")])
    if end > at:
        return shlex.join([*words[:end], model, *words[end:]])
    changed = [*words[:at], model, *words[at + 1 :]]
    option = f"--{field.removeprefix('recipe.').replace('_', '-')}"
    return shlex.join(_elsewhere(_without(changed, option, "--lr" if option == "--learning-rate" else option)))


def _model(words: Sequence[str]) -> int:
    """Returns the index of the model's expression among the words of a command. Raises ValueError if no word is an
    expression."""
    free = [i for i in range(2, len(words)) if not words[i].startswith("-")]
    # words after an option are tried last, because --out NAME is more frequent than --watch MODEL
    for i in sorted(free, key=lambda i: words[i - 1].startswith("-")):
        with suppress(RequestError):
            check_model(words[i])
            return i
    raise ValueError("no expression")


def _without(words: Sequence[str], *options: str) -> list[str]:
    """Returns the words of a command with --resume removed, and with these `options` and their values removed."""
    valued = {i for i, word in enumerate(words) if word in options}
    kept = [word for i, word in enumerate(words) if i not in valued and i - 1 not in valued]
    return [word for word in kept if word != "--resume" and word.partition("=")[0] not in options]


def _elsewhere(words: list[str]) -> list[str]:
    """Returns the words of a command with another output folder, which does not exist yet."""
    for i, word in enumerate(words):
        if word.startswith(f"{OUT}="):
            return [*words[:i], f"{OUT}={_free(word.removeprefix(f'{OUT}='))}", *words[i + 1 :]]
        if word == OUT and i + 1 < len(words):
            return [*words[: i + 1], _free(words[i + 1]), *words[i + 2 :]]
    return words


def _free(folder: str) -> str:
    number = 2
    while Path(f"{folder.rstrip('/')}-{number}").exists():
        number += 1
    return f"{folder.rstrip('/')}-{number}"
