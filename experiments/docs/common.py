"""The model and the text that pages about readings and statistics share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import glassformer as gf
from glassformer.model import Model

PASSAGE = """The keeper of the lighthouse counted the ships every evening and wrote their names into a green book. On
the first page stood the Mary Ellen, a schooner of ninety tons, which carried salt to the islands and came back with
wool. Below her stood the Petrel, the Good Intent, and a brig without a name whose captain never answered the lamp.
"""


@dataclass(frozen=True)
class Smol:
    model: Model
    tokenizer: Any

    def tokens(self, text: str) -> Tensor:
        """(1, s)"""
        return torch.tensor([list(self.tokenizer.encode(text))])

    def token(self, text: str) -> int:
        """The id of a text of one token."""
        (one,) = self.tokenizer.encode(text)
        return int(one)


@cache
def smollm2() -> Smol:
    loaded = gf.load("smollm2", dtype=torch.float32)
    return Smol(loaded.model, loaded.tokenizer)
