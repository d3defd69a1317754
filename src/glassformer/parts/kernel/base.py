from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.visibility import Visibility

Index = tuple[Tensor, Tensor]
"""(q_idx (s,) or (b, s), k_idx (t,) or (b, t)): which tokens the queries and keys are, from the sequence's start."""

Once = Callable[[Hashable, Callable[[], Any]], Any]
"""once(key, make): keeps what depends on shapes and positions alone for all layers of a pass."""


def anew(key: Hashable, make: Callable[[], Any]) -> Any:
    """The Once that keeps nothing."""
    return make()


class ScoreBias:
    """bias(score, b, n, q_idx, k_idx) -> score, the convention of `torch.nn.attention.flex_attention`.

    `additive` promises that bias(score, ...) = score + bias(0, ...), so a mask can carry it.
    """

    def __init__(self, function: Callable[..., Tensor], additive: bool, key: Hashable):
        self.function = function
        self.additive = additive
        self.key = key
        """Equal for equal biases within one pass of the model."""

    def __call__(self, score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return self.function(score, b, n, q_idx, k_idx)

    @staticmethod
    def chain(first: ScoreBias | None, then: ScoreBias | None) -> ScoreBias | None:
        """Both, in this order."""
        if first is None or then is None:
            return first or then
        both = first.additive and then.additive
        return ScoreBias(lambda score, *at: then(first(score, *at), *at), both, (first.key, then.key))


def softcap(cap: float) -> ScoreBias:
    """score -> cap tanh(score / cap), bounding |score| by cap (Gemma 2, 2408.00118)."""
    return ScoreBias(lambda score, b, n, q_idx, k_idx: cap * torch.tanh(score / cap), False, ("softcap", cap))


class Kernel:
    """How z = dropout(softmax(bias(q k^T scale) where visible)) v is computed.

    q (b, s, n, h), k and v (b, t, g, h) with g dividing n: query head i reads key/value head i // (n/g).
    Returns z (b, s, n, h). `scale` defaults to 1/sqrt(h); `index` to the queries being the last s of the t tokens.
    A row that sees no key is zero. Every kernel equals `naive` in outputs and gradients.
    """

    def check(self, visibility: Visibility, softcap: float | None, dropout: float) -> None:
        """Refuses, at construction, what this kernel cannot do.

        Raises RequestError with the field and what would serve."""

    def check_training(self, device: str) -> None:
        """Refuses, before anything is computed, to train on a device where there is no backward pass."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        bias: ScoreBias | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        index: Index | None = None,
        once: Once = anew,
    ) -> Tensor:
        raise NotImplementedError


class KernelConfig(PartConfig, axis="kernel"):
    def build(self, ctx: BuildContext) -> Kernel:
        raise NotImplementedError


def refuse(kernel: str, field: str, value: object, instead: str) -> None:
    raise RequestError(f"kernel={kernel} cannot serve {field}={value}; use kernel={instead}")


def indices(q: Tensor, k: Tensor, index: Index | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b (b,1,1,1), n (1,n,1,1), q_idx (1 or b,1,s,1), k_idx (1 or b,1,1,t): they broadcast to (b, n, s, t)."""
    b, s, n, t, device = q.shape[0], q.shape[1], q.shape[2], k.shape[1], q.device
    q_idx, k_idx = index or (torch.arange(t - s, t, device=device), torch.arange(t, device=device))
    return (
        torch.arange(b, device=device).view(b, 1, 1, 1),
        torch.arange(n, device=device).view(1, n, 1, 1),
        q_idx.reshape(-1, 1, s, 1),
        k_idx.reshape(-1, 1, 1, t),
    )


def additive_mask(q: Tensor, k: Tensor, visibility: Visibility, bias: ScoreBias | None, index: Index | None) -> Tensor:
    """Mask in q's dtype, 0 or the bias where visible and -inf elsewhere, broadcastable to (b, n, s, t)."""
    at = indices(q, k, index)
    visible = visibility.visible(*at)
    zero = torch.zeros((), device=q.device)
    scores = zero if bias is None else bias(zero, *at)
    return torch.where(visible, scores, float("-inf")).to(q.dtype)
