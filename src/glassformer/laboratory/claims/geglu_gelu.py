"""The gate with the activation left alone."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

CLAIM = Claim(
    name="geglu-beats-gelu",
    statement="With as many weights, GeGLU ends at a lower loss than GELU.",
    source="2002.05202, table 1",
    published="1.942 against 1.983 at 65,536 steps; perplexity 3.16 against 3.21",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=12,
    measure=contrast(["gpt2@1m", "gpt2@1m+geglu"], [Gap("gpt2@1m", "gpt2@1m+geglu", most=0.0, published=-0.041)], LONG),
)
