"""Why scores are divided by sqrt(d)."""

import math

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled

WIDTHS, PAIRS, KEYS, DRAWS, TOLERANCE = (16, 64, 256, 1024), 4096, 64, 8, 0.05


def measure(bench: Bench) -> Outcome:
    pairs, made = bench.scaled(PAIRS, 256), torch.Generator().manual_seed(0)

    def scores(d: int) -> torch.Tensor:
        q, k = (torch.randn(pairs, d, generator=made) for _ in range(2))
        return (q * k).sum(1)

    def entropy(d: int, scale: float) -> float:
        """Of a pattern over KEYS random keys, as a share of the most there can be."""
        q, k = torch.randn(64, d, generator=made), torch.randn(KEYS, d, generator=made)
        p = (q @ k.T * scale).softmax(-1).clamp_min(1e-30)
        return float(-(p * p.log()).sum(-1).mean()) / math.log(KEYS)

    ratios = [float(scores(d).var()) / d for d in WIDTHS for _ in range(DRAWS)]
    scaled = [float((scores(d) / math.sqrt(d)).var()) for d in WIDTHS for _ in range(DRAWS)]
    near = {"least": 1 - TOLERANCE, "most": 1 + TOLERANCE, "published": 1.0}
    widest = WIDTHS[-1]
    figures = (
        sampled("variance of q k over d", ratios, **near),
        sampled("variance of q k / sqrt(d)", scaled, **near),
        sampled(f"entropy of a pattern, d = {widest:,}, scaled", [entropy(widest, widest**-0.5) for _ in range(DRAWS)],
                "of the most"),
        sampled("the same, not scaled", [entropy(widest, 1.0) for _ in range(DRAWS)], "of the most", most=0.25),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"normal queries and keys, d = {WIDTHS[0]} to {widest:,}",
                   sure=f"{DRAWS} draws of {pairs:,} pairs for each width, intervals of 95 %")  # fmt: skip


CLAIM = Claim(
    name="score-variance",
    statement="Unscaled scores of independent queries and keys have variance d, and their softmax saturates.",
    source="1706.03762, section 3.2.1",
    published="variance d, and 1 when divided by sqrt(d)",
    kind="measured",
    size="any",
    minutes=0.05,
    measure=measure,
)
