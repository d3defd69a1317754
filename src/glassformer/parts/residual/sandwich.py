from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class Sandwich(Sequential):
    """Sandwich wiring x <- x + norm(mixer(norm(x))); x <- x + norm(ffn(norm(x))). Ding et al. 2021,
    2105.13290; Gemma 2.

    x ─┬───────────────────────(+)─┬─────────────────────(+)─
       └─ norm ─ mixer ─ norm ──┘  └─ norm ─ ffn ─ norm ──┘
    """

    norms_stream: ClassVar[bool] = False

    def __init__(
        self,
        mixer_norm: nn.Module,
        mixer_post_norm: nn.Module,
        ffn_norm: nn.Module | None = None,
        ffn_post_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.mixer_post_norm = mixer_norm, mixer_post_norm
        self.ffn_norm, self.ffn_post_norm = ffn_norm, ffn_post_norm

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(x + self.share(self.mixer_post_norm(mixer(self.mixer_norm(x)))))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        assert self.ffn_post_norm is not None, "a block with an ffn needs ffn_post_norm"
        return x + self.share(self.ffn_post_norm(ffn(self.ffn_norm(x))))


class SandwichConfig(ResidualConfig, kind="sandwich", words="sandwich"):
    wiring = Sandwich
    norms: ClassVar[tuple[str, ...]] = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")
