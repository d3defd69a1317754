"""A norm without a mean has no shift."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.norm import LayerNorm, RMSNorm

WIDTH = 4096


def measure(bench: Bench) -> Outcome:
    rms, layer = (sum(p.numel() for p in norm.parameters()) for norm in (RMSNorm(WIDTH), LayerNorm(WIDTH)))
    figure = exact("parameters of RMSNorm over those of LayerNorm", rms / layer, least=0.5, most=0.5, published=0.5)
    return Outcome(figures=(figure,), size=f"width {WIDTH:,}", sure="counted")


CLAIM = Claim(
    name="rmsnorm-parameters",
    statement="RMSNorm has half the parameters of LayerNorm.",
    source="1910.07467",
    published="half",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
