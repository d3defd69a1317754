"""Two optimizers."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

ADAMW, MUON = "llama@1m", "llama@1m+recipe.optimizer=muon"

CLAIM = Claim(
    name="muon-beats-adamw",
    statement="After as many tokens, Muon ends at a lower loss than AdamW.",
    source="2502.16982, section 3",
    published="as low with half the FLOPs",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=6,
    measure=contrast(
        [ADAMW, MUON], [Gap(ADAMW, MUON, most=0.0)], SHORT,
        notes=["Both have the rates of their rules: neither was tuned here, and tuned baselines shrink such leads."],
    ),
)  # fmt: skip
