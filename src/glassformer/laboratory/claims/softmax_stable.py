"""A softmax that does not overflow."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact

LARGE, TOLERANCE = 200.0, 1e-6


def measure(bench: Bench) -> Outcome:
    x = torch.tensor([0.0, 1.0, 2.0])
    shifted = (x + LARGE - (x + LARGE).max()).exp()
    plain = x.exp() / x.exp().sum()
    overflowed = (x + LARGE).exp() / (x + LARGE).exp().sum()
    figures = (
        exact("change by a shift of 200, largest subtracted", float((shifted / shifted.sum() - plain).abs().max()),
              most=TOLERANCE, published=0),
        exact("numbers that are left without the subtraction", int(overflowed.isfinite().sum()), most=0, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size="three scores, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="softmax-stable",
    statement="Subtracting the largest score changes no softmax and keeps it from overflowing.",
    source="a guide from architecture to training dynamics",
    published="equal",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
