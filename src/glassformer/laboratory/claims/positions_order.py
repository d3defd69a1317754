"""Which positions lose most beyond the context."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome
from glassformer.laboratory.claims.contrast import outcome
from glassformer.laboratory.claims.positions import further, rise, trained


def measure(bench: Bench) -> Outcome:
    names = ["alibi", "rope", "sinusoidal"]
    found = trained(bench, names)
    figures = [further(found, "rope", "alibi", 4), further(found, "sinusoidal", "rope", 4)]
    return outcome(found, [*figures, *(rise(found, name, 4) for name in names)])


CLAIM = Claim(
    name="positions-order",
    statement="At four times the context ALiBi loses least, rotary positions more and absolute ones most.",
    source="a guide to improvements of the architecture",
    published="perplexity +3 %, +20 %, +150 %",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=6,
    measure=measure,
)
