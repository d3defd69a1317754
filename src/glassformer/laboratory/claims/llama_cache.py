"""The formula of the cache's size."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

TOKENS = 4096
LAYERS, WIDTH, BYTES = 32, 4096, 2


def measure(bench: Bench) -> Outcome:
    formula = 2 * LAYERS * WIDTH * BYTES
    found = preset("llama-7b").state_bytes(TOKENS) / TOKENS
    figure = exact("bytes of the cache for a token", found, "bytes", least=formula, most=formula, published=formula)
    return Outcome(figures=(figure,), size=f"llama-7b, {TOKENS:,} tokens in 16 bits", sure="counted")


CLAIM = Claim(
    name="llama-7b-cache",
    statement="A cache takes 2 L d numbers for each token: half a MiB for a model of 7B with a head of keys for each.",
    source="a guide to the mathematics of transformers",
    published="2 x 32 x 4,096 x 2 bytes",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
