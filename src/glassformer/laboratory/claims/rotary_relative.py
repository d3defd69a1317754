"""Rotary positions are relative."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position import Rotary

LENGTH, WIDTH, TOLERANCE = 256, 64, 1e-4


def measure(bench: Bench) -> Outcome:
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, WIDTH, generator=made).expand(1, LENGTH, 1, WIDTH) for _ in range(2))
    turned_q, turned_k = Rotary(WIDTH)(q, k, Pass(0, LENGTH))
    scores = torch.einsum("bsnh,btnh->st", turned_q, turned_k)  # the same query and the same key everywhere
    spread = max(float(scores.diagonal(i).max() - scores.diagonal(i).min()) for i in range(1 - LENGTH, LENGTH))
    size = float(scores.abs().max())
    figure = exact("spread of scores of one distance over the largest score", spread / size, most=TOLERANCE,
                   published=0)  # fmt: skip
    return Outcome(figures=(figure,), size=f"{LENGTH} positions, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="rotary-relative",
    statement="With rotary positions a score depends on the distance of query and key alone.",
    source="2104.09864, section 3.2",
    published="only m - n matters",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
