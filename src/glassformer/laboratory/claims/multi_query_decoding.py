"""One head of keys, in the time of a token."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.timing import Race, Work, decoding, races

TOKENS = 2048


def sides(scale: int) -> tuple[Work, Work]:
    return decoding("+mha", TOKENS // scale), decoding("+mqa", TOKENS // scale)


CLAIM = Claim(
    name="multi-query-decodes-faster",
    statement="With one head of keys a token after 2,048 takes 30 to 40 % less time.",
    source="a guide to improvements of the architecture; 1911.02150",
    published="30 to 40 % less",
    kind="measured",
    size="4 layers of width 768",
    minutes=1,
    measure=races(Race("a token with 12 heads of keys over one with 1", sides, least=1 / 0.7, published=1.54)),
)
