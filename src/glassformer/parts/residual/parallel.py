from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.words import Word
from glassformer.parts.residual.base import Branch, Residual, ResidualConfig


class Parallel(Residual):
    """Wiring x <- x + mixer(norm(x)) + ffn(norm'(x)): both branches read one stream. GPT-J; PaLM, 2204.02311.

    With one shared norm (Falcon-7B, Phi) norm' is norm; with two they differ (GPT-NeoX, Falcon-40B). It has no
    `resid_mid`, because no place is between the branches.

        x ─┬───────────────────(+)─      x ─┬──────────────────(+)─
           ├─ norm ─┬─ mixer ──┤            ├─ norm ── mixer ──┤
           │        └─ ffn ────┘            └─ norm' ─ ffn ────┘
             one shared norm                    two norms
    """

    norms_stream: ClassVar[bool] = False

    def __init__(
        self, mixer_norm: nn.Module, ffn_norm: nn.Module | None = None, dropout: float = 0.0, scale: float = 1.0
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm
        del self.resid_mid

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        normed = self.mixer_norm(x)
        mixed = x + self.share(mixer(normed))
        if ffn is None:
            return mixed
        return mixed + self.share(ffn(normed if self.ffn_norm is None else self.ffn_norm(x)))


class ParallelConfig(
    ResidualConfig,
    kind="parallel",
    words=(Word("parallel", fields={"shared_norm": True}), Word("parallel2", fields={"shared_norm": False})),
):
    wiring = Parallel
    shared_norm: bool = True
    """True for one norm for both branches, False for one for each."""

    def norm_names(self, has_ffn: bool) -> tuple[str, ...]:
        return super().norm_names(has_ffn and not self.shared_norm)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the wiring. The tensor that mixer and FFN both read, the norm's result or the stream, is
        counted as kept once."""
        twice = shape.keeps(ctx.d_model, shape.products if self.shared_norm else shape.dtype)
        return super().costs(ctx, shape) + Cost(kept=-twice if ctx.has_ffn else 0)
