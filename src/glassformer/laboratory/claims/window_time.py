"""What a window saves in time."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.timing import Race, Work, attention, races
from glassformer.parts.kernel import Auto
from glassformer.parts.visibility import Causal, SlidingWindow

TOKENS, WINDOW = 4096, 1024


def sides(scale: int) -> tuple[Work, Work]:
    whole, part = Causal(), SlidingWindow(WINDOW // scale)
    return attention(Auto(), whole, TOKENS // scale), attention(Auto(), part, TOKENS // scale)


CLAIM = Claim(
    name="window-is-faster",
    statement="A window of a quarter of 4,096 tokens makes attention four times as fast.",
    source="2004.05150",
    published="4 times",
    kind="measured",
    size="4,096 tokens, 16 heads of 64",
    minutes=1,
    measure=races(Race("attention to all before over a window of 1,024", sides, least=4.0, published=4.0)),
)
