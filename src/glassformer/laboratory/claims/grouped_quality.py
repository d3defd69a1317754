"""What fewer heads of keys and values cost."""

import math

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

TWO_PERCENT = math.log(1.02)
"""Of perplexity, in nats."""

CLAIM = Claim(
    name="shared-keys-cost-little",
    statement="With two heads of keys instead of four, or with one, perplexity rises by less than 2 %.",
    source="a guide to improvements of the architecture; 2305.13245, table 1",
    published="less than 2 %",
    kind="scoped",
    size="1M parameters, 1.5M tokens",
    minutes=18,
    measure=contrast(
        ["llama@1m+mha", "llama@1m+gqa:2", "llama@1m+mqa"],
        [Gap("llama@1m+mha", f"llama@1m{change}", most=TWO_PERCENT) for change in ("+gqa:2", "+mqa")],
        LONG,
        allow_unmatched=True,
        notes=["Nothing pays for the weights of the keys and values that are left out."],
    ),
)
