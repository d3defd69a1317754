"""Claims about learning from examples in the prompt."""

from typing import Any

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Figure, Outcome, exact, sampled
from glassformer.laboratory.icl import POSTERIOR, exact_step, one_step, softmax
from glassformer.laboratory.induction import MODEL, induction


def icl_gradient_step(bench: Bench) -> Outcome:
    sizes = ((5, 10), (10, 20), (3, 50))
    tolerance = 1e-10  # absolute, of answers of about 2, in fp64
    found = [exact_step(dims, examples) for dims, examples in sizes]
    figures = tuple(
        exact(f"largest difference, {one.examples} examples in {one.dims} dimensions", one.apart, most=tolerance)
        for one in found
    )
    return Outcome(figures=figures, size="256 prompts of each size, fp64", sure=f"to {tolerance:g}")


def icl_trained_step(bench: Bench) -> Outcome:
    near = 0.05  # relative tolerance of the layer's error, and of its answers against the step's
    steps, seeds = bench.scaled(3_000, 5), bench.runs(3)
    more: dict[str, Any] = {"batch": 16, "prompts": 500} if bench.tiny else {}
    found = [one_step(steps=steps, seed=seed, **more) for seed in seeds]
    best = found[0].published
    figures = (
        sampled("squared error", [one.error for one in found], least=(1 - near) * best, most=(1 + near) * best,
                published=best),
        sampled("distance from the step's answers, over their size", [one.apart for one in found], most=near),
        sampled("cosine with the step's answers", [one.cosine for one in found], least=1 - near**2),
    )  # fmt: skip
    return Outcome(
        figures=figures, size=f"5 dimensions, 10 examples, {steps:,} steps of 512 prompts",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
    )  # fmt: skip


def icl_ridge(bench: Bench) -> Outcome:
    dims, steps, seeds = 5, bench.scaled(8_000, 3), bench.runs(3)
    more: dict[str, Any] = {"batch": 4, "prompts": 64} if bench.tiny else {}
    how = bench.alone(*(("transformer", seed) for seed in seeds))
    found = [softmax(dims, steps=steps, seed=seed, **more, **how("transformer", seed)) for seed in seeds]
    near = [one.distances["ridge"][dims] / one.distances["least squares"][dims] for one in found]
    beyond = [one.errors["transformer"][dims] / one.errors["one step"][dims] for one in found]
    figures = (
        sampled(f"distance to ridge over that to least squares, {dims} examples", near, most=0.5),
        sampled(f"error over that of one step of descent, {dims} examples", beyond, most=0.9),
        sampled(f"error / d, {dims} examples", [one.errors["transformer"][dims] for one in found]),
        sampled(f"that of ridge, {dims} examples", [one.errors["ridge"][dims] for one in found]),
    )
    return Outcome(
        figures=figures,
        size=f"{found[0].parameters:,} parameters, {dims} dimensions, noise 0.5, {steps:,} steps of 64 prompts",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("Published at 20 dimensions with 22.4M parameters and 500,000 steps.",),
    )  # fmt: skip


def icl_mixture(bench: Bench) -> Outcome:
    dims, functions, noise, steps, seeds = 3, 8, 1.0, bench.scaled(4_000, 3), bench.runs(3)
    more: dict[str, Any] = {"batch": 4, "prompts": 64} if bench.tiny else {}
    how = bench.alone(*(("mixture", seed) for seed in seeds))
    found = [
        softmax(dims, noise, seed, steps, "gpt2+layers=2+d_model=64+heads=4", mixture=functions, **more,
                **how("mixture", seed))
        for seed in seeds
    ]  # fmt: skip
    shown = range(1, 2 * dims + 1)

    def mean(of: tuple[float, ...]) -> float:
        return sum(of[k] for k in shown) / len(shown)

    near = [mean(one.distances[POSTERIOR]) / mean(one.distances["ridge"]) for one in found]
    best = [mean(one.errors["transformer"]) / mean(one.errors[POSTERIOR]) for one in found]
    figures = (
        sampled("distance to the posterior mean over that to ridge", near, most=0.1),
        sampled("error over that of the posterior mean", best, least=0.95, most=1.2),
        sampled("error of ridge over that of the posterior mean",
                [mean(one.errors["ridge"]) / mean(one.errors[POSTERIOR]) for one in found]),
        *(sampled(f"error / d, {who}, {k} examples", [one.errors[who][k] for one in found])
          for k in (1, dims, 2 * dims) for who in ("transformer", POSTERIOR)),
    )  # fmt: skip
    return Outcome(
        figures=figures,
        size=f"{found[0].parameters:,} parameters, {functions} functions of {dims} dimensions, noise {noise:g}, "
        f"{steps:,} steps of 64 prompts, means over {shown[0]} to {shown[-1]} examples",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("All seeds train on the same functions, each as probable as another. The verdict is of this budget.",),
    )  # fmt: skip


def induction_two_layers(bench: Bench) -> Outcome:
    steps, alone, seeds = bench.scaled(600, 2), bench.scaled(1_000, 2), bench.runs(3)
    models = {MODEL: steps, MODEL.replace("layers=2", "layers=1"): alone}
    two, one = ([induction(model, seed, n) for seed in seeds] for model, n in models.items())
    figures: list[Figure] = [
        sampled("loss of repeated tokens, two layers", [run.final for run in two], "nats", most=0.5),
        sampled("the same, one layer", [run.final for run in one], "nats", least=0.5),
        sampled("attention to the token before, strongest head", [run.previous.score for run in two], least=0.5),
        sampled("prefix match, strongest head", [run.prefix.score for run in two], least=0.5),
        sampled("prefix match, one layer", [run.prefix.score for run in one], most=0.5),
        sampled("layer of the head that matches prefixes", [run.prefix.layer for run in two], least=0.5),
    ]
    falls = [low - high for high, low in (run.fall for run in two) if high is not None and low is not None]
    if len(falls) == len(two):
        figures.append(
            sampled("steps from 90 to 10 % of a guess, over all", [fall / steps for fall in falls], most=0.5)
        )
    return Outcome(
        figures=tuple(figures), size=f"attention only, width 64, {steps:,} steps; one layer {alone:,}",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="icl-gradient-step", kind="exact", minutes=0.01,
        statement="The weights of one layer of linear attention can be written down so that it answers a prompt of "
        "examples as one step of gradient descent does.",
        source="2212.07677, proposition 1", published="equal", size="any",
        measure=icl_gradient_step,
    ),
    Claim(
        name="icl-trained-step", kind="measured", minutes=1,
        statement="Trained on prompts of linear functions, one layer of linear attention becomes one step of gradient "
        "descent at the best rate.",
        source="2212.07677; error in closed form: 2306.09927",
        published="error d (d + 1) / (n + d + 1) = 1.875",
        size="5 dimensions, 10 examples",
        measure=icl_trained_step,
    ),
    Claim(
        name="icl-ridge", kind="scoped", minutes=20,
        statement="A transformer trained on noisy linear functions answers as the best estimator does (ridge "
        "regression) and not as least squares does.",
        source="2208.01066; 2211.15661", published="near ridge",
        size="5 dimensions, 200k parameters",
        measure=icl_ridge,
    ),
    Claim(
        name="icl-mixture", kind="scoped", minutes=5,
        statement="Trained on a mixture of a few tasks, a transformer infers in context as Bayes does: it answers with "
        "the mean of the posterior over these tasks, and not with ridge regression.",
        source="2111.02080; few linear functions: 2306.15063, section 3",
        published="near the posterior mean, after far longer training",
        size="8 functions of 3 dimensions, 100k parameters",
        measure=icl_mixture,
    ),
    Claim(
        name="induction-two-layers", kind="measured", minutes=3,
        statement="Induction, which repeats what followed before, forms in an abrupt change, by a head that attends to "
        "the previous token and one above it that matches prefixes; a single layer forms no such heads.",
        source="2209.11895", published="a phase change, from two layers on",
        size="two layers of width 64",
        measure=induction_two_layers,
    ),
]  # fmt: skip
