"""A comparison of pretrained encoders."""

from glassformer.laboratory.claims.claim import Claim, undecidable

CLAIM = Claim(
    name="linformer-quality",
    statement="Linformer with 128 projected keys reads 512 tokens as well as RoBERTa.",
    source="2006.04768, section 5",
    published="k = 128 near RoBERTa",
    kind="undecidable",
    size="a pretrained RoBERTa, months of one processor",
    minutes=0,
    measure=undecidable("The claim is about fine-tuned scores of pretrained encoders of 110M parameters."),
)
