"""Attention without a residual stream makes all tokens alike."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled

WIDTH, TOKENS, DEPTH, HEADS, DRAWS = 64, 32, 12, 4, 8
COLLAPSED = 1e-3
"""Share of the tokens' norm that is not common to all."""


def stack(residual: bool, depth: int, made: torch.Generator) -> float:
    """|x - mean over tokens| / |x| after `depth` layers of attention with random weights; what is added to a residual
    stream is 1 / sqrt(2 depth) of it, as in GPT-2."""
    x = torch.randn(TOKENS, WIDTH, generator=made, dtype=torch.float64)
    for _ in range(depth):
        z = torch.zeros_like(x)
        for _ in range(HEADS):
            q, k, v = (x @ torch.randn(WIDTH, WIDTH // HEADS, generator=made, dtype=torch.float64) / WIDTH**0.5
                       for _ in range(3))  # fmt: skip
            out = torch.randn(WIDTH // HEADS, WIDTH, generator=made, dtype=torch.float64) / (WIDTH // HEADS) ** 0.5
            z += (q @ k.T / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v @ out
        x = x + z / (2 * depth) ** 0.5 if residual else z
        x = x / x.square().mean().sqrt()
    return float((x - x.mean(0)).norm() / x.norm())


def measure(bench: Bench) -> Outcome:
    draws, made = bench.scaled(DRAWS, 2), torch.Generator().manual_seed(0)
    figures = (
        sampled(f"what tokens differ in after {DEPTH} layers, without residual",
                [stack(False, DEPTH, made) for _ in range(draws)], "of the norm", most=COLLAPSED, published=0),
        sampled("the same, with it", [stack(True, DEPTH, made) for _ in range(draws)], "of the norm", least=0.1),
        sampled("after 2 layers, without", [stack(False, 2, made) for _ in range(draws)], "of the norm"),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{DEPTH} layers of random weights, width {WIDTH}, {HEADS} heads, fp64",
                   sure=f"{draws} draws, intervals of 95 %")  # fmt: skip


CLAIM = Claim(
    name="rank-collapse",
    statement="Attention without residual connections makes all tokens alike with depth, and with them it does not.",
    source="2103.03404, theorem 2.2",
    published="to rank 1, doubly exponentially",
    kind="measured",
    size="random weights",
    minutes=0.05,
    measure=measure,
)
