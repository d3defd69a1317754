"""Linear biases beyond the context of training."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome
from glassformer.laboratory.claims.contrast import outcome
from glassformer.laboratory.claims.positions import rise, trained

SLIGHT = 0.02


def measure(bench: Bench) -> Outcome:
    found = trained(bench, ["alibi"])
    return outcome(found, [rise(found, "alibi", 8, most=SLIGHT, published=0.0), rise(found, "alibi", 4)])


CLAIM = Claim(
    name="alibi-extrapolates",
    statement="Trained on short texts, a model with ALiBi reads texts eight times as long without a loss.",
    source="2108.12409, section 4",
    published="no loss to twice the length, and none beyond",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=2,
    measure=measure,
)
