"""A little attention among recurrences."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

HYBRID, RECURRENT, ATTENTION = "llama@1m+stack:mamba2*3,attention", "llama@1m+mamba2", "llama@1m"

CLAIM = Claim(
    name="hybrid-beats-pure",
    statement="Three layers of Mamba-2 and one of attention end at a lower loss than either alone.",
    source="2403.19887, section 6; 2406.07887",
    published="lower than both",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=15,
    measure=contrast(
        [HYBRID, RECURRENT, ATTENTION],
        [Gap(HYBRID, other, least=0.0) for other in (RECURRENT, ATTENTION)],
        SHORT,
        allow_unmatched=True,
    ),
)
