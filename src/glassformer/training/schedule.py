"""Learning-rate schedules: factor(t, n) in [0, 1] of the peak at step t of n, for real t >= 0."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from glassformer.parts.core.base import PartConfig


class ScheduleConfig(PartConfig, axis="schedule"):
    warmup: float = Field(0.05, ge=0)
    """Steps of linear rise if 1 or more, else a fraction of the run."""

    def rise(self, n: float) -> float:
        """Returns the number of warm-up steps in a run of n steps."""
        return min(self.warmup if self.warmup >= 1 else self.warmup * n, n)

    def factor(self, t: float, n: float) -> float:
        """Returns the learning rate at step t of n, as a factor of its peak: (t + 1) / (w + 1) over w warm-up steps,
        then `after(u)`, u = (t - w) / (n - w) in [0, 1]."""
        w = self.rise(n)
        if t < w:
            return (t + 1) / (w + 1)
        return self.after(min(1.0, (t - w) / (n - w)) if n > w else 1.0)

    def after(self, u: float) -> float:
        raise NotImplementedError


class CosineConfig(ScheduleConfig, kind="cosine"):
    """Cosine schedule: m + (1 - m) (1 + cos(pi u)) / 2, down to the floor m. Loshchilov & Hutter 2016; GPT-3's
    shape."""

    floor: float = Field(0.1, ge=0, le=1)

    def after(self, u: float) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * u))


class ConstantConfig(ScheduleConfig, kind="constant"):
    """Constant schedule: the learning rate stays at its peak after the warm-up."""

    def after(self, u: float) -> float:
        return 1.0


class WsdConfig(ScheduleConfig, kind="wsd"):
    """Schedule of warm-up, stable phase, and decay over the last share of the run. MiniCPM, 2404.06395; 1 - sqrt:
    2405.18392."""

    decay: float = Field(0.2, gt=0, le=1)
    """Share of the run after the warm-up that decays."""
    shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    floor: float = Field(0.0, ge=0, le=1)

    def after(self, u: float) -> float:
        x = max(0.0, (u - (1 - self.decay)) / self.decay)
        fallen = {"linear": x, "sqrt": math.sqrt(x), "cosine": 0.5 * (1 - math.cos(math.pi * x))}[self.shape]
        return self.floor + (1 - self.floor) * (1 - fallen)


class NoamConfig(ScheduleConfig, kind="noam"):
    """Schedule min((t+1)^-1/2, (t+1) w^-3/2) sqrt(w): linear rise, then inverse square root, scaled to a peak of 1.

    Vaswani et al. 2017, section 5.3, whose peak is (d w)^-1/2; there a learning rate of 6.9877e-4 at d = 512, w =
    4000."""

    warmup: float = Field(4000, ge=1)

    def factor(self, t: float, n: float) -> float:
        t += 1
        return min(math.sqrt(self.warmup / t), t / self.warmup)
