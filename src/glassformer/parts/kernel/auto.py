from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.banded import Banded
from glassformer.parts.kernel.base import AttentionCall, CallFacts, HeadLayout, KeptTensors, Kernel, KernelConfig
from glassformer.parts.kernel.direct import Direct
from glassformer.parts.kernel.flex import Flex
from glassformer.parts.kernel.on_gpu import OnGpuConfig
from glassformer.parts.kernel.sdpa import Sdpa
from glassformer.parts.kernel.table import ranking
from glassformer.parts.precision import slow_in_bf16
from glassformer.parts.visibility import Visibility


class Auto(Kernel):
    """Kernel that delegates each call to the first kernel of its `ranking` (by device, dtype, shape and visibility)
    that can compute the call. A bf16 call without gradients on a processor that is slow in bf16 is ranked, and
    computed, as one in fp32."""

    name = "auto"
    kernels: ClassVar[dict[str, Kernel]] = {kernel.name: kernel for kernel in (Sdpa(), Banded(), Direct(), Flex())}

    def __call__(self, call: AttentionCall) -> Tensor:
        kernel = self.fastest(call.facts)
        dtype = call.q.dtype
        reading = dtype == torch.bfloat16 and not torch.is_grad_enabled()
        if reading and kernel.name != "direct" and slow_in_bf16(call.q.device.type):
            facts = call.facts._replace(dtype=torch.float32)
            kernel = self.fastest(facts)
            if kernel.name == "sdpa" and fused_loops.attends(facts):
                z = fused_loops.half_attention(call.q, call.k, call.v, call.visibility.causal, call.score_scale)
                if z is not None:
                    return z
            call = call.replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
        return kernel.attend(call).to(dtype)

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        return self.fastest(facts).keeps(facts, visibility, heads)

    def in_loops(self, facts: CallFacts) -> bool:
        return self.fastest(facts).in_loops(facts)

    def has_pairs(self, facts: CallFacts) -> bool:
        return self.fastest(facts).has_pairs(facts)

    def fastest(self, facts: CallFacts) -> Kernel:
        """Returns the fastest kernel that can compute, on this machine, a call with these facts."""
        for name in ranking(facts):
            if not self.kernels[name].refusal(facts):
                break
        return self.kernels[name]


class AutoConfig(KernelConfig, kind="auto"):
    def build(self, ctx: BuildContext) -> Auto:
        return Auto()

    def for_gpu(self) -> OnGpuConfig:
        return OnGpuConfig.model_construct()  # it has no kind to be validated by
