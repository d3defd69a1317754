"""Errors of requests and of work, with the exit status of each."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import PurePath
from typing import Any, Literal

Code = Literal[
    "causal", "changed", "conflict", "damaged", "disk", "diverged", "exists", "failed", "memory", "missing", "network",
    "process", "range", "schema", "stopped", "syntax", "type", "unknown", "unsupported",
]  # fmt: skip
"""Kind of an error, for programs"""

CODES: dict[Code, str] = {
    "causal": "The work needs a model in which no token sees a later one, or one in which every token does.",
    "changed": "A file, a model or a setting differs from the one at the start of the work.",
    "conflict": "Two things that were asked for exclude each other.",
    "damaged": "A file does not hold what its kind of file holds.",
    "disk": "The operating system refuses to read, write or map a file.",
    "diverged": "A number that the work rests on is infinite or not a number.",
    "exists": "The place is taken.",
    "failed": "Part of the work, such as one run of several, did not succeed.",
    "memory": "There is not enough memory.",
    "missing": "A value, a file or a library that is needed was not given or not found.",
    "network": "Another computer cannot be reached.",
    "process": "Another process cannot be started, or ended too early.",
    "range": "A number, a size or a length is too small or too large.",
    "schema": "A file was written in another version of its format.",
    "stopped": "The work was stopped from outside.",
    "syntax": "A text does not follow the grammar that it should.",
    "type": "A value is of another kind than it should be.",
    "unknown": "A name is not among those that are known.",
    "unsupported": "The request has a meaning that this program, format or machine cannot give it.",
}
"""Codes of errors, with their meaning"""


def _restored(kind: type[BaseException], message: str, fields: dict[str, object]) -> BaseException:
    """Rebuilds an error from another process."""
    error = kind.__new__(kind, message)
    vars(error).update(fields)
    return error


class RequestError(ValueError):
    """Refusal of a wrong request, in one sentence with the field, the value and the expected value (exit status 2).

    Parameters
    ----------
    message
        Sentence that replaces the one made of the other parameters.
    code
        Kind of the error, one of `CODES`.
    field
        Path of the field, option, file or key at fault, such as "mixer.n_heads".
    value
        The given value.
    expected
        Description of the values that are accepted.

    Examples
    --------
    >>> try:
    ...     gf.preset("llama@1m+gqa:3")
    ... except gf.RequestError as problem:
    ...     print(problem.code, problem.field, problem.value)
    range n_kv_heads 3
    """

    exit_status = 2

    def to_dict(self) -> dict[str, str]:
        """Returns code, field and message, for programs.

        Returns
        -------
        dict of str
            Keys code, field, message.

        Examples
        --------
        >>> gf.RequestError("seed is missing", code="missing", field="seed").to_dict()["field"]
        'seed'
        """
        return {"code": self.code, "field": self.field, "message": str(self)}

    def __init__(self, message: str = "", *, code: Code, field: str, value: object = None, expected: str = ""):
        super().__init__(_short(message or f"{field} must be {expected}, got {value!r}", value))
        self.code, self.field, self.value, self.expected = code, field, value, expected

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), str(self), vars(self))

    def of(self, what: str) -> RequestError:
        """Returns the error with the name of the file, arm or step at fault before its sentence.

        Parameters
        ----------
        what
            The name.

        Returns
        -------
        RequestError
            The error, with the same code, field and value.

        Examples
        --------
        >>> str(gf.RequestError("seed is missing", code="missing", field="seed").of("design.yaml"))
        'design.yaml: seed is missing'
        """
        return RequestError(
            f"{what}: {self}", code=self.code, field=self.field, value=self.value, expected=self.expected
        )


class WorkError(RuntimeError):
    """Failure of correctly requested work, in one sentence with a remedy (exit status 1).

    Parameters
    ----------
    message
        The sentence.
    code
        Kind of the error, one of `CODES`.

    Examples
    --------
    >>> gf.WorkError("the run diverged", code="diverged").code
    'diverged'
    """

    exit_status = 1

    def to_dict(self) -> dict[str, str]:
        """Returns code, field and message, for programs; no field is at fault.

        Returns
        -------
        dict of str
            Keys code, field (empty), message.

        Examples
        --------
        >>> gf.WorkError("the run diverged", code="diverged").to_dict()["code"]
        'diverged'
        """
        return {"code": self.code, "field": "", "message": str(self)}

    reported = False
    """True if the printed result contains the failure already"""

    def __init__(self, message: str, *, code: Code):
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), str(self), vars(self))


def _short(message: str, value: object) -> str:
    """Returns a sentence with its value cut to at most `LONGEST` characters, and with a path written as text."""
    if isinstance(value, PurePath):
        message = message.replace(repr(value), repr(str(value)))
        value = str(value)
    try:
        forms = () if value is None else (repr(value), str(value))
    except RecursionError:  # a tree of thousands of levels
        forms = ()
    for written in forms:
        if len(written) > LONGEST + 2 or "\n" in written:  # 2 for the quotes of a text
            message = message.replace(written, shown(written))
    return message


def plain_error(error: BaseException) -> list[str]:
    """Returns an error as plain data, for another process to restore it with `error_of`."""
    if isinstance(error, RequestError):
        return [str(error), error.code, error.field]
    return [str(error) or type(error).__name__, error.code if isinstance(error, WorkError) else "failed"]


def error_of(plain: list[Any]) -> RequestError | WorkError:
    """Restores an error from the result of `plain_error`: a WorkError if it has no field, otherwise a RequestError."""
    message, code, *field = plain
    return RequestError(message, code=code, field=field[0]) if field else WorkError(message, code=code)


@contextmanager
def keeping(made: Callable[[], object]) -> Iterator[None]:
    """Attaches the results so far to an error or interrupt that ends the block, as its `so_far`.

    `made` returns them, or None; results of an inner block have precedence."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if so_far(error) is None:
            vars(error)["so_far"] = made()
        raise


def so_far(error: BaseException) -> Any:
    """Returns the results that were ready before an error ended the work; None without any."""
    return vars(error).get("so_far")


FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Error numbers for a file that may not be read or written"""
REFUSALS = FORBIDDEN | {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
"""Error numbers that another path or permission avoids; all others are failures of the work"""


def system_error(problem: OSError) -> RequestError | WorkError:
    """Converts an OSError to a RequestError or WorkError, with the same form of message for every file."""
    where = str(problem.filename or "a file")
    message = f"{shown(where, 200)} cannot be read or written ({problem.strerror or problem})"
    if problem.errno in REFUSALS:
        return RequestError(message, code="disk", field=where, value=where)
    return WorkError(message, code="disk")


NO_MEMORY = "this needs more memory than the machine has"


def no_memory(error: BaseException) -> bool:
    """Returns True if an allocation failed, on any device. On a CPU torch raises a plain RuntimeError for it."""
    phrases = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
    message = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in message for phrase in phrases)
    )


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises RequestError unless the value is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        message = f"{name}={value!r} must be a whole number from {least} up"
        raise RequestError(message, code="type", field=name, value=value, expected=f"an integer >= {least}")
    if int(value) < least:
        message = f"{name}={value} must be at least {least}"
        raise RequestError(message, code="range", field=name, value=value, expected=f"an integer >= {least}")


def check_seed(seed: object) -> int:
    """Returns a seed as an int. Raises RequestError unless it is a non-negative integer of at most 63 bits."""
    if isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= int(seed) < 1 << 63:
        return int(seed)
    message = f"seed={shown(seed, 40)} must be a whole number from 0 up to 2^63"
    code: Code = "range" if isinstance(seed, int) else "type"
    raise RequestError(message, code=code, field="seed", value=seed, expected="an integer in [0, 2**63)")


LONGEST = 80
"""Largest number of characters of foreign text in a message"""


def shown(word: object, most: int = LONGEST) -> str:
    """Returns foreign text for a message: at most `most` characters, on one line, all of them printable."""
    return printable(" ".join(str(word)[:most].split()))[:most]


def printable(text: str) -> str:
    """Returns the text with control characters and unencodable ones escaped as in Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def initials(name: str) -> str:
    """Returns the first letters of the words of a name.

    >>> initials("learning_rate")
    'lr'
    """
    return "".join(word[0] for word in re.split(r"[_\W]+", name) if word).lower()


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """Returns `; did you mean "x" or "y"?`, or an empty string if no known word is similar."""
    options, word = sorted(set(known)), word[:LONGEST]
    near = difflib.get_close_matches(word, options, n=limit, cutoff=0.6)
    near = near or [name for name in options if word.lower() in name.lower()][:limit]
    near = near or [name for name in options if len(word) > 1 and word.lower() == initials(name)][:limit]
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
