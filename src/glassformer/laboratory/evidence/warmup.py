"""Three explanations of warm-up, each tested by a run without warm-up in which one cause is removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from glassformer import dynamics
from glassformer.laboratory.chain import MODEL, TOKENS, texts
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Figure, MeanCurve, Outcome, Picture, curve, sampled
from glassformer.model import Model
from glassformer.naming import preset

POST = f"{MODEL}+post"
RATE, STEPS, WARMUP, BATCH, SEEDS = 3e-2, 120, 30, 8, 3
BETAS, EPS = (0.9, 0.999), 1e-8
THRESHOLD = 2 * (1 + BETAS[0]) / (1 - BETAS[0])
"""Preconditioned sharpness times learning rate above which Adam is unstable, 38 (2207.14484, equation 2)."""
FIRST = 10
"""First steps, whose updates are compared with those after warm-up; also the length of a tiny measurement."""
ESTIMATES, DRAWS = 50, 4
"""Gradients in an estimate of second moments before the first step; repetitions of the estimate."""
POWER = 20
"""Iterations of the power method for the largest eigenvalue."""
EVERY = 5
"""Steps between two points of a picture."""


@dataclass(frozen=True)
class RunStart:
    """Options for the start of a run: warm-up, and the remedies that replace it.

    Attributes
    ----------
    warmup : int
        Steps of the warm-up.
    estimates : int
        Gradients for an estimate of second moments before the first step; 0 for no estimate.
    fresh : int
        Steps after which the state of the optimizer is dropped; 0 for never.
    limit : float
        Largest relative change of a matrix by a step.
    """

    warmup: int = 0
    estimates: int = 0
    fresh: int = 0
    limit: float = math.inf


WARM, NONE = RunStart(warmup=WARMUP), RunStart()
WITH, WITHOUT = "with warm-up", "without"


@dataclass
class WarmupRun:
    """Measurements of a run with or without warm-up: loss and largest relative change of a matrix by step, and
    preconditioned sharpness before the first step and after warm-up."""

    losses: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        """Mean loss of the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


class Adam:
    """Adam (1412.6980, algorithm 1) with separate gradient counts for its two moments, so that the second can be
    estimated before the first step."""

    def __init__(self, weights: Sequence[Tensor]):
        self.first, self.second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        self.counts = [0, 0]

    def estimate(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to the optimizer's estimates of second moments, without a step."""
        self.counts[1] += 1
        for second, gradient in zip(self.second, gradients, strict=True):
            second.lerp_(gradient.square(), 1 - BETAS[1])

    def scales(self) -> list[Tensor]:
        """Returns Adam's scale of each weight: the root of the weight's second moment, plus eps."""
        return [(second / (1 - BETAS[1] ** self.counts[1])).sqrt() + EPS for second in self.second]

    def directions(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Updates the moments by the gradients, and returns the update of each weight at a learning rate of 1, with the
        sign of the gradient."""
        self.estimate(gradients)
        self.counts[0] += 1
        for first, gradient in zip(self.first, gradients, strict=True):
            first.lerp_(gradient, 1 - BETAS[0])
        unbiased = 1 - BETAS[0] ** self.counts[0]
        return [first / unbiased / scale for first, scale in zip(self.first, self.scales(), strict=True)]


def gradients(model: Model, text: Tensor) -> tuple[float, list[Tensor]]:
    """Returns the loss of a batch (b, t + 1), and the gradients of the loss by all weights."""
    loss = model.loss(text[:, :-1], text[:, 1:])
    return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))


def sharpness(
    gradient: Callable[[], list[Tensor]], weights: Sequence[Tensor], scales: Sequence[Tensor], power: int = POWER
) -> float:
    """Returns the absolute value of the largest eigenvalue of D^-1/2 H D^-1/2, D the diagonal of `scales` and H the
    Hessian of the function of fp64 `weights` that has this gradient: by the power method on differences of
    gradients."""
    generator = torch.Generator().manual_seed(0)
    roots = [scale.double().rsqrt() for scale in scales]
    at = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]
    found = 0.0
    for _ in range(power):
        norm = _norm(at)
        step = [one / norm * root for one, root in zip(at, roots, strict=True)]
        near = 1e-4 / _norm(step)
        _move(weights, step, near)
        above = gradient()
        _move(weights, step, -2 * near)
        below = gradient()
        _move(weights, step, near)
        at = [(up - down) / (2 * near) * root for up, down, root in zip(above, below, roots, strict=True)]
        found = _norm(at)
    return found


def _norm(of: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in of))


@torch.no_grad()
def _move(weights: Sequence[Tensor], step: Sequence[Tensor], times: float) -> None:
    for weight, one in zip(weights, step, strict=True):
        weight.add_(one, alpha=times)


def sharpness_of(model: Model, text: Tensor, adam: Adam) -> float:
    """Returns the preconditioned sharpness of a batch's loss: the largest absolute eigenvalue of its Hessian, scaled by
    Adam."""
    twin = model.config.build(seed=0)
    twin.load_state_dict(model.state_dict())
    twin.double()
    return sharpness(lambda: gradients(twin, text)[1], list(twin.parameters()), adam.scales())


@cache
def course(arm: RunStart, seed: int, steps: int = STEPS, rate: float = RATE, expression: str = POST) -> WarmupRun:
    """Trains a model with this start; returns its measurements. Claims that are measured together share runs. The rate
    is constant until `WARMUP` and falls linearly to zero afterwards, also in runs without warm-up."""
    model, found = preset(expression).build(seed=seed), WarmupRun()
    weights = list(model.parameters())
    adam, source = Adam(weights), texts(torch.Generator().manual_seed(seed), BATCH)
    for _ in range(arm.estimates):
        adam.estimate(gradients(model, next(source))[1])
    for step, text in zip(range(1, steps + 1), source, strict=False):
        loss, of = gradients(model, text)
        if step == arm.fresh + 1:
            adam = Adam(weights) if arm.fresh else adam
        updates = adam.directions(of)
        if step in (1, WARMUP + 1) and arm in (WARM, NONE):
            found.sharpness.append(sharpness_of(model, text, adam))
        rise = step / arm.warmup if arm.warmup else 1.0
        at = rate * min(rise, 1.0, (steps - step + 1) / max(1, steps - WARMUP))
        found.changes.append(move_within(weights, updates, at, arm.limit))
        found.losses.append(loss)
    return found


@torch.no_grad()
def move_within(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float, limit: float) -> float:
    """Subtracts rate * update from each weight, but changes a matrix by at most `limit` of its norm; returns the
    largest relative change of a matrix."""
    largest = 0.0
    for weight, update in zip(weights, updates, strict=True):
        ratio = float(dynamics.update_ratio(rate * update, weight)) if weight.dim() == 2 else 0.0
        times = min(1.0, limit / ratio) if ratio else 1.0
        weight.sub_(update, alpha=rate * times)
        largest = max(largest, ratio * times)
    return largest


def cured(
    bench: Bench, cure: Callable[[WarmupRun], RunStart], words: str
) -> tuple[dict[str, list[WarmupRun]], list[Figure]]:
    """Trains runs with warm-up, without, and without warm-up but with one cause removed. Returns the runs by name, and
    measured values of their losses. `cure` maps the run with warm-up of a seed to the start of the third run."""
    steps, runs = bench.scaled(STEPS, FIRST), list[tuple[WarmupRun, WarmupRun, WarmupRun]]()
    for seed in bench.runs(SEEDS):
        warm = course(WARM, seed, steps)
        runs.append((warm, course(NONE, seed, steps), course(cure(warm), seed, steps)))
    figures = [
        sampled("loss without warm-up less that with it", [n.final - w.final for w, n, _ in runs], "nats", least=0.0),
        sampled(f"loss {words}, less the middle of both", [c.final - (w.final + n.final) / 2 for w, n, c in runs],
                "nats", most=0.0),
        sampled(f"loss {words}, less that with warm-up", [c.final - w.final for w, _, c in runs], "nats"),
    ]  # fmt: skip
    return dict(zip((WITH, WITHOUT, words), map(list, zip(*runs, strict=True)), strict=True)), figures


def _outcome(bench: Bench, runs: dict[str, list[WarmupRun]], figures: Sequence[Figure]) -> Outcome:
    steps = bench.scaled(STEPS, FIRST)

    def curves(of: Callable[[WarmupRun], list[float]]) -> tuple[MeanCurve, ...]:
        return tuple(
            curve(name, range(1, steps + 1, EVERY), [of(one)[::EVERY] for one in found]) for name, found in runs.items()
        )

    return Outcome(
        figures=tuple(figures),
        size=f"2 layers of width 64, Post-LN, {steps} steps of Adam at {RATE:g}, {WARMUP} of them warm-up, of {BATCH} "
        f"rows of {TOKENS} tokens of a chain of pairs",
        sure=f"{len(bench.runs(SEEDS))} seeds, intervals of 95 %",
        pictures=(
            Picture(title="loss, nats", x="step", curves=curves(lambda one: one.losses)),
            Picture(title="largest relative change of a matrix", x="step", log="y",
                    curves=curves(lambda one: one.changes)),
        ),
    )  # fmt: skip


def _later(one: WarmupRun) -> float:
    """Returns the largest relative change of a matrix in the second half of a run."""
    return max(one.changes[len(one.changes) // 2 :])


def by_size(bench: Bench) -> Outcome:
    runs, figures = cured(bench, lambda warm: RunStart(limit=_later(warm)), "with limited changes, without warm-up")
    first = [max(n.changes[:FIRST]) / _later(w) for w, n in zip(runs[WITH], runs[WITHOUT], strict=True)]
    figures.append(sampled(f"largest change of a matrix in the first {FIRST} steps without warm-up, over that in the "
                           "second half with it", first, least=1.0))  # fmt: skip
    return _outcome(bench, runs, figures)


def by_noise(bench: Bench) -> Outcome:
    runs, figures = cured(
        bench, lambda _: RunStart(estimates=ESTIMATES), f"after {ESTIMATES} estimates, without warm-up"
    )
    spreads = [spread(seed, bench.scaled(ESTIMATES, 2)) for seed in bench.runs(SEEDS)]
    figures += [
        sampled(f"spread of the scale of an entry from one gradient, over that from {ESTIMATES}",
                [one / many for one, many in spreads], least=1.0),
        sampled("the spread from one gradient, standard deviation of the logarithm", [one for one, _ in spreads]),
    ]  # fmt: skip
    return _outcome(bench, runs, figures)


def spread(seed: int, estimates: int) -> tuple[float, float]:
    """Returns the standard deviation, over draws of gradients, of the log of Adam's scale of the median weight:
    estimated from one gradient, and from `estimates` gradients."""
    model, source = preset(POST).build(seed=seed), texts(torch.Generator().manual_seed(seed), BATCH)

    def scale(count: int) -> Tensor:
        adam = Adam(list(model.parameters()))
        for _ in range(count):
            adam.estimate(gradients(model, next(source))[1])
        return torch.cat([one.flatten() for one in adam.scales()]).log()

    one, many = (float(torch.stack([scale(count) for _ in range(DRAWS)]).std(0).median()) for count in (1, estimates))
    return one, many


def by_sharpness(bench: Bench) -> Outcome:
    words = "with a fresh optimizer after warm-up"
    runs, figures = cured(bench, lambda _: RunStart(warmup=WARMUP, fresh=WARMUP), words)
    figures += [
        sampled("preconditioned sharpness at the first step, over the threshold of the peak rate",
                [one.sharpness[0] * RATE / THRESHOLD for one in runs[WITHOUT]], least=1.0),
        sampled("the same, after warm-up", [one.sharpness[-1] * RATE / THRESHOLD for one in runs[WITH]], most=1.0),
        sampled("the same after these steps without warm-up",
                [one.sharpness[-1] * RATE / THRESHOLD for one in runs[WITHOUT]]),
    ]  # fmt: skip
    return _outcome(bench, runs, figures)


CLAIMS = [
    Claim(
        name="warmup-limits-updates", kind="scoped", minutes=2,
        statement="Warm-up helps because first updates are too large: with relative changes limited to their later "
        "size, more than half of its gain is there without it.",
        source="2410.23922, section 4", published="less need of warm-up with updates of a fixed relative size",
        size="2 layers, 120 steps",
        measure=by_size,
    ),
    Claim(
        name="warmup-calms-moments", kind="scoped", minutes=2,
        statement="Warm-up helps because second moments of few gradients are noisy: with moments from 50 gradients, "
        "more than half of its gain is there without it.",
        source="1908.03265, section 3", published="no need of warm-up with moments from 2,000 gradients",
        size="2 layers, 120 steps",
        measure=by_noise,
    ),
    Claim(
        name="warmup-finds-flat-place", kind="scoped", minutes=2,
        statement="Warm-up helps because it leads from a sharp place to a flat one: the sharpness falls from above the "
        "threshold of the rate to below it, and from there a fresh optimizer needs no warm-up.",
        source="2406.09405, section 4; threshold: 2207.14484", published="lower sharpness, larger rates",
        size="2 layers, 120 steps",
        measure=by_sharpness,
    ),
]  # fmt: skip
