"""Statistics of the similarity and size of activations x (..., t, d), one number per leading index.

Computed in fp32, for fp64 input in fp64. NaN in, NaN out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.parts.precision import wide


def token_cosine(x: Float[Tensor, "... t d"]) -> Float[Tensor, "..."]:
    """Returns rho = 1/(T(T-1)) Σ_{k!=k'} cos(x_k, x_k'), the mean cosine between different tokens; -1/(T-1) to 1.

    In O(T d): with u_k = x_k / |x_k|, the sum is |Σ u_k|^2 - Σ |u_k|^2. A token of zeros has cosine 0 with every other;
    fewer than two tokens give 0. Noci et al. 2022, arXiv 2206.03126, figure 1.

    Trouble: rho -> 1 over depth is rank collapse: all tokens are equal, and W_Q, W_K get no gradient. The diagnosis
    finds it above 0.95, if queries and keys get less than 1e-3 of the gradient of the values.
    """
    x, t = wide(x), x.shape[-2]
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    units = torch.where(norms == 0, 0.0, x / norms)  # NaN stays NaN
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    return pairs / max(1, t * (t - 1)) if t > 1 else pairs * 0


def relative_residual(x: Float[Tensor, "... t d"]) -> Float[Tensor, "..."]:
    """Returns mu = ||X - 1 x̄^T||_F / ||X||_F, x̄ the mean token: from 0 (tokens equal) to 1 (x̄ = 0).

    If all tokens have the same norm, mu^2 = (1 - rho) (T-1)/T. X = 0 gives 0. After Dong et al. 2021, arXiv 2103.03404,
    with the Frobenius norm in place of their composite norm (`composite_residual`): x̄ then minimises the residual
    exactly.

    Trouble: mu -> 0 over depth is rank collapse. Unlike rho, mu also falls for a large common offset.
    """
    x = wide(x)
    norm, residual = (torch.linalg.vector_norm(part, dim=(-2, -1)) for part in (x, _centred(x)))
    return torch.where(norm == 0, 0.0, residual / norm)


def composite_norm(x: Float[Tensor, "... t d"]) -> Float[Tensor, "..."]:
    """Returns ||X||_{1,inf} = sqrt(||X||_1 ||X||_inf), of the largest column sum and the largest row sum of |X|.

    Dong et al. (2021, arXiv 2103.03404) prove in this measure that pure attention loses rank doubly exponentially. It
    is not a norm: the triangle inequality fails."""
    size = wide(x).abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def composite_residual(x: Float[Tensor, "... t d"]) -> Float[Tensor, "..."]:
    """Returns ||X - 1 x̄^T||_{1,inf} / ||X||_{1,inf}, the relative residual of Dong et al. 2021, arXiv 2103.03404, with
    x̄ the mean token, in place of their minimiser. X = 0 gives 0."""
    x = wide(x)
    norm, residual = composite_norm(x), composite_norm(_centred(x))
    return torch.where(norm == 0, 0.0, residual / norm)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-2, keepdim=True)


def residual_rms(x: Float[Tensor, "... t d"]) -> Float[Tensor, "..."]:
    """Returns the RMS of x, sqrt(mean x^2) over tokens and features; 0 without a token.

    A Pre-LN stream grows like sqrt(l) with depth at init. Trouble: faster growth, a jump at one layer, or a drop to 0
    (a dead layer below a Post-LN stack)."""
    x = wide(x)
    return torch.linalg.vector_norm(x, dim=(-2, -1)) / max(1, x.shape[-2] * x.shape[-1]) ** 0.5


@dataclass(frozen=True)
class Massive:
    """Massive activations found by `massive`: their mask, and one count, maximum and median per leading index of x."""

    mask: Tensor
    """Mask (..., t, d), True for massive values."""
    count: Tensor
    """Number of massive values, (...,)."""
    largest: Tensor
    """Maximum |x|, (...,)."""
    median: Tensor
    """Median |x|, (...,), the lower of the two middle values for an even number."""

    @property
    def ratio(self) -> Tensor:
        """Ratio max |x| / median |x|; 0 if all x are zero, inf if only the median is zero."""
        return torch.where(self.largest == 0, 0.0, self.largest / self.median)


def massive(x: Float[Tensor, "... t d"], above: float = 100.0, times: float = 1000.0) -> Massive:
    """Finds massive activations: |x| > `above` and |x| >= `times` times the median |x| over all tokens and features.

    Sun et al. 2024, arXiv 2402.17762, section 2; `above` and `times` are its thresholds ("at least or around"). In
    trained models, massive values appear in a few fixed features of the first token: they work as a bias, and break
    int8 quantization of activations. Early in a run they are trouble: one feature carries the stream.
    """
    size = wide(x).abs()
    flat = size.flatten(-2)
    if not flat.shape[-1]:
        nothing = flat.new_zeros(flat.shape[:-1])
        return Massive(size > above, nothing.long(), nothing, nothing)
    median, largest = flat.median(-1).values, flat.amax(-1)
    mask = (size > above) & (size >= times * median[..., None, None])
    return Massive(mask, mask.sum((-2, -1)), largest, median)
