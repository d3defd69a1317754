from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class Post(Sequential):
    """Post-norm wiring x <- norm(x + mixer(x)); x <- norm(x + ffn(x)). Vaswani et al. 2017; BERT. Needs a warm-up.

    x ─┬──────────(+)─ norm ─┬────────(+)─ norm ─
       └─ mixer ──┘          └─ ffn ──┘
    """

    norms_stream: ClassVar[bool] = True

    def __init__(
        self, mixer_norm: nn.Module, ffn_norm: nn.Module | None = None, dropout: float = 0.0, scale: float = 1.0
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(self.mixer_norm(x + self.share(mixer(x))))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.ffn_norm(x + self.share(ffn(x)))


class PostConfig(ResidualConfig, kind="post", words="post"):
    wiring = Post
    feeds_products: ClassVar[bool] = False
    ends_in_norm: ClassVar[bool] = True
    wants_warmup: ClassVar[bool] = True
