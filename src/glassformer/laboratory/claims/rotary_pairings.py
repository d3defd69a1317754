"""Two ways to pair the values of a head."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position import Rotary

LENGTH, WIDTH, TOLERANCE = 64, 32, 1e-5


def measure(bench: Bench) -> Outcome:
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, LENGTH, 1, WIDTH, generator=made) for _ in range(2))
    order = torch.arange(WIDTH).view(2, -1).T.flatten()  # half pairs, laid side by side
    half = torch.einsum("bsnh,btnh->st", *Rotary(WIDTH)(q, k, Pass(0, LENGTH)))
    turned = Rotary(WIDTH, pairing="interleaved")(q[..., order], k[..., order], Pass(0, LENGTH))
    unordered = torch.einsum("bsnh,btnh->st", *Rotary(WIDTH, pairing="interleaved")(q, k, Pass(0, LENGTH)))
    interleaved = torch.einsum("bsnh,btnh->st", *turned)
    size = float(half.abs().max())
    figures = (
        exact("largest difference of scores, values permuted", float((half - interleaved).abs().max()) / size,
              most=TOLERANCE, published=0),
        exact("the same, values as they are", float((half - unordered).abs().max()) / size),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{LENGTH} positions, fp32, over the largest score", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="rotary-pairings",
    statement="Turning neighbours and turning halves of a head are the same up to a permutation of its values.",
    source="a first lesson on language models, by the example of Qwen3-8B",
    published="equal up to a permutation",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
