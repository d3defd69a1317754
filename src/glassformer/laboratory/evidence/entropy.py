"""Attention entropy and logits while small models are trained."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glassformer import dynamics
from glassformer.introspection import capture
from glassformer.laboratory.chain import MODEL, TOKENS, Setting, Trace, shorter, traced, trained
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Figure, MeanCurve, Outcome, Picture, curve, exact, sampled
from glassformer.model import Model

QK_NORM, SIGMA = f"{MODEL}+qknorm+qk_norm.norm=layernorm", f"{MODEL}+sigmareparam"
HIGH = Setting(rate=0.3, batch=8)
ARMS = {
    "plain": HIGH,
    "QK-LN": Setting(QK_NORM, rate=0.3, batch=8),
    "sigma-reparam": Setting(SIGMA, rate=0.3, batch=8),
    "QK-clip": Setting(rate=0.3, batch=8, clip=100.0),
}
CURES = ("QK-LN", "sigma-reparam")
WELL, ILL = "learning rate 0.01", "learning rate 0.1"
RATES = {WELL: Setting(batch=8), ILL: Setting(rate=0.1, batch=8)}
TINY = 6
"""Steps of a tiny measurement."""
ROUNDING = 1e-9


@cache
def of(how: Setting, seed: int) -> Trace:
    """Trains a model and returns its attention measurements; claims that are measured together share runs."""
    return traced(how, seed)


def _runs(arms: dict[str, Setting], bench: Bench, seeds: range) -> dict[str, list[Trace]]:
    steps = bench.scaled(next(iter(arms.values())).steps, TINY)
    return {name: [of(shorter(how, steps), seed) for seed in seeds] for name, how in arms.items()}


def _pictures(runs: dict[str, list[Trace]]) -> tuple[Picture, ...]:
    """Returns charts of the largest logit, the entropy and the loss by step, with a curve for each arm."""

    def curves(field: str) -> tuple[MeanCurve, ...]:
        return tuple(
            curve(name, traces[0].steps, [getattr(one, field) for one in traces]) for name, traces in runs.items()
        )

    return (
        Picture(title="largest attention logit", x="step", log="y", curves=curves("logits")),
        Picture(title="entropy over log(keys), lowest layer", x="step", curves=curves("entropies")),
        Picture(title="loss, nats", x="step", curves=curves("losses")),
    )


def _size(bench: Bench, how: Setting) -> str:
    steps = bench.scaled(how.steps, TINY)
    return f"2 layers of width 64, {steps} steps of {how.batch} rows of {TOKENS} tokens of a chain of pairs"


def logit_growth(bench: Bench) -> Outcome:
    seeds = bench.runs(3)
    runs = _runs(ARMS, bench, seeds)
    logits = {name: [math.log10(one.logits[-1]) for one in traces] for name, traces in runs.items()}
    entropies = {name: [one.entropies[-1] for one in traces] for name, traces in runs.items()}
    losses = {name: [one.losses[-1] for one in traces] for name, traces in runs.items()}
    figures = [
        sampled("largest logit, log10, plain", logits["plain"], least=3),
        sampled("entropy, plain", entropies["plain"], most=0.05),
    ]
    for name in CURES:
        gains = [a - b for a, b in zip(losses["plain"], losses[name], strict=True)]
        figures += [
            sampled(f"largest logit, log10, {name}", logits[name], most=2),
            sampled(f"entropy, {name}", entropies[name], least=0.1),
            sampled(f"loss of plain less that of {name}", gains, "nats", least=0.7),
        ]
    clipped = [10 ** (a - b) for a, b in zip(logits["QK-clip"], logits["plain"], strict=True)]
    figures.append(sampled("largest logit with QK-clip at 100, over that of plain", clipped, most=0.5))
    return Outcome(
        figures=tuple(figures), size=f"a learning rate of 0.3, {_size(bench, HIGH)}", sure=_sure(seeds),
        pictures=_pictures(runs),
        notes=("After 40 steps, with 4 of warm-up and 32 rows, all arms are at chance, 4.15 nats, and the entropy of "
               "sigma-reparametrized heads is below 0.05 too: the weights of the first steps have not been undone "
               "yet.",),
    )  # fmt: skip


def entropy_collapse(bench: Bench) -> Outcome:
    seeds = bench.runs(8)
    steps = bench.scaled(HIGH.steps, TINY)
    watched = {name: [heads_of(shorter(how, steps), seed) for seed in seeds] for name, how in RATES.items()}
    well, ill = watched[WELL], watched[ILL]
    times = [float(b.sigmas[-1].max() / a.sigmas[-1].max()) for a, b in zip(well, ill, strict=True)]
    figures = (
        sampled("entropy of the worst head over log(keys), 0.01", [one.entropies[-1] for one in well], least=0.15),
        sampled("largest logit, 0.01", [max(one.logits) for one in well], most=100),
        sampled("entropy of the worst head over log(keys), 0.1", [one.entropies[-1] for one in ill], most=0.05),
        sampled("largest spectral norm of W_Q W_K^T of a head, 0.1 over 0.01, log10", [math.log10(x) for x in times],
                least=1),
        *(sampled(f"loss at {name}", [one.losses[-1] for one in of], "nats") for name, of in watched.items()),
    )  # fmt: skip
    sigmas = tuple(
        curve(name, of[0].steps, [[float(sigma.max()) for sigma in one.sigmas] for one in of])
        for name, of in watched.items()
    )
    entropies = tuple(curve(name, of[0].steps, [one.entropies for one in of]) for name, of in watched.items())
    return Outcome(
        figures=figures, size=_size(bench, HIGH), sure=_sure(seeds),
        pictures=(
            Picture(title="largest spectral norm of W_Q W_K^T of a head", x="step", log="y", curves=sigmas),
            Picture(title="entropy over log(keys), worst head", x="step", curves=entropies),
        ),
        notes=("A low entropy by itself shows no failure: heads that copy have one.",),
    )  # fmt: skip


class HeadRecord:
    """Measurements of the attention heads in one run, in lists over the steps at which it is measured.

    Attributes
    ----------
    sigmas : list of Tensor
        Spectral norm of W_Q W_K^T, (l, n).
    entropies, logits : list of float
        Entropy over log(keys) of the worst head; largest logit.
    points : list of Tensor
        Norm of the logits and entropy of queries that attend to all tokens, (2, rows).
    rows, violations : int
        Rows of attention that were compared with the bound, and rows below it.
    """

    def __init__(self, how: Setting, seed: int) -> None:
        self.steps, self.losses, self.entropies, self.logits = list[int](), list[float](), list[float](), list[float]()
        self.sigmas, self.points = list[Tensor](), list[Tensor]()
        self.rows = self.violations = 0
        trained(how, seed, self.add)

    @torch.no_grad()
    def add(self, step: int, loss: float, model: Model, tokens: Tensor) -> None:
        """Measures a model on tokens (b, s) at a step, and appends the results to the record."""
        sites = ["layers.*.resid_pre", "layers.*.mixer.scores", "layers.*.mixer.pattern"]
        seen = capture(model, tokens[:4], sites)
        sigmas, entropies, logits = [], [], []
        layers: Any = model.layers
        for i, layer in enumerate(layers):
            scores, pattern = (seen[f"layers.{i}.mixer.{site}"] for site in ("scores", "pattern"))
            q, k, _ = layer.mixer.qkv.weight.unflatten(0, (3, layer.mixer.n_heads, -1))
            sigma = dynamics.product_spectrum(q, k)[:, 0]
            x = layer.residual.mixer_norm(seen[f"layers.{i}.resid_pre"])
            self.compare(scores.double(), x.double(), sigma, q.shape[1])
            sigmas.append(sigma)
            entropies.append(dynamics.attention_entropy(pattern, normalised=True))
            logits.append(dynamics.max_attention_logit(scores))
        self.steps.append(step)
        self.losses.append(loss)
        self.sigmas.append(torch.stack(sigmas))
        self.entropies.append(float(torch.stack(entropies).min()))
        self.logits.append(float(torch.stack(logits).max()))

    def compare(self, scores: Tensor, x: Tensor, sigma: Tensor, head: int) -> None:
        """Compares the entropy of every row of attention with its theoretical lower bound, at the norm of the row's
        logits and at that norm's upper bound |x_i| sigma |X|_2 / sqrt(h); x (b, s, d), scores (b, n, s, s), h the
        width of a head."""
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1)  # (b, n, s)
        keys = dynamics.causal_counts(scores)
        hidden = scores.isinf()
        centred = scores - scores.masked_fill(hidden, 0).sum(-1, keepdim=True) / keys[:, None]
        norms = centred.masked_fill(hidden, 0).norm(dim=-1)
        reach = x.norm(dim=-1) * dynamics.spectral_norm(x)[:, None] / math.sqrt(head)  # (b, s)
        for s in (norms, reach[:, None] * sigma[:, None]):
            self.violations += int((entropy < dynamics.entropy_bound(s, keys) - ROUNDING).sum())
            self.rows += entropy.numel()
        self.points.append(torch.stack([norms[:1, :, -1].flatten(), entropy[:1, :, -1].flatten()]))


@cache
def heads_of(how: Setting, seed: int) -> HeadRecord:
    """Trains a model and returns the measurements of its attention heads; claims that are measured together share
    runs."""
    return HeadRecord(how, seed)


def _closed_forms() -> list[Figure]:
    """Returns measured values that compare the entropy's lower bound with rows of 16 logits: one that attains it, and
    2,000 at random."""
    keys, generator = 16, torch.Generator().manual_seed(0)
    figures = []
    for s in (1.0, 4.0, 8.0):
        tight = torch.full((keys,), -1 / (keys - 1), dtype=torch.float64)
        tight[0] = 1.0
        rows = torch.randn(2000, keys, generator=generator, dtype=torch.float64)
        least, attained = (
            torch.special.entr((s * one / one.norm(dim=-1, keepdim=True)).softmax(-1)).sum(-1).min().item()
            for one in (rows, tight)
        )
        bound = dynamics.entropy_bound(s, keys).item()
        figures += [
            exact(f"bound at a norm of {s:g} less the entropy that attains it", abs(bound - attained), "nats",
                  most=1e-9),
            exact(f"lowest entropy of 2,000 random rows above it, {s:g}", least - bound, "nats", least=1e-9),
        ]  # fmt: skip
    return figures


def entropy_bound(bench: Bench) -> Outcome:
    steps = bench.scaled(HIGH.steps, TINY)
    watched = {name: heads_of(shorter(how, steps), 0) for name, how in RATES.items()}
    figures = (
        *_closed_forms(),
        *(exact(f"rows of {one.rows:,} below the bound, {name}", one.violations, most=0, published=0)
          for name, one in watched.items()),
    )  # fmt: skip
    curves = []
    for name, one in watched.items():
        points = torch.cat(one.points, 1)
        points = points[:, points[0].argsort()][:, ::2]
        curves.append(curve(name, points[0].tolist(), [points[1].tolist()], dots=True))
    norms = torch.logspace(-1, 4.5, 60)
    curves.append(curve("the bound", norms.tolist(), [dynamics.entropy_bound(norms, TOKENS).tolist()]))
    picture = Picture(title=f"entropy of rows of {TOKENS} keys, nats", x="norm of the logits", log="x",
                      curves=tuple(curves))  # fmt: skip
    return Outcome(
        figures=figures, size=f"rows of 16 logits, and {_size(bench, HIGH)}",
        sure="every row of four texts at every twentieth step, in fp64, and at the bound of its norm",
        pictures=(picture,),
    )  # fmt: skip


FREE = {
    "plain": Setting(MODEL, decay=0.1, batch=8),
    "plain, no warm-up, no decay": Setting(MODEL, warmup=0, batch=8),
    "sigma-reparam": Setting(SIGMA, decay=0.1, batch=8),
    "sigma-reparam, no warm-up, no decay": Setting(SIGMA, warmup=0, batch=8),
}


def without_warmup(bench: Bench) -> Outcome:
    seeds = bench.runs(3)
    runs = _runs(FREE, bench, seeds)
    finals = {name: [one.final for one in traces] for name, traces in runs.items()}
    plain, free_plain, sigma, free_sigma = finals.values()
    figures = (
        sampled("loss of sigma-reparam without warm-up and decay, less that with both",
                [a - b for a, b in zip(free_sigma, sigma, strict=True)], "nats", most=0.05),
        sampled("the same, less that of the plain model with both",
                [a - b for a, b in zip(free_sigma, plain, strict=True)], "nats", most=0.05),
        sampled("entropy of sigma-reparam without both",
                [one.entropies[-1] for one in runs["sigma-reparam, no warm-up, no decay"]], least=0.05),
        sampled("loss of the plain model without warm-up and decay, less that with both",
                [a - b for a, b in zip(free_plain, plain, strict=True)], "nats"),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"a learning rate of 0.01, {_size(bench, HIGH)}", sure=_sure(seeds),
                   pictures=_pictures(runs))  # fmt: skip


def _sure(seeds: range) -> str:
    return f"{len(seeds)} seeds, intervals of 95 %"


CLAIMS = [
    Claim(
        name="entropy-bound", kind="measured", minutes=2,
        statement="The norm of a row's logits, and so the spectral norm of W_Q W_K^T, bounds the entropy of its "
        "attention from below.",
        source="2303.06296, theorem 3.1", published="a tight bound", size="two trained models of 2 layers",
        measure=entropy_bound,
    ),
    Claim(
        name="entropy-collapse", kind="scoped", minutes=4,
        statement="Where the spectral norm of W_Q W_K^T runs away, the entropy of attention collapses.",
        source="2303.06296, section 3.1", published="low entropy with instability",
        size="2 layers, 300 steps at rates of 0.01 and 0.1",
        measure=entropy_collapse,
    ),
    Claim(
        name="logit-growth", kind="scoped", minutes=8,
        statement="At a learning rate of 0.3 attention logits pass a thousand and entropy collapses, and neither "
        "happens with norms on queries and keys or with sigma-reparametrized maps.",
        source="2309.14322, section 3.1; 2303.06296", published="stable with QK-norm",
        size="2 layers, 300 steps",
        measure=logit_growth,
    ),
    Claim(
        name="sigma-reparam-without-warmup", kind="scoped", minutes=6,
        statement="With sigma-reparametrized maps a model needs neither warm-up nor weight decay: within 0.05 nats.",
        source="2303.06296, abstract", published="competitive without warm-up and weight decay",
        size="2 layers, 300 steps",
        measure=without_warmup,
    ),
]  # fmt: skip
