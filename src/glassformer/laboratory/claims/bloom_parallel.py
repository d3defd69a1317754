"""How BLOOM's blocks are wired."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset


def measure(bench: Bench) -> Outcome:
    layers = list(preset("bloom-7b1").layers())
    parallel = sum(block.residual.kind.startswith("parallel") for block in layers)
    figure = exact("layers that run attention beside the network", parallel, least=len(layers), most=len(layers),
                   published=len(layers))  # fmt: skip
    return Outcome(figures=(figure,), size=f"bloom-7b1, {len(layers)} layers", sure="read off the published model")


CLAIM = Claim(
    name="bloom-parallel",
    statement="BLOOM runs attention and the network side by side.",
    source="a guide to improvements of the architecture",
    published="parallel",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
