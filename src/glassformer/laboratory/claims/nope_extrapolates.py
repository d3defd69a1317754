"""No positions at all."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome
from glassformer.laboratory.claims.contrast import outcome
from glassformer.laboratory.claims.positions import further, rise, trained


def measure(bench: Bench) -> Outcome:
    found = trained(bench, ["nope", "rope"])
    return outcome(found, [further(found, "rope", "nope", 8), rise(found, "nope", 8), rise(found, "rope", 8)])


CLAIM = Claim(
    name="nope-extrapolates",
    statement="Beyond its context a decoder without positions loses less than one with rotary positions.",
    source="2305.19466, section 4",
    published="less",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=4,
    measure=measure,
)
