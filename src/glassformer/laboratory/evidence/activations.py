"""Activations and gates of the FFNs."""

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim, credit
from glassformer.laboratory.evidence.contrast import LONG, Gap, contrast
from glassformer.laboratory.evidence.figure import Outcome, exact, sampled
from glassformer.laboratory.evidence.stored import quoted
from glassformer.laboratory.evidence.timing import Pair, Race, races, training
from glassformer.naming import preset


def swiglu_width(bench: Bench) -> Outcome:
    tolerance = 0.01
    width = 4096
    hidden = round(8 * width / 3)
    shape = f"llama@7b+d_model={width}"
    gated, plain = (preset(f"{shape}+{what}").num_params(embeddings=False) for what in
                    (f"swiglu:{hidden}", "relu+nobias"))  # fmt: skip
    figure = exact("parameters with SwiGLU of 8/3 d over those with ReLU of 4 d", gated / plain,
                   least=1 - tolerance, most=1 + tolerance, published=1)  # fmt: skip
    return Outcome(figures=(figure,), size=shape, sure=f"counted; within {tolerance:.0%}")


def target(x: Tensor) -> Tensor:
    """Returns the function f(x), (b, n) -> (b, n), that the constructed transformer approximates: continuous, with
    every token dependent on every other."""
    largest = x.max(-1, keepdim=True).values
    return torch.sin(3 * x * largest) + (x - x.mean(-1, keepdim=True)).abs()


def steps(z: Tensor) -> Tensor:
    """Returns 1 where z > 0, else 0, with a narrow slope between: relu(c z + 1) - relu(c z), two ReLUs."""
    sharp = 1e6  # inputs within 1 / sharp of a border of the grid are mapped wrongly
    return (sharp * z + 1).relu() - (sharp * z).relu()


def transformer(x: Tensor, grid: int) -> Tensor:
    """Returns the approximation of `target` that a constructed transformer computes, (b, n) -> (b, n): FFN, attention,
    FFN.

    The first FFN finds the grid cell of each token, and multiplies its index by the power of the grid size that belongs
    to its position, with a ReLU pair for every border and position. Attention with queries of zero, the mean over
    tokens, maps each sequence of cells to a unique number (the contextual mapping). The second FFN has a pair for every
    such number and position, and adds up the differences between successive values."""
    n = x.shape[-1]
    position = torch.eye(n, dtype=x.dtype)
    borders = torch.arange(1, grid, dtype=x.dtype) / grid
    # z (b, n, p, k) > 0 if token i has position p and exceeds border k
    z = x[..., None, None] - borders + 2 * (position[None, :, :, None] - 1)
    powers = torch.tensor([float(grid**p) for p in range(n)], dtype=x.dtype)
    code = (steps(z).sum(-1) * powers).sum(-1)  # (b, n)
    scores = torch.zeros(n, n, dtype=x.dtype)  # queries of zero
    number = torch.einsum("st,bt->bs", scores.softmax(-1), code) * n
    cells = torch.tensor([cell[::-1] for cell in product(range(grid), repeat=n)], dtype=x.dtype)
    values = target((cells + 0.5) / grid)  # (grid^n, n), ordered by the number of the sequence
    rises = values.diff(dim=0)
    middles = torch.arange(1, len(values), dtype=x.dtype) - 0.5
    return values[0] + torch.einsum("bsm,ms->bs", steps(number[..., None] - middles), rises)


def universal_approximation(bench: Bench) -> Outcome:
    tokens, draws, sequences = 3, 8, 512
    grids = (4, 8, 16)[: bench.scaled(3, 2)]
    errors: dict[int, list[float]] = {grid: [] for grid in grids}
    for seed in range(bench.scaled(draws, 2)):
        made = torch.Generator().manual_seed(seed)
        x = torch.rand(bench.scaled(sequences, 16), tokens, generator=made, dtype=torch.float64)
        for grid in grids:
            errors[grid].append(float((transformer(x, grid) - target(x)).square().mean().sqrt()))
    logs = np.log([list(of) for of in errors.values()])
    slopes = np.polyfit(np.log(grids), logs, 1)[0]
    half = [b / a for a, b in zip(errors[grids[-2]], errors[grids[-1]], strict=True)]
    figures = [
        sampled("slope of log error in log cells", list(slopes), least=-1.25, most=-0.75),
        sampled("error with twice the cells of a token, over that before", half, most=1 / math.sqrt(2)),
        *(sampled(f"error with {grid} cells a token", errors[grid]) for grid in grids),
    ]  # fmt: skip
    return Outcome(
        figures=tuple(figures), size=f"sequences of {tokens} numbers from 0 to 1, fp64",
        sure=f"{len(half)} draws of {len(x)} sequences, intervals of 95 %",
        notes=(f"The price is the proof's: the second network has {tokens} G^{tokens} pairs of ReLUs for G cells.",),
    )  # fmt: skip


def step_with(change: str) -> Pair:
    """Returns two pieces of work to time: a training step with a change of the activation, and one with ReLU."""
    return lambda scale: (training(change, 512 // scale), training("+relu", 512 // scale))


times = races(
    Race("a step with GELU over one with ReLU", step_with("+gelu"), most=1.05, published=1.02),
    Race("a step with SwiGLU over one with ReLU", step_with("+swiglu"), most=1.15, published=1.15),
    Race("a step with GeGLU over one with ReLU", step_with("+geglu"), most=1.15, published=1.15),
)


def activations_table(bench: Bench) -> Outcome:
    """Measures the time of a training step with four kinds of FFN, and quotes the stored differences of their
    losses."""
    timed, quotes = times(bench), ("gelu-beats-relu", "swiglu-beats-gelu", "geglu-beats-gelu")
    losses = tuple(figure for name in quotes for figure in quoted(name))
    notes = (f"Losses are those of claims {', '.join(quotes)}.",) if losses else ()
    return timed.model_copy(update={"figures": (*timed.figures, *losses), "notes": notes})


CLAIMS = [
    Claim(
        name="gelu-beats-relu", kind="scoped", minutes=12,
        statement="GELU ends at a lower loss than ReLU.",
        source="2002.05202, table 1", published="1.983 against 1.997; perplexity 3.21 against 3.45",
        size="1M parameters, 1.5M tokens",
        measure=contrast(Gap("gpt2@1m+relu", "gpt2@1m", most=0.0, published=-0.014), tokens=LONG),
    ),
    Claim(
        name="geglu-beats-gelu", kind="scoped", minutes=12,
        statement="With the same number of weights, GeGLU ends at a lower loss than GELU.",
        source="2002.05202, table 1", published="1.942 against 1.983 at 65,536 steps; perplexity 3.16 against 3.21",
        size="1M parameters, 1.5M tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+geglu", most=0.0, published=-0.041), tokens=LONG),
    ),
    Claim(
        name="swiglu-beats-gelu", kind="scoped", minutes=12,
        statement="With the same number of weights, SwiGLU ends at a lower loss than GELU.",
        source="2002.05202, table 1", published="1.944 against 1.983 at 65,536 steps; perplexity 3.15 against 3.21",
        size="1M parameters, 1.5M tokens: at 200k tokens GELU leads",
        measure=contrast(
            Gap("gpt2@1m", "gpt2@1m+swiglu", most=0.0, published=-0.039),
            tokens=LONG,
            notes=["Rates are the rule's, not tuned; with fewer tokens or another rate the order has been seen "
                   "reversed."],
        ),
    ),
    Claim(
        name="activations-table", kind="measured", minutes=3,
        statement="GELU, SwiGLU and GeGLU end at lower losses than ReLU, and their training steps take 1.02, 1.15 and "
        "1.15 times its time.",
        source=credit("architecture"),
        published="perplexity 3.45, 3.21, 3.15, 3.16; time 1, 1.02, 1.15, 1.15",
        size="4 layers of width 768",
        measure=activations_table,
    ),
    Claim(
        name="swiglu-width", kind="exact", minutes=0.01,
        statement="A gated FFN of width 8/3 d has the same number of parameters as a plain one of 4 d.",
        source="2002.05202", published="equal", size="any",
        measure=swiglu_width,
    ),
    Claim(
        name="squared-relu-beats-gelu", kind="scoped", minutes=12,
        statement="A squared ReLU ends at a lower loss than GELU.",
        source="2109.08668, section 4", published="lower", size="1M parameters, 1.5M tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+relu2", most=0.0), tokens=LONG),
    ),
    Claim(
        name="universal-approximation", kind="measured", minutes=0.1,
        statement="A transformer approximates any continuous map of sequences: written down on a grid, "
        "its error falls as the cells get smaller.",
        source="1912.10077, theorem 3", published="any error above 0, with enough width or depth", size="any",
        measure=universal_approximation,
    ),
]  # fmt: skip
