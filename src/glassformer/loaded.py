"""A model ready to run, from a run folder or a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import ModelConfig
from glassformer.figures import Markup, tag
from glassformer.model import Model
from glassformer.parts.head import Pool
from glassformer.text import Tokenizer


@dataclass(frozen=True)
class Pooling:
    """How a checkpoint says that hidden states become one vector for a text."""

    how: Pool
    normalize: bool
    """To length 1."""
    max_tokens: int | None = None
    """Of a text; what follows is cut off. None: the model's context."""


@dataclass
class Loaded:
    """A model ready to run, with what it needs to read and write text."""

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer | None
    fresh: tuple[str, ...] = ()
    """Parameters that the checkpoint does not have: they begin anew."""
    regrouped: tuple[str, ...] = ()
    """Parameters whose keys or values were made of other numbers of heads."""
    ends: tuple[int, ...] = ()
    """Ids at which an answer ends, where the checkpoint names them."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """How it says that an answer is drawn, in the words of a generation_config.json."""
    pooling: Pooling | None = None
    """How it says that a text becomes a vector, where it is one of sentence-transformers."""

    def __post_init__(self) -> None:
        """Tells the model its ends: the checkpoint's and the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_id
        if ends := dict.fromkeys([*self.ends, *([] if own is None else [own])]):
            self.model.ends = tuple(ends)

    @property
    def adapted(self) -> list[str]:
        """What is not as it lies in the checkpoint, a clause each."""
        told = []
        if self.regrouped:
            told.append(f"{len(self.regrouped):,} parameters have keys and values made of other numbers of heads")
        if self.fresh:
            told.append(f"{len(self.fresh):,} parameters begin anew")
        return told

    def _repr_html_(self) -> str:
        """In a notebook: the parts and their parameters, and what reads its text."""
        read = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        size = "" if self.tokenizer is None else f" of {self.tokenizer.vocab_size:,} tokens"
        return tag("div", Markup(self.config._repr_html_()), tag("p", "; ".join([f"{read}{size}", *self.adapted])))
