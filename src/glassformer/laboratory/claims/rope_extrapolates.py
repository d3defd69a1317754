"""Rotary positions beyond the context of training."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome
from glassformer.laboratory.claims.contrast import outcome
from glassformer.laboratory.claims.positions import rise, trained

SLIGHT = 0.02


def measure(bench: Bench) -> Outcome:
    found = trained(bench, ["rope"])
    return outcome(found, [rise(found, "rope", 8, most=SLIGHT, published=0.0), rise(found, "rope", 4)])


CLAIM = Claim(
    name="rope-extrapolates",
    statement="Rotary positions extrapolate without limit.",
    source="a guide to improvements of the architecture",
    published="without limit",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=2,
    measure=measure,
)
