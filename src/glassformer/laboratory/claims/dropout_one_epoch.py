"""Dropout where no text is read twice."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

CLAIM = Claim(
    name="dropout-hurts-in-one-epoch",
    statement="Where no text is read twice, dropout of 0.1 raises the loss.",
    source="1910.10683, section 3; 2204.02311, section 5",
    published="trained without",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=12,
    measure=contrast(["gpt2@1m", "gpt2@1m+dropout:0.1"], [Gap("gpt2@1m", "gpt2@1m+dropout:0.1", least=0.0)], LONG),
)
