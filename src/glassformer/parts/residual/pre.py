from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.fused_products import Step
from glassformer.parts.norm.base import NormConfig
from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class Pre(Sequential):
    """Pre-norm wiring x <- x + mixer(norm(x)); x <- x + ffn(norm(x)): the stream itself is never normalised. Xiong
    2020, 2002.04745.

    x ─┬────────────────(+)─┬──────────────(+)─
       └─ norm ─ mixer ──┘  └─ norm ─ ffn ──┘

    Without `mixer_norm` the mixer reads the raw stream: in the first layer of ModernBERT (2412.13663), after an
    embedding with a norm.
    """

    norms_stream: ClassVar[bool] = False

    def __init__(
        self,
        mixer_norm: nn.Module | None = None,
        ffn_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(self.adds(x, mixer, self.mixer_norm)(x))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.adds(x, ffn, self.ffn_norm)(x)

    def steps(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> list[Step] | None:
        if type(self) is not Pre:
            return None
        return [self.adds(x, mixer, self.mixer_norm), *([] if ffn is None else [self.adds(x, ffn, self.ffn_norm)])]


class PreConfig(ResidualConfig, kind="pre", words="pre"):
    wiring = Pre
    mixer_normed: bool = True
    """True if a norm precedes the mixer."""

    def norm_names(self, has_ffn: bool) -> tuple[str, ...]:
        return tuple(name for name in super().norm_names(has_ffn) if self.mixer_normed or name != "mixer_norm")

    def feeds(self, branch: str) -> bool:
        return self.mixer_normed or branch != "mixer"

    def adds_at_once(self, branch: str, ctx: BuildContext) -> bool:
        plain = self.numbers(ctx)["scale"] == 1.0 and not self.dropout
        return plain and isinstance(ctx.norm, NormConfig) and ctx.norm.of_rows and self.feeds(branch)
