"""Perplexities without a text, a tokenizer or a source."""

from glassformer.laboratory.claims.claim import Claim, undecidable

CLAIM = Claim(
    name="seven-b-perplexity",
    statement="At 7B, LLaMA-2 has a lower perplexity than Falcon, BLOOM and a model wired as GPT-2.",
    source="a guide to improvements of the architecture, which names no source",
    published="13.8, 14.1, 14.5, 15.2",
    kind="undecidable",
    size="four models of 7B on one text",
    minutes=0,
    measure=undecidable(
        "The source names neither text nor tokenizer, models of 7B do not fit the laboratory, and perplexities per "
        "token of different tokenizers do not compare."
    ),
)
