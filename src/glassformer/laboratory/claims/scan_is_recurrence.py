"""The fast scan is the slow one, and its state does not grow."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.mixer.scan import naive_scan, selective_scan

CHANNELS, STATES, TOLERANCE = 16, 8, 1e-5


def measure(bench: Bench) -> Outcome:
    made = torch.Generator().manual_seed(0)
    s = bench.scaled(512, 32)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    u, dt = draw(2, s, CHANNELS), draw(2, s, CHANNELS).sigmoid()
    a, b, c, h = -draw(STATES, CHANNELS).exp(), draw(2, s, STATES), draw(2, s, STATES), torch.zeros(2, STATES, CHANNELS)
    wanted, last = naive_scan(u, dt, a, b, c, h)
    found, state = selective_scan(u, dt, a, b, c, h)
    size = float(wanted.abs().max())
    config = preset("mamba@10m")
    figures = (
        exact("largest difference of outputs, over the largest output", float((found - wanted).abs().max()) / size,
              most=TOLERANCE, published=0),
        exact("largest difference of the last state", float((state - last).abs().max()), most=TOLERANCE),
        exact("bytes of the state after 65,536 tokens over those after 256",
              config.state_bytes(65536) / config.state_bytes(256), least=1, most=1, published=1),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{s} tokens, fp32; mamba@10m", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="scan-is-recurrence",
    statement="Mamba's scan of a whole text is its recurrence token by token, from a state of fixed size.",
    source="2312.00752, section 3.3",
    published="equal; O(1) state",
    kind="exact",
    size="any",
    minutes=0.05,
    measure=measure,
)
