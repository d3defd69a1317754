"""Norms after the addition without a warm-up."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import Gap, contrast

STEPS, BATCH, CONTEXT, RATE = 500, 16, 64, 1e-3
WARM, COLD = "gpt2@1m+layers=6+post", "gpt2@1m+layers=6+post+recipe.warmup=0"

CLAIM = Claim(
    name="post-norm-needs-warmup",
    statement="Post-LN transformers need a warm-up: without one they lose more than half a nat.",
    source="2002.04745, section 3",
    published="BLEU 8.45 without, about 34 with",
    kind="scoped",
    size="6 layers, 500 steps at a rate of 0.001",
    minutes=6,
    measure=contrast(
        [WARM, COLD], [Gap(WARM, COLD, least=0.5)], STEPS * BATCH * CONTEXT, batch_size=BATCH, context=CONTEXT,
        learning_rate=RATE,
    ),
)  # fmt: skip
