"""Ranks and directions of matrices: statistics of weights (o, i) and activations (t, d), one number per leading index.

Effective rank, stable rank and spectral norm are functions of one spectrum: compute `singular_values` once and pass it
to the `_of` functions. All are NaN for a matrix with a value that is not finite, and 0 for a zero or empty one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from glassformer.figures import plain_table
from glassformer.parts.precision import exact, wide

ROWS = 2048
"""Maximum rows for pairwise cosines; from a larger table, evenly spaced rows are taken."""
ALIKE, SHOWN = 0.9, 12
"""Display of a map in a notebook: |cosine| above which pairs count, and maximum number of matrices."""


def singular_values(a: Float[Tensor, "... m n"]) -> Float[Tensor, "... k"]:
    """Returns the min(m, n) singular values, largest first.

    They are the roots of the eigenvalues of the smaller Gram matrix, formed in fp64: as fast as `svdvals` of a square
    fp32 matrix, and three times faster at 384 x 1536. Squaring halves the digits: values below about 3e-7 of the
    largest, fp32's resolution, are rounding and set to 0, so that a matrix of rank r has r values. A Gram matrix in
    fp32 would take half the time and lose the rank: its rounding, 3e-4 of the largest value, gives a 384 x 1536 matrix
    of rank 1 an effective rank of 1.14.
    """
    finite = a.isfinite().all(-1).all(-1)[..., None]
    b = exact(torch.where(finite[..., None], a, 0.0))
    b = b.mT if b.shape[-2] > b.shape[-1] else b
    squares = torch.linalg.eigvalsh(b @ b.mT).flip(-1).clamp(min=0)
    noise = squares[..., :1] * (b.shape[-1] * torch.finfo(torch.float64).eps)
    values = torch.where(squares > noise, squares, 0.0).sqrt()
    return torch.where(finite.to(values.device), values, torch.nan).to(wide(a))


def product_spectrum(w_q: Float[Tensor, "... n h d"], w_k: Float[Tensor, "... g h d"]) -> Float[Tensor, "... n h"]:
    """Returns the singular values of W_Q W_K^T of each head, largest first: the first h, because the other d - h are 0.

    w_q and w_k hold each head's rows of the projections, as in `Linear.weight.unflatten(0, (n, h))`; n query heads
    share g KV heads. Computed from thin factors: with Q R = w^T for w_q and w_k, the spectrum is that of R_q R_k^T, h x
    h; the d x d product is never formed (20 times faster at 6 heads of 64 in d = 384).

    W_Q W_K^T is the bilinear form behind the scores, x W_Q W_K^T x^T / sqrt(h): its norm bounds the entropy from below
    (`entropy_bound`), its effective rank falls when queries and keys collapse (`effective_rank`).
    """
    w_q, w_k, finite = _by_head(w_q, w_k)
    with torch.autocast(w_q.device.type, enabled=False):
        r_q, r_k = (torch.linalg.qr(w.mT, mode="r").R for w in (w_q, w_k))
        return torch.where(finite[..., None], torch.linalg.svdvals(r_q @ r_k.mT), torch.nan)


def product_row_cosine(w_q: Float[Tensor, "... n h d"], w_k: Float[Tensor, "... g h d"]) -> Float[Tensor, "... n"]:
    """Returns `row_cosine` of each head's (d, d) matrix W_Q W_K^T, which is never formed: with Q R = w_k^T its rows are
    those of w_q^T R^T, rotated by Q, which preserves cosines. Arguments as in `product_spectrum`."""
    w_q, w_k, finite = _by_head(w_q, w_k)
    with torch.autocast(w_q.device.type, enabled=False):
        rows = w_q.mT @ torch.linalg.qr(w_k.mT, mode="r").R.mT
    return torch.where(finite, row_cosine(rows), torch.nan)


def _by_head(
    w_q: Float[Tensor, "... n h d"], w_k: Float[Tensor, "... g h d"]
) -> tuple[Float[Tensor, "... n h d"], Float[Tensor, "... n h d"], Bool[Tensor, "... n"]]:
    """Returns w_q and w_k with a matrix for each query head, at least in fp32, and the mask of heads whose values are
    all finite; the matrices of other heads are zero."""
    w_k = w_k.repeat_interleave(w_q.shape[-3] // w_k.shape[-3], dim=-3)
    finite = (w_q.isfinite() & w_k.isfinite()).all(-1).all(-1)
    w_q, w_k = (torch.where(finite[..., None, None], wide(w), 0.0) for w in (w_q, w_k))
    return w_q, w_k, finite


def effective_rank(a: Float[Tensor, "... m n"]) -> Float[Tensor, "..."]:
    """Returns erank(A) = exp(-Σ p_i log p_i), p_i = s_i / Σ_j s_j of the singular values s; 1 to the rank, 0 for zeros.

    Roy & Vetterli 2007. The p_i are shares of s_i, not of s_i^2. A square Gaussian d x d has about 0.80 d.

    Trouble: of activations (t, d), below 5 % of min(t, d), with rho near 1: rank collapse. Of weights, a fall to half
    of the rank at init during the warm-up: condensation. Of W_Q W_K^T per head, below 2 on a plateau of the loss.
    """
    return effective_rank_of(singular_values(a))


def stable_rank(a: Float[Tensor, "... m n"]) -> Float[Tensor, "..."]:
    """Returns ||A||_F^2 / ||A||_2^2 = Σ s_i^2 / max s_i^2; 1 to the rank, 0 for zeros. A Gaussian d x d has about d/4.

    Depends less on small singular values than the effective rank. Rudelson & Vershynin 2007."""
    return stable_rank_of(singular_values(a))


def spectral_norm(w: Float[Tensor, "... m n"]) -> Float[Tensor, "..."]:
    """Returns ||W||_2, the largest singular value: how much W can stretch a vector.

    Trouble: steady growth of q and k (logits grow with its square); sigma-reparametrisation holds it at a learned gamma
    (Zhai et al. 2023, arXiv 2303.06296)."""
    return spectral_norm_of(singular_values(w))


def effective_rank_of(s: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
    """Returns the `effective_rank` of a matrix with singular values s."""
    total = s.sum(-1, keepdim=True)
    entropy = torch.special.entr(s / torch.where(total == 0, 1.0, total)).sum(-1)
    return torch.where(total.squeeze(-1) == 0, 0.0, entropy.exp())


def stable_rank_of(s: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
    """Returns the `stable_rank` of a matrix with singular values s, largest first."""
    top = spectral_norm_of(s)
    return (s / torch.where(top == 0, 1.0, top).unsqueeze(-1)).square().sum(-1)


def spectral_norm_of(s: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
    """Returns the `spectral_norm` of a matrix with singular values s, largest first."""
    return s[..., :1].sum(-1)


def row_cosine(w: Float[Tensor, "... o i"], rows: int = ROWS) -> Float[Tensor, "..."]:
    """Returns the mean |cos(w_i, w_j)| over pairs of different rows; from 0 (all orthogonal) to 1 (all on one line:
    condensed).

    Gaussian rows of i features have about sqrt(2 / (pi i)). A row of zeros has cosine 0 with every other; a single row
    gives 0. At most `rows` rows, evenly spaced, are compared. Chen & Luo 2025, arXiv 2510.06954, definition 1.

    Trouble: a high value is harmless under a small init, where neurons condense first and differ later; under an init
    of usual size, a rise of W_Q or W_K with a falling effective rank shows that queries and keys are collapsing.
    """
    kept = min(w.shape[-2], rows)
    at = torch.arange(kept, device=w.device) * w.shape[-2] // max(1, kept)
    cosines = cosine_matrix(w[..., at, :])
    total = cosines.abs().sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total / max(1, kept * (kept - 1))


def cosine_matrix(w: Float[Tensor, "... o i"]) -> Float[Tensor, "... o o"]:
    """Returns S_ij = cos(w_i, w_j) of all pairs of rows of w; 0 for a row of zeros."""
    norms = torch.linalg.vector_norm(wide(w), dim=-1, keepdim=True)
    units = torch.where(norms == 0, 0.0, wide(w) / norms)
    with torch.autocast(w.device.type, enabled=False):
        return units @ units.mT


class CosineMap(NamedTuple):
    cosines: Tensor
    """`cosine_matrix` with rows and columns re-ordered, (..., o, o)."""
    order: Tensor
    """Index of the row of w at each row and column of `cosines`, (..., o)."""

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: the similarity of the rows of each matrix, in numbers."""
        maps = self.cosines.reshape(-1, *self.cosines.shape[-2:]).abs()
        count, size = max(1, maps.shape[-1] * (maps.shape[-1] - 1)), maps.shape[-1]
        off = maps.masked_fill(torch.eye(size, dtype=torch.bool, device=maps.device), 0.0)
        rows = [
            (str(i), size, f"{float(one.sum()) / count:.3f}", f"{float((one > ALIKE).sum()) / count:.1%}")
            for i, one in enumerate(off[:SHOWN])
        ]
        more = f", the first {SHOWN} of them" if len(maps) > SHOWN else ""
        headings = ("matrix", "rows", "mean |cos|", f"pairs above {ALIKE}")
        return plain_table(f"cosines between the rows of {len(maps)} matrices{more}", headings, rows)


def cosine_map(w: Float[Tensor, "... o i"]) -> CosineMap:
    """Returns C_ab = S_{o(a) o(b)} with S_ij = cos(w_i, w_j), where the order o sorts the entries of the top
    eigenvector of S: condensed rows form a block.

    Chen & Luo 2025, arXiv 2510.06954, figures 1 to 3, show condensation by this map, on a colour scale from -1 to 1."""
    cosines = cosine_matrix(w)
    vectors = torch.linalg.eigh(torch.nan_to_num(cosines)).eigenvectors
    order = vectors[..., -1].argsort(-1)
    across = order.unsqueeze(-2).expand_as(cosines)
    return CosineMap(cosines.gather(-2, across.mT).gather(-1, across), order)
