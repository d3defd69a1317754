"""Models that no published class can hold: their config and their names are our own. `transformers` builds them after
`import glassformer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.convert.family import Family
from glassformer.convert.fields import Fields
from glassformer.convert.names import Names, Piece


class _Same(Names):
    """Every parameter under its own name, and what is kept beside them."""

    def pieces(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, list[Piece]]]:
        for path, value in modules[""].state_dict(keep_vars=True).items():
            yield path, value, [Piece(f"model.{path}", tuple(value.shape))]


def read(fields: Fields) -> ModelConfig:
    fields.ignore(*(name for name in fields.values if name != "glassformer"))  # they repeat it for other tools
    return ModelConfig.from_dict(fields.get("glassformer"), fields.where)


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "glassformer": config.to_dict(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
    }


OWN = Family("glassformer", "GlassformerForCausalLM", _Same("", {}, prefix="model."), read, write)
