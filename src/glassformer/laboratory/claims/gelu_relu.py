"""Two plain activations."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

CLAIM = Claim(
    name="gelu-beats-relu",
    statement="GELU ends at a lower loss than ReLU.",
    source="2002.05202, table 1",
    published="1.983 against 1.997; perplexity 3.21 against 3.45",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=12,
    measure=contrast(["gpt2@1m+relu", "gpt2@1m"], [Gap("gpt2@1m+relu", "gpt2@1m", most=0.0, published=-0.014)], LONG),
)
