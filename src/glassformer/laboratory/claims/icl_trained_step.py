"""One layer of linear attention, trained on linear functions, comes to one step of gradient descent."""

from typing import Any

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled
from glassformer.laboratory.icl import one_step

SEEDS, STEPS, TINY_STEPS, TINY_PROMPTS = 3, 3_000, 5, 500
NEAR = 0.05
"""Share by which its error may be off, and its answers from those of the step."""


def measure(bench: Bench) -> Outcome:
    steps, seeds = bench.scaled(STEPS, TINY_STEPS), range(bench.seeds or bench.scaled(SEEDS, 2))
    more: dict[str, Any] = {"batch": 16, "prompts": TINY_PROMPTS} if bench.tiny else {}
    found = [one_step(steps=steps, seed=seed, **more) for seed in seeds]
    best = found[0].published
    figures = (
        sampled("squared error", [one.error for one in found], least=(1 - NEAR) * best, most=(1 + NEAR) * best,
                published=best),
        sampled("distance from the step's answers, over their size", [one.apart for one in found], most=NEAR),
        sampled("cosine with the step's answers", [one.cosine for one in found], least=1 - NEAR**2),
    )  # fmt: skip
    return Outcome(
        figures=figures, size=f"5 dimensions, 10 examples, {steps:,} steps of 512 prompts",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
    )  # fmt: skip


CLAIM = Claim(
    name="icl-trained-step",
    statement="Trained on prompts of linear functions, one layer of linear attention becomes one step of gradient "
    "descent at the best rate.",
    source="von Oswald et al. 2022, 2212.07677; error in closed form: Zhang, Frei and Bartlett 2023, 2306.09927",
    published="error d (d + 1) / (n + d + 1) = 1.875",
    kind="measured",
    size="5 dimensions, 10 examples",
    minutes=1,
    measure=measure,
)
