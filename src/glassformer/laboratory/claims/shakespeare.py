"""The comparison that a guide prints."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import Gap, contrast

STEPS, BATCH, CONTEXT = 5000, 16, 256

CLAIM = Claim(
    name="shakespeare",
    statement="On Shakespeare, 10M parameters in the way of LLaMA reach 1.42 nats in 5,000 steps, and of GPT-2 1.47.",
    source="a guide to improvements of the architecture",
    published="1.47 and 1.42, a difference of 0.05",
    kind="scoped",
    size="10M parameters, 5,000 steps",
    minutes=300,
    needs="the works of Shakespeare, 1.1 MB of text",
    measure=contrast(
        ["gpt2@10m", "llama@10m"],
        [Gap("gpt2@10m", "llama@10m", least=-0.1, most=-0.02, published=-0.05)],
        STEPS * BATCH * CONTEXT,
        batch_size=BATCH,
        context=CONTEXT,
    ),
)
