"""Models that no published class can hold: config and names are in this package's format. `transformers` builds them
after `import glassformer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.conversion.family import Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, Stacked, TensorLayout, TensorPiece
from glassformer.parts.ffn import ExpertsConfig
from glassformer.register.sizes import sizes


class _Same(Names):
    """Names in this package's format: `model.` and our own path of each parameter and buffer."""

    def pieces(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, list[TensorPiece]]]:
        for path, value in modules[""].state_dict(keep_vars=True).items():
            yield path, value, [TensorPiece(f"model.{path}", tuple(value.shape))]

    def layout(self, module: str) -> tuple[TensorLayout, str]:
        if any(f"{whole}." in module for whole in self.wholes):  # a part that is compared as a whole
            raise KeyError(module)
        return Stacked(f"model.{module}"), ""


def read(fields: Fields) -> ModelConfig:
    fields.ignore(*(name for name in fields.values if name != "glassformer"))  # repeated for other tools
    return ModelConfig.from_dict(fields.get("glassformer"), fields.where)


def write(config: ModelConfig) -> dict[str, Any]:
    return {"glassformer": config.to_dict(), **sizes(config)}


def names(config: ModelConfig) -> Names:
    mixed = any(isinstance(block.ffn, ExpertsConfig) for block in config.layers())
    wholes, encoder = {".ffn": "ffn"} if mixed else {}, Names("model.encoder.layers.*.", {})
    return _Same("model.layers.*.", {}, prefix="model.", wholes=wholes, encoder=encoder)


class _Own(Family):
    def architecture_of(self, config: ModelConfig) -> str:
        if config.encoder is not None:
            return "GlassformerForSeq2SeqLM"
        if config.head.predicts_tokens:
            return "GlassformerForCausalLM" if config.writes else "GlassformerForMaskedLM"
        return "GlassformerForSequenceClassification" if config.head.classes else "GlassformerModel"


OWN = _Own("glassformer", "GlassformerForCausalLM", names, read, write, start="eos_token_id")
