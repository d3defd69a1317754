"""Texts of `glassformer explain`: words of the grammar, topics, and terms of the glossary. Torch is not needed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names.checks import knows_others
from glassformer.names.known import SHORT_NAMES

FOLDER = Path(__file__).parent


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


@cache
def texts() -> dict[str, dict[str, Any]]:
    """Returns the texts of `glassformer explain` by word: for each word a dict with the keys what and formula, and for
    some words claims, page, kind or word."""
    return _read("explained.yaml")


@cache
def glossary() -> dict[str, dict[str, str]]:
    """Returns the glossary: for each section, the meanings by term."""
    return _read("glossary.yaml")


@cache
def terms() -> dict[str, str]:
    """Returns the meanings of the glossary by term; `stack, stage` and `network (ffn)` are two terms each."""
    found: dict[str, str] = {}
    for section in glossary().values():
        for names, meaning in section.items():
            for name in re.split(r", | \(|\)", names):
                if name:
                    found.setdefault(name, meaning)
    return found


def _plain(word: str) -> str:
    return re.sub(r"[ _-]", "", word.lower().lstrip("+").partition(":")[0])


def check_explained(word: str) -> str:
    """Returns the known spelling of a word to explain: `+GQA:2` is gqa. An unknown word is returned unchanged if parts
    from outside the package may define it, otherwise RequestError is raised."""
    known = {_plain(name): name for name in (*terms(), *SHORT_NAMES, *texts())}
    for one in (_plain(word), _plain(word).removesuffix("s")):
        if one in known:
            return known[one]
    if knows_others():
        return word
    raise unknown(word)


def unknown(word: str) -> RequestError:
    """Returns the refusal of a word that is not known, with the nearest ones."""
    names = [*SHORT_NAMES, *texts(), *terms()]
    return RequestError(
        f"explain knows no word {shown(repr(word))}{did_you_mean(word.lower(), names)}; glassformer presets lists the "
        "words of the grammar, docs/glossary.md the terms",
        code="unknown", field="word", value=word,
    )  # fmt: skip
