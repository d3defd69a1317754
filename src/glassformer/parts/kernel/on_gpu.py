from __future__ import annotations

import torch
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.banded import Banded
from glassformer.parts.kernel.base import AttentionCall, CallFacts, HeadLayout, KeptTensors, Kernel, KernelConfig
from glassformer.parts.kernel.flex import Flex
from glassformer.parts.kernel.sdpa import Sdpa
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Bidirectional, Visibility


class OnGpu(Kernel):
    """Kernel that a plan counts for a GPU in place of `auto`, on a machine that may have no GPU: SDPA, and
    FlexAttention for sinks and for biases that are not additive, or `banded` if these meet dropout or a learned bias.

    Only for tensors without data (meta device). FlexAttention rejects these, so SDPA without a mask, whose tensors have
    the same sizes, is called in its place: the result has the correct size and no meaning."""

    name = "on_gpu"

    def _chosen(self, facts: CallFacts) -> Kernel:
        if facts.additive and not facts.sinks:
            return Sdpa()
        return Banded() if facts.dropout or facts.learned else Flex()

    def has_pairs(self, facts: CallFacts) -> bool:
        return self._chosen(facts).has_pairs(facts)

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        return self._chosen(facts).keeps(facts, visibility, heads)

    def attend(self, call: AttentionCall) -> Tensor:
        kernel = self._chosen(call.facts)
        if kernel.name != "flex":
            return kernel.attend(call)
        z = Sdpa().attend(AttentionCall(call.q, call.k, call.v, Bidirectional()))
        if call.sinks is None:
            return z
        left = torch.sigmoid(z.new_zeros(z.shape[:3], dtype=wide(z[:0]).dtype) - wide(call.sinks))
        return z * left.to(z.dtype)[..., None]


class OnGpuConfig(KernelConfig):
    """Config of the kernel `OnGpu`. Unlike other kernels it has no name (`kind`) for model files, because only plans
    use it."""

    def build(self, ctx: BuildContext) -> OnGpu:
        return OnGpu()
