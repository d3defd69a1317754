from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.owner import Owner
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.position.picture import Plot


class EmbeddingPosition(nn.Module):
    """Position encoding that is added to the token's embedding: forward(pass_) -> (s, d) or (b, s, d)."""

    limit: int | None = None
    """First position that cannot be represented; None without a limit."""

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the encoding for a text of `length` tokens."""
        return {}


class AttentionPosition(nn.Module):
    """Position encoding inside attention: of queries and keys, or of the scores."""

    @property
    def moves_with_length(self) -> bool:
        """True if the encoding of one position changes as the text grows: cached keys keep the old one."""
        return False

    @property
    def settled(self) -> int | None:
        """Largest length of a text within which the encoding of a position does not change; None if it never does."""
        return None

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        """Returns q (b, s, n, h) and k (b, s, g, h) of the new tokens at their positions, `pass_.ids`."""
        return q, k

    def bias(self, pass_: Pass) -> ScoreBias | None:
        """Returns the bias of the scores (b, n, s, t) before the softmax, or None."""
        return None

    def take_share(self, owner: Owner) -> None:
        """Takes the share of an owner's heads. Raises RequestError for a bias that cannot be divided by heads."""
        biases = type(self).bias is not AttentionPosition.bias
        owner.refuse("mixer.position", biases and type(self).__name__, "does not say which head's bias is whose")

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the encoding for a text of `length` tokens."""
        return {}


class PositionConfig(PartConfig, axis="position", words="nope"):
    """Config of a position encoding; None for a model without one."""

    place: ClassVar[Literal["", "embedding", "mixer"]] = ""
    """Part that holds a choice of this kind."""


class EmbeddingPositionConfig(PositionConfig):
    """Config of a position encoding for `embedding.position`."""

    place = "embedding"
    scales_tokens: ClassVar[bool] = False
    """True if it outweighs tokens with small initial embeddings, so that these are multiplied by sqrt(d_model), as
    published."""

    def build(self, ctx: BuildContext) -> EmbeddingPosition:
        raise NotImplementedError

    def limit(self, ctx: BuildContext) -> int | None:
        """Returns the first position that cannot be represented, or None."""
        raise NotImplementedError(f"{type(self).__name__} must define limit")


class AttentionPositionConfig(PositionConfig):
    place = "mixer"

    """Config of a position encoding for `mixer.position`; the context has n_heads and head_dim."""

    turns: ClassVar[bool] = False
    """True if it changes queries and keys."""
    biases: ClassVar[bool] = False
    """True if it changes scores, differently for each head."""

    def build(self, ctx: BuildContext) -> AttentionPosition:
        raise NotImplementedError

    def stretched(self, choice: type[PartConfig], context: int, **fields: Any) -> AttentionPositionConfig | None:
        """Returns the position with its rotary frequencies, trained for `context` tokens, scaled by this choice of
        `parts/position/scaling.py` with these fields; None if it has no such frequencies."""
        return None

    @property
    def longest(self) -> int | None:
        """Number of tokens that scaled frequencies are meant for; None without a scaling."""
        return None
