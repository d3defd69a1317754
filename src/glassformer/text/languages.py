"""Synthetic languages with exact answers: pairs of a source and its correct target, as a corpus."""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Iterator

from glassformer.errors import RequestError, did_you_mean
from glassformer.text.documents import BETWEEN, Corpus, Document

PREFIX = "pairs:"
COUNT = 20_000
"""Number of distinct pairs of a language."""
VERSION = 1  # version of the content of languages

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
LETTERS = "abcdefghijklmnop"


def words(n: int) -> str:
    """Returns n, from 0 to 999,999, in English words: 21042 is twenty-one thousand forty-two."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    size, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{words(n // size)} {name}" + (f" {words(n % size)}" if n % size else "")


def numbers(draw: random.Random) -> tuple[str, str]:
    """Draws a pair (number in words, digits); short numbers are as probable as long ones."""
    n = draw.randrange(10 ** draw.randint(1, 6))
    return words(n), str(n)


def dates(draw: random.Random) -> tuple[str, str]:
    """Draws a pair (date as it is spoken, date in ISO 8601)."""
    day = datetime.date(1600, 1, 1) + datetime.timedelta(days=draw.randrange(200_000))
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}", day.isoformat()


def reversal(draw: random.Random) -> tuple[str, str]:
    """Draws a pair (four to ten letters, the letters reversed)."""
    text = "".join(draw.choices(LETTERS, k=draw.randint(4, 10)))
    return text, text[::-1]


LANGUAGES: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "numbers": numbers,
    "dates": dates,
    "reversal": reversal,
}


def pairs(language: str, count: int = COUNT, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yields `count` pairs (source, target) of a language without repeated sources, a pure function of the
    arguments."""
    draw, seen = random.Random(f"{language} {seed}"), set[str]()
    while len(seen) < count:
        source, target = LANGUAGES[language](draw)
        if source not in seen:
            seen.add(source)
            yield source, target


def open_pairs(data: str) -> Corpus:
    """Opens the corpus `pairs:LANGUAGE`: each pair is a document of its source, a tab, its target. Raises RequestError
    for an unknown language."""
    language = data.removeprefix(PREFIX)
    if language not in LANGUAGES:
        raise RequestError(
            f"data={data!r}: known languages are {', '.join(LANGUAGES)}{did_you_mean(language, LANGUAGES)}",
            code="unknown", field="data", value=data, expected=f"{PREFIX}LANGUAGE",
        )  # fmt: skip

    def documents() -> Iterator[Document]:
        for number, (source, target) in enumerate(pairs(language)):
            yield Document(f"{language} {number}", f"{source}{BETWEEN}{target}")

    made = hashlib.sha256(f"{data} {COUNT} {VERSION}".encode()).hexdigest()
    return Corpus(data, made, documents)
