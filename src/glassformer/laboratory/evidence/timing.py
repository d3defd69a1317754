"""Claims about speed: two pieces of work timed in turn, and how many times as long the first takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.figure import Figure, Outcome
from glassformer.naming import preset
from glassformer.parts.kernel import AttentionCall, Kernel
from glassformer.parts.visibility import Visibility
from glassformer.runs.contrasts import mean_interval
from glassformer.thresholds import CONFIDENCE

ROUNDS, TINY_ROUNDS = 9, 2
MODEL = "llama@1m+layers=4+d_model=768+heads=12+vocab_size=256+context=4096"
"""Wide enough for matrix products to be most of the work."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Race:
    """`make(scale)` gives the work that is said to take longer and the other; lengths are divided by the scale."""

    name: str
    make: Callable[[int], tuple[Work, Work]]
    least: float | None = None
    most: float | None = None
    published: float | None = None

    def figure(self, rounds: int, scale: int) -> Figure:
        """The ratio of the times of each round, with the interval of their geometric mean."""
        first, second = self.make(scale)
        first(), second()
        logs = [math.log(seconds(first) / seconds(second)) for _ in range(rounds)]
        mean, low, high = (math.exp(one) for one in mean_interval(logs, CONFIDENCE))
        return Figure(name=self.name, value=mean, unit="times", low=low, high=high, least=self.least, most=self.most,
                      published=self.published)  # fmt: skip


def seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def races(*each: Race) -> Callable[[Bench], Outcome]:
    """The measurement that runs them, on this machine's processor in fp32."""

    def measure(bench: Bench) -> Outcome:
        rounds, scale = bench.scaled(ROUNDS, TINY_ROUNDS), bench.scaled(1, 32)
        return Outcome(
            figures=tuple(race.figure(rounds, scale) for race in each),
            size=f"this machine, fp32, threads: {torch.get_num_threads()}",
            sure=f"{rounds} rounds in turn, intervals of {CONFIDENCE:.0%}",
        )

    return measure


def attention(kernel: Kernel, visibility: Visibility, s: int, heads: int = 16, width: int = 64) -> Work:
    """Forward and backward of one call."""
    q, k, v = (torch.randn(1, s, heads, width, requires_grad=True) for _ in range(3))
    ones = torch.ones(1, s, heads, width)
    return lambda: torch.autograd.grad(kernel(AttentionCall(q, k, v, visibility)), (q, k, v), ones)


def training(change: str, tokens: int) -> Work:
    """Forward and backward of a model on one sequence."""
    model = preset(MODEL + change).build(seed=0)
    text = torch.randint(256, (1, tokens))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(text, text.roll(-1, 1)).backward()

    return step


def decoding(change: str, after: int, tokens: int = 8) -> Work:
    """Tokens of cached decoding after a prompt of so many."""
    model = preset(MODEL + change).build(seed=0).eval()

    def prepare() -> Work:
        state = model.init_state(1, after + tokens)
        with torch.inference_mode():
            model(torch.randint(256, (1, after)), state)

        def decode() -> None:
            with torch.inference_mode():
                for _ in range(tokens):
                    model(torch.zeros(1, 1, dtype=torch.int64), state)
                state.truncate(after)

        return decode

    return prepare()
