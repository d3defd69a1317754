"""A number that its owners have not published."""

from glassformer.laboratory.claims.claim import Claim, undecidable

CLAIM = Claim(
    name="gpt4-size",
    statement="GPT-4 has 1.76 trillion parameters in 16 experts.",
    source="a guide to the mathematics of transformers",
    published="1.76T",
    kind="undecidable",
    size="the model",
    minutes=0,
    measure=undecidable("Neither the model nor its size is published: no measurement of ours bears on it."),
)
