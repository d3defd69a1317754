"""Attention beside the network instead of before it."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, alike, contrast

CLAIM = Claim(
    name="parallel-loses-nothing",
    statement="Blocks with attention beside the network end at the loss of sequential ones.",
    source="2204.02311, section 2: small loss at 8B, none at 62B",
    published="none at 62B",
    kind="scoped",
    size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
    minutes=18,
    measure=contrast(["gpt2@1m", "gpt2@1m+parallel"], [alike("gpt2@1m", "gpt2@1m+parallel")], LONG, seeds=5),
)
