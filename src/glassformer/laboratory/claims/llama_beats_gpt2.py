"""All of the changes at once."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

CLAIM = Claim(
    name="llama-beats-gpt2",
    statement="Wired as LLaMA, a small model ends at a lower loss than wired as GPT-2.",
    source="a guide to improvements of the architecture",
    published="1.42 against 1.47 nats, at 10M on Shakespeare",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=12,
    measure=contrast(["gpt2@1m", "llama@1m"], [Gap("gpt2@1m", "llama@1m", most=0.0, published=-0.05)], LONG),
)
