"""Whether the mean that RMSNorm leaves in costs anything."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, alike, contrast

CLAIM = Claim(
    name="rmsnorm-loses-nothing",
    statement="RMSNorm ends at the loss of LayerNorm.",
    source="1910.07467, section 6",
    published="comparable",
    kind="scoped",
    size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
    minutes=18,
    measure=contrast(["gpt2@1m", "gpt2@1m+rmsnorm"], [alike("gpt2@1m", "gpt2@1m+rmsnorm")], LONG, seeds=5),
)
