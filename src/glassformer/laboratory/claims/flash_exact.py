"""Attention in blocks is attention."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.kernel import AttentionCall, Kernel, Naive, Sdpa
from glassformer.parts.kernel.banded import Banded
from glassformer.parts.visibility import Causal

HEADS, WIDTH, TOLERANCE = 4, 32, 1e-5


def measure(bench: Bench) -> Outcome:
    s = bench.scaled(1024, 64)
    made = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, s, HEADS, WIDTH, generator=made) for _ in range(3)]

    def run(kernel: Kernel) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        z = kernel(AttentionCall(q, k, v, Causal()))
        return [z.detach(), *torch.autograd.grad(z.square().sum(), (q, k, v))]

    wanted = run(Naive())
    figures = []
    for name, kernel in (("torch's fused kernel", Sdpa()), ("our blocks", Banded())):
        found = run(kernel)
        output = float((found[0] - wanted[0]).abs().max())
        gradient = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[1:], wanted[1:], strict=True))
        figures += [
            exact(f"largest difference of outputs, {name}", output, most=TOLERANCE, published=0),
            exact(f"largest difference of gradients over the largest, {name}", gradient, most=TOLERANCE, published=0),
        ]
    return Outcome(figures=tuple(figures), size=f"{s} tokens, {HEADS} heads of {WIDTH}, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="flash-exact",
    statement="FlashAttention computes attention exactly, in outputs and gradients.",
    source="2205.14135, theorem 1",
    published="no approximation",
    kind="exact",
    size="any",
    minutes=0.05,
    measure=measure,
)
