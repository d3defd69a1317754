from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, additive_mask, anew, indices
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility

BLOCK = 64


class Direct(Kernel):
    """Two matrix products and a softmax in fp32, each key/value head read once for all its queries: for few queries.

    Decoding reads every key for one query per head, so memory decides: repeating keys for grouped queries, or tiling
    over queries that are not there, only costs.

    Keys come in blocks of one size, the last filled up with zeros, and sums go over the blocks in order. So keys that
    a row does not see add zeros at the end and change no bit of it, however many they are: in a batch of sequences a
    row's z depends on its own alone. (A product of another length would add in another order. In 16 bits that is
    enough to part two texts within a few words.)
    """

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
        (b, s, n, h), (t, g) = q.shape, k.shape[1:3]
        blocks = (t + BLOCK - 1) // BLOCK
        rows = (wide(q) * (scale or h**-0.5)).transpose(1, 2).reshape(b * g, 1, n // g * s, h)
        keys, values = _in_blocks(k, blocks), _in_blocks(v, blocks)
        scores = (rows @ keys.transpose(-1, -2)).transpose(1, 2).reshape(b, n, s, blocks * BLOCK)
        near = visibility.reach is None or visibility.reach >= t
        plain = visibility.only_order and near and bias is None and index is None
        filled = (0, blocks * BLOCK - t)
        if plain and not (visibility.causal and s > 1):
            scores = F.pad(scores[..., :t], filled, value=float("-inf"))
        elif bias is None or bias.additive:
            key = ("direct", visibility.key, bias and bias.key)  # layers that see alike keep as many tokens
            mask = once(
                key, lambda: F.pad(additive_mask(wide(q), k, visibility, bias, index), filled, value=float("-inf"))
            )
            scores = scores + mask
        else:
            at = indices(q, k, index)
            scores = bias(scores[..., :t], *at).masked_fill(~visibility.visible(*at), float("-inf"))
            scores = F.pad(scores, filled, value=float("-inf"))
        largest = scores.detach().amax(-1, keepdim=True)
        if not visibility.sees_itself or index is not None:
            largest = largest.clamp(min=torch.finfo(scores.dtype).min)  # zero for a row without keys
        e = torch.exp(scores - largest).view(b * g, n // g * s, blocks, BLOCK).transpose(1, 2)
        total = e.sum(-1, keepdim=True).cumsum(1)[:, -1]
        z = (F.dropout(e, dropout, dropout > 0) @ values).cumsum(1)[:, -1] / total.clamp(min=1e-30)
        return z.view(b, n, s, h).transpose(1, 2).to(q.dtype)


def _in_blocks(x: Tensor, blocks: int) -> Tensor:
    """(b, t, g, h) -> (b g, blocks, BLOCK, h), in fp32 at least."""
    b, t, g, h = x.shape
    filled = F.pad(wide(x).transpose(1, 2), (0, 0, 0, blocks * BLOCK - t))
    return filled.reshape(b * g, blocks, BLOCK, h)


class DirectConfig(KernelConfig, kind="direct"):
    def build(self, ctx: BuildContext) -> Direct:  # type: ignore[override]
        return Direct()
