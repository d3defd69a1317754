"""Experts at the FLOPs of a dense network."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

CLAIM = Claim(
    name="experts-beat-dense",
    statement="Eight experts of which each token meets two end at a lower loss than a dense network of as many FLOPs.",
    source="2101.03961, section 3",
    published="lower at equal FLOPs",
    kind="scoped",
    size="1M active parameters, 400k tokens",
    minutes=12,
    measure=contrast(["llama@1m", "llama@1m+moe:8:2"], [Gap("llama@1m", "llama@1m+moe:8:2", most=0.0)], SHORT),
)
