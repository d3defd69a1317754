"""What the networks have of a layer."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape

CLAIMED, ROUNDED = 0.789, 0.0005


def measure(bench: Bench) -> Outcome:
    cost = preset("qwen3-8b").costs(Shape())
    layer, network = cost["layers.0"].parameters, cost["layers.0.ffn"].parameters
    figure = exact("share of the network in a layer's parameters", network / layer, least=CLAIMED - ROUNDED,
                   most=CLAIMED + ROUNDED, published=CLAIMED)  # fmt: skip
    return Outcome(figures=(figure,), size=f"qwen3-8b, {layer:,} parameters in a layer", sure="counted")


CLAIM = Claim(
    name="qwen3-ffn-share",
    statement="In Qwen3-8B the network holds 78.9 % of the parameters of a layer.",
    source="a first lesson on language models, by the example of Qwen3-8B",
    published="78.9 %",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
