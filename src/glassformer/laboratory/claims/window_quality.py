"""What a short window costs."""

import math

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import SHORT, Gap, contrast

WHOLE, WINDOW = "llama@1m", "llama@1m+window:64"

CLAIM = Claim(
    name="window-costs-little",
    statement="A window of a quarter of the context costs less than 2 % of perplexity.",
    source="2004.05150, section 4",
    published="little",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=6,
    measure=contrast([WHOLE, WINDOW], [Gap(WHOLE, WINDOW, most=math.log(1.02))], SHORT),
)
