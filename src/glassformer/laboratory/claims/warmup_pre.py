"""Norms before the branches without a warm-up."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import Gap, contrast
from glassformer.laboratory.claims.warmup_post import BATCH, CONTEXT, RATE, STEPS

WARM, COLD = "gpt2@1m+layers=6", "gpt2@1m+layers=6+recipe.warmup=0"
SLIGHT = 0.05

CLAIM = Claim(
    name="pre-norm-needs-no-warmup",
    statement="Pre-LN transformers need no warm-up: without one the loss is the same within 0.05 nats.",
    source="2002.04745, section 4",
    published="no loss",
    kind="scoped",
    size="6 layers, 500 steps at a rate of 0.001",
    minutes=6,
    measure=contrast(
        [WARM, COLD], [Gap(WARM, COLD, -SLIGHT, SLIGHT)], STEPS * BATCH * CONTEXT, batch_size=BATCH, context=CONTEXT,
        learning_rate=RATE,
    ),
)  # fmt: skip
