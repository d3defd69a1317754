"""The model and the text that pages about readings and statistics share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import glassformer as gf
from glassformer.model import Model

PASSAGE = Path(__file__).with_name("passage.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Smol:
    model: Model
    tokenizer: Any

    def tokens(self, text: str) -> Tensor:
        """Returns the ids of a text (1, s)."""
        return torch.tensor([list(self.tokenizer.encode(text))])

    def token(self, text: str) -> int:
        """Returns the id of a text of one token."""
        (one,) = self.tokenizer.encode(text)
        return int(one)


@cache
def smollm2() -> Smol:
    loaded = gf.load("smollm2", dtype=torch.float32)
    return Smol(loaded.model, loaded.tokenizer)
