"""Detection of spikes: values far above the forecast from earlier steps."""

from __future__ import annotations

import math
import sys
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np

from glassformer.errors import RequestError

STAYS = 16
"""Number of consecutive spikes that count as a new level of the series."""
FLOOR = 1e-4
"""Minimum sigma, as a share of the expected value: a curve without noise does not spike by rounding."""
_TINY = sys.float_info.min


class Spikes:
    """Detector of spikes in a series such as the loss or the gradient norm, one value at a time.

    The forecast is a least-squares line through the last `window` values, whose residuals r follow r_t = phi r_(t-1) +
    e_t. The next value is expected at line + phi r, with deviation std(e); a spike is more than `sigma` deviations
    above it. The line follows a falling loss and phi its bend, which a mean and its deviation (window 128, sigma 6:
    OLMo-core's StabilityMonitor) take for noise, so that spikes of the steep part go undetected. The threshold is five
    and a half sigma, because a spike of eight is added to noise that may be 2.5 below. Gaussian noise reaches it once
    in fifty million steps. Real text in batches of 512 tokens never did in 20,000 healthy steps (eight small runs on
    python-docs), but reached five sigma seven times; an odd document may cause that.

    A spike does not enter the window: the next one is measured against the calm before both. After 16 consecutive
    spikes the level has moved; they enter the window together, and the alarm ends. Nothing is judged before `least`
    values are known, except that nan and inf are spikes at any time, and never enter.

    `log` judges the logarithm of the values, which must then be positive (0 counts as the smallest float): for a series
    whose noise is skewed, such as the gradient norm. A spike is then also at least `times` the expected: the logarithm
    of a gradient norm has tails that no window of 128 shows. In those 20,000 healthy steps it passed six sigma 58
    times, with three times the expected 17 times, and with ten times once.

    >>> spikes = Spikes()
    >>> [spikes.see(loss) for loss in losses]        # None, or how many sigma above the expected
    """

    def __init__(self, window: int = 128, sigma: float = 5.5, least: int = 64, log: bool = False, times: float = 1.0):
        if not 8 <= least <= window:
            raise RequestError(
                f"least={least} must be from 8 to window={window}", code="range", field="least", value=least
            )
        if not sigma > 0:
            raise RequestError(f"sigma={sigma} must be above 0", code="range", field="sigma", value=sigma)
        if not times >= 1:
            raise RequestError(
                f"times={times} must be at least 1: a spike is this multiple of the expected",
                code="range", field="times", value=times,
            )  # fmt: skip
        self.sigma, self.least, self.log, self.times = sigma, least, log, times
        self.calm: deque[float] = deque(maxlen=window)
        self.raised: list[float] = []
        """Values of the spikes since the last calm value, logarithms if `log`."""

    def see(self, value: float) -> float | None:
        """Returns the sigmas of `value` above the forecast if it is a spike (inf for nan and inf), else None."""
        if not math.isfinite(value):
            return math.inf
        value = math.log(max(value, _TINY)) if self.log else float(value)
        if len(self.calm) >= self.least:
            expected, sigma = forecast(np.array(self.calm))
            above = (value - expected) / max(sigma, FLOOR * (1 if self.log else abs(expected)), _TINY)
            bound = expected + math.log(self.times) if self.log else expected * self.times
            if above > self.sigma and value >= bound:
                self.raised.append(value)
                if len(self.raised) == STAYS:
                    self.calm.extend(self.raised)
                    self.raised.clear()
                return float(above)
        self.raised.clear()
        self.calm.append(value)
        return None

    def state(self) -> dict[str, Any]:
        """Returns the values that the detector has kept, as JSON can hold them, for `restore`."""
        return {"calm": list(self.calm), "raised": list(self.raised)}

    def restore(self, state: Any) -> None:
        """Restores the detector from `state()`. Raises RequestError for an invalid state."""
        most = {"calm": self.calm.maxlen or 0, "raised": STAYS - 1}
        if not isinstance(state, dict) or state.keys() != most.keys():
            raise RequestError(
                "the state of a spike detector has the lists calm and raised, and this has not",
                code="damaged", field="state",
            )  # fmt: skip
        for name, length in most.items():
            values = state[name]
            if not isinstance(values, list) or len(values) > length or not all(map(_is_finite, values)):
                raise RequestError(
                    f"{name} in the state of a spike detector must be at most {length} finite numbers",
                    code="damaged", field=f"state.{name}",
                )  # fmt: skip
        self.calm.clear()
        self.calm.extend(state["calm"])
        self.raised = list(state["raised"])


def forecast(values: np.ndarray) -> tuple[float, float]:
    """Returns (expected, sigma) of the next value: a line whose residuals follow an AR(1).

    phi = sum r_t r_(t-1) / sum r_(t-1)^2 within [0, 1]; sigma^2 = sum (r_t - phi r_(t-1))^2 / (n - 3), for the two
    parameters of the line and phi."""
    n = len(values)
    times, square = _times(n)
    slope = times @ values / square
    level = np.add.reduce(values) / n
    residual = values - level - slope * times
    before, after = residual[:-1], residual[1:]
    power = before @ before
    phi = min(1.0, max(0.0, before @ after / power)) if power > 0 else 0.0
    error = after - phi * before
    return level + slope * (n + 1) / 2 + phi * residual[-1], math.sqrt(error @ error / (n - 3))


@lru_cache
def _times(n: int) -> tuple[np.ndarray, float]:
    """Returns n numbers a distance of 1 apart with a mean of 0, and the sum of their squares."""
    times = np.arange(n) - (n - 1) / 2
    return times, float(times @ times)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
