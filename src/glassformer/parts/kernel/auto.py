from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from glassformer.parts.base import BuildContext
from glassformer.parts.kernel.banded import Banded
from glassformer.parts.kernel.base import Index, Kernel, KernelConfig, Once, ScoreBias, anew
from glassformer.parts.kernel.direct import Direct
from glassformer.parts.kernel.naive import Naive
from glassformer.parts.kernel.sdpa import Sdpa
from glassformer.parts.kernel.table import fastest
from glassformer.parts.precision import slow_in_bf16
from glassformer.parts.visibility import Visibility


class Auto(Kernel):
    """The kernel that the measured table (`table.py`) found fastest for this device, dtype, shape and visibility; in
    fp32 where nobody learns and the processor is slow in bf16."""

    kernels: ClassVar[dict[str, Kernel]] = {
        "naive": Naive(), "sdpa": Sdpa(), "banded": Banded(), "direct": Direct(),
    }  # fmt: skip

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
        additive = bias is None or bias.additive
        name = fastest(q, k, visibility, additive, plain=bias is None and index is None)
        dtype = q.dtype
        if name != "direct" and dtype == torch.bfloat16 and not torch.is_grad_enabled() and slow_in_bf16(q.device.type):
            q, k, v = q.float(), k.float(), v.float()
        return self.kernels[name](q, k, v, visibility, bias, scale, dropout, index, once).to(dtype)


class AutoConfig(KernelConfig, kind="auto"):
    def build(self, ctx: BuildContext) -> Auto:
        return Auto()
