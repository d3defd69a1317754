"""Configs resized to another number of parameters or another width."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from glassformer.names.sizes import shape

if TYPE_CHECKING:
    from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
    from glassformer.parts.core.base import BuildContext
    from glassformer.parts.embedding import EmbeddingConfig
    from glassformer.parts.head import HeadConfig

    Scaled = TypeVar("Scaled", EmbeddingConfig, HeadConfig)


def resize(config: ModelConfig, size: str) -> ModelConfig:
    """Returns the config at another named size: layers, width and number of heads change, and the FFN's width, head
    sizes and scales of sqrt(d_model) or its inverse follow. Two towers have half of the layers each. Raises
    RequestError for an unknown size."""
    n_layers, d_model, n_heads = shape(size)
    encoder = (
        None if config.encoder is None else config.encoder.replace(stack=_scaled(config.encoder, n_layers / 2, n_heads))
    )
    if encoder is not None:
        encoder = encoder.replace(
            d_model=None, embedding=_followed(encoder.embedding, encoder.d_model or config.d_model, d_model)
        )
    return config.replace(
        d_model=d_model, stack=_scaled(config, n_layers, n_heads), encoder=encoder,
        embedding=_followed(config.embedding, config.d_model, d_model),
        head=_followed(config.head, config.d_model, d_model),
    )  # fmt: skip


def widened(config: ModelConfig, d_model: int) -> ModelConfig:
    """Returns the config with the sizes that follow from the width set for `d_model`: widths of FFN and heads, ranks,
    and scales of sqrt(d_model) or its inverse. The numbers of layers and heads, and `config.d_model` itself, are
    unchanged."""

    def fit(block: BlockConfig, ctx: BuildContext) -> BlockConfig:
        mixer = block.mixer
        own = {name: value for name, value in mixer if name in ("n_heads", "n_kv_heads", "n_v_heads")}
        heads = mixer.heads(ctx)
        resized = mixer.resized(heads.n_heads if heads else 1).replace(**own)
        return block.replace(mixer=resized, ffn=block.ffn.replace(hidden=None) if block.ffn else None)

    def stack(tower: TowerConfig, ctx: BuildContext) -> tuple[Stage, ...]:
        return tuple(stage.replace(blocks=tuple(fit(one, ctx) for one in stage.blocks)) for stage in tower.stack)

    encoder = config.encoder
    if encoder is not None:
        embedding = _followed(encoder.embedding, encoder.d_model or config.d_model, d_model)
        encoder = encoder.replace(d_model=None, embedding=embedding, stack=stack(encoder, config.encoder_ctx))
    return config.replace(
        stack=stack(config, config.ctx), encoder=encoder,
        embedding=_followed(config.embedding, config.d_model, d_model),
        head=_followed(config.head, config.d_model, d_model),
    )  # fmt: skip


def _followed(part: Scaled, before: int, after: int) -> Scaled:
    """Returns the embedding or head with its scale for the width `after`, if its scale is sqrt(before) or its inverse,
    as in Vaswani et al. 2017, Gemma and T5."""
    for power in (0.5, -0.5):
        if part.scale is not None and math.isclose(part.scale, before**power):
            return part.replace(scale=after**power)
    return part


def _scaled(tower: TowerConfig, n_layers: float, n_heads: int) -> tuple[Stage, ...]:
    """Returns the tower's stages with `n_heads` heads per mixer and about `n_layers` layers in total."""
    each, stack = n_layers / tower.n_layers, []
    for stage in tower.stack:
        blocks = tuple(
            block.replace(mixer=block.mixer.resized(n_heads), ffn=block.ffn.replace(hidden=None) if block.ffn else None)
            for block in stage.blocks
        )
        stack.append(stage.replace(repeat=max(1, round(stage.repeat * each)), blocks=blocks))
    return tuple(stack)
