"""How what is kept for the backward pass grows with the text."""

import math

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.kernel import AttentionCall, Kernel, Naive, Sdpa
from glassformer.parts.visibility import Causal

HEADS, WIDTH, TOLERANCE = 2, 16, 0.1


def kept(kernel: Kernel, s: int) -> int:
    """Bytes of distinct tensors that autograd keeps of one call."""
    q, k, v = (torch.randn(1, s, HEADS, WIDTH, requires_grad=True) for _ in range(3))
    seen: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        z = kernel(AttentionCall(q, k, v, Causal()))
    del z
    return sum(seen.values())


def measure(bench: Bench) -> Outcome:
    short, long = 512, 2048
    figures = []
    for name, kernel, wanted in (("all scores", Naive(), 2.0), ("a fused kernel", Sdpa(), 1.0)):
        found = math.log(kept(kernel, long) / kept(kernel, short)) / math.log(long / short)
        figures.append(exact(f"exponent of the bytes that {name} keeps", found, least=wanted - TOLERANCE,
                             most=wanted + TOLERANCE, published=wanted))  # fmt: skip
    saved = kept(Naive(), long) / kept(Sdpa(), long)
    figures.append(exact(f"times less at {long:,} tokens", saved))
    return Outcome(figures=tuple(figures), size=f"{short:,} to {long:,} tokens, {HEADS} heads of {WIDTH}, fp32",
                   sure=f"bytes that autograd keeps, counted; within {TOLERANCE:g}")  # fmt: skip


CLAIM = Claim(
    name="flash-memory",
    statement="FlashAttention's memory grows linearly with the text, where plain attention's grows with its square.",
    source="2205.14135, section 3",
    published="exponents 1 and 2",
    kind="exact",
    size="512 to 2,048 tokens",
    minutes=0.05,
    measure=measure,
)
