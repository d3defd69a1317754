"""Why Vaswani et al. multiply the embedding by sqrt(d)."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

PLAIN, SCALED = "gpt2@1m+sinusoidal+embedding.scale=1", "gpt2@1m+sinusoidal+embedding.scale=11.3"

CLAIM = Claim(
    name="sinusoids-need-scale",
    statement="Sinusoidal positions need an embedding that is multiplied by sqrt(d).",
    source="1706.03762, section 3.4",
    published="multiplied",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=6,
    measure=contrast([SCALED, PLAIN], [Gap(SCALED, PLAIN, least=0.05)], SHORT),
)
