"""What two fits of the same runs advise."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact

FLOPS = 5.76e23
"""Chinchilla's own budget."""
FITS = {
    "the replication": (482.01, 2085.43, 0.3478, 0.3658),
    "the paper's third approach": (406.4, 410.7, 0.3392, 0.2849),
}
"""A, B, alpha, beta of L = E + A N^-alpha + B D^-beta, as published."""
LOW, HIGH, CLAIMED = 15.0, 25.0, 20.0


def ratio(a: float, b: float, alpha: float, beta: float) -> float:
    """D / N at the least loss for 6 N D = FLOPS."""
    both = alpha + beta
    best = (alpha * a / beta / b) ** (1 / both) * (FLOPS / 6) ** (beta / both)
    return FLOPS / 6 / best**2


def measure(bench: Bench) -> Outcome:
    found = {name: ratio(*fit) for name, fit in FITS.items()}
    figures = (
        exact("tokens for a parameter, by the replication", found["the replication"], least=LOW, most=HIGH,
              published=CLAIMED),
        exact("the same, by the paper's third approach", found["the paper's third approach"]),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{FLOPS:.3g} FLOPs, published fits", sure="by formula, from published fits",
                   notes=("The two fits are of the same runs; the paper's rounding and an early stop are why they "
                          "differ (2404.10102).",))  # fmt: skip


CLAIM = Claim(
    name="chinchilla-ratio",
    statement="The compute-optimal model reads about 20 tokens for each parameter.",
    source="2203.15556; 2404.10102",
    published="20",
    kind="exact",
    size="published fits",
    minutes=0.01,
    measure=measure,
)
