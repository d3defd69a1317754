from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.kernel.base import AttentionCall, Kernel


class AmongPieces(Kernel):
    """The queries of one of `pieces` of a sequence, as context parallelism divides it, with another kernel. Where that
    has a value for every pair of a query and a key, keys and values are those of all pieces, gathered, (b, p t, g, h);
    where it has none, they go round the ranks, a piece at a time (Liu et al. 2023, 2310.01889).

    It holds what a rank holds, and computes nothing of use: the other pieces are this one again."""

    name = "among_pieces"

    def __init__(self, within: Kernel, pieces: int) -> None:
        self.within, self.pieces = within, pieces

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.index is None and self.within.has_pairs(call.facts):
            call = call.vary(k=torch.cat([call.k] * self.pieces, 1), v=torch.cat([call.v] * self.pieces, 1))
        return self.within(call)
