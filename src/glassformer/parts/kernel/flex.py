from __future__ import annotations

import os
import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, anew, refuse
from glassformer.parts.visibility import Visibility


@lru_cache(maxsize=1)
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return create_block_mask, torch.compile(flex_attention, dynamic=False)


@lru_cache
def _found(compiler: str) -> bool:
    return shutil.which(compiler) is not None


class Flex(Kernel):
    """FlexAttention: the visibility and the bias are compiled into one tiled kernel, blocks nobody sees are skipped.

    Dong et al. 2024, 2412.05496. On a GPU it trains; on the CPU it has no backward pass and needs a C++ compiler.
    """

    def check(self, visibility: Visibility, softcap: float | None, dropout: float) -> None:
        if dropout:
            refuse("flex", "dropout", dropout, "naive, banded or sdpa")

    def check_training(self, device: str) -> None:
        if device == "cpu":
            raise RequestError("kernel=flex has no backward pass on the CPU; train with kernel=banded, sdpa or auto")

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
        if torch.is_grad_enabled() and q.requires_grad:
            self.check_training(q.device.type)
        if q.device.type == "cpu" and not torch.compiler.is_compiling() and not _found(os.environ.get("CXX", "g++")):
            raise RequestError("kernel=flex needs a C++ compiler on the CPU (g++, or CXX); use kernel=auto")
        create_block_mask, flex_attention = _flex()
        q_idx, k_idx = index or (
            torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device),
            torch.arange(k.shape[1], device=q.device),
        )

        # Without names of their own: torch counts their arguments, which a checker of annotations would hide.
        visible = lambda b, n, i, j: visibility.visible(b, n, q_idx[i], k_idx[j])  # noqa: E731
        bend = None if bias is None else lambda score, b, n, i, j: bias(score, b, n, q_idx[i], k_idx[j])
        mask = create_block_mask(visible, q.shape[0], q.shape[2], q.shape[1], k.shape[1], device=q.device)
        z = flex_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            score_mod=bend, block_mask=mask, scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return z.transpose(1, 2)


class FlexConfig(KernelConfig, kind="flex"):
    def build(self, ctx: BuildContext) -> Flex:
        return Flex()
