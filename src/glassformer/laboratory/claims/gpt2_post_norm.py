"""Where GPT-2 has its norms."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset


def measure(bench: Bench) -> Outcome:
    layers = list(preset("gpt2").layers())
    post = sum(block.residual.kind == "post" for block in layers)
    figure = exact("layers that norm after the addition", post, least=len(layers), most=len(layers),
                   published=len(layers))  # fmt: skip
    return Outcome(figures=(figure,), size=f"gpt2, {len(layers)} layers, whose weights load and agree in every logit",
                   sure="read off the published model")  # fmt: skip


CLAIM = Claim(
    name="gpt2-post-norm",
    statement="GPT-2 is a Post-LN transformer.",
    source="a guide to improvements of the architecture",
    published="Post-LN",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
