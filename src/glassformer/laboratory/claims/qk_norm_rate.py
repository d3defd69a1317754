"""Norms on queries and keys at a rate that is too high."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

RATE = 1.2e-2
PLAIN, NORMED = "gpt2@1m", "gpt2@1m+qknorm"

CLAIM = Claim(
    name="qk-norm-holds-high-rates",
    statement="At a learning rate nine times the usual one, norms on queries and keys lower the loss.",
    source="2309.14322, section 3.1; 2302.05442",
    published="stable over a wider range of rates",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=6,
    measure=contrast([PLAIN, NORMED], [Gap(PLAIN, NORMED, most=0.0)], SHORT, learning_rate=RATE),
)
