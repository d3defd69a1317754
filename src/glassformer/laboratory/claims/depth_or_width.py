"""As many weights in few wide layers or in many narrow ones."""

from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.contrast import LONG, Gap, contrast

SHARE = 0.03
MIDDLE, DEEP, WIDE = "gpt2@1m", "gpt2@1m+d_model=64+layers=16", "gpt2@1m+d_model=256+layers=1"

CLAIM = Claim(
    name="shape-matters-little",
    statement="At equal parameters the loss depends little on whether layers are many or wide: within 3 %.",
    source="2001.08361, section 3.1, figure 5",
    published="a few percent over a factor of 40 in width over depth",
    kind="scoped",
    size="1M parameters, 1.5M tokens, width over depth from 4 to 256",
    minutes=25,
    measure=contrast(
        [MIDDLE, DEEP, WIDE], [Gap(MIDDLE, other, -SHARE, SHARE, relative=True) for other in (DEEP, WIDE)], LONG
    ),
)
