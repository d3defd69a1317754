from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.owner import Owner, Vocabulary
from glassformer.parts.core.shard import REPLICATED, Shard, Shards
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Matrix
from glassformer.parts.loss import linear_cross_entropy
from glassformer.parts.norm import NormConfig
from glassformer.parts.patches import Patches, PatchesConfig
from glassformer.parts.position import EmbeddingPosition, EmbeddingPositionConfig
from glassformer.parts.vectors import Vectors, VectorsConfig


class Segments(nn.Module):
    """Segment embedding S[segment], (b, s, d): a trained vector for each kind of text in a sequence, weight (n, d);
    S[0] for a pass without segments (BERT's token types: Devlin et al. 2018, 1810.04805)."""

    roles: tuple[Role, ...] = ("embedding",)
    shards: ClassVar[Shards] = {"weight": (REPLICATED,)}

    def __init__(self, n: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d_model))
        self.init_weights(Init())

    def forward(self, pass_: Pass) -> Float[Tensor, "*b d"]:
        if pass_.segments is None:  # weight[0] would be a leaf without gradients: torch's counters refuse it
            return F.embedding(torch.zeros(1, dtype=torch.long, device=self.weight.device), self.weight)
        return F.embedding(pass_.segments, self.weight)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")


class Embedding(nn.Module):
    """x = dropout(norm(E[token] scale + P[position] + S[segment])); tokens (b, s), E (v, d), x (b, s, d).

    With `patches` the input is images (b, c, h, w), with `vectors` real vectors (b, s, size), and their embedding
    replaces E[token]; E is then absent.

    scale is sqrt(d) in Vaswani et al. 2017 and Gemma; the norm is BLOOM's (Le Scao et al. 2022, 2211.05100). Tied, E is
    the table of another embedding, passed with the call: for an encoder that shares its decoder's table.
    """

    roles: tuple[Role, ...] = ("embedding",)
    shards: ClassVar[Shards] = {"weight": (Shard("vocab"),)}
    vocabulary: Vocabulary | None = None
    """Share of the vocabulary whose rows of the table this tensor-parallel rank holds (`parts/core/owner.py`); None for
    all tokens."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        position: EmbeddingPosition | None = None,
        dropout: float = 0.0,
        tied: bool = False,
        segments: Segments | None = None,
        patches: Patches | None = None,
        vectors: Vectors | None = None,
    ):
        super().__init__()
        if not tied and patches is None and vectors is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.tied = tied
        self.scale, self.dropout = scale, dropout
        self.norm = norm
        self.position = position
        self.segments = segments
        self.patches, self.vectors = patches, vectors
        self.init_weights(Init())

    @property
    def reader(self) -> Patches | Vectors | None:
        """Embedding of images or vectors, in a model with one in place of the table of tokens; None if the model reads
        tokens."""
        return self.patches if self.vectors is None else self.vectors

    def forward(self, tokens: Tensor, pass_: Pass, table: Embedding | None = None) -> Float[Tensor, "b s d"]:
        x = self._own(table).look_up(tokens) if self.reader is None else self.reader(tokens)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)  # rounded as Gemma rounds it
        if self.position is not None:
            x = x + self.position(pass_).to(x.dtype)
        if pass_.segments is not None:
            self._check_segments(pass_.segments, x.shape[:2])
        if self.segments is not None:
            x = x + self.segments(pass_).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(x, self.dropout, self.training)

    def look_up(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Returns E[token], (b, s, d): the rows of the table for the token ids (b, s)."""
        if self.vocabulary is None:
            return F.embedding(tokens, self.weight)
        rows, here = self.vocabulary.here(tokens)
        return self.vocabulary.leave(F.embedding(rows, self.weight) * here[..., None])

    def divide(self, owner: Owner) -> None:
        if not self.tied and self.reader is None:
            self.vocabulary = owner.vocabulary(self.vocab_size)

    def _check_segments(self, given: Tensor, shape: torch.Size) -> None:
        """Raises RequestError unless `given`, the segment of each token, has the shape of the tokens and values that
        the model knows: 0 .. n - 1, or only 0 in a model without a segment embedding."""
        if given.shape != shape:
            raise RequestError(
                f"segments has the shape {tuple(given.shape)} and the tokens {tuple(shape)}; say of each token which "
                "kind of text it belongs to",
                code="conflict", field="segments", value=tuple(given.shape), expected=str(tuple(shape)),
            )  # fmt: skip
        if not given.numel():
            return
        least, most = int(given.min()), int(given.max())
        known = 1 if self.segments is None else len(self.segments.weight)
        if least < 0 or most >= known:
            right = "only segment 0; leave segments out" if known == 1 else f"segments 0 to {known - 1}"
            wrong = least if least < 0 else most
            raise RequestError(
                f"segments holds {wrong}, and this model knows {right}",
                code="range", field="segments", value=wrong, expected=f"0 to {known - 1}",
            )  # fmt: skip

    def places(self, tokens: Tensor) -> Tensor:
        """Returns a tensor (b, s) with one element for each vector that the embedding makes of the input: token ids are
        returned unchanged; for images and vectors the elements are uninitialised. Raises RequestError for an input that
        the model cannot read."""
        if self.vectors is not None:
            self.vectors.check(tokens)
            return torch.empty(tokens.shape[:2], device=tokens.device)
        if self.patches is not None:
            self.patches.check(tokens)
            return torch.empty(len(tokens), self.patches.tokens, device=tokens.device)
        if tokens.dim() != 2:
            raise RequestError(
                f"this model reads token ids (b, s), and a tensor {tuple(tokens.shape)} was given",
                code="conflict", field="tokens", value=tuple(tokens.shape), expected="(b, s)",
            )  # fmt: skip
        return tokens

    def matrices(self) -> dict[str, Matrix]:
        """Returns {"embed": matrix}: the table, or the projection of patches or vectors; empty if the table belongs to
        another embedding."""
        if self.tied:
            return {}
        own = self.reader
        table = Matrix(self.weight, 0, len(self.weight)) if own is None else Matrix.of(own.projection)
        return {"embed": table}

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def _any(self) -> Tensor:
        if self.vectors is not None:
            return self.vectors.projection.weight
        return self.weight if self.patches is None else self.patches.first.weight

    def _own(self, table: Embedding | None) -> Embedding:
        """Returns the embedding that holds the table of tokens: this one, or, if this one is tied, the embedding
        `table`."""
        if not self.tied:
            return self
        if table is None:
            raise TypeError("a tied embedding looks tokens up in another; call it as embedding(tokens, pass_, table)")
        return table

    @property
    def limit(self) -> int | None:
        """Smallest position that the position encoding cannot represent; None without a limit."""
        return None if self.position is None else self.position.limit

    def unembed(self, x: Float[Tensor, "... d"], bias: Tensor | None = None) -> Float[Tensor, "... v"]:
        """Returns the logits x E^T + b of a head that shares the table E (v, d); `bias` b (v,), None for zero."""
        return F.linear(x, self.weight, bias)

    def cross_entropy(self, x: Float[Tensor, "n d"], targets: Int[Tensor, " n"], **how: Any) -> Tensor:
        """Returns the loss of the logits of `unembed`, without keeping the logits: `linear_cross_entropy` with E as the
        weight, and the arguments `how`."""
        return linear_cross_entropy(x, self.weight, targets, **how)

    def applied(self) -> Float[Tensor, "v d"]:
        """Returns the table E (v, d), the matrix of `unembed`. Raises RequestError for a model without a table."""
        if self.reader is not None:
            what, field = ("images", "patches") if self.vectors is None else ("vectors", "vectors")
            raise RequestError(
                f"this model reads {what}, so it has no table of words", code="conflict", field=f"embedding.{field}"
            )
        return self.weight

    @property
    def vocab_size(self) -> int:
        """Number of rows in the table, one for each token; 1 for a model without a table."""
        if self.vocabulary is not None:
            return self.vocabulary.size
        return self.weight.shape[0] if self.reader is None else 1

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        if not self.tied and self.reader is None:
            init.fill(self.weight, "embedding")


class EmbeddingConfig(PartConfig, axis="embedding", kind="embedding"):
    scale: float | None = Field(None, gt=0)
    """Factor on token embeddings; None for 1."""
    norm: NormConfig | None = None
    position: EmbeddingPositionConfig | None = None
    dropout: float = Field(0.0, ge=0, lt=1)
    tied: bool = False
    """True if the embedding has no table: an encoder then shares the table of the model around it."""
    segments: int | None = Field(None, gt=0, le=1 << 16)
    """Number n of segments (kinds of text in a sequence), each with a trained vector; None for a model without segment
    embedding."""
    patches: PatchesConfig | None = None
    """Embedding of images; None if the model does not read images."""
    vectors: VectorsConfig | None = None
    """Embedding of vectors of real numbers; None if the model does not read vectors."""

    @model_validator(mode="after")
    def _reads_one_thing(self) -> EmbeddingConfig:
        if self.patches is not None and self.vectors is not None:
            raise RequestError(
                "patches and vectors are both given; a model reads one of them", code="conflict", field="vectors"
            )
        return self

    @property
    def reads(self) -> Literal["tokens", "images", "vectors"]:
        """Kind of input that the model reads."""
        if self.vectors is not None:
            return "vectors"
        return "tokens" if self.patches is None else "images"

    def limit(self, ctx: BuildContext) -> int | None:
        """Returns the smallest position that the position encoding cannot represent; None without a limit."""
        return None if self.position is None else self.position.limit(ctx)

    def build(self, ctx: BuildContext) -> Embedding:
        return Embedding(
            ctx.vocab_size, ctx.d_model, self.scale or 1.0,
            norm=self.norm.build(ctx) if self.norm else None,
            position=self.position.build(ctx) if self.position else None,
            dropout=self.dropout,
            tied=self.tied,
            segments=Segments(self.segments, ctx.d_model) if self.segments else None,
            patches=self.patches.build(ctx) if self.patches else None,
            vectors=self.vectors.build(ctx) if self.vectors else None,
        )  # fmt: skip

    def resolved(self, ctx: BuildContext) -> EmbeddingConfig:
        position = self.position.resolved(ctx) if self.position else None
        return self.replace(scale=self.scale or 1.0, position=position, dropout=0.0)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the embedding: one row of the table is read and one written for each token, and in
        training the row's gradient."""
        rows = shape.tokens * ctx.d_model * shape.dtype.itemsize
        masks = shape.keeps_mask(ctx.d_model, shape.dtype) if self.dropout else 0
        moved = (4 if shape.phase == "train" else 2) * rows
        reader = self.patches or self.vectors
        if reader is not None:
            table = reader.costs(ctx, shape) + Cost(kept=masks)
        else:
            kept = shape.keeps(1, torch.int64) + masks
            table = Cost.weights(0 if self.tied else ctx.vocab_size * ctx.d_model, kept=kept, moved_bytes=moved)
        named = Cost.weights((self.segments or 0) * ctx.d_model)
        return sum((part.costs(ctx, shape) for part in (self.norm, self.position) if part), table + named)
