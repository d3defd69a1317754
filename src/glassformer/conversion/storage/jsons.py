"""Parser of untrusted JSON, member by member, so that a small file cannot unfold into gigabytes.

`json.loads` turns three bytes (`[],`) into eighty. Here an object's members are found by one expression that allocates
only the match, and each caller decodes only values of bounded length. The quantifiers are possessive: time is linear
for any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

LONGEST_NAME = 4096
DEEPEST = 100
"""Most levels of nested lists and objects. The interpreter's limit does not suffice, because compiling a model raises
it."""
STRING = rb'"(?:[^"\\]++|\\.)*+"'


def _object(inner: bytes = STRING) -> bytes:
    return rb'\{(?:[^{}"]++|' + STRING + b"|" + inner + rb")*+\}"


_VALUE = _object(_object(_object())) + b"|" + STRING + rb'|[^\s{}",]++'  # objects three deep; no lists outside of them
_SPACE = rb"[ \t\r\n]*+"
_OPEN = re.compile(_SPACE + rb"\{" + _SPACE)
_CLOSE = re.compile(_SPACE + rb"\}" + _SPACE + rb"\Z")
_MEMBER = re.compile(
    b"(" + STRING + b")" + _SPACE + b":" + _SPACE + b"(" + _VALUE + b")" + _SPACE + b"(?:," + _SPACE + rb'(?=")|(?=\}))'
)
_BRACKETS = re.compile(STRING + rb"|[\[\]{}]")


class BadJSON(ValueError):
    """Error, with the reason, for a text that is not a JSON object of the kind read here."""


def members(text: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """Yields (decoded name, text of the value) of the members of a JSON object in order. Raises BadJSON, also for more
    than `most` members and for a duplicate name.

    Values may be strings, numbers, or objects; of an object only the braces are checked."""
    opening = _OPEN.match(text)
    if not opening:
        raise BadJSON("it is not a JSON object")
    at = opening.end()
    seen: set[str] = set()
    while member := _MEMBER.match(text, at):
        if len(member[1]) > LONGEST_NAME:
            raise BadJSON(f"the JSON has a name of {len(member[1])} bytes")
        name = string(member[1])
        if name in seen or len(seen) == most:
            raise BadJSON(f"the JSON names {name[:80]!r} twice" if name in seen else f"it has more than {most} members")
        seen.add(name)
        yield name, member[2]
        at = member.end()
    if not _CLOSE.match(text, at):
        raise BadJSON(f"the JSON is damaged at byte {at}")


def string(text: bytes) -> str:
    """Returns the string that a JSON text encodes. Raises BadJSON for another value, and for half a surrogate pair,
    which no name can hold."""
    if text.isascii() and text[:1] == text[-1:] == b'"' and b"\\" not in text and len(text) > 1:
        inner = text[1:-1].decode()
        if inner.isprintable() and '"' not in inner:  # needs no decoding: most names
            return inner
    value = small(text)
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise BadJSON(f"the JSON has {text[:40]!r} where a string belongs") from None
    return value


def small(text: bytes) -> Any:
    """Returns the value that a JSON text encodes, for callers that have bounded its length. Raises BadJSON, also for a
    duplicate name."""
    try:
        if _depth(text) > DEEPEST:
            raise ValueError
        return _DECODER.decode(text.decode("utf-8"))
    except ValueError:
        raise BadJSON(f"the JSON is damaged at {text[:40]!r}") from None


def _depth(text: bytes) -> int:
    """Returns how deeply lists and objects are nested; 0 for texts with at most DEEPEST brackets, which need no
    check."""
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return 0
    steps = ((found[0] in b"[{") - (found[0] in b"]}") for found in _BRACKETS.finditer(text))
    return max(accumulate(steps), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
