"""Interpolation against nothing."""

from functools import partial

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.extension import difference

CLAIM = Claim(
    name="interpolation-reads-longer",
    statement="Untuned, interpolated positions read four times the context at a lower loss than plain ones.",
    source="2306.15595, section 2",
    published="lower",
    kind="scoped",
    size="1M parameters, 400k tokens of 64 characters",
    minutes=3,
    measure=partial(difference, worse=None, better="linear"),
)
