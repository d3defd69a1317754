"""The table of sizes, and a config at one of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from glassformer.errors import RequestError

if TYPE_CHECKING:
    from glassformer.config import ModelConfig, Stage, TowerConfig
    from glassformer.parts.embedding import EmbeddingConfig
    from glassformer.parts.head import HeadConfig

    Scaled = TypeVar("Scaled", EmbeddingConfig, HeadConfig)

# size: (layers, d_model, heads). The name counts the layers' own parameters, about 12 L d^2, not the vocabulary's.
SIZES: dict[str, tuple[int, int, int]] = {
    "1m": (4, 128, 4),
    "3m": (4, 256, 4),
    "10m": (6, 384, 6),
    "30m": (10, 512, 8),
    "60m": (12, 640, 10),
    "124m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "3b": (36, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (60, 6656, 52),
    "70b": (80, 8192, 64),
}


def resize(config: ModelConfig, size: str) -> ModelConfig:
    """The same parts at one of the sizes of the table: layers, width and heads change, ffn and head widths follow, and
    so do scales that are the root of the width, or one over it. Two towers have half of the layers each. Raises
    RequestError for a size that is not in it."""
    if size.lower() not in SIZES:
        raise RequestError(
            f"no size is named {size!r}; sizes are {', '.join(SIZES)}", code="unknown", field="size", value=size
        )
    n_layers, d_model, n_heads = SIZES[size.lower()]
    encoder = (
        None if config.encoder is None else config.encoder.vary(stack=_scaled(config.encoder, n_layers / 2, n_heads))
    )
    if encoder is not None:
        encoder = encoder.vary(
            d_model=None, embedding=_followed(encoder.embedding, encoder.d_model or config.d_model, d_model)
        )
    return config.vary(
        d_model=d_model, stack=_scaled(config, n_layers, n_heads), encoder=encoder,
        embedding=_followed(config.embedding, config.d_model, d_model),
        head=_followed(config.head, config.d_model, d_model),
    )  # fmt: skip


def _followed(part: Scaled, before: int, after: int) -> Scaled:
    """With its scale, where that follows the width as in Vaswani et al. 2017, Gemma and T5."""
    for power in (0.5, -0.5):
        if part.scale is not None and math.isclose(part.scale, before**power):
            return part.vary(scale=after**power)
    return part


def _scaled(tower: TowerConfig, n_layers: float, n_heads: int) -> tuple[Stage, ...]:
    """Its blocks at another size, about so many in all."""
    each, stack = n_layers / tower.n_layers, []
    for stage in tower.stack:
        blocks = tuple(
            block.vary(mixer=block.mixer.resized(n_heads), ffn=block.ffn.vary(hidden=None) if block.ffn else None)
            for block in stage.blocks
        )
        stack.append(stage.vary(repeat=max(1, round(stage.repeat * each)), blocks=blocks))
    return tuple(stack)
