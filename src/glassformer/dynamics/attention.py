"""Statistics of the spread of attention, from patterns and scores; a number per head.

Patterns and scores are maps of queries against keys, (..., n, s, t): the last three axes are heads, queries, keys, and
every axis before them (the batch) is averaged over. A single map (s, t) gives a single number. NaN in, NaN out.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.precision import exact, wide


def attention_entropy(
    pattern: Float[Tensor, "... s t"], normalised: bool = False, visible: Shaped[Tensor, "..."] | None = None
) -> Tensor:
    """Returns the entropy Ent(A) = -Σ_j A_ij log A_ij in nats, averaged over the queries i (and the batch); per head,
    (n,).

    From 0, every query on one key, to log t, all keys alike. Zhai et al. 2023, arXiv 2303.06296.

    `normalised` divides each row by the log of its number of visible keys, which makes rows and lengths comparable, 0
    to 1, and leaves out rows with a single visible key (our convention, not the paper's). `visible` is the number of
    visible keys of each query, of a shape that broadcasts to (..., n, s); by default causal: the queries are the last s
    of t tokens, the i-th token attends to i keys. Rows without a visible key are left out. Without any row the entropy
    is 0 and the normalised entropy 1: nothing is collapsed.

    Trouble: a head falling below 0.1 while the loss stalls or oscillates and the largest logit passes 1e3 (entropy
    collapse). A low entropy by itself is healthy: induction heads and sinks have it.
    """
    entropy = torch.special.entr(wide(pattern)).sum(-1)  # (..., s)
    visible = causal_counts(pattern) if visible is None else visible.to(entropy.device)
    kept = (visible > (1 if normalised else 0)).expand_as(entropy)
    if normalised:
        entropy = entropy / visible.clamp(min=2).to(entropy.dtype).log()
    total, count = _per_head(entropy.where(kept, 0.0)), _per_head(kept.to(entropy.dtype))
    return torch.where(count > 0, total / count.clamp(min=1), 1.0 if normalised else 0.0)


def causal_counts(pattern: Float[Tensor, "... s t"]) -> Tensor:
    """Returns the number of visible keys of each of the last s of t tokens, (s,), under causal attention: t - s + 1,
    ..., t."""
    s, t = pattern.shape[-2:]
    return torch.arange(t - s + 1, t + 1, device=pattern.device)


def max_attention_logit(scores: Float[Tensor, "... s t"]) -> Tensor:
    """Returns max_ij |S_ij| over visible keys (a hidden key has score -inf) and the batch; per head, (n,).

    Scores are the inputs of the softmax, with scale and bias applied. 0 without a visible key.

    Trouble: every run of Wortsman et al. 2023 (arXiv 2309.14322, section 3.3) in which this logit passed 1e4 diverged,
    and the loss suffers from about 1e3; Kimi K2 (2507.20534) rescales heads above 100. A healthy small model stays
    below 50.
    """
    if not scores.numel():
        return scores.new_zeros(scores.shape[-3:-2])
    seen = scores.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)
    largest = torch.maximum(seen.amax((-2, -1)), -seen.amin((-2, -1)))  # (..., n)
    return wide(largest.reshape(-1, largest.shape[-1]).amax(0) if largest.dim() else largest)


def sink_mass(pattern: Float[Tensor, "... s t"], key: int = 0) -> Tensor:
    """Returns the mean attention that key k receives from the queries at and after position k, Σ_{i>=k} A_ik / (T - k);
    per head, (n,).

    The first query attends only to itself and counts with 1. 0 without a query. Gu et al. 2024, arXiv 2410.10781; Xiao
    et al. 2023, 2309.17453. Raises RequestError for a key out of range.

    A head above 0.3 is called a sink head (`sink_rate`). Not trouble by itself: trained models put most of their
    attention on the first token, and fail if a window drops the key of that token.
    """
    s, t = pattern.shape[-2:]
    if not 0 <= key < t:
        raise RequestError(
            f"key={key} is out of range: the pattern has keys 0 to {t - 1}", code="range", field="key", value=key
        )
    return _mean_per_head(wide(pattern[..., max(0, key - (t - s)) :, key]))


def sink_rate(pattern: Float[Tensor, "... s t"], key: int = 0, above: float = 0.3) -> Tensor:
    """Returns the share of heads whose `sink_mass` is more than `above` (Gu et al. 2024, arXiv 2410.10781: 0.3 at T =
    64)."""
    return (sink_mass(pattern, key) > above).float().mean()


def inverse_participation_ratio(pattern: Float[Tensor, "... s t"]) -> Tensor:
    """Returns IPR = Σ_j A_ij^2, averaged over the queries (and the batch); per head, (n,). From 1/t (all keys alike) to
    1 (one key).

    1/IPR is the effective number of keys. Giorlandino & Goldt 2025, arXiv 2505.24333: scores of variance β^2 log T give
    0 below a critical β and 1 - β_c/β above it in the limit of long sequences; short ones are far from it. At 0 and at
    1 the gradient of W_Q vanishes. 0 without a query.
    """
    return _mean_per_head(wide(pattern).square().sum(-1))


def entropy_bound(s: Tensor | float, keys: Tensor | int) -> Tensor:
    """Returns the minimum entropy, in nats, that softmax of `keys` logits of Euclidean norm <= s can have; fp64, with s
    and `keys` (T) broadcast.

        log(1 + (T-1) b) + s sqrt(T (T-1)) b / (1 + (T-1) b),   b = exp(-s sqrt(T / (T-1)))

    Attained by one large logit and the rest alike; about T s e^-s for large s. Zhai et al. 2023, arXiv 2303.06296,
    theorem 3.1, with s = ||W_Q W_K^T||_2 ||X X^T||_2 / sqrt(h): a bounded spectral norm keeps attention from collapse.
    """
    s, keys = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in (s, keys))
    s = exact(s).clamp(max=1e3)  # the bound is 0 beyond 1e3, where inf * 0 would be NaN
    others = exact(keys).to(s.device) - 1
    gap = s * (1 + 1 / others.clamp(min=1)).sqrt()  # between the large logit and the others
    weight = others * torch.exp(-gap)
    return torch.log1p(weight) + gap * weight / (1 + weight)


def _per_head(x: Tensor) -> Tensor:
    """Returns sums over queries and batch: (..., n, s) -> (n,), (s,) -> ()."""
    return x.sum(-1).reshape(-1, x.shape[-2]).sum(0) if x.dim() > 1 else x.sum()


def _mean_per_head(x: Tensor) -> Tensor:
    """Returns means over queries and batch, 0 without a query: (..., n, s) -> (n,), (s,) -> ()."""
    heads = x.shape[-2] if x.dim() > 1 else 1
    return _per_head(x) / max(1, x.numel() // heads)
