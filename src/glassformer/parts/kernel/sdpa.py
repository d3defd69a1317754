from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.base import AttentionCall, CallFacts, HeadLayout, KeptTensors, Kernel, KernelConfig
from glassformer.parts.visibility import Visibility


class Sdpa(Kernel):
    """Kernel of `F.scaled_dot_product_attention`: tiled, without a full (s, t) matrix (Dao et al. 2022, 2205.14135).

    Plain causal and bidirectional calls need no mask; windows, documents and additive biases become a mask. A sink is
    an additional key of zeros, with the sink as its bias.
    """

    name = "sdpa"

    def refusal(self, facts: CallFacts) -> str | None:
        return None if facts.additive else "cannot apply a softcap, or another bias that is not additive"

    def in_loops(self, facts: CallFacts) -> bool:
        return fused_loops.attends(facts)

    def has_pairs(self, facts: CallFacts) -> bool:
        return self._by_definition(facts) or (facts.masked and not fused_loops.attends(facts))

    def _by_definition(self, facts: CallFacts) -> bool:
        return facts.sinks or (facts.dropout and facts.device == "cpu")

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        """Returns the sizes of the tensors kept of a training call: q, k, v, z and the logarithm of each row's sum of
        exponentials; v and z are padded if values are narrower than keys. On CPUs torch computes dropout by the
        definition, and values wider than keys by another one, all in fp32."""
        if self._by_definition(facts):
            return super().keeps(facts, visibility, heads)
        width, h = heads.value_dim or facts.head_dim, facts.head_dim
        sums = facts.batch * heads.n * facts.s * 4
        if fused_loops.attends(facts):
            return KeptTensors(sums, 0, "qkvz")
        if width > h and facts.device == "cpu":
            fp32 = torch.promote_types(facts.dtype, torch.float32)
            values = facts.s * (facts.t + h) + facts.t * (h + width)
            return KeptTensors(facts.batch * heads.n * values * fp32.itemsize)
        mask = facts.s * facts.t * (heads.n if heads.biased else 1) * facts.dtype.itemsize if facts.masked else 0
        if not narrow(facts.device, h, width, facts.dropout):
            return KeptTensors(sums, mask, "qkvz")
        filled = facts.batch * (heads.n * facts.s + heads.g * facts.t) * h
        return KeptTensors(sums + filled * facts.dtype.itemsize, mask, "qk")

    def attend(self, call: AttentionCall) -> Tensor:
        q, k, v = call.q, call.k, call.v
        if call.plain and call.sinks is None and not call.dropout:
            z = fused_loops.attention(q, k, v, call.visibility.causal, call.score_scale)
            if z is not None:
                return z
        sees_past = call.sees_past
        mask = None
        if call.sinks is not None or not (sees_past or call.sees_all):
            mask = call.once(("mask", *call.key), lambda: call.additive_mask(q.dtype))
        if call.sinks is not None:
            assert mask is not None
            column = call.sinks.to(q.dtype).view(1, -1, 1, 1)
            parts = [x.expand(len(mask), q.shape[2], q.shape[1], -1) for x in (mask, column)]
            mask, sees_past = torch.cat(parts, -1), False
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        h, width = k.shape[-1], v.shape[-1]
        if narrow(q.device.type, h, width, call.dropout > 0):
            v = F.pad(v, (0, h - width))
        if q.shape[2] != k.shape[2] and not shares_keys(q.device.type, q.dtype, mask is not None):
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=mask, dropout_p=call.dropout, is_causal=sees_past, scale=call.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return z.transpose(1, 2)[..., :width]


def narrow(device: str, h: int, width: int, dropout: bool) -> bool:
    """Returns True if values of `width` elements should be padded with zeros to h elements, the width of keys: on CPUs
    torch computes values of another width than keys by the definition, with all scores in memory. It does so for
    dropout in any case, so padding would then gain nothing."""
    return device == "cpu" and width < h and not dropout


def shares_keys(device: str, dtype: torch.dtype, masked: bool) -> bool:
    """Returns True if torch has tiled code for grouped query heads, which share keys: on NVIDIA's GPUs in 16 bits
    without a mask. Other such calls on these GPUs are computed by the definition, with all scores in memory."""
    return device != "cuda" or (dtype in (torch.float16, torch.bfloat16) and not masked)


class SdpaConfig(KernelConfig, kind="sdpa"):
    def build(self, ctx: BuildContext) -> Sdpa:
        return Sdpa()
