from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.base import AttentionCall, Index, Kernel, KernelConfig, softmax_over
from glassformer.parts.precision import wide

BLOCK = 64


class Direct(Kernel):
    """Kernel of two matmuls and a softmax in fp32, which reads each KV head once for all its queries: for few queries.

    Decoding reads every key that may be visible for one query per head, so it is bound by memory: repeating keys for
    grouped queries, or tiling over absent queries, only adds costs.

    Keys come in blocks of one size, the last padded with zeros, and values are added up block by block. Any number of
    keys that a row does not attend to thus adds zeros at the end of its sums and changes no bit: in a batch of
    sequences a row's z depends only on that row. (Matmuls of another length add in another order. In 16 bits this is
    enough to make two generated texts differ within a few words.)
    """

    name = "direct"

    def attend(self, call: AttentionCall) -> Tensor:
        call = _near(call)
        q, k, v = call.q, call.k, call.v
        (b, s, n, h), (t, g) = q.shape, k.shape[1:3]
        compiling = torch.compiler.is_compiling()  # the number of blocks would be compiled in
        size, blocks = (t, 1) if compiling else (BLOCK, (t + BLOCK - 1) // BLOCK)
        end = size * blocks
        rows = (wide(q) * call.score_scale).transpose(1, 2).reshape(b * g, 1, n // g * s, h)
        keys, values = (_filled(x, end).view(b * g * blocks, size, x.shape[-1]) for x in (k, v))
        scores = torch.bmm(rows.expand(-1, blocks, -1, -1).reshape(len(keys), -1, h), keys.transpose(1, 2))
        scores = scores.view(b * g, blocks, -1, size).transpose(1, 2).reshape(b, n, s, end)
        if not call.sees_all:
            scores = _masked(scores, call, end)
        elif end > t:
            scores = scores + call.once(("direct", t), lambda: _hidden(scores.new_zeros(t), end))
        if call.sinks is not None:  # so that no row is without a score
            pattern = softmax_over(scores, call.sinks)
        else:
            softmax = torch.softmax if call.sees_itself else torch.ops.aten._safe_softmax  # zero for a row without keys
            pattern = softmax(scores, -1)
        pattern = F.dropout(pattern, call.dropout, call.dropout > 0)
        pattern = pattern.reshape(b * g, -1, blocks, size).transpose(1, 2).reshape(len(values), -1, size)
        z = torch.bmm(pattern, values).view(b * g, blocks, -1, v.shape[-1])
        z = z[:, 0] if blocks == 1 else z.cumsum(1)[:, -1]  # adds in order; the order of `sum` depends on the size
        return z.reshape(b, n, s, -1).transpose(1, 2).to(q.dtype)


def _near(call: AttentionCall) -> AttentionCall:
    """Returns the call with fewer keys: only those in the intervals that its visibility needs (`Visibility.spans`), if
    these are at most a quarter of all keys; otherwise the call itself."""
    s, t, width = call.q.shape[1], call.k.shape[1], call.visibility.width
    if width is None or call.index is not None or torch.compiler.is_compiling() or width > t // 4:
        return call
    spans = call.visibility.spans(t - s, t, t)
    device = call.k.device

    def make() -> Index:
        keys = torch.cat([torch.arange(begin, end, device=device) for begin, end in spans])
        return torch.arange(t - s, t, device=device), keys

    k, v = (torch.cat([x[:, begin:end] for begin, end in spans], dim=1) for x in (call.k, call.v))
    return call.replace(k=k, v=v, index=call.once(("near", *call.key), make))


def _masked(scores: Tensor, call: AttentionCall, end: int) -> Tensor:
    """Returns the scores (b, n, s, end) of the keys before `end`, with the bias added, and -inf for keys that the query
    does not attend to."""
    if call.additive:
        dtype = scores.dtype
        return scores + call.once(("direct", *call.key), lambda: _hidden(call.additive_mask(dtype), end))
    assert call.bias is not None
    at = call.at
    scores = call.bias(scores[..., : call.k.shape[1]], *at)
    return _hidden(scores.masked_fill(~call.visibility.visible(*at), float("-inf")), end)


def _filled(x: Tensor, end: int) -> Tensor:
    """Returns the keys or values x (b, t, g, h) as (b, g, end, h), at least in fp32, padded with zeros in the slots t
    .. end-1."""
    x = x.transpose(1, 2)
    if x.shape[2] == end:
        return wide(x).contiguous()
    made = x.new_empty(*x.shape[:2], end, x.shape[3], dtype=wide(x[:0]).dtype)
    made[:, :, : x.shape[2]] = x
    made[:, :, x.shape[2] :] = 0
    return made


def _hidden(scores: Tensor, end: int) -> Tensor:
    """Returns the scores (b, n, s, t) padded with -inf to `end` keys, because the added slots hold no key."""
    return F.pad(scores, (0, end - scores.shape[-1]), value=float("-inf"))


class DirectConfig(KernelConfig, kind="direct"):
    def build(self, ctx: BuildContext) -> Direct:
        return Direct()
