"""Papers by their number on arXiv, for citations that a reader can look up."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

FILE = Path(__file__).with_name("papers.yaml")
NUMBER = re.compile(r"\b(?:\d{4}\.\d{5}|(?:0[7-9]|1[0-4])\d{2}\.\d{4})\b")
"""Five digits after the point, and four until 2014."""


class Paper(NamedTuple):
    """Paper on arXiv."""

    number: str
    """Number on arXiv, such as 1706.03762."""
    authors: str
    """Authors and year."""
    title: str

    @property
    def address(self) -> str:
        """Address of the abstract."""
        return f"https://arxiv.org/abs/{self.number}"

    def __str__(self) -> str:
        return f'{self.authors}, "{self.title}" (arXiv {self.number})'


@cache
def papers() -> dict[str, Paper]:
    """Returns all papers that the package cites, by number."""
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {number: Paper(number, authors, title) for number, (authors, title) in found.items()}


def cited(text: str) -> str:
    """Returns a text with authors and title in front of the number of each paper."""
    return NUMBER.sub(lambda match: str(papers().get(match[0], match[0])), text)
