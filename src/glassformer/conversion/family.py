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
    """Turns exceptions inside the block, from reading an untrusted config, into a RequestError that names the file
    `where`."""
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
    """Storage of a family in llama.cpp's format: the architecture's name, the keys of its metadata, the names of its
    tensors."""

    architecture: str
    names: Names
    fields: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json, dotted if nested -> key of the GGUF metadata, without the architecture; added to the keys
    that all families share."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flag of config.json -> name of the tensor whose presence sets it, or `!name` if its absence does."""
    unheeded: frozenset[str] = frozenset()
    """Metadata keys that llama.cpp ignores, so that their values block an export to it."""
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}
    """Function from the metadata (without the architecture's name) to fields of config.json that llama.cpp derives."""
    factors: bool = False
    """True if llama.cpp reads tensors of frequency divisors, one per rotated pair (rope_freqs, rope_factors)."""
    fraction: str = "partial_rotary_factor"
    """Name of the field of config.json with the rotated share of a head."""


@dataclass(frozen=True)
class Family:
    """A published family of models. `read` is exact: it returns the config that the fields describe or raises
    RequestError. `write` returns the fields nearest to a config; the family can hold the config if reading them gives
    it back (exports.py)."""

    model_type: str
    """Value of `model_type` in config.json."""
    architecture: str
    """Name of the class of `transformers` for a language model."""
    names: Callable[[ModelConfig], Names] | Names
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    gguf: Gguf | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """Kind of another head, "vector" or "classes" -> name of its class in `transformers`."""
    start: str = "pad_token_id"
    """Key of config.json whose token starts a decoder's text if decoder_start_token_id is absent."""

    as_ours: Callable[[Any, Any], None] = lambda theirs, model: None
    """Function of (the published model, ours) for families whose published class computes otherwise in evaluation than
    in training: makes the published model compute as in training, for comparisons."""

    of_class: Callable[[str], str] = lambda name: name
    """Function from a tensor's name in the file to its name in the class, if `transformers` renames it."""

    def architecture_of(self, config: ModelConfig) -> str:
        """Returns the name of the class of `transformers` for this config. Raises Blocked if the family has no class
        for its head."""
        if config.head.predicts_tokens:
            return self.architecture
        kind = "vector" if config.head.vector else "classes"
        if kind not in self.others:
            raise Blocked({"head.classes" if config.head.classes else "head.vector": config.head.classes or True})
        return self.others[kind]

    def config(self, fields: Fields) -> ModelConfig:
        """Returns the config that the fields describe. Raises RequestError that names the file, for every error."""
        with complaints(fields.where):
            return self.read(fields)

    def names_of(self, config: ModelConfig) -> Names:
        """Returns the names of the modules for a config; in most families they are equal for all configs."""
        return self.names if isinstance(self.names, Names) else self.names(config)


class Blocked(RequestError):
    """Error for a config that a family cannot hold: `parts` maps each path of the config that blocks it to its
    value."""

    def __init__(self, parts: Mapping[str, Any]):
        self.parts = dict(parts)
        told, (field, value) = ", ".join(f"{path}={held}" for path, held in parts.items()), next(iter(parts.items()))
        super().__init__(told, code="unsupported", field=field, value=value)


def attention(block: BlockConfig) -> AttentionConfig:
    """Returns the block's mixer. Raises Blocked if the mixer is not attention."""
    if not isinstance(block.mixer, AttentionConfig):
        raise Blocked({"mixer.kind": block.mixer.kind})
    return block.mixer


def ffn(block: BlockConfig) -> FFNConfig:
    """Returns the block's FFN. Raises Blocked for a block without one."""
    if block.ffn is None:
        raise Blocked({"ffn": None})
    return block.ffn


def experts(block: BlockConfig) -> ExpertsConfig:
    """Returns the block's mixture of experts. Raises Blocked if the FFN is of another kind."""
    if not isinstance(block.ffn, ExpertsConfig):
        raise Blocked({"ffn.kind": block.ffn.kind if block.ffn else None})
    return block.ffn
