"""Linear maps that apply another matrix than the one that is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.base import PartConfig
from glassformer.parts.precision import wide

_LEAST = 1e-12


class Reparam(nn.Module):
    """The matrix applied, made from the one trained: W (o, i), maps stacked by rows, to W_hat (o, i)."""

    def forward(self, weight: Tensor) -> Tensor:
        """W_hat; while training, what is kept beside W may follow it."""
        raise NotImplementedError

    def applied(self, weight: Tensor) -> Tensor:
        """W_hat, changing nothing."""
        raise NotImplementedError

    def begin(self, weight: Tensor) -> None:
        """Takes W as the weights to begin from."""
        raise NotImplementedError


MakeReparam = Callable[[int, tuple[int, ...]], Reparam]
"""(in_features, outs) -> the part for maps of so many outputs each, stacked by rows."""


class SigmaReparam(Reparam):
    """W_hat = (gamma / sigma(W)) W for each of the maps stacked in W (o, i), sigma its largest singular value.

    Zhai et al. 2023, 2303.06296: the spectral norm of what is applied is the learned scalar gamma alone, so attention
    scores cannot grow without it. Every training forward takes one step of power iteration, v <- W u / |W u|,
    u <- W^T v / |W^T v|, three matrix-vector products per map; sigma = v^T W u carries a gradient to W, u and v none.
    They are buffers u (maps, i) and v (o,), and so part of a checkpoint.

    `gamma`: where it begins; None: at sigma(W_0), which leaves the function of W_0 as it is.
    """

    u: Tensor
    v: Tensor

    def __init__(self, in_features: int, outs: tuple[int, ...], gamma: float | None = None):
        super().__init__()
        self.outs, self.begins = outs, gamma
        self.gamma = nn.Parameter(torch.empty(len(outs)))
        self.register_buffer("u", torch.empty(len(outs), in_features))
        self.register_buffer("v", torch.empty(sum(outs)))

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            self.iterate(weight)
        return self.applied(weight)

    def applied(self, weight: Tensor) -> Tensor:
        """W_hat by the u and v of the last iteration."""
        with torch.autocast(weight.device.type, enabled=False):
            factors = self.gamma / self.sigmas(weight).clamp(min=_LEAST)
            parts = zip(factors.unbind(), weight.split(self.outs), strict=True)
            return torch.cat([(factor * wide(part)).to(weight.dtype) for factor, part in parts])

    def sigmas(self, weight: Tensor) -> Tensor:
        """v^T W u of each map, (maps,), at least fp32."""
        u, v = wide(self.u.clone()), wide(self.v.clone())  # the iteration goes on before a gradient comes back
        parts = zip(u, v.split(self.outs), weight.split(self.outs), strict=True)
        return torch.stack([right.dot(wide(part).mv(left)) for left, right, part in parts])

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        with torch.autocast(weight.device.type, enabled=False):
            for u, v, part in zip(self.u, self.v.split(self.outs), weight.split(self.outs), strict=True):
                v.copy_(F.normalize(wide(part).mv(wide(u)), dim=0))
                u.copy_(F.normalize(wide(part).t().mv(wide(v)), dim=0))

    @torch.no_grad()
    def begin(self, weight: Tensor) -> None:
        """Takes W as W_0: its leading singular vectors, exactly, and gamma."""
        for u, v, part in zip(self.u, self.v.split(self.outs), weight.split(self.outs), strict=True):
            u.copy_(leading_right_vector(wide(part)))
            v.copy_(F.normalize(wide(part).mv(wide(u)), dim=0))
        self.gamma.copy_(self.sigmas(weight) if self.begins is None else torch.full_like(self.gamma, self.begins))


def leading_right_vector(weight: Tensor) -> Tensor:
    """The right singular vector (i,) of the largest singular value of W (o, i), by the smaller of W W^T and W^T W."""
    if weight.shape[1] <= weight.shape[0]:
        return torch.linalg.eigh(weight.t() @ weight).eigenvectors[:, -1]
    return F.normalize(weight.t().mv(torch.linalg.eigh(weight @ weight.t()).eigenvectors[:, -1]), dim=0)


class ReparamConfig(PartConfig, axis="reparam"):
    """How every linear map of the model holds its matrix: those of the layers, and of a head that is not tied."""

    def over(self, in_features: int, outs: tuple[int, ...]) -> Reparam:
        """For maps of so many outputs each, stacked by rows."""
        raise NotImplementedError

    def params_over(self, outs: tuple[int, ...]) -> int:
        raise NotImplementedError


class SigmaReparamConfig(ReparamConfig, kind="sigma"):
    gamma: float | None = Field(None, gt=0)
    """None: sigma(W_0)."""

    def over(self, in_features: int, outs: tuple[int, ...]) -> SigmaReparam:
        return SigmaReparam(in_features, outs, self.gamma)

    def params_over(self, outs: tuple[int, ...]) -> int:
        return len(outs)
