"""What leaving the softmax out costs."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

CLAIM = Claim(
    name="linear-attention-costs-loss",
    statement="Linear attention ends at a higher loss than attention with a softmax.",
    source="2006.16236, section 4; 2102.11174",
    published="higher in language modelling",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=8,
    measure=contrast(
        ["llama@1m", "llama@1m+linear_attention"], [Gap("llama@1m", "llama@1m+linear_attention", least=0.0)], SHORT
    ),
)
