"""What sines and cosines of positions can do."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.position.sinusoidal import sinusoid

LENGTH, WIDTH, SHIFT, TOLERANCE = 128, 64, 17, 1e-4


def measure(bench: Bench) -> Outcome:
    encoding = sinusoid(torch.arange(LENGTH + SHIFT), WIDTH, 10000.0).double()
    here, there = encoding[:LENGTH], encoding[SHIFT:]
    shift = torch.linalg.lstsq(here, there, driver="gelsd").solution
    dots = encoding @ encoding.T
    spread = max(float(dots.diagonal(i).max() - dots.diagonal(i).min()) for i in range(len(dots) - 1))
    figures = (
        exact(f"error of PE(p + {SHIFT}) as a matrix times PE(p)", float((here @ shift - there).abs().max()),
              most=TOLERANCE, published=0),
        exact("spread of PE(p) PE(p + k) over p, relative", spread / (WIDTH / 2), most=TOLERANCE, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{LENGTH} positions of {WIDTH} values", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="sinusoid-linear",
    statement="PE(p + k) is a linear map of PE(p), and PE(p) PE(p + k) depends on k alone.",
    source="1706.03762, section 3.5",
    published="exact",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
