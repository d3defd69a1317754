from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import InitConfig
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart

Branch = Callable[[Tensor], Tensor]


class PartBranch:
    """Branch of one part, a mixer or a feed-forward network: the part with the pass, and the decode state of a
    mixer."""

    def __init__(self, part: Any, pass_: Pass, state: Any = None):
        self.part, self.pass_, self.state = part, pass_, state

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x, self.pass_) if self.state is None else self.part(x, self.pass_, self.state)
        return y

    def added(self, x: Tensor, norm: nn.Module) -> FusedPart | None:
        """Returns x + part(norm(x)) as a fused part for tensors like x; None if the part cannot be fused here."""
        found: FusedPart | None = self.part.added_at_once(x, norm, self.pass_) if self.fuses else None
        return found

    @property
    def fuses(self) -> bool:
        """True if the part may be fused: its own class allows it, not a module inside a wrapper, and it has no decode
        state."""
        says = hasattr(type(self.part), "added_at_once") and getattr(self.part, "in_blocks", True)
        return self.state is None and says


class Residual(nn.Module):
    """Base of residual wirings of one block: forward(x, mixer, ffn) -> x'; `ffn` may be None.

    x (b, s, d). Owns the norms; `mid` is the stream between the two branches, if the wiring has such a place. `scale`
    multiplies what each branch adds (Granite's residual_multiplier).
    """

    transparent = True
    """True if the children of this module are named in paths as if they were children of the block."""
    norms_stream: ClassVar[bool | None] = None
    """True if `mixer_norm` and `ffn_norm` act on the residual stream, after a sum; False if each acts on the input of
    its branch; None if the stream is not a sum of branches."""

    def __init__(self, dropout: float = 0.0, scale: float = 1.0):
        super().__init__()
        self.dropout, self.scale = dropout, scale
        self.resid_mid = Site()

    def share(self, branch: Tensor) -> Tensor:
        """Returns the result of a branch in the form that is added to the stream: multiplied by the scale, with
        dropout."""
        branch = branch if self.scale == 1.0 else branch * self.scale
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch

    def fused(self, x: Tensor, branch: Branch, norm: nn.Module) -> FusedPart | None:
        """Returns the fused part that computes, for a tensor like x, its sum with the branch's result for its norm;
        None if the branch cannot be fused here."""
        plain = isinstance(branch, PartBranch) and self.scale == 1.0 and not self.dropout
        return cast(PartBranch, branch).added(x, norm) if plain else None

    def added(self, x: Tensor, branch: Branch, norm: nn.Module) -> Tensor:
        """Returns x plus the branch's result for the norm of x."""
        part = self.fused(x, branch, norm)
        return x + self.share(branch(norm(x))) if part is None else part(x)

    def parts(self, x: Tensor, mixer: PartBranch, ffn: PartBranch | None) -> list[FusedPart] | None:
        """Returns the fused parts that one after another compute this wiring for a tensor like x if nothing observes
        its values; None if the wiring computes more."""
        return None

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        raise NotImplementedError

    def of_rows(self, x: Tensor, mixer: Branch, ffn: Branch | None, rows: Tensor) -> Tensor:
        """Computes the block for only some tokens: returns the stream after it, x' (1, n, d), of the tokens with
        indices `rows` (n,) among the b s of x."""
        return only(self(x, mixer, ffn), rows)


def fused_parts(wiring: nn.Module, x: Tensor, mixer: PartBranch, ffn: PartBranch | None) -> list[FusedPart] | None:
    """Returns `wiring.parts(x, mixer, ffn)`; None for a module that is not a `Residual`."""
    return wiring.parts(x, mixer, ffn) if isinstance(wiring, Residual) else None


class Sequential(Residual):
    """Base of wirings whose second branch, the FFN, reads the stream after the first one, the mixer."""

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        x = self.mix(x, mixer)
        return x if ffn is None else self.feed(x, ffn)

    def of_rows(self, x: Tensor, mixer: Branch, ffn: Branch | None, rows: Tensor) -> Tensor:
        """Computes the block for only some tokens: returns the stream after it, x' (1, n, d), of those with indices
        `rows` (n,) among the b s of x; the FFN processes no other tokens."""
        x = only(self.mix(x, mixer), rows)
        return x if ffn is None else self.feed(x, ffn)

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        """Returns the stream after the mixer's branch was added to x."""
        raise NotImplementedError

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        """Returns the stream after the FFN's branch was added to x."""
        raise NotImplementedError


def only(x: Tensor, rows: Tensor) -> Tensor:
    """Returns some tokens of x (b, s, d): those with indices `rows` (n,) among the b s, as (1, n, d)."""
    return x.flatten(0, 1).index_select(0, rows)[None]


class ResidualConfig(PartConfig, axis="residual", words=Word("branch_scale", fields={"depth_scaled": True})):
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which an element of a branch's result is dropped."""
    scale: float | None = Field(None, gt=0)
    """Factor on each branch's result; None for 1."""
    depth_scaled: bool = False
    """True for a further factor 1 / sqrt(L) on each branch's result, for L layers: tokens then stay distinct at any
    depth (Noci et al. 2022, 2206.03126)."""

    ends_in_norm: ClassVar[bool] = False
    """True if a block ends with a norm of the stream, so that the model needs no final norm."""
    brings: ClassVar[InitConfig | None] = None
    """Initialisation that belongs to this wiring: the wiring's short name sets both. None for no particular
    initialisation."""
    wants_warmup: ClassVar[bool] = False
    """True if training stalls without a warm-up (Xiong et al. 2020, 2002.04745)."""
    feeds_products: ClassVar[bool] = True
    """True if branches read the result of a norm, in the dtype of matmuls; False if they read the stream, in its
    dtype."""
    norms: ClassVar[tuple[str, ...]] = ("mixer_norm", "ffn_norm")
    """Names of the norms of this wiring in a block with both branches."""

    def resolved(self, ctx: BuildContext) -> ResidualConfig:
        return self.replace(dropout=0.0, scale=self.numbers(ctx)["scale"], depth_scaled=False)

    def norm_names(self, has_ffn: bool) -> tuple[str, ...]:
        return self.norms if has_ffn else tuple(name for name in self.norms if not name.startswith("ffn"))

    wiring: ClassVar[type[Residual]]

    def numbers(self, ctx: BuildContext) -> dict[str, Any]:
        """Returns the arguments of the residual wiring other than its norms, by name."""
        scale = self.scale or 1.0
        return {"dropout": self.dropout, "scale": scale * (ctx.n_branches / 2) ** -0.5 if self.depth_scaled else scale}

    def feeds(self, branch: str) -> bool:
        """Returns True if the branch "mixer" or "ffn" reads a norm in the dtype of matmuls; False if it reads the
        stream, in its dtype."""
        return self.feeds_products

    def adds_at_once(self, branch: str, ctx: BuildContext) -> bool:
        """Returns True if x + part(norm(x)) may be one operation for the branch "mixer" or "ffn"."""
        return False

    def build(self, ctx: BuildContext) -> Residual:
        """Returns the residual wiring of a block. The context has the block's norm, and whether the block has an
        FFN."""
        assert ctx.norm is not None, "a wiring places the norm of its context"
        norms: dict[str, Any] = {
            name: ctx.norm.build(ctx.within(feeds_products=self.feeds_products and not name.endswith("post_norm")))
            for name in self.norm_names(ctx.has_ffn)
        }
        return self.wiring(**norms, **self.numbers(ctx))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the costs of the wiring: those of its norms by name, and of the dropout masks."""
        assert ctx.norm is not None, "a wiring places the norm of its context"
        after = shape.reading(shape.products)  # norms of a branch's result
        names = self.norm_names(ctx.has_ffn)
        norms = {name: ctx.norm.costs(ctx, after if name.endswith("post_norm") else shape) for name in names}
        masks = (1 + ctx.has_ffn) * shape.keeps_mask(ctx.d_model) if self.dropout else 0
        return Cost.of(norms) + Cost(kept=masks)
