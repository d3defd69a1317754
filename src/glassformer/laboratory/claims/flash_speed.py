"""Speed on a device that is not here."""

from glassformer.laboratory.claims.claim import Claim, undecidable

CLAIM = Claim(
    name="flash-speed-on-gpu",
    statement="FlashAttention is three times as fast as plain attention on a GPU.",
    source="2205.14135, abstract",
    published="3x on GPT-2 at 1,024 tokens",
    kind="undecidable",
    size="a GPU",
    minutes=0,
    measure=undecidable(
        "The claim is about an A100, and the ratio depends on its memory: a processor decides nothing about it."
    ),
)
