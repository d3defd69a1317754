"""Latent attention keeps one latent for all heads."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

TOKENS = 4096
PUBLISHED = 70_272
"""Bytes for a token in 16 bits: 61 layers of 576 numbers."""


def measure(bench: Bench) -> Outcome:
    found = preset("deepseek-v3").state_bytes(TOKENS) / TOKENS
    figure = exact("bytes of the cache for a token", found, "bytes", least=PUBLISHED, most=PUBLISHED,
                   published=PUBLISHED)  # fmt: skip
    return Outcome(figures=(figure,), size=f"deepseek-v3, {TOKENS:,} tokens in 16 bits", sure="counted")


CLAIM = Claim(
    name="latent-cache",
    statement="DeepSeek-V3 keeps 70 kB of cache for a token.",
    source="2412.19437; 2505.09343",
    published="70.272 kB",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
