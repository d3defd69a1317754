"""The table of token vectors."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

CLAIMED, ROUNDED = 622e6, 0.5e6


def measure(bench: Bench) -> Outcome:
    config = preset("qwen3-8b")
    tables = config.num_params() - config.num_params(embeddings=False)
    figures = (
        exact("parameters of the embedding", config.vocab_size * config.d_model, least=CLAIMED - ROUNDED,
              most=CLAIMED + ROUNDED, published=CLAIMED),
        exact("parameters of embedding and head", tables),
    )  # fmt: skip
    return Outcome(figures=figures, size="qwen3-8b", sure="counted")


CLAIM = Claim(
    name="qwen3-embedding",
    statement="The embedding of Qwen3-8B has 622M parameters.",
    source="a first lesson on language models, by the example of Qwen3-8B",
    published="622M",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
