"""Similarity of tokens over the depth of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.dynamics import relative_residual, token_cosine
from glassformer.errors import check_whole
from glassformer.introspection import at_rest, capture, eager, rows_of, within
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.model import Model
from glassformer.parts.precision import exact


@dataclass(frozen=True, eq=False, repr=False)
class TokenSimilarity(Reading):
    """Similarity of the tokens of a text in the residual stream. By depth (0: embedding, i: after layer i - 1), means
    over rows: `rho` (layers + 1,), the mean cosine between two tokens, and `mu` (layers + 1,), the share of the
    stream's norm that is left without the mean token. `cosines` (T, T): of row 0 at `depth`; with `tile` > 1 a cell is
    the mean over tile x tile pairs of tokens."""

    title: ClassVar[str] = "Token similarity"

    rho: Float[Tensor, " l"]
    mu: Float[Tensor, " l"]
    cosines: Float[Tensor, "t t"]
    depth: int
    tile: int

    def __str__(self) -> str:
        last = len(self.rho) - 1
        lines = [f"depth {at}: rho {self.rho[at]:.3f}, mu {self.mu[at]:.3f}" for at in sorted({0, last // 2, last})]
        return "\n".join(["mean cosine between tokens, rho, and what is left without their mean, mu", *lines])

    def figure(self, width: float = 9.5, height: float = 4.0) -> Any:
        return super().figure(width, height)

    def draw(self, figure: Any) -> None:
        left, right = style.axes(figure, 1, 2, width_ratios=(1.15, 1)).flat
        depths = range(len(self.rho))
        left.plot(depths, self.rho, label="rho, mean cosine between tokens", marker="o", markersize=3)
        left.plot(depths, self.mu, label="mu, share that is not the mean token", marker="s", markersize=3)
        left.set(xlabel="depth (0: embedding)", ylim=(min(0.0, float(self.rho.min())) - 0.03, 1.03))
        left.set_title("by depth", loc="left", color=style.INK, fontsize=9)
        left.axhline(0.95, label="rho above it: rank collapse", color=style.MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        style.legend(left, loc="best")
        extent = (-0.5, self.cosines.shape[0] * self.tile - 0.5, self.cosines.shape[0] * self.tile - 0.5, -0.5)
        style.heat(right, self.cosines, label="cosine", signed=True, high=1.0, extent=extent, aspect="equal")
        tiles = f", means of {self.tile} x {self.tile}" if self.tile > 1 else ""
        right.set_title(f"at depth {self.depth}{tiles}", loc="left", color=style.INK, fontsize=9)
        right.set(xlabel="token", ylabel="token")


def token_similarity(
    model: Model, tokens: Int[Tensor, "b s"], depth: int | None = None, pool: int = 256
) -> TokenSimilarity:
    """Returns rho and mu of the stream after the embedding and after every layer, and all cosines at one `depth` (the
    middle).

        rho = 1/(T(T-1)) Σ_{k!=k'} cos(x_k, x_k')       mu = ||X - 1 x̄^T||_F / ||X||_F

    Noci et al. 2022, 2206.03126; Dong et al. 2021, 2103.03404. rho -> 1 and mu -> 0 over depth is rank collapse. A
    moderate rise is usual: in a trained model one large shared direction lifts rho. The matrix of cosines is pooled to
    at most pool x pool, each cell the mean of its tile. Raises RequestError for fewer than two tokens, and for a depth
    out of range."""
    tokens, count = rows_of(model, tokens, least=2), len(eager(model).layers) + 1
    check_whole("pool", pool)
    depth = within(count // 2 if depth is None else depth, count, "depth")[0]
    names = ["embed", *(f"layers.{at}.resid_post" for at in range(count - 1))]

    def both(x: Tensor) -> Tensor:
        return torch.stack([token_cosine(exact(x)), relative_residual(exact(x))]).mean(-1)

    with at_rest(model):
        found = capture(model, tokens, names, reduce=both)
        x = exact(capture(model, tokens[:1], names[depth])[names[depth]][0])
    rho, mu = torch.stack([found[name] for name in names], dim=1).cpu()
    units = torch.nn.functional.normalize(x, dim=-1)
    tile = -(-len(x) // pool)
    means = torch.stack([part.mean(0) for part in units.split(tile)])  # the mean of products is the product of means
    return TokenSimilarity(rho, mu, (means @ means.T).cpu(), depth, tile)
