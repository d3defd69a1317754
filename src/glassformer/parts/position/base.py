from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.owner import Owner
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.position.picture import Plot


class EmbeddingPosition(nn.Module):
    """Base of position encodings that are added to the token's embedding: forward(pass_) -> (s, d) or (b, s, d)."""

    limit: int | None = None
    """Smallest position that this encoding cannot represent; None without a limit."""

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the encoding for a text of `length` tokens; none by default."""
        return {}


class AttentionPosition(nn.Module):
    """Base of position encodings inside attention: of queries and keys, or of the scores."""

    @property
    def moves_with_length(self) -> bool:
        """True if the encoding of a position changes as the text grows, so that keys in a decode state keep an older
        encoding."""
        return False

    @property
    def settled(self) -> int | None:
        """Largest length of a text within which the encoding of a position does not change; None if it does not change
        at any length."""
        return None

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        """Returns q (b, s, n, h) and k (b, s, g, h) of the new tokens with their positions, `pass_.ids`, encoded;
        unchanged by default."""
        return q, k

    def pair_rotation(self, pass_: Pass) -> tuple[Tensor, Tensor, int] | None:
        """Returns the tables of cos and sin and the axis of pairs, if `forward` only rotates pairs by `turn`; None
        otherwise."""
        return None

    def bias(self, pass_: Pass) -> ScoreBias | None:
        """Returns the bias that this encoding adds to the scores (b, n, s, t) before the softmax; None for no bias."""
        return None

    def take_share(self, owner: Owner) -> None:
        """Reduces the encoding to the heads of one tensor-parallel rank. Raises RequestError for a bias that cannot be
        divided by heads."""
        biases = type(self).bias is not AttentionPosition.bias
        owner.refuse("mixer.position", biases and type(self).__name__, "does not say which head's bias is whose")

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the encoding for a text of `length` tokens; none by default."""
        return {}


class PositionConfig(PartConfig, axis="position", words="nope"):
    """Base of the configs of position encodings."""

    place: ClassVar[Literal["", "embedding", "mixer"]] = ""
    """Config that holds an encoding of this kind: "embedding" or "mixer"; empty for the base class."""


class EmbeddingPositionConfig(PositionConfig):
    """Base of the configs of position encodings that are added to embeddings, `embedding.position`."""

    place = "embedding"
    scales_tokens: ClassVar[bool] = False
    """True if the encoding outweighs token embeddings with small initial values, so that these are multiplied by
    sqrt(d_model), as published."""

    def build(self, ctx: BuildContext) -> EmbeddingPosition:
        raise NotImplementedError

    def limit(self, ctx: BuildContext) -> int | None:
        """Returns the smallest position that the encoding cannot represent; None without a limit."""
        raise NotImplementedError(f"{type(self).__name__} must define limit")


class AttentionPositionConfig(PositionConfig):
    """Base of the configs of position encodings inside attention, `mixer.position`; the context has n_heads and
    head_dim."""

    place = "mixer"

    pairs: ClassVar[bool] = False
    """True if the encoding only rotates pairs of elements of q and k (`AttentionPosition.pair_rotation`)."""
    turns: ClassVar[bool] = False
    """True if the encoding changes queries and keys (rotary)."""
    biases: ClassVar[bool] = False
    """True if the encoding adds a bias to scores, another for each head."""

    def build(self, ctx: BuildContext) -> AttentionPosition:
        raise NotImplementedError

    def stretched(self, choice: type[PartConfig], context: int, **fields: Any) -> AttentionPositionConfig | None:
        """Returns this config with its rotary frequencies scaled by `choice`, a class of `parts/position/scaling.py`,
        with these fields, from a training at `context` tokens; None for an encoding without rotary frequencies."""
        return None

    @property
    def longest(self) -> int | None:
        """Number of tokens for which scaled rotary frequencies are intended; None without a scaling."""
        return None
