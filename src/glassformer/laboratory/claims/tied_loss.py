"""One table for both ends."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, alike, contrast

CLAIM = Claim(
    name="tied-head-loses-nothing",
    statement="A head tied to the embedding ends at the loss of one of its own.",
    source="1608.05859",
    published="no loss, or less of it",
    kind="scoped",
    size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
    minutes=18,
    measure=contrast(["gpt2@1m", "gpt2@1m+untied"], [alike("gpt2@1m", "gpt2@1m+untied")], LONG, seeds=5,
                     notes=["The vocabulary is of characters: the table is small, and so is what tying can change."]),
)  # fmt: skip
