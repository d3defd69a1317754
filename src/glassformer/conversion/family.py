"""What a published family is to Glassformer: its fields and its names, each readable and writable."""

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
    """Turns all that reading a stranger's config may raise into one sentence that names the file."""
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
    """How llama.cpp stores the family: its name there, and its tensors."""

    architecture: str
    names: Names
    fields: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json, dotted where it is nested -> key of the GGUF metadata, without the architecture; added to the
    usual ones."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flag of config.json -> the tensor whose presence says that it is set; `!name`: whose absence."""
    unheeded: frozenset[str] = frozenset()
    """Keys of the metadata that llama.cpp ignores, so that their values block an export to it."""
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}
    """Fields of config.json that llama.cpp decides itself, from the metadata (without the architecture's name)."""
    factors: bool = False
    """Whether llama.cpp looks for divisors of the frequencies, pair by pair (rope_freqs, rope_factors)."""
    fraction: str = "partial_rotary_factor"
    """What config.json calls the share of the head that is turned."""


@dataclass(frozen=True)
class Family:
    """`read` is exact: it makes the model that the fields describe or refuses. `write` states the fields that come
    nearest to a config; the family can hold the config where reading them gives it back (exports.py)."""

    model_type: str
    """Of config.json."""
    architecture: str
    """The class that `transformers` builds."""
    names: Callable[[ModelConfig], Names] | Names
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    gguf: Gguf | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """The classes for other heads than of tokens: "vector" and "classes" -> class."""
    start: str = "pad_token_id"
    """Which token a text that is written from a source begins with, where config.json does not say."""

    as_ours: Callable[[Any, Any], None] = lambda theirs, model: None
    """(the published model, ours): where it computes something else in evaluation than what it was trained as, makes it
    compute the latter, for comparisons."""

    of_class: Callable[[str], str] = lambda name: name
    """A name in the file -> what the class calls it, where `transformers` renames between them."""

    def architecture_of(self, config: ModelConfig) -> str:
        """The class that `transformers` builds for this config. Raises Blocked where there is none for its head."""
        if config.head.predicts_tokens:
            return self.architecture
        kind = "vector" if config.head.vector else "classes"
        if kind not in self.others:
            raise Blocked({"head.classes" if config.head.classes else "head.vector": config.head.classes or True})
        return self.others[kind]

    def config(self, fields: Fields) -> ModelConfig:
        """`read`, with every complaint in one sentence that names the file. Raises RequestError."""
        with complaints(fields.where):
            return self.read(fields)

    def names_of(self, config: ModelConfig) -> Names:
        """Most families have one set of names; some choose by the config."""
        return self.names if isinstance(self.names, Names) else self.names(config)


class Blocked(RequestError):
    """A config that a family cannot hold; `parts` are the paths that block it, with their values."""

    def __init__(self, parts: Mapping[str, Any]):
        self.parts = dict(parts)
        told, (field, value) = ", ".join(f"{path}={held}" for path, held in parts.items()), next(iter(parts.items()))
        super().__init__(told, code="unsupported", field=field, value=value)


def attention(block: BlockConfig) -> AttentionConfig:
    """The block's mixer, where it is attention. Raises Blocked."""
    if not isinstance(block.mixer, AttentionConfig):
        raise Blocked({"mixer.kind": block.mixer.kind})
    return block.mixer


def ffn(block: BlockConfig) -> FFNConfig:
    """The block's feed-forward network. Raises Blocked where there is none."""
    if block.ffn is None:
        raise Blocked({"ffn": None})
    return block.ffn


def experts(block: BlockConfig) -> ExpertsConfig:
    """The block's feed-forward network, where it is a mixture of experts. Raises Blocked."""
    if not isinstance(block.ffn, ExpertsConfig):
        raise Blocked({"ffn.kind": block.ffn.kind if block.ffn else None})
    return block.ffn
