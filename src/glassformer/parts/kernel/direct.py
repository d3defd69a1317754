from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, additive_mask, anew, indices
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility


class Direct(Kernel):
    """Two matrix products and a softmax in fp32, each key/value head read once for all its queries: for few queries.

    Decoding reads every key for one query per head, so memory decides: repeating keys for grouped queries, or tiling
    over queries that are not there, only costs.
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
        rows = (wide(q) * (scale or h**-0.5)).transpose(1, 2).reshape(b * g, n // g * s, h)
        keys, values = (wide(x).transpose(1, 2).reshape(b * g, t, h) for x in (k, v))
        scores = torch.bmm(rows, keys.transpose(1, 2)).view(b, n, s, t)
        near = visibility.reach is None or visibility.reach >= t
        plain = visibility.only_order and near and bias is None and index is None
        if not plain or (visibility.causal and s > 1):
            if bias is None or bias.additive:
                key = ("direct", visibility.key, bias and bias.key)  # layers that see alike keep as many tokens
                scores = scores + once(key, lambda: additive_mask(wide(q), k, visibility, bias, index))
            else:
                at = indices(q, k, index)
                scores = bias(scores, *at).masked_fill(~visibility.visible(*at), float("-inf"))
        seeing = visibility.sees_itself and index is None
        softmax = torch.softmax if seeing else torch.ops.aten._safe_softmax  # zero for a row without keys
        pattern = F.dropout(softmax(scores, -1), dropout, dropout > 0)
        return torch.bmm(pattern.view(b * g, n // g * s, t), values).view(b, n, s, h).transpose(1, 2).to(q.dtype)


class DirectConfig(KernelConfig, kind="direct"):
    def build(self, ctx: BuildContext) -> Direct:  # type: ignore[override]
        return Direct()
