"""Attention as a dictionary that is asked softly."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.kernel import AttentionCall, Naive
from glassformer.parts.visibility import Bidirectional

ENTRIES, WIDTH, SHARP, TOLERANCE = 64, 64, 1e4, 1e-5


def measure(bench: Bench) -> Outcome:
    made = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(ENTRIES, WIDTH, generator=made), dim=-1)
    values = torch.randn(ENTRIES, WIDTH, generator=made)
    asked = keys + 0.3 * torch.randn(ENTRIES, WIDTH, generator=made) / WIDTH**0.5
    best = values[(asked @ keys.T).argmax(-1)]

    def answers(sharpness: float) -> torch.Tensor:
        q, k, v = (x[None, :, None] for x in (asked, keys, values))
        return Naive()(AttentionCall(q, k, v, Bidirectional(), scale=sharpness))[0, :, 0]

    figures = (
        exact("difference from the value of the nearest key, temperature 1e-4",
              float((answers(SHARP) - best).abs().max()), most=TOLERANCE, published=0),
        exact("the same, temperature 1", float((answers(1.0) - best).abs().max())),
        exact("difference from the mean value, temperature 1e6",
              float((answers(1e-6) - values.mean(0)).abs().max()), most=TOLERANCE, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{ENTRIES} keys of {WIDTH} values, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="dictionary-lookup",
    statement="As its temperature goes to 0, attention gives the value of the nearest key, and to infinity their mean.",
    source="a guide to the mathematics of transformers",
    published="the argmax, and the mean",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
