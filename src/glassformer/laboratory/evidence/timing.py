"""Claims about speed: two pieces of work timed in turn, as models train."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.figure import Figure, Outcome
from glassformer.naming import preset
from glassformer.parts.kernel import AttentionCall, Kernel
from glassformer.parts.region import compiled_regions
from glassformer.parts.visibility import Visibility
from glassformer.runs.contrasts import mean_interval
from glassformer.thresholds import CONFIDENCE
from glassformer.training import fast_training

ROUNDS, TINY_ROUNDS = 9, 2
MODEL = "llama@1m+layers=4+d_model=768+heads=12+vocab_size=256+context=4096"
"""Expression of a model wide enough for matmuls to be most of the work."""

Work = Callable[[], Callable[[], object]]
"""Function that prepares a piece of work and returns the part that is timed."""

Pair = Callable[[int], tuple[Work, Work]]
"""Function from a divisor of the lengths to the work claimed to be slower and the other."""


@dataclass(frozen=True)
class Passes:
    """A function of tensors, (..) -> (..), whose forward and backward passes are timed.

    Attributes
    ----------
    function : callable
        The function.
    inputs : tuple of Tensor
        Arguments whose gradients are computed.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def forward(self) -> Callable[[], object]:
        """Returns the function to time: the forward pass, which keeps the tensors for the backward pass."""
        return lambda: self.function(*self.inputs)

    def backward(self) -> Callable[[], object]:
        """Runs the forward pass, and returns the function to time: the backward pass."""
        z = self.function(*self.inputs)
        ones = torch.ones_like(z)
        return lambda: torch.autograd.grad(z, self.inputs, ones)

    def both(self) -> Callable[[], object]:
        """Returns the function to time: the forward and the backward pass together."""
        return lambda: self.backward()()


def each(work: Callable[[Passes], Callable[[], object]], make: Callable[[int], tuple[Passes, Passes]]) -> Pair:
    """Returns two pieces of work to time, made of the two `Passes` that `make` returns for a divisor of lengths;
    `work`, such as `Passes.forward`, chooses the passes that are timed."""

    def pair(scale: int) -> tuple[Work, Work]:
        first, second = make(scale)
        return partial(work, first), partial(work, second)

    return pair


@dataclass(frozen=True)
class Race:
    """Comparison of the times of two pieces of work: the ratio of the first that `make` returns to the second."""

    name: str
    make: Pair
    least: float | None = None
    most: float | None = None
    published: float | None = None

    def figure(self, rounds: int, scale: int) -> Figure:
        """Measures the ratio of the two times over all rounds; returns it with the interval of its geometric mean."""
        first, second = self.make(scale)
        for _ in range(2):  # two calls: the first compiles the forward pass, its gradient the backward pass
            first()(), second()()
        logs = [math.log(seconds(first) / seconds(second)) for _ in range(rounds)]
        mean, low, high = (math.exp(one) for one in mean_interval(logs, CONFIDENCE))
        return Figure(name=self.name, value=mean, unit="times", low=low, high=high, least=self.least, most=self.most,
                      published=self.published)  # fmt: skip


def seconds(work: Work) -> float:
    """Runs a piece of work once, and returns the seconds of its timed part."""
    timed = work()
    began = time.perf_counter()
    timed()
    return time.perf_counter() - began


def races(*each: Race) -> Callable[[Bench], Outcome]:
    """Returns a claim's measuring function: it measures these ratios of times under training conditions. Memory is kept
    from step to step, elementwise regions are compiled, all is in fp32."""

    def measure(bench: Bench) -> Outcome:
        rounds, scale = bench.scaled(ROUNDS, TINY_ROUNDS), bench.scaled(1, 32)
        with fast_training("cpu", "float32", compile=False if bench.tiny else None) as how:
            return Outcome(
                figures=tuple(race.figure(rounds, scale) for race in each),
                size=f"this machine, fp32, training with {'compiled' if how.compile else 'eager'} regions, "
                f"threads: {torch.get_num_threads()}",
                sure=f"{rounds} rounds in turn, intervals of {CONFIDENCE:.0%}",
            )

    return measure


def attention(kernel: Kernel, visibility: Visibility, s: int, heads: int = 16, width: int = 64) -> Passes:
    """Returns passes to time: one call of an attention kernel on s tokens."""
    q, k, v = (torch.randn(1, s, heads, width, requires_grad=True) for _ in range(3))
    return Passes(lambda q, k, v: kernel(AttentionCall(q, k, v, visibility)), (q, k, v))


def training(change: str, tokens: int, rows: int = 1) -> Work:
    """Returns a piece of work to time: the forward and backward passes of a model on `rows` sequences of `tokens`
    tokens."""
    model = preset(MODEL + change).build(seed=0)
    text = torch.randint(256, (rows, tokens))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(text, text.roll(-1, 1)).backward()

    return lambda: step


def decoding(change: str, after: int, tokens: int = 8) -> Work:
    """Returns a piece of work to time: the generation of `tokens` tokens by a model with a cache, after a prompt of
    `after` tokens."""
    model = preset(MODEL + change).build(seed=0).eval()
    state = model.init_state(1, after + tokens)
    with torch.inference_mode(), compiled_regions(False):
        model(torch.randint(256, (1, after)), state)

    def decode() -> None:
        with torch.inference_mode(), compiled_regions(False):  # generation mode
            for _ in range(tokens):
                model(torch.zeros(1, 1, dtype=torch.int64), state)
            state.truncate(after)

    return lambda: decode


def recomputing(after: int, tokens: int) -> Work:
    """Returns a piece of work to time: the generation of `tokens` tokens by a model without a cache, which recomputes
    all keys and values for each token, after a prompt of `after` tokens."""
    model = preset(MODEL).build(seed=0).eval()
    text = torch.randint(256, (1, after + tokens))

    def decode() -> None:
        with torch.inference_mode(), compiled_regions(False):
            for length in range(after, after + tokens):
                model(text[:, : length + 1])

    return lambda: decode
