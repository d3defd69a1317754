"""Grouped heads keep fewer keys and values."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODEL = "llama@124m"
"""12 heads, as in the source."""
TOKENS = 2048


def measure(bench: Bench) -> Outcome:
    whole = preset(f"{MODEL}+mha").state_bytes(TOKENS)
    figures = [
        exact(f"cache of {groups} groups over that of 12 heads", preset(f"{MODEL}{change}").state_bytes(TOKENS) / whole,
              least=groups / 12 - 1e-12, most=groups / 12 + 1e-12, published=published)
        for groups, change, published in ((1, "+mqa", 0.08), (4, "+gqa:4", 0.33))
    ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{MODEL}, {TOKENS:,} tokens", sure="counted")


CLAIM = Claim(
    name="gqa-cache",
    statement="The cache of grouped-query attention is g/n of the whole: a third with 4 of 12 heads, 8 % with one.",
    source="2305.13245",
    published="33 % and 8 %",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
