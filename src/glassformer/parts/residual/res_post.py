from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class ResPost(Sequential):
    """Wiring x <- x + norm(mixer(x)); x <- x + norm(ffn(x)): branches read the raw stream and add a normalised result.

    Res-post-norm of Swin V2 (Liu et al. 2021, 2111.09883), OLMo 2's reordered norm (2501.00656).

    x ─┬────────────────(+)─┬──────────────(+)─
       └─ mixer ─ norm ──┘  └─ ffn ─ norm ──┘
    """

    norms_stream: ClassVar[bool] = False

    def __init__(
        self,
        mixer_post_norm: nn.Module,
        ffn_post_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ):
        super().__init__(dropout, scale)
        self.mixer_post_norm, self.ffn_post_norm = mixer_post_norm, ffn_post_norm

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(x + self.share(self.mixer_post_norm(mixer(x))))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_post_norm is not None, "a block with an ffn needs ffn_post_norm"
        return x + self.share(self.ffn_post_norm(ffn(x)))


class ResPostConfig(ResidualConfig, kind="res_post", words="respost"):
    wiring = ResPost
    feeds_products: ClassVar[bool] = False
    norms: ClassVar[tuple[str, ...]] = ("mixer_post_norm", "ffn_post_norm")
