"""NTK-aware scaling against interpolation."""

from functools import partial

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.extension import difference

CLAIM = Claim(
    name="ntk-reads-longer",
    statement="Untuned, NTK-aware positions read four times the context at a lower loss than interpolated ones.",
    source="2309.00071, section 3",
    published="lower",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=3,
    measure=partial(difference, worse="linear", better="ntk"),
)
