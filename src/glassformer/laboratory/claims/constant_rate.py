"""Whether the learning rate has to come down."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

COSINE, CONSTANT = "llama@1m", "llama@1m+recipe.schedule=constant"

CLAIM = Claim(
    name="decay-lowers-loss",
    statement="A learning rate that comes down ends at a lower loss than one that stays.",
    source="2405.18392",
    published="lower",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=6,
    measure=contrast([COSINE, CONSTANT], [Gap(COSINE, CONSTANT, least=0.0)], SHORT),
)
