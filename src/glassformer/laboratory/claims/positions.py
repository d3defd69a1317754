"""Models of several positions, trained on short texts and read at longer ones."""

from __future__ import annotations

from collections.abc import Sequence

from glassformer.laboratory.claims.bench import Bench, Compared
from glassformer.laboratory.claims.claim import Figure, sampled
from glassformer.laboratory.claims.contrast import lost

CONTEXT, TOKENS, BATCH = 64, 400_000, 16
ARM = {
    "alibi": "gpt2@1m+alibi",
    "rope": "gpt2@1m+rope",
    "nope": "gpt2@1m+nope",
    "sinusoidal": "gpt2@1m+sinusoidal+embedding.scale=11.3",
    "learned": "gpt2@1m",
}
"""Sinusoids with the embedding multiplied by sqrt(d), as they were published."""


def trained(bench: Bench, names: Sequence[str]) -> Compared:
    return bench.compare([ARM[name] for name in names], TOKENS, context=CONTEXT, batch_size=BATCH)


def rise(found: Compared, name: str, times: int, **bounds: float | None) -> Figure:
    """By how much the loss is higher at so many times the context."""
    values = found.rise(ARM[name], times)
    label = f"rise of the loss at {times} times the context, {name}"
    return found.judged(sampled(label, values, "nats", **bounds), ARM[name]) if values else lost(found, [ARM[name]])


def further(found: Compared, more: str, less: str, times: int) -> Figure:
    """By how much more the loss of one rises than that of the other; the claim is that it does."""
    pairs = list(zip(found.rise(ARM[more], times), found.rise(ARM[less], times), strict=False))
    if not pairs:
        return lost(found, [ARM[more], ARM[less]])
    name = f"rise at {times} times the context, {more} less {less}"
    return found.judged(sampled(name, [a - b for a, b in pairs], "nats", least=0.0), ARM[more], ARM[less])
