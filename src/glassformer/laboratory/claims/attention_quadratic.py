"""Which part of a layer costs more as the text grows."""

import math
from collections.abc import Callable

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.core.cost import Cost, Shape

SHORT, LONG = 1 << 14, 1 << 20
TOLERANCE = 1e-3


def measure(bench: Bench) -> Outcome:
    config = preset("gpt2@124m")

    def cost(n: int) -> Cost:
        return config.costs(Shape(s=n, t=n, phase="prefill"))

    def products(n: int) -> float:
        """Of queries with keys and of patterns with values: what attention has besides its matrices."""
        mixer = cost(n)["layers.0.mixer"]
        return mixer.flops - 2 * n * 4 * config.d_model**2

    def network(n: int) -> float:
        return cost(n)["layers.0.ffn"].flops

    def exponent(of: Callable[[int], float]) -> float:
        return math.log(of(LONG) / of(SHORT)) / math.log(LONG / SHORT)

    figures = [
        exact(f"exponent of the FLOPs of {what} in n", exponent(of), least=wanted - TOLERANCE, most=wanted + TOLERANCE,
              published=wanted)
        for what, of, wanted in (("attention", products, 2), ("the network", network, 1))
    ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"gpt2@124m, {SHORT:,} to {LONG:,} tokens", sure="counted")


CLAIM = Claim(
    name="attention-quadratic",
    statement="Attention costs O(n^2 d) and the network O(n d^2).",
    source="1706.03762",
    published="exponents 2 and 1",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
