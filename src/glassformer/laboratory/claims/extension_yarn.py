"""YaRN against NTK-aware scaling."""

from functools import partial

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.extension import difference

CLAIM = Claim(
    name="yarn-reads-longer",
    statement="Untuned, YaRN reads four times the context at a lower loss than NTK-aware positions.",
    source="2309.00071, table 1",
    published="lower",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=3,
    measure=partial(difference, worse="ntk", better="yarn"),
)
