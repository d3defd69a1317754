from __future__ import annotations

from torch import Tensor, nn

from glassformer.parts.residual.base import Branch, ResidualConfig, Sequential


class NoResidual(Sequential):
    """Wiring x <- mixer(norm(x)); x <- ffn(norm(x)): the branches without the sum, as He et al. 2016, 1603.05027, test
    it.

    x ─ norm ─ mixer ─ norm ─ ffn ─

    A gradient passes through every branch, and a token keeps only mixtures of all tokens: rank collapse (Dong et al.
    2021, 2103.03404). Pre-norm blocks add the sum.
    """

    def __init__(
        self, mixer_norm: nn.Module, ffn_norm: nn.Module | None = None, dropout: float = 0.0, scale: float = 1.0
    ):
        super().__init__(dropout, scale)
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def mix(self, x: Tensor, mixer: Branch) -> Tensor:
        return self.resid_mid(self.share(mixer(self.mixer_norm(x))))

    def feed(self, x: Tensor, ffn: Branch) -> Tensor:
        assert self.ffn_norm is not None, "a block with an ffn needs ffn_norm"
        return self.share(ffn(self.ffn_norm(x)))


class NoResidualConfig(ResidualConfig, kind="no_residual", words="noresidual"):
    wiring = NoResidual
