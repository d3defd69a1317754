"""What turning queries and keys costs."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.timing import Race, Work, races, training

TOKENS = 512


def sides(scale: int) -> tuple[Work, Work]:
    return training("", TOKENS // scale), training("+nope", TOKENS // scale)


CLAIM = Claim(
    name="rotary-costs-little",
    statement="Rotary positions add 1 to 3 % to the time of a training step.",
    source="2104.09864, as EleutherAI measured it",
    published="1 to 3 %",
    kind="measured",
    size="4 layers of width 768",
    minutes=1,
    measure=races(Race("a step with rotary positions over one without", sides, most=1.03, published=1.02)),
)
