"""The load-balancing loss at its two ends."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.parts.core import auxiliary
from glassformer.parts.ffn import Router

EXPERTS, ALPHA, TOLERANCE = 8, 1e-2, 1e-6


def loss(p: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    router = Router(4, EXPERTS, 1, balance_loss=ALPHA)
    counts = torch.bincount(chosen, minlength=EXPERTS).double()
    with auxiliary.gathering() as added:
        router.balance(p.log(), p, counts)
    return torch.stack(list(added)).sum()


def measure(bench: Bench) -> Outcome:
    tokens = 16 * EXPERTS
    level = torch.full((tokens, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    one = torch.nn.functional.one_hot(torch.zeros(tokens, dtype=torch.int64), EXPERTS).double().clamp_min(1e-12)
    uniform = loss(level, torch.arange(tokens) % EXPERTS)
    single = loss(one, torch.zeros(tokens, dtype=torch.int64))
    figures = [
        exact(f"loss where {what}", found.item(), least=wanted - TOLERANCE, most=wanted + TOLERANCE, published=wanted)
        for what, found, wanted in (
            ("all experts are chosen alike", uniform, ALPHA),
            ("one of 8 experts is chosen by all", single, ALPHA * EXPERTS),
        )
    ]
    return Outcome(figures=tuple(figures), size=f"{EXPERTS} experts, fp64", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="switch-loss",
    statement="The balance loss is alpha where all experts are chosen alike and alpha N where one is chosen by all.",
    source="2101.03961, equation 4",
    published="alpha = 0.01 and 0.08",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
