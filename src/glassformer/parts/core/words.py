"""Short names of parts in expressions: the words of `llama+rope+gqa:2`. A part declares its own, in its own file:

    class RMSNormConfig(NormConfig, kind="rmsnorm", words="rmsnorm"):
    class SlidingWindowConfig(VisibilityConfig, kind="...", words=Word("window", whole("window"), "256")):

A word replaces the model's part of the same axis (norm, mixer). A word with `change` changes a property of all mixers
that have the property. A word of an axis' base class sets fields of the part that the model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.errors import RequestError

Reader = Callable[[str, str], Mapping[str, Any]]
"""Function of (short name, text after the colon) that returns the fields of a config; raises RequestError for a text
that it cannot read."""


@dataclass(frozen=True)
class Word:
    """Short name of a part in an expression, `+name` or `+name:value`.

    read      function that makes fields from the value; None for a word without a value
    example   a value, for listings and messages
    optional  True if the value may be left out
    fields    further fields of the config that the word sets
    change    property of mixers that the word changes, to the value of the field of that name; a function gets the
              old value and the norm of the block
    """

    name: str
    read: Reader | None = None
    example: str = ""
    optional: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    change: str = ""

    def __str__(self) -> str:
        """Returns the short name with its example value, as in a listing: `gqa:2`, `swiglu[:1024]` (optional),
        `rope`."""
        value = f":{self.example}" if self.read else ""
        return f"{self.name}[{value}]" if self.optional else f"{self.name}{value}"

    def given(self, value: str | None) -> dict[str, Any]:
        """Returns the fields of a config that `+name:value` sets, or `+name` for a `value` of None. Raises RequestError
        for a value that is missing, superfluous or unreadable."""
        if self.read is None:
            if value is not None:
                raise RequestError(
                    f"+{self.name} takes no value, and {value!r} was given",
                    code="range", field=self.name, value=value, expected="no value",
                )  # fmt: skip
            return dict(self.fields)
        if value:
            return {**self.fields, **self.read(self.name, value)}
        if value is not None and self.optional:
            raise RequestError(
                f"+{self.name}: has a colon without a value; give one, or leave the colon out",
                code="missing", field=self.name, value=value, expected="a value",
            )  # fmt: skip
        if not self.optional:
            raise RequestError(
                f"+{self.name} needs a value, such as +{self.name}:{self.example}",
                code="missing", field=self.name, expected=f"a value such as {self.example}",
            )  # fmt: skip
        return dict(self.fields)


Words = str | Word | tuple[str | Word, ...]


def as_words(words: Words) -> tuple[Word, ...]:
    several = words if isinstance(words, tuple) else (words,)
    return tuple(Word(word) if isinstance(word, str) else word for word in several)


def whole(name: str) -> Reader:
    """Returns a function of (short name, text) that reads the text as a whole number >= 1, the field `name`."""
    return lambda word, text: {name: whole_number(word, text)}


def positive(name: str) -> Reader:
    """Returns a function of (short name, text) that reads the text as a number > 0, the field `name`."""
    return lambda word, text: {name: positive_number(word, text)}


def number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{word}:{text}: {text!r} is not a number"
        raise RequestError(message, code="type", field=word, value=text, expected="a number") from None


def positive_number(word: str, text: str) -> float:
    value = number(word, text)
    if not 0 < value < float("inf"):
        message = f"{word}:{text}: the value must be a number above 0"
        raise RequestError(message, code="range", field=word, value=text, expected="a number above 0")
    return value


def whole_number(word: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        message = f"{word}:{text}: the value must be a whole number from 1 up"
        raise RequestError(message, code="range", field=word, value=text, expected="an integer >= 1")
    return int(text)
