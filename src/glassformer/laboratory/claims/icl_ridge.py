"""A transformer answers as ridge regression does, not as least squares does, where examples are noisy and few."""

from typing import Any

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled
from glassformer.laboratory.icl import softmax

SEEDS, STEPS, TINY_STEPS, TINY_PROMPTS, DIMS = 3, 8_000, 3, 64, 5


def measure(bench: Bench) -> Outcome:
    steps, seeds = bench.scaled(STEPS, TINY_STEPS), range(bench.seeds or bench.scaled(SEEDS, 2))
    more: dict[str, Any] = {"batch": 4, "prompts": TINY_PROMPTS} if bench.tiny else {}
    how = bench.alone(*(("transformer", seed) for seed in seeds))
    found = [softmax(DIMS, steps=steps, seed=seed, **more, **how("transformer", seed)) for seed in seeds]
    near = [one.distances["ridge"][DIMS] / one.distances["least squares"][DIMS] for one in found]
    beyond = [one.errors["transformer"][DIMS] / one.errors["one step"][DIMS] for one in found]
    figures = (
        sampled(f"distance to ridge over that to least squares, {DIMS} examples", near, most=0.5),
        sampled(f"error over that of one step of descent, {DIMS} examples", beyond, most=0.9),
        sampled(f"error / d, {DIMS} examples", [one.errors["transformer"][DIMS] for one in found]),
        sampled(f"that of ridge, {DIMS} examples", [one.errors["ridge"][DIMS] for one in found]),
    )
    return Outcome(
        figures=figures,
        size=f"{found[0].parameters:,} parameters, {DIMS} dimensions, noise 0.5, {steps:,} steps of 64 prompts",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("Published at 20 dimensions with 22.4M parameters and 500,000 steps.",),
    )  # fmt: skip


CLAIM = Claim(
    name="icl-ridge",
    statement="A transformer trained on noisy linear functions answers as the best estimator does (ridge regression) "
    "and not as least squares does.",
    source="Garg et al. 2022, 2208.01066; Akyürek et al. 2022, 2211.15661",
    published="near ridge",
    kind="scoped",
    size="5 dimensions, 200k parameters",
    minutes=20,
    measure=measure,
)
