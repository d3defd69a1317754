from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.site import Site
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.norm.base import NormConfig
from glassformer.parts.residual.base import Branch, PartBranch, ResidualConfig, Sequential


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
        norm = self.mixer_norm
        return self.resid_mid(x + self.share(mixer(x)) if norm is None else self.added(x, mixer, norm))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.added(x, ffn, self.ffn_norm)

    def parts(self, x: Tensor, mixer: PartBranch, ffn: PartBranch | None) -> list[FusedPart] | None:
        plain = type(self) is Pre and type(self.resid_mid) is Site and _methods() == _WRITTEN
        if not plain or not (ffn is None or ffn.fuses):
            return None
        found: list[FusedPart] = []
        for branch, norm in ((mixer, self.mixer_norm), (ffn, self.ffn_norm)):
            part = None if branch is None or norm is None else self.fused(x, branch, norm)
            if part is None and branch is not None:
                return None
            found += [] if part is None else [part]
        return found


def _methods() -> tuple[Any, ...]:
    return Pre.forward, Pre.mix, Pre.feed, Pre.added, Pre.share


_WRITTEN = _methods()  # a program may replace them


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
