"""What one table for both ends saves."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset


def measure(bench: Bench) -> Outcome:
    tied, untied = preset("gpt2"), preset("gpt2+untied")
    saved = untied.num_params() - tied.num_params()
    table = tied.vocab_size * tied.d_model
    figures = (
        exact("parameters that a tied head saves", saved, least=table, most=table, published=table),
        exact("of an untied model", saved / untied.num_params(), "of all"),
    )
    return Outcome(figures=figures, size="gpt2", sure="counted")


CLAIM = Claim(
    name="tied-parameters",
    statement="Tying the head to the embedding saves one table of vocabulary times width.",
    source="1608.05859",
    published="v x d",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
