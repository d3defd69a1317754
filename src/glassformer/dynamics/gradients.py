"""Statistics of the size of gradients and updates: whole tensors, one number each."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.parts.precision import wide


def gradient_norm(gradient: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Returns the gradient norm ||dL/dW||_F.

    At init, the norm of the last layer falls like L^-0.5 with the depth of a Pre-LN stack and does not depend on the
    depth of a Post-LN stack (Xiong et al. 2020, arXiv 2002.04745). Trouble: norms of the first and the last layer that
    are more than 100 times apart.
    """
    return torch.linalg.vector_norm(wide(gradient))


def gradient_rms(gradient: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Returns sqrt(mean (dL/dW)^2), the size of one element; 0 for an empty tensor.

    Trouble: within a factor of 10 of AdamW's eps, which then swallows the update (Wortsman et al. 2023, arXiv
    2309.14322, section 3.4: eps 1e-15 in place of 1e-8 cured it)."""
    return gradient_norm(gradient) / max(1, gradient.numel()) ** 0.5


def update_ratio(update: Float[Tensor, "..."], weight: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Returns ||ΔW||_F / ||W||_F of one step; 0 without an update, inf for an update of zero weights ("inf" in
    dynamics.jsonl).

    LARS multiplies the rate of each layer by the trust ratio ||W|| / ||dL/dW||, so that all layers have the same update
    ratio (You et al. 2017, arXiv 1708.03888). About 1e-3 is usual (a rule of thumb).

    Trouble: above 1e-2 for long, the learning rate is too large for this matrix; below 1e-5, it hardly learns."""
    return share_moved(gradient_norm(update), gradient_norm(weight))


def share_moved(moved: Float[Tensor, "..."], norm: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns moved / norm, the update ratio of known norms ||ΔW|| and ||W||; 0 if `moved` is 0, inf if only `norm` is
    0."""
    return torch.where(moved == 0, 0.0, moved / norm)
