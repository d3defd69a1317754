"""The activation that a search found."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

CLAIM = Claim(
    name="squared-relu-beats-gelu",
    statement="A squared ReLU ends at a lower loss than GELU.",
    source="2109.08668, section 4",
    published="lower",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=12,
    measure=contrast(["gpt2@1m", "gpt2@1m+relu2"], [Gap("gpt2@1m", "gpt2@1m+relu2", most=0.0)], LONG),
)
