"""A window bounds what is kept."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

WINDOW, TOKENS = 4096, 32768


def measure(bench: Bench) -> Outcome:
    config = preset("mistral-7b")
    ratio = config.state_bytes(TOKENS) / preset("mistral-7b+causal").state_bytes(TOKENS)
    figure = exact(f"cache after {TOKENS:,} tokens over that without a window", ratio, least=WINDOW / TOKENS,
                   most=WINDOW / TOKENS * 1.01, published=WINDOW / TOKENS)  # fmt: skip
    return Outcome(figures=(figure,), size=f"mistral-7b, window {WINDOW:,}", sure="counted")


CLAIM = Claim(
    name="window-cache",
    statement="A window of 4,096 tokens keeps an eighth of the cache at 32,768 tokens.",
    source="2310.06825, section 2",
    published="8 times less",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
