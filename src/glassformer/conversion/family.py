"""A published family: its config fields and its tensor names, each readable and writable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glassformer.config import BlockConfig, ModelConfig
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names
from glassformer.errors import RequestError, shown
from glassformer.parts.ffn import ExpertsConfig, FFNConfig
from glassformer.parts.mixer import AttentionConfig


@contextmanager
def complaints(where: str) -> Iterator[None]:
    """Turns every exception of reading an untrusted config into a RequestError that names the file."""
    try:
        yield
    except RequestError as problem:
        named = str(problem).startswith(where)
        raise problem if named else problem.of(where) from None
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as problem:
        told = f"{where} describes no model ({shown(problem, 160)})"
        raise RequestError(told, code="damaged", field=Path(where).name) from None


@dataclass(frozen=True)
class Gguf:
    """Storage of the family in llama.cpp: its name, its metadata and its tensors."""

    architecture: str
    names: Names
    fields: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json, dotted if nested -> key of the GGUF metadata, without the architecture; added to the common
    ones."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flag of config.json -> tensor whose presence sets it; `!name`: whose absence."""
    unheeded: frozenset[str] = frozenset()
    """Metadata keys that llama.cpp ignores, so that their values block an export to it."""
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}
    """Function from the metadata (without the architecture's name) to fields of config.json that llama.cpp derives."""
    factors: bool = False
    """True if llama.cpp reads divisors of the frequencies for each pair (rope_freqs, rope_factors)."""
    fraction: str = "partial_rotary_factor"
    """Field of config.json with the share of the head that is rotated."""


@dataclass(frozen=True)
class Family:
    """A published family. `read` is exact: it builds the model that the fields describe or refuses. `write` returns the
    fields nearest to a config; the family can hold the config if reading them gives it back (exports.py)."""

    model_type: str
    """Value of `model_type` in config.json."""
    architecture: str
    """Class of `transformers` for a language model."""
    names: Callable[[ModelConfig], Names] | Names
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    gguf: Gguf | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """Classes for other heads: "vector" and "classes" -> class."""
    start: str = "pad_token_id"
    """Key of the token with which the decoder starts a text, if config.json has no field for it."""

    as_ours: Callable[[Any, Any], None] = lambda theirs, model: None
    """Function of (the published model, ours) that, for comparisons, makes the former compute in evaluation as in
    training, if it differs."""

    of_class: Callable[[str], str] = lambda name: name
    """Function from a tensor's name in the file to its name in the class, if `transformers` renames it."""

    def architecture_of(self, config: ModelConfig) -> str:
        """Returns the class of `transformers` for this config. Raises Blocked for a head without one."""
        if config.head.predicts_tokens:
            return self.architecture
        kind = "vector" if config.head.vector else "classes"
        if kind not in self.others:
            raise Blocked({"head.classes" if config.head.classes else "head.vector": config.head.classes or True})
        return self.others[kind]

    def config(self, fields: Fields) -> ModelConfig:
        """Reads a config, and turns every error into one sentence that names the file. Raises RequestError."""
        with complaints(fields.where):
            return self.read(fields)

    def names_of(self, config: ModelConfig) -> Names:
        """Returns the names for a config; most families have one set."""
        return self.names if isinstance(self.names, Names) else self.names(config)


class Blocked(RequestError):
    """A config that a family cannot hold; `parts` are the paths that block it, with their values."""

    def __init__(self, parts: Mapping[str, Any]):
        self.parts = dict(parts)
        told, (field, value) = ", ".join(f"{path}={held}" for path, held in parts.items()), next(iter(parts.items()))
        super().__init__(told, code="unsupported", field=field, value=value)


def attention(block: BlockConfig) -> AttentionConfig:
    """Returns the block's mixer. Raises Blocked if it is not attention."""
    if not isinstance(block.mixer, AttentionConfig):
        raise Blocked({"mixer.kind": block.mixer.kind})
    return block.mixer


def ffn(block: BlockConfig) -> FFNConfig:
    """Returns the block's FFN. Raises Blocked for a block without one."""
    if block.ffn is None:
        raise Blocked({"ffn": None})
    return block.ffn


def experts(block: BlockConfig) -> ExpertsConfig:
    """Returns the block's mixture of experts. Raises Blocked for another FFN."""
    if not isinstance(block.ffn, ExpertsConfig):
        raise Blocked({"ffn.kind": block.ffn.kind if block.ffn else None})
    return block.ffn
