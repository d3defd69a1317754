"""Whether the paper's own third fit says what the paper says."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.chinchilla_ratio import CLAIMED, FITS, FLOPS, HIGH, LOW, ratio
from glassformer.laboratory.claims.claim import Claim, Outcome, exact


def measure(bench: Bench) -> Outcome:
    found = ratio(*FITS["the paper's third approach"])
    figure = exact("tokens for a parameter", found, least=LOW, most=HIGH, published=CLAIMED)
    return Outcome(figures=(figure,), size=f"{FLOPS:.3g} FLOPs, the published fit", sure="by formula")


CLAIM = Claim(
    name="chinchilla-third-approach",
    statement="The parametric fit of the Chinchilla paper agrees with its 20 tokens for each parameter.",
    source="2203.15556, section 3.3",
    published="20",
    kind="exact",
    size="published fit",
    minutes=0.01,
    measure=measure,
)
