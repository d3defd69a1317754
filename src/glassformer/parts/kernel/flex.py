from __future__ import annotations

import os
import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel.base import AttentionCall, CallFacts, HeadLayout, KeptTensors, Kernel, KernelConfig
from glassformer.parts.precision import wide
from glassformer.parts.visibility import Visibility

GPUS = {"cuda", "xpu"}
"""Types of devices for which FlexAttention generates Triton code."""
DTYPES = {torch.float32, torch.float16, torch.bfloat16}
LEAST_HEAD_DIM = 16
"""Minimum head dimension of the Triton code."""
TILE = 128
"""Number of queries in a block of a mask. For fewer queries torch has other Triton code, which puts the queries of all
heads that share a KV head into one block, and fails to compile if these exceed the block."""


@lru_cache(maxsize=1)
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Compiled, the block mask is made without the (s, t) mask.
    return torch.compile(create_block_mask), torch.compile(flex_attention)


@lru_cache
def _found(compiler: str) -> bool:
    return shutil.which(compiler) is not None


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


def cannot_compile(device: str) -> str | None:
    """Returns the reason why this machine cannot compile FlexAttention for this type of device; None if it can."""
    if torch._dynamo.config.disable:
        return "needs torch.compile, which is switched off"
    if device == "cpu" and not torch.compiler.is_compiling() and not _found(os.environ.get("CXX", "g++")):
        return "needs a C++ compiler on the CPU (g++, or CXX)"
    if device in GPUS and not _has_triton():
        return "needs Triton on a GPU"
    return None


class Flex(Kernel):
    """Kernel of FlexAttention: visibility and bias are compiled into one tiled kernel, and blocks that no query attends
    to are skipped.

    Dong et al. 2024, 2412.05496. On a GPU it trains; on the CPU it has no backward pass and needs a C++ compiler. Sinks
    are applied afterwards: z sigmoid(log sum exp(scores) - sinks).
    """

    name = "flex"

    def refusal(self, facts: CallFacts) -> str | None:
        if facts.dropout:
            return "has no dropout"
        if not facts.device:  # at construction
            return None
        if facts.device == "cpu" and facts.grad:
            return "has no backward pass on the CPU"
        if facts.device == "cpu" and facts.sinks:
            return "has no sinks on the CPU"
        if facts.device != "cpu" and facts.device not in GPUS:
            return f"does not run on {facts.device}"
        if facts.dtype not in DTYPES:
            return f"does not compute in {facts.dtype}"
        if facts.device in GPUS and facts.head_dim < LEAST_HEAD_DIM:
            return f"needs head_dim >= {LEAST_HEAD_DIM} on a GPU, got {facts.head_dim}"
        if facts.learned:
            return "is not known to give a learned bias its gradient"
        return cannot_compile(facts.device)

    def has_pairs(self, facts: CallFacts) -> bool:
        return False

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        """Returns the sizes of the tensors kept of a training call: q, k, v, z and the logarithm of each row's sum of
        exponentials; masks are not kept. With sinks, z is kept before and after they are applied."""
        rows = facts.batch * heads.n * facts.s
        if not facts.sinks:
            return KeptTensors(rows * 4, given="qkvz")
        rounded = facts.dtype.itemsize if facts.dtype.itemsize < 4 else 0
        z = (heads.value_dim or facts.head_dim) * facts.dtype.itemsize
        return KeptTensors(rows * (4 + 4 + rounded + z), given="qkv")

    def attend(self, call: AttentionCall) -> Tensor:
        _, flex_attention = _flex()
        q, k, v, bias = call.q, call.k, call.v, call.bias
        at = _tokens(call)
        # without annotations, because torch counts the arguments, which a checker of annotations would hide
        bend = None if bias is None else lambda score, b, n, i, j: bias(score, b, n, *at(b, i, j))
        crowded = q.shape[1] * (q.shape[2] // k.shape[2]) > TILE
        z, about = flex_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            score_mod=bend, block_mask=call.once(("blocks", *call.key), lambda: block_mask(call)), scale=call.scale,
            enable_gqa=q.shape[2] != k.shape[2], return_aux=_request(call.sinks is not None),
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if crowded else None,
        )  # fmt: skip
        if call.sinks is not None:
            left = torch.sigmoid(about.lse - wide(call.sinks)[:, None])
            z = z * left.to(z.dtype)[..., None]
        return z.transpose(1, 2)


def _request(sums: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=sums)


def block_mask(call: AttentionCall) -> Any:
    """Returns torch's block mask of a call: for each block of queries, the blocks of keys that it attends to; one mask
    is shared by rows and heads with equal visibility."""
    create_block_mask, _ = _flex()
    visibility, at = call.visibility, _tokens(call)
    b, n, q_idx, k_idx = call.at
    rows, heads = visibility.visible(b, n, q_idx[:, :, :1], k_idx[..., :1]).shape[:2]
    visible = lambda b, n, i, j: visibility.visible(b, n, *at(b, i, j))  # noqa: E731
    many = (rows if rows > 1 else None, heads if heads > 1 else None)
    return create_block_mask(visible, *many, call.q.shape[1], call.k.shape[1], device=call.q.device)


def _tokens(call: AttentionCall) -> Any:
    """Returns a function at(b, i, j) -> (q_idx, k_idx): the positions of the i-th query and the j-th key of row b."""
    q_idx, k_idx = call.tokens
    by_row = [x.dim() == 2 for x in (q_idx, k_idx)]
    return lambda b, i, j: (q_idx[b, i] if by_row[0] else q_idx[i], k_idx[b, j] if by_row[1] else k_idx[j])


class FlexConfig(KernelConfig, kind="flex"):
    def build(self, ctx: BuildContext) -> Flex:
        return Flex()
