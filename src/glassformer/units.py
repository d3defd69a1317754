"""Numbers with suffixes and units: 80GB, 3.35TB/s, 4k, 15T."""

from __future__ import annotations

import re

from glassformer.errors import RequestError, shown

POWERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*([kKmMgGtTpP]i?|[bB])?")


def quantity(text: object, unit: str = "", field: str = "") -> float:
    """Returns the number in `text`, in units of `unit`; a plain number has this unit.

    >>> quantity("80GB", "B"), quantity("80GiB", "B"), quantity("15T"), quantity("3.35TB/s", "B/s")
    (80000000000.0, 85899345920.0, 15000000000000.0, 3350000000000.0)

    Raises RequestError for another unit, or if it is not a number."""
    expected = f"a number such as {f'80G{unit}' if unit else '4k or 15T'}"
    sentence = "" if field else f"{shown(repr(text))} is not {expected}"
    wrong = RequestError(sentence, code="type", field=field, value=text, expected=expected)
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise wrong
    written = str(text).replace("_", "").replace(",", "").strip()
    if unit and written.lower().endswith(unit.lower()):
        written = written[: -len(unit)].strip()
    found = NUMBER.fullmatch(written) if len(shown(written)) == len(written) else None
    power = ((found[2] or "") if found else "").lower()
    if found is None or (unit and power == "b"):
        raise wrong
    value = float(found[1]) * {**POWERS, **BINARY}[power]
    if value == float("inf"):
        raise RequestError(
            f"{shown(text)!r} is more than a number can hold", code="range", field=field, value=text, expected=expected
        )
    return value


def count(value: object, field: str = "") -> int:
    """Returns a count, written as 200_000 or as "200k". Raises RequestError unless it is a whole number.

    >>> count("200k"), count(5_000_000)
    (200000, 5000000)
    """
    number = quantity(value, field=field)
    if number != int(number):
        sentence = "" if field else f"{shown(repr(value))} is not a whole number"
        raise RequestError(sentence, code="type", field=field, value=value, expected="a whole number")
    return value if isinstance(value, int) else int(number)


def plural(number: float, noun: str) -> str:
    """Returns a number with its noun, which takes an s unless the number is 1.

    >>> plural(1, "step"), plural(0.5, "minute"), plural(12000, "token")
    ('1 step', '0.5 minutes', '12,000 tokens')
    """
    return f"{number:{',' if isinstance(number, int) else ',g'}} {noun}{'' if number == 1 else 's'}"


def share(text: str, field: str = "") -> float:
    """Returns a fraction, written as `1%` or `0.01`. Raises RequestError for other text."""
    written = text.strip()
    percent = written.endswith("%")
    found = NUMBER.fullmatch(written.removesuffix("%").strip())
    if found is None or found[2]:
        raise RequestError(code="type", field=field or "share", value=text, expected="a share such as 1% or 0.01")
    return float(found[1]) / (100 if percent else 1)


def whole_numbers(text: str, field: str = "") -> list[int]:
    """Returns a list of integers: `3,5,8` is [3, 5, 8]. Raises RequestError for other text."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise RequestError(code="type", field=field or "numbers", value=text, expected="whole numbers such as 3,5,8")
    return [int(word) for word in words]
