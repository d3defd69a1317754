"""How many parameters GPT-2 small has."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

CLAIMED, ROUNDED = 117e6, 0.5e6


def measure(bench: Bench) -> Outcome:
    config = preset("gpt2")
    figures = (
        exact("parameters", config.num_params(), least=CLAIMED - ROUNDED, most=CLAIMED + ROUNDED, published=CLAIMED),
        exact("parameters of the layers", config.num_params(embeddings=False)),
    )
    return Outcome(figures=figures, size="gpt2", sure="counted")


CLAIM = Claim(
    name="gpt2-parameters",
    statement="GPT-2 small has about 117M parameters.",
    source="a guide from architecture to training dynamics, after the first version of the GPT-2 report",
    published="117M",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
