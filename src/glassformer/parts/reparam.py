"""Reparametrisation of linear layers, whose effective matrix differs from the trained one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.words import Word, positive
from glassformer.parts.precision import full_precision, wide

_LEAST = 1e-12


Vectors = list[tuple[Tensor, Tensor]]
"""Pairs of singular vectors (right (i,), left (o,)) of the largest singular value, one pair for each linear layer;
exact or approximate."""


class Reparam(nn.Module):
    """Base of reparametrisations: a module that makes the effective matrix W_hat (o, i) of the trained W (o, i), in
    which layers are stacked by rows."""

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the effective matrix W_hat of `weight`; in training, may update the buffers kept with it."""
        raise NotImplementedError

    def applied(self, weight: Tensor) -> Tensor:
        """Returns the effective matrix W_hat of `weight` without changing buffers."""
        raise NotImplementedError

    def begin(self, weight: Tensor) -> None:
        """Initialises the buffers and scales of this reparametrisation from `weight`, the initial weights W."""
        raise NotImplementedError


MakeReparam = Callable[[int, tuple[int, ...]], Reparam]
"""Function of (in_features, outs); returns the reparametrisation of layers with these output widths, stacked by
rows."""


class SigmaReparam(Reparam):
    """W_hat = (gamma / sigma(W)) W for each of the linear layers stacked in W (o, i), sigma its largest singular value.

    Zhai et al. 2023, 2303.06296: the spectral norm of W_hat is the learned scalar gamma, so attention scores cannot
    grow without it. Every forward takes one step of power iteration, v = W u / |W u| and u' = W^T v / |W^T v|, and
    sigma = v^T W u': three matrix-vector products per layer. The gradient of sigma goes to W; u' and v are constants.
    While training u' is kept for the next step, in the buffer u (layers, i) that is part of a checkpoint; evaluation
    keeps nothing.

    `gamma`: initial value; None for sigma(W_0), so that W_hat is W_0 at first.
    """

    u: Tensor

    def __init__(self, in_features: int, outs: tuple[int, ...], gamma: float | None = None):
        super().__init__()
        self.outs, self.begins = outs, gamma
        self.gamma = nn.Parameter(torch.empty(len(outs)))
        self.register_buffer("u", torch.empty(len(outs), in_features))

    def forward(self, weight: Tensor) -> Tensor:
        vectors = self.step(weight)
        if self.training:
            self.keep(vectors)
        return self._made(weight, vectors)

    def applied(self, weight: Tensor) -> Tensor:
        return self._made(weight, self.step(weight))

    def sigmas(self, weight: Tensor) -> Tensor:
        """Returns the estimate of each layer's largest singular value, a lower bound: (layers,), at least fp32."""
        return self._sigmas(weight, self.step(weight))

    @torch.no_grad()
    def step(self, weight: Tensor) -> Vectors:
        """Returns the approximate singular vectors (u', v) of each layer after one step of power iteration, at least
        fp32."""
        with full_precision(weight):
            return [_power_step(wide(part), wide(u)) for part, u in zip(weight.split(self.outs), self.u, strict=True)]

    @torch.no_grad()
    def keep(self, vectors: Vectors) -> None:
        self.u.copy_(torch.stack([u for u, _ in vectors]))

    @torch.no_grad()
    def begin(self, weight: Tensor) -> None:
        """Sets u to the exact leading singular vectors of the initial weights W_0, and gamma to its initial value."""
        if weight.is_meta:
            return
        self.u.copy_(torch.stack([leading_right_vector(wide(part)) for part in weight.split(self.outs)]))
        self.gamma.copy_(self.sigmas(weight) if self.begins is None else torch.full_like(self.gamma, self.begins))

    def _sigmas(self, weight: Tensor, vectors: Vectors) -> Tensor:
        with full_precision(weight):
            parts = zip(weight.split(self.outs), vectors, strict=True)
            return torch.stack([v.dot(wide(part).mv(u)) for part, (u, v) in parts])

    def _made(self, weight: Tensor, vectors: Vectors) -> Tensor:
        factors = self.gamma / self._sigmas(weight, vectors).clamp(min=_LEAST)
        parts = zip(factors.unbind(), weight.split(self.outs), strict=True)
        return torch.cat([(factor * wide(part)).to(weight.dtype) for factor, part in parts])


def _power_step(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = F.normalize(weight.mv(u), dim=0)
    return F.normalize(weight.t().mv(v), dim=0), v


def leading_right_vector(weight: Tensor) -> Tensor:
    """Returns the right singular vector (i,) of the largest singular value of W (o, i), by the smaller of W W^T and W^T
    W."""
    if weight.shape[1] <= weight.shape[0]:
        return torch.linalg.eigh(weight.t() @ weight).eigenvectors[:, -1]
    return F.normalize(weight.t().mv(torch.linalg.eigh(weight @ weight.t()).eigenvectors[:, -1]), dim=0)


class ReparamConfig(PartConfig, axis="reparam"):
    """Config of a reparametrisation of every linear layer of the model, and of a head that is not tied."""

    counts_passes: ClassVar[bool] = False
    """True if every pass in training updates buffers, so that the result depends on the number of passes."""

    def build(self, ctx: BuildContext) -> Reparam:
        """Returns the reparametrisation of layers with `ctx.width` inputs and `ctx.outs` outputs each, stacked by
        rows."""
        raise NotImplementedError

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        raise NotImplementedError


class SigmaReparamConfig(
    ReparamConfig, kind="sigma", words=Word("sigmareparam", positive("gamma"), "1", optional=True)
):
    counts_passes: ClassVar[bool] = True

    gamma: float | None = Field(None, gt=0)
    """Initial gamma; None for sigma(W_0)."""

    def build(self, ctx: BuildContext) -> SigmaReparam:
        return SigmaReparam(ctx.width or ctx.d_model, ctx.outs, self.gamma)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the parameter gamma, and of keeping the effective matrix, which is computed at every
        call."""
        made = sum(ctx.outs) * (ctx.width or ctx.d_model)
        return Cost.weights(len(ctx.outs), kept=shape.keeps_once(made, shape.dtype))
