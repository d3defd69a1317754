"""Mixtures of experts."""

import torch

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.contrast import SHORT, Gap, contrast
from glassformer.laboratory.evidence.figure import Outcome, exact, sampled
from glassformer.naming import preset
from glassformer.parts.core import auxiliary
from glassformer.parts.core.base import after_step
from glassformer.parts.ffn import Router


def experts_active(bench: Bench) -> Outcome:
    # published: parameters, active parameters
    models = {"mixtral-8x7b": (46.7e9, 12.9e9), "deepseek-v3": (671e9, 37e9)}
    tolerance = 0.02
    figures = []
    for name, published in models.items():
        config = preset(name)
        for what, found, said in zip(
            ("parameters", "active parameters"), (config.num_params(), config.active_params()), published, strict=True
        ):
            figures.append(exact(f"{what} of {name}", found, least=said * (1 - tolerance), most=said * (1 + tolerance),
                                 published=said))  # fmt: skip
    return Outcome(figures=tuple(figures), size=", ".join(models), sure=f"counted; within {tolerance:.0%}")


EXPERTS, ALPHA = 8, 1e-2
"""Experts of the routers here, and the weight of their balance loss."""


def loss(p: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    router = Router(4, EXPERTS, 1, balance_loss=ALPHA)
    counts = torch.bincount(chosen, minlength=EXPERTS).double()
    with auxiliary.gathering() as added:
        router.balance(p.log(), p, counts)
    return torch.stack(list(added)).sum()


def switch_loss(bench: Bench) -> Outcome:
    tokens, tolerance = 16 * EXPERTS, 1e-6
    level = torch.full((tokens, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    one = torch.nn.functional.one_hot(torch.zeros(tokens, dtype=torch.int64), EXPERTS).double().clamp_min(1e-12)
    uniform = loss(level, torch.arange(tokens) % EXPERTS)
    single = loss(one, torch.zeros(tokens, dtype=torch.int64))
    figures = [
        exact(f"loss where {what}", found.item(), least=wanted - tolerance, most=wanted + tolerance, published=wanted)
        for what, found, wanted in (
            ("all experts are chosen alike", uniform, ALPHA),
            ("one of 8 experts is chosen by all", single, ALPHA * EXPERTS),
        )
    ]
    return Outcome(figures=tuple(figures), size=f"{EXPERTS} experts, fp64", sure=f"to {tolerance:g}")


def violation(bias: bool, steps: int, seed: int) -> float:
    """Trains a router on tokens of skewed clusters for `steps` steps, and returns its MaxVio: the busiest expert's load
    over the mean, minus 1. `bias`: True to balance by a selection bias instead of a loss."""
    shares = (0.4, 0.2, 0.12, 0.1, 0.08, 0.05, 0.03, 0.02)
    width, tokens, rate = 16, 256, 1e-3
    made = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(EXPERTS, width, generator=made)
    router = Router(width, EXPERTS, 2, "sigmoid", balance_rate=rate if bias else None).train()
    with torch.no_grad():
        router.weight.copy_(centres / width)

    def load(count: int) -> torch.Tensor:
        clusters = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=made)
        x = centres[clusters] + 0.5 * torch.randn(count, width, generator=made)
        logits = router(x)
        p = router.score(logits)
        counts = torch.bincount(router.choose(p)[1].flatten(), minlength=EXPERTS).float()
        router.balance(logits, p, counts)
        return counts

    with torch.no_grad():
        for _ in range(steps if bias else 0):
            load(tokens)
            after_step(router)
        counts = load(64 * tokens)
    return float(counts.max() / counts.mean()) - 1


def loss_free_balance(bench: Bench) -> Outcome:
    level_load = 0.2
    steps, seeds = bench.scaled(2_000, 5), bench.runs(5)
    figures = (
        sampled(
            "MaxVio with the bias", [violation(True, steps, seed) for seed in seeds], most=level_load, published=0.04
        ),
        sampled("MaxVio without", [violation(False, steps, seed) for seed in seeds], least=level_load),
    )
    return Outcome(
        figures=figures, size=f"{EXPERTS} experts, 2 chosen, {steps:,} steps of 256 tokens",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("The published value is that of a model of 1B parameters on text.",),
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="experts-active", kind="exact", minutes=0.01,
        statement="Each token activates few experts: 12.9B of 46.7B in Mixtral, 37B of 671B in DeepSeek-V3.",
        source="2401.04088; 2412.19437", published="12.9B of 46.7B, 37B of 671B", size="any",
        measure=experts_active,
    ),
    Claim(
        name="experts-beat-dense", kind="scoped", minutes=12,
        statement="Eight experts, two for each token, end at a lower loss than a dense network of equal FLOPs.",
        source="2101.03961, section 3", published="lower at equal FLOPs", size="1M active parameters, 400k tokens",
        measure=contrast(Gap("llama@1m", "llama@1m+moe:8:2", most=0.0), tokens=SHORT),
    ),
    Claim(
        name="switch-loss", kind="exact", minutes=0.01,
        statement="The balance loss is alpha if all experts are chosen equally often, and alpha N if all tokens choose "
        "one.",
        source="2101.03961, equation 4", published="alpha = 0.01 and 0.08", size="any",
        measure=switch_loss,
    ),
    Claim(
        name="loss-free-balance", kind="measured", minutes=0.3,
        statement="A selection bias moved by 0.001 a step keeps experts level without a loss.",
        source="2408.15664, section 4; 2412.19437", published="MaxVio 0.04 against 0.72",
        size="2,000 steps on skewed clusters",
        measure=loss_free_balance,
    ),
]  # fmt: skip
