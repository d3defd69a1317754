from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import (
    Index,
    Kernel,
    KernelConfig,
    Once,
    ScoreBias,
    additive_mask,
    anew,
    refuse,
)
from glassformer.parts.visibility import Visibility


class Sdpa(Kernel):
    """`F.scaled_dot_product_attention`: tiled, no (s, t) matrix kept (Dao et al. 2022, 2205.14135).

    Plain causal and bidirectional calls need no mask; windows, documents and ALiBi travel as an additive mask.
    """

    def check(self, visibility: Visibility, softcap: float | None, dropout: float) -> None:
        if softcap is not None:
            refuse("sdpa", "softcap", softcap, "naive, banded or flex")

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
        s, t = q.shape[1], k.shape[1]
        near = visibility.reach is None or visibility.reach >= t
        plain = visibility.only_order and near and bias is None and index is None
        # Causal with one query, or no order at all: everything is visible. Causal from the start: the kernel knows.
        see_all = plain and (not visibility.causal or s == 1)
        see_past = plain and visibility.causal and not see_all and bool(s == t)  # lengths are symbols to a compiler
        mask = None
        if not (see_all or see_past):
            key = ("mask", visibility.key, bias and bias.key, s, t, q.dtype)
            mask = once(key, lambda: additive_mask(q, k, visibility, bias, index))
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=mask, dropout_p=dropout, is_causal=see_past, scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return z.transpose(1, 2)


class SdpaConfig(KernelConfig, kind="sdpa"):
    def build(self, ctx: BuildContext) -> Sdpa:
        return Sdpa()
