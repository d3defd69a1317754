"""The slopes of linear biases."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.position.alibi import alibi_slopes

HEADS = (8, 16)


def measure(bench: Bench) -> Outcome:
    figures = []
    for heads in HEADS:
        wanted = [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
        error = max(abs(a / b - 1) for a, b in zip(alibi_slopes(heads), wanted, strict=True))
        figures.append(exact(f"largest relative error of {heads} slopes", error, most=1e-12, published=0))
    ratio = alibi_slopes(16)[0] ** 2 / alibi_slopes(8)[0]
    figures.append(exact("first slope of 16 heads, squared, over that of 8", ratio, least=1 - 1e-12, most=1 + 1e-12))
    return Outcome(figures=tuple(figures), size="8 and 16 heads", sure="to 1e-12")


CLAIM = Claim(
    name="alibi-slopes",
    statement="The slopes of ALiBi's n heads are the powers 2^(-8 i / n).",
    source="2108.12409, section 3",
    published="1/2, 1/4, ..., 1/256 for 8 heads",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
