"""How many entries a dictionary of width d tells apart."""

import math

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled

WIDTHS, ENTRIES, DRAWS = (8, 16, 24, 32), 4096, 8


def measure(bench: Bench) -> Outcome:
    entries, made = bench.scaled(ENTRIES, 128), torch.Generator().manual_seed(0)
    margins: dict[int, list[float]] = {}
    for d in WIDTHS:
        for _ in range(DRAWS):
            keys = torch.nn.functional.normalize(torch.randn(entries, d, generator=made), dim=-1)
            close = (keys @ keys.T).fill_diagonal_(-1)
            margins.setdefault(d, []).append(1 - float(close.max(-1).values.mean()))
    narrow, wide = WIDTHS[0], WIDTHS[-1]
    needed = [math.log(entries / 0.01) / margin for margin in margins[wide]]
    growth = [b / a for a, b in zip(margins[narrow], margins[wide], strict=True)]
    figures = (
        *(sampled(f"margin of the right key, d = {d}", values) for d, values in margins.items()),
        sampled(f"margin at d = {wide} over that at d = {narrow}", growth, least=2.0),
        sampled(f"sharpness that leaves 1 % to the others, d = {wide}", needed),
    )
    return Outcome(
        figures=figures, size=f"{entries:,} random keys of length 1", sure=f"{DRAWS} draws, intervals of 95 %"
    )


CLAIM = Claim(
    name="dictionary-size",
    statement="The width of a head limits how many keys it tells apart: the margin of the right one grows with d.",
    source="a guide to the mathematics of transformers; concentration of random directions",
    published="grows with d",
    kind="measured",
    size="any",
    minutes=0.1,
    measure=measure,
)
