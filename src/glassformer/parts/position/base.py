from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.owner import Owner
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel.base import ScoreBias
from glassformer.parts.position.picture import Plot


class EmbeddingPosition(nn.Module):
    """A position that is added to the token's embedding: forward(pass_) -> (s, d) or (b, s, d)."""

    limit: int | None = None
    """The first position it cannot represent, if there is one."""

    def picture(self, length: int) -> dict[str, Plot]:
        """What a text of `length` tokens meets, as named plots."""
        return {}


class AttentionPosition(nn.Module):
    """A position that acts inside attention: on queries and keys, or on the scores."""

    @property
    def moves_with_length(self) -> bool:
        """True if the encoding of one position changes as the text grows: cached keys keep the old one."""
        return False

    @property
    def settled(self) -> int | None:
        """Largest length of a text within which the encoding of a position stays; None if it always does."""
        return None

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        """Returns q (b, s, n, h) and k (b, s, g, h) of the new tokens at their positions, `pass_.ids`."""
        return q, k

    def bias(self, pass_: Pass) -> ScoreBias | None:
        """Returns what changes the scores (b, n, s, t) before the softmax; None if nothing does."""
        return None

    def take_share(self, owner: Owner) -> None:
        """Takes the share of an owner's heads. Raises RequestError for a bias that does not say what is whose."""
        biases = type(self).bias is not AttentionPosition.bias
        owner.refuse("mixer.position", biases and type(self).__name__, "does not say which head's bias is whose")

    def picture(self, length: int) -> dict[str, Plot]:
        """What a text of `length` tokens meets, as named plots."""
        return {}


class PositionConfig(PartConfig, axis="position", words="nope"):
    """How a model knows the order of its tokens; None means it does not."""

    place: ClassVar[Literal["", "embedding", "mixer"]] = ""
    """The part that holds a choice of this kind."""


class EmbeddingPositionConfig(PositionConfig):
    """The choices for `embedding.position`."""

    place = "embedding"
    scales_tokens: ClassVar[bool] = False
    """Whether it outweighs tokens that begin small, so that these are published times sqrt(d_model)."""

    def build(self, ctx: BuildContext) -> EmbeddingPosition:
        raise NotImplementedError

    def limit(self, ctx: BuildContext) -> int | None:
        """The first position that cannot be represented; None if there is none."""
        raise NotImplementedError(f"{type(self).__name__} must define limit")


class AttentionPositionConfig(PositionConfig):
    place = "mixer"

    """The choices for `mixer.position`; the context has n_heads and head_dim."""

    turns: ClassVar[bool] = False
    """It makes queries and keys anew."""
    biases: ClassVar[bool] = False
    """It changes scores, each head's in its own way."""

    def build(self, ctx: BuildContext) -> AttentionPosition:
        raise NotImplementedError

    def stretched(self, choice: type[PartConfig], context: int, **fields: Any) -> AttentionPositionConfig | None:
        """Returns the position with its rotary frequencies, trained for `context` tokens, scaled by this choice of
        `parts/position/scaling.py` with these fields; None if it has no such frequencies."""
        return None

    @property
    def longest(self) -> int | None:
        """Tokens that scaled frequencies are meant for; None without a scaling."""
        return None
