"""Models without biases."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, alike, contrast

CLAIM = Claim(
    name="biases-can-go",
    statement="Without biases a model ends at the loss that it has with them.",
    source="2204.02311, section 2",
    published="no loss",
    kind="scoped",
    size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
    minutes=18,
    measure=contrast(["gpt2@1m", "gpt2@1m+nobias"], [alike("gpt2@1m", "gpt2@1m+nobias")], LONG, seeds=5),
)
