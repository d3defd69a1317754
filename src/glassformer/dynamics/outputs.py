"""Statistics of hidden units, logits and the load of experts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.parts.precision import wide

VALUES_PER_BLOCK = 1 << 24


def dead_units(hidden: Float[Tensor, "... f"], threshold: float = 1e-3) -> Float[Tensor, ""]:
    """Returns |{j: max_t |hidden_tj| <= threshold}| / f, the share of the f units silent at every token; 0 if empty.

    hidden is the output of the activation (in a gated network, the product with the linear branch). ReLU's dead units
    are exactly 0; those of GELU and SiLU only come close, hence the threshold (values of living ones are around 0.1 to
    1).

    Trouble: a share that grows after a spike or under a large learning rate: such units get no gradient and stay dead
    (Lu et al. 2019, arXiv 1903.06733, on ReLU; already at init if a net is deep and narrow).
    """
    size = wide(hidden).abs().flatten(0, -2)
    if not size.numel():
        return size.new_zeros(())
    largest = size.amax(0)
    return torch.where(largest.isnan(), torch.nan, (largest <= threshold).to(size.dtype)).mean()


def log_z(logits: Float[Tensor, "... v"]) -> Float[Tensor, ""]:
    """Returns mean log Z over tokens, Z = Σ_v exp(logit_v); 0 without a token. Softmax does not depend on log Z; only
    z-loss bounds it.

    It is log V if all logits are 0. Trouble: a drift of more than 5 from log V, or logits sinking far below 0, late in
    a run without weight decay: output-logit divergence (Chowdhery et al. 2022, arXiv 2204.02311; Wortsman et al. 2023,
    2309.14322). The z-loss is 1e-4 mean (log Z)^2.
    """
    rows = logits.flatten(0, -2)
    blocks = rows.split(max(1, VALUES_PER_BLOCK // max(1, rows.shape[-1])))  # fp32 copies of bounded size
    total = torch.stack([wide(block).logsumexp(-1).sum() for block in blocks]).sum()
    return total / max(1, rows.shape[0])


def router_load(experts: Int[Tensor, "... k"], n_experts: int) -> Float[Tensor, "e"]:
    """Returns f_i = 1/(n k) Σ_t |{j: experts_tj = i}|, the share of the assignments that expert i of e = `n_experts`
    receives; `experts` are the indices of the k experts chosen for each of n tokens. The shares sum to 1.

    Zeros without a token. An equal load is 1/e. Fedus et al. 2021, arXiv 2101.03961 (f_i of the balance loss, k =
    1)."""
    chosen = experts.flatten().long()
    counts = torch.zeros(n_experts, device=experts.device).index_add_(0, chosen, torch.ones_like(chosen).float())
    return counts / max(1, chosen.numel())


def router_entropy(probabilities: Float[Tensor, "... e"], normalised: bool = False) -> Float[Tensor, ""]:
    """Returns the entropy -Σ_i p_i log p_i of the router's probabilities in nats, the mean over tokens; `normalised`
    divides it by log e. 0 without a token.

    p = softmax(W x) of Shazeer et al. 2017, arXiv 1701.06538, who found that an unbalanced gate increasingly favours
    few experts; Fedus et al. 2021, arXiv 2101.03961, balance the load by the mean of p.

    Trouble: near 0 early (the router decided before it learned), or at log e for long (it does not decide at all)."""
    entropy = torch.special.entr(wide(probabilities)).sum(-1)
    scale = math.log(max(2, probabilities.shape[-1])) if normalised else 1.0
    return entropy.sum() / (scale * max(1, entropy.numel()))


def max_violation(load: Float[Tensor, "... e"]) -> Float[Tensor, "..."]:
    """Returns MaxVio = max_i load_i / mean load - 1: from 0 (equal load) to e - 1 (all to one expert); 0 without load.

    Wang et al. 2024, arXiv 2408.15664: 0.04 with a bias that balances, 0.72 with an auxiliary loss. Trouble: above 1,
    the busiest expert has twice its share; with a capacity factor, its tokens are dropped."""
    mean = wide(load).mean(-1)
    return torch.where(mean == 0, 0.0, wide(load).amax(-1) / mean - 1)
