"""What a head of few values can score."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact

TOKENS, WIDTHS = 128, (8, 32)


def measure(bench: Bench) -> Outcome:
    made = torch.Generator().manual_seed(0)
    figures = []
    for width in WIDTHS:
        q, k = (torch.randn(TOKENS, width, generator=made, dtype=torch.float64) for _ in range(2))
        scores = q @ k.T
        figures += [
            exact(f"rank of the scores of a head of {width}", int(torch.linalg.matrix_rank(scores)), most=width,
                  published=width),
            exact(f"rank of its pattern, of {TOKENS}",
                  int(torch.linalg.matrix_rank((scores / width**0.5).softmax(-1)))),
        ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{TOKENS} tokens, fp64", sure="numerical rank",
                   notes=("The softmax raises the rank: the bound is on scores, not on patterns.",))  # fmt: skip


CLAIM = Claim(
    name="low-rank-scores",
    statement="The scores of a head have at most the rank of its width.",
    source="2002.07028, theorem 1",
    published="at most d_head",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
