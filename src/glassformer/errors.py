"""The two ways in which a request can end badly, and the exit status each one has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral


class RequestError(ValueError):
    """The request was wrong: one sentence that names the field, the value, and what would be right (exit 2)."""

    exit_status = 2


class WorkError(RuntimeError):
    """The request was right but the work failed: one sentence that says what failed and what to do (exit 1)."""

    exit_status = 1


NO_MEMORY = "this needs more memory than the machine has"


def no_memory(error: BaseException) -> bool:
    """Whether the error is of an allocation that failed, which torch tells as a RuntimeError."""
    told = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )


def check_whole(name: str, value: object, least: int = 1) -> None:
    """RequestError where the value is no whole number, or less than the least."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(f"{name}={value!r} must be a whole number from {least} up")
    if int(value) < least:
        raise RequestError(f"{name}={value} must be at least {least}")


LONGEST = 80
"""Characters of a stranger's word in a sentence of ours."""


def shown(word: object, most: int = LONGEST) -> str:
    """A stranger's word in a sentence of ours: at most so many characters, on one line, none of them unprintable."""
    return printable(" ".join(str(word)[:most].split()))[:most]


def printable(text: str) -> str:
    """The text with what a terminal would obey rather than print, and what no encoding has, as Python escapes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """`; did you mean "x" or "y"?`, or an empty string where nothing is near."""
    options, word = sorted(set(known)), word[:LONGEST]
    near = difflib.get_close_matches(word, options, n=limit, cutoff=0.6)
    near = near or [name for name in options if word.lower() in name.lower()][:limit]
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
