"""Claims about training: optimizers, rates, regularisation, shapes, and scaling laws."""

from collections.abc import Sequence

import numpy as np

from glassformer.laboratory.evidence.bench import Bench, Compared
from glassformer.laboratory.evidence.claim import Claim, credit, undecidable
from glassformer.laboratory.evidence.contrast import BRIEF, LONG, SHORT, Gap, alike, contrast, outcome
from glassformer.laboratory.evidence.figure import Figure, Outcome, exact, sampled
from glassformer.laboratory.law import fit_scaling_law

FLOPS = 5.76e23
"""Training FLOPs of Chinchilla."""
FITS = {
    "the replication": (482.01, 2085.43, 0.3478, 0.3658),
    "the paper's third approach": (406.4, 410.7, 0.3392, 0.2849),
}
"""A, B, alpha, beta of L = E + A N^-alpha + B D^-beta, as published."""
KAPLAN = 0.076
"""Exponent of L(N), as published."""
HEAD = 100_352
"""Rows of the head of OLMo's models, which their published N includes."""
LADDER = {
    768: (190_354_176, 3.605174, 3.337846),
    1024: (371_262_464, 3.397042, 3.134005),
    1536: (758_220_288, 3.205544, 2.954874),
    2048: (1_279_395_840, 3.065172, 2.832061),
}
"""Ladder of OLMo (2412.04403): width -> published N, loss on C4 after 20 and after 200 tokens per parameter."""
SMALL = ((5_727_840, 4.506404), (53_092_864, 3.372367), (124_628_544, 2.990392), (359_973_888, 2.688089))
"""Runs on C4 of 2403.08540 with 320 tokens per parameter: N without embeddings, loss."""
LOW, HIGH, CLAIMED = 15.0, 25.0, 20.0
POST, PRE, LLAMA = "gpt2@10m+post", "gpt2@10m", "llama@10m+gqa:2"
"""GPT-2 in the guide's form and as published, and the guide's LLaMA."""
ROWS: dict[str, dict[str, float]] = {
    POST: {"ms per step": 125, "ms per token written": 8, "parameters": 10.2e6, "longest text": 256},
    LLAMA: {"ms per step": 145, "ms per token written": 6, "parameters": 10.8e6, "longest text": 512},
}
"""Values of the guide without the loss; it does not name its machine."""


def ratio(a: float, b: float, alpha: float, beta: float) -> float:
    """Returns the compute-optimal number of tokens per parameter, D / N at the minimum of the loss for 6 N D = FLOPS,
    by the law with amplitudes a, b and exponents alpha, beta."""
    both = alpha + beta
    best = (alpha * a / beta / b) ** (1 / both) * (FLOPS / 6) ** (beta / both)
    return FLOPS / 6 / best**2


def shakespeare(bench: Bench) -> Outcome:
    """Measures the rows of the guide's table for its three models: loss, time per step and per token, parameters,
    longest text, spread over seeds."""
    found = bench.compare([POST, PRE, LLAMA], 5000 * 16 * 256)
    gaps = [
        Gap(POST, LLAMA, least=-0.1, most=-0.02, published=-0.05).figure(found),
        Gap(PRE, LLAMA).figure(found),
    ]
    rows = [one for arm in (POST, PRE, LLAMA) for one in six_rows(found, arm)]
    return outcome(found, [*gaps, *rows], ["Times are of this machine. A text longer than the trained context is read "
                                           "where positions allow it, at the loss given."])  # fmt: skip


def six_rows(found: Compared, arm: str) -> list[Figure]:
    """Returns an arm's measured values other than its loss (times, parameters, ...), each over the arm's seeds; values
    that no run has are omitted."""
    runs, budget, losses = list(found.runs(arm).values()), found.results.budget, found.losses(arm)
    step = (budget.batch_size or 0) * (budget.context or 0)
    read = [{row.context or 0: row.loss for row in run.extrapolation if row.loss is not None} for run in runs]
    values = {
        "ms per step": [1e3 * step / run.train.tokens_per_second for run in runs if run.train],
        "ms per token written": [1e3 * run.generation.seconds_per_token for run in runs if run.generation],
        "parameters": [float(run.parameters or 0) for run in runs],
        "longest text": [float(max(reach)) for reach in read if reach],
    }
    figures = [
        sampled(f"{name} of {arm}", of, published=ROWS.get(arm, {}).get(name)) for name, of in values.items() if of
    ]
    twice = 2 * (budget.context or 0)
    rise = found.rise(arm, 2)
    if rise and twice:
        figures.append(sampled(f"loss of {arm} at {twice:,} tokens less that at {twice // 2:,}", rise, "nats"))
    if len(losses) > 1:
        figures.append(Figure(name=f"spread of the loss of {arm} over seeds", unit="nats",
                              value=max(losses.values()) - min(losses.values())))  # fmt: skip
    return [*figures, Figure(name=f"seeds of {arm} that diverged", value=found.diverged(arm))]


def chinchilla_ratio(bench: Bench) -> Outcome:
    found = {name: ratio(*fit) for name, fit in FITS.items()}
    figures = (
        exact("tokens for a parameter, by the replication", found["the replication"], least=LOW, most=HIGH,
              published=CLAIMED),
        exact("the same, by the paper's third approach", found["the paper's third approach"]),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{FLOPS:.3g} FLOPs, published fits", sure="by formula, from published fits",
                   notes=("The two fits are of the same runs; the paper's rounding and an early stop are why they "
                          "differ (2404.10102).",))  # fmt: skip


def chinchilla_third(bench: Bench) -> Outcome:
    found = ratio(*FITS["the paper's third approach"])
    figure = exact("tokens for a parameter", found, least=LOW, most=HIGH, published=CLAIMED)
    return Outcome(figures=(figure,), size=f"{FLOPS:.3g} FLOPs, the published fit", sure="by formula")


def exponent(sizes: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the exponent alpha of the scaling law L = (Nc / N)^alpha, fitted to runs of these sizes and losses."""
    rows = [{"N": n, "D": 1.0, "loss": loss} for n, loss in zip(sizes, losses, strict=True)]
    return float(fit_scaling_law(rows, form="kaplan_params").values["alpha_N"])


def kaplan_exponent(bench: Bench) -> Outcome:
    near = 0.1
    counted, early, late = zip(*LADDER.values(), strict=True)
    small, losses = zip(*SMALL, strict=True)
    own = [n - HEAD * width for width, n in zip(LADDER, counted, strict=True)]
    bounds = {"least": (1 - near) * KAPLAN, "most": (1 + near) * KAPLAN, "published": KAPLAN}
    figures = (
        exact("exponent, 113M to 1.07B parameters, 200 tokens for each", exponent(own, late), **bounds),
        exact("the same, 20 tokens for each", exponent(own, early), **bounds),
        exact("the same at 200, the head counted as a layer", exponent(counted, late)),
        exact("exponent, 6M to 360M parameters of other runs, 320 tokens for each", exponent(small, losses)),
    )  # fmt: skip
    return Outcome(
        figures=figures, size="8 published runs of OLMo's ladder, loss on C4", sure="fitted to published losses",
        notes=("Kaplan's own runs are not published. OLMo counts the head among its parameters, Kaplan does not. The "
               "other runs (2403.08540) are steeper: one power law without a constant holds over a narrow range.",),
    )  # fmt: skip


def law_recovered(bench: Bench) -> Outcome:
    made = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849}
    tolerance = 1e-5
    sizes, tokens = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e10, 6), np.geomspace(1e9, 1e12, 6)))
    loss = made["E"] + made["A"] * sizes ** -made["alpha"] + made["B"] * tokens ** -made["beta"]
    law = fit_scaling_law({"params": sizes.tolist(), "tokens": tokens.tolist(), "loss": loss.tolist()})
    figures = [
        exact(f"{name}, relative error", abs(float(law.values[name]) / value - 1), most=tolerance, published=0)
        for name, value in made.items()
    ]
    return Outcome(figures=tuple(figures), size="36 runs without noise", sure=f"to {tolerance:g}")


CLAIMS = [
    Claim(
        name="decay-lowers-loss", kind="scoped", minutes=6,
        statement="A learning rate that comes down ends at a lower loss than one that stays.",
        source="2405.18392", published="lower", size="1M parameters, 400k tokens",
        measure=contrast(Gap("llama@1m", "llama@1m+recipe.schedule=constant", least=0.0), tokens=SHORT),
    ),
    Claim(
        name="muon-beats-adamw", kind="scoped", minutes=6,
        statement="After the same number of tokens, Muon ends at a lower loss than AdamW.",
        source="2502.16982, section 3", published="as low with half the FLOPs", size="1M parameters, 400k tokens",
        measure=contrast(
            Gap("llama@1m", "llama@1m+recipe.optimizer=muon", most=0.0),
            tokens=SHORT,
            notes=["Both have the rates of their rules: neither was tuned here, and tuned baselines shrink such "
                   "leads."],
        ),
    ),
    Claim(
        name="dropout-hurts-in-one-epoch", kind="scoped", minutes=12,
        statement="If no text is read twice, dropout of 0.1 raises the loss.",
        source="1910.10683, section 3; 2204.02311, section 5", published="trained without",
        size="1M parameters, 1.5M tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+dropout:0.1", least=0.0), tokens=LONG),
    ),
    Claim(
        name="biases-can-go", kind="scoped", minutes=18,
        statement="Without biases a model ends at the loss that it has with them.",
        source="2204.02311, section 2", published="no loss", size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
        measure=contrast(alike("gpt2@1m", "gpt2@1m+nobias"), tokens=LONG, seeds=5),
    ),
    Claim(
        name="initial-weights", kind="scoped", minutes=3,
        statement="Weights drawn by Xavier's rule end within 2 % of the loss of N(0, 0.02^2), and weights ten times as "
        "large end at a higher loss.",
        source=credit("in-depth"), published="Xavier or N(0, 0.02^2)", size="1M parameters, 50k tokens",
        measure=contrast(
            alike("gpt2@1m", "gpt2@1m+init.kind=xavier", 0.02),
            Gap("gpt2@1m", "gpt2@1m+init.std=0.2", least=0.0),
            tokens=BRIEF,
            batch_size=8,
            context=64,
        ),
    ),
    Claim(
        name="tied-head-loses-nothing", kind="scoped", minutes=18,
        statement="A head tied to the embedding ends at the loss of a separate one.",
        source="1608.05859", published="no loss, or less of it",
        size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
        measure=contrast(
            alike("gpt2@1m", "gpt2@1m+untied"),
            tokens=LONG,
            seeds=5,
            notes=["The vocabulary is of characters: the table is small, and so is what tying can change."],
        ),
    ),
    Claim(
        name="shape-matters-little", kind="scoped", minutes=25,
        statement="At equal parameters the loss depends little on whether layers are many or wide: within 3 %.",
        source="2001.08361, section 3.1, figure 5", published="a few percent over a factor of 40 in width over depth",
        size="1M parameters, 1.5M tokens, width over depth from 4 to 256",
        measure=contrast(
            *(Gap("gpt2@1m", f"gpt2@1m{shape}", -0.03, 0.03, relative=True)
              for shape in ("+d_model=64+layers=16", "+d_model=256+layers=1")),
            tokens=LONG,
        ),
    ),
    Claim(
        name="llama-beats-gpt2", kind="scoped", minutes=12,
        statement="Wired as LLaMA, a small model ends at a lower loss than wired as GPT-2.",
        source=credit("architecture"), published="1.42 against 1.47 nats, at 10M on Shakespeare",
        size="1M parameters, 1.5M tokens",
        measure=contrast(Gap("gpt2@1m", "llama@1m", most=0.0, published=-0.05), tokens=LONG),
    ),
    Claim(
        name="shakespeare", kind="scoped", minutes=450,
        statement="On Shakespeare, 10M parameters in the way of LLaMA with GQA reach 1.42 nats in 5,000 steps, and of "
        "GPT-2 with Post-LN 1.47.",
        source=credit("architecture"), published="1.47 and 1.42, a difference of 0.05",
        size="10M parameters, 5,000 steps",
        needs="the works of Shakespeare, 1.1 MB of text (--data shakespeare)",
        measure=shakespeare,
    ),
    Claim(
        name="seven-b-perplexity", kind="undecidable", minutes=0,
        statement="At 7B, LLaMA-2 has a lower perplexity than Falcon, BLOOM and a model wired as GPT-2.",
        source=credit("architecture") + ", which names no source", published="13.8, 14.1, 14.5, 15.2",
        size="four models of 7B on one text",
        measure=undecidable(
            "The source names neither text nor tokenizer, models of 7B do not fit the laboratory, and perplexities per "
            "token of different tokenizers do not compare."
        ),
    ),
    Claim(
        name="chinchilla-ratio", kind="exact", minutes=0.01,
        statement="The compute-optimal model reads about 20 tokens for each parameter.",
        source="2203.15556; 2404.10102", published="20", size="published fits",
        measure=chinchilla_ratio,
    ),
    Claim(
        name="chinchilla-third-approach", kind="exact", minutes=0.01,
        statement="The parametric fit of the Chinchilla paper agrees with its 20 tokens for each parameter.",
        source="2203.15556, section 3.3", published="20", size="published fit",
        measure=chinchilla_third,
    ),
    Claim(
        name="kaplan-exponent", kind="exact", minutes=0.1,
        statement="The loss falls with the parameters without embeddings as N^-0.076: within 10 % of this exponent.",
        source="2001.08361, equation 1.1; runs: 2412.04403", published="0.076", size="published runs",
        measure=kaplan_exponent,
    ),
    Claim(
        name="law-recovered", kind="exact", minutes=0.1,
        statement="Losses of a grid of runs determine the five numbers of Chinchilla's law.",
        source="2203.15556, section 3.3", published="E 1.69, A 406.4, B 410.7, 0.34, 0.28",
        size="36 runs without noise",
        measure=law_recovered,
    ),
]  # fmt: skip
