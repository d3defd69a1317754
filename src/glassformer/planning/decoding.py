"""Time of a decoding step: the roofline of its reads and its compute, as a range.

For b sequences on W accelerators that divide every tensor, in seconds:

read       (weights read + b states) / (W bandwidth)      weights of all experts that b tokens choose
compute    b FLOPs of a token / (W peak)
exchange   two all-reduces a layer, if W > 1

Low end: max(read, compute) at the best share of the machine's rates that decoders reach; high end: their sum at the
worst share. With many sequences compute exceeds reading; from that batch on, each further sequence costs its full time
(Pope et al. 2022, 2211.05102).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from glassformer.config import ModelConfig
from glassformer.planning.machines import Cluster

REACHED = (0.5, 0.85)
"""(worst, best) share of the bandwidth, and of the peak, that decoders reach: 0.69 is published for Llama 2 7B on an
A100 (pytorch-labs/gpt-fast at 0f925b5, README)."""
LATENCY = (5e-6, 40e-6)
"""(best, worst) seconds of a small all-reduce within a node: 23 to 29 us in the README cited at `REACHED`, for 70B and
7B on eight A100."""
MOST = 1 << 20
"""Largest batch that `Decoding.turning_batch` tries."""


class DecodingPlan(Protocol):
    """Interface of a plan of generation, as far as `Decoding` reads it."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def context(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def parameters(self) -> int: ...
    @property
    def active_parameters(self) -> int: ...
    @property
    def expert_parameters(self) -> int: ...
    @property
    def read_parameters(self) -> int: ...
    @property
    def bytes_of_weight(self) -> float: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def flops(self) -> float: ...


@dataclass(frozen=True)
class Decoding:
    """Time and price of decoding steps, each one token for every sequence of a plan, on a cluster."""

    plan: DecodingPlan
    cluster: Cluster

    def bytes_read(self, batch: int) -> float:
        """Returns the bytes of one step: weights once (only experts that `batch` tokens choose) and all sequences'
        states."""
        plan = self.plan
        idle = plan.parameters - plan.active_parameters
        experts = plan.expert_parameters
        missed = idle / experts if experts else 0.0
        met = experts * (1 - missed**batch)
        weights = plan.read_parameters - (experts - idle) + met
        return weights * plan.bytes_of_weight + batch * plan.state_bytes

    def roof(self, batch: int) -> tuple[float, float, float]:
        """Returns (seconds to read, to compute, to exchange) of one step at the machine's full rates."""
        plan, machine, count = self.plan, self.cluster.machine, self.cluster.count
        read = self.bytes_read(batch) / (count * machine.bandwidth)
        compute = batch * plan.flops / (count * machine.peak_of(str(plan.dtype).removeprefix("torch.")))
        link = machine.inside if count <= self.cluster.node else machine.between
        stream = 2 * plan.config.n_layers * batch * plan.config.d_model * plan.dtype.itemsize
        return read, compute, 2 * stream * (count - 1) / count / link

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """(least, most) seconds of a step at the plan's batch."""
        read, compute, exchange = self.roof(self.plan.batch)
        waits = 2 * self.plan.config.n_layers if self.cluster.count > 1 else 0
        least = max(read, compute) / REACHED[1] + exchange + waits * LATENCY[0]
        most = (read + compute + exchange) / REACHED[0] + waits * LATENCY[1]
        return least, most

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """(least, most) tokens per second over all sequences."""
        least, most = self.seconds
        return self.plan.batch / most, self.plan.batch / least

    @cached_property
    def turning_batch(self) -> int | None:
        """Smallest batch for which a step computes as long as it reads memory; None if states grow faster than
        FLOPs."""
        low, high = 0, 1
        while not self._computes(high):
            if high >= MOST:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._computes(middle) else (middle, high)
        return high

    def _computes(self, batch: int) -> bool:
        read, compute, _ = self.roof(batch)
        return compute >= read

    @property
    def first_token(self) -> tuple[float, float]:
        """(least, most) seconds to prefill a prompt that fills the context, for one sequence."""
        plan, machine, count = self.plan, self.cluster.machine, self.cluster.count
        flops = plan.config.flops(plan.context) * plan.context
        roof = flops / (count * machine.peak_of(str(plan.dtype).removeprefix("torch.")))
        return roof / REACHED[1], roof / REACHED[0]

    @property
    def cost_per_million(self) -> tuple[float, float, str] | None:
        """(least, most, currency) of a million generated tokens; None if the machine has no price."""
        price = self.cluster.machine.price
        if price is None:
            return None
        hours = [self.cluster.count * 1e6 / rate / 3600 for rate in reversed(self.tokens_per_second)]
        return hours[0] * price.low, hours[1] * price.high, price.currency

    def to_dict(self) -> dict[str, Any]:
        named = ("seconds", "tokens_per_second", "turning_batch", "first_token", "cost_per_million")
        return {
            "machine": self.cluster.name,
            "accelerators": self.cluster.count,
            **{name: getattr(self, name) for name in named},
        }
