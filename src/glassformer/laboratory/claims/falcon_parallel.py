"""How Falcon-7B's blocks are wired."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape

TOKENS = 1024


def measure(bench: Bench) -> Outcome:
    config = preset("falcon-7b")
    layers = list(config.layers())
    parallel = sum(block.residual.kind.startswith("parallel") for block in layers)
    whole = preset("falcon-7b+mha").costs(Shape(s=1, t=TOKENS, phase="decode")).state_bytes
    shared = config.costs(Shape(s=1, t=TOKENS, phase="decode")).state_bytes
    heads = round(whole / shared)
    figures = (
        exact("layers that run attention beside the network", parallel, least=len(layers), most=len(layers),
              published=len(layers)),
        exact("heads that share one head of keys", heads, least=71, most=71, published=71),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"falcon-7b, {len(layers)} layers", sure="read off the published model")


CLAIM = Claim(
    name="falcon-parallel",
    statement="Falcon-7B runs attention beside the network, and its 71 heads share one head of keys and values.",
    source="2311.16867",
    published="parallel, multi-query",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
