"""How the error of random features falls with their number."""

import math

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled
from glassformer.parts.mixer.performer import orthogonal_features

WIDTH, FEATURES, DRAWS = 16, (16, 64, 256, 1024, 4096), 200
SIZE = 0.35
"""Length of q and of k times d^-1/4: the kernel is then near 1 and its error is that of the features."""
SLOPE, RATIO = 0.1, 0.1
GROUPS = 5


def measure(bench: Bench) -> Outcome:
    draws = bench.scaled(DRAWS, 20)
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(WIDTH, generator=made, dtype=torch.float64) for _ in range(2))
    q, k = SIZE * q / q.norm() * WIDTH**0.25, SIZE * k / k.norm() * WIDTH**0.25
    kernel = math.exp(float(q @ k))
    both = float((q + k).square().sum())
    lemma = math.exp(both) * kernel**2 * (1 - math.exp(-both))

    def estimate(w: torch.Tensor) -> float:
        phi = torch.exp(w @ q - q.square().sum() / 2) * torch.exp(w @ k - k.square().sum() / 2)
        return float(phi.mean())

    slopes, ratios, better = [], [], []
    for group in range(GROUPS):
        errors = {}
        for m in FEATURES:
            random = torch.randn(draws, m, WIDTH, generator=made, dtype=torch.float64)
            errors[m] = sum((estimate(w) - kernel) ** 2 for w in random) / draws
            ratios.append(errors[m] * m / lemma)
        orthogonal = (
            sum(
                (estimate(orthogonal_features(draws * group + i, 0, FEATURES[0], WIDTH)) - kernel) ** 2
                for i in range(draws)
            )
            / draws
        )
        better.append(orthogonal / errors[FEATURES[0]])
        x, y = ([math.log(one) for one in ones] for ones in (FEATURES, errors.values()))
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slopes.append(
            sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
        )
    figures = (
        sampled("slope of log error in log features", slopes, least=-1 - SLOPE, most=-1 + SLOPE, published=-1),
        sampled("squared error over Lemma 2's", ratios, least=1 - RATIO, most=1 + RATIO, published=1),
        sampled("squared error of orthogonal features over random ones", better, most=1),
    )
    return Outcome(figures=figures, size=f"d = {WIDTH}, {FEATURES[0]} to {FEATURES[-1]:,} features",
                   sure=f"{GROUPS} times {draws} draws, intervals of 95 %")  # fmt: skip


CLAIM = Claim(
    name="performer-features",
    statement="The squared error of positive random features is that of Lemma 2, falls as 1/m, and is less where they "
    "are orthogonal.",
    source="2009.14794, lemma 2 and theorem 2",
    published="slope -1; less",
    kind="measured",
    size="d = 16",
    minutes=0.3,
    measure=measure,
)
