"""Numbers as text: round ticks in steps of 1, 2 and 5, suffixes k M B T, a true minus sign.

One style everywhere: `count` for counts, `si` for a quantity with some significant figures, `fixed` for a
measurement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_LIMIT = 1e300


def finite(value: object) -> float | None:
    """Returns the value as a finite float; None for any other value (also for True, strings, and numbers beyond
    1e300)."""
    if type(value) is float:  # nearly all values of a page
        return value if -_LIMIT <= value <= _LIMIT else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) and abs(real) <= _LIMIT else None


def widen(low: float, high: float) -> tuple[float, float]:
    """Returns (low, high) in order; if both are equal, the range of 5 % to each side of them, or of 0.5 to each side of
    zero."""
    if high < low:
        low, high = high, low
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-290):
        return low, high
    margin = abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def nice_ticks(low: float, high: float, target: int = 6) -> list[float]:
    """Returns about `target` values inside [low, high], in steps of 1, 2 or 5 times a power of ten."""
    low, high = widen(low, high)
    rough = (high - low) / max(target, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_multiple(index, step) for index in range(first, last + 1)]


def _multiple(index: int, step: float) -> float:
    """Returns index * step without the rounding errors of binary fractions (0.30000000000000004)."""
    return float(f"{index * step:.12g}")


def log_ticks(low: float, high: float, target: int = 6) -> list[float]:
    """Returns round values inside [low, high] for a logarithmic axis: powers of ten, and 2 and 5 times these if there
    is room; [] unless 0 < low < high."""
    if low <= 0 or high <= low:
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / (target + 1)))
    for mantissas in ((1,), (1, 2, 5)):
        ticks = [m * 10.0**e for e in range(first, last + 1, stride) for m in mantissas]
        inside = [float(f"{t:.12g}") for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(inside) >= max(3, target // 2 + 1) or stride > 1:
            return inside
    return inside if len(inside) >= 2 else [t for t in nice_ticks(low, high, target) if t > 0]


def fixed(value: float, decimals: int = 3, signed: bool = False) -> str:
    """Formats a number with `decimals` decimals and a true minus sign, never as −0.000; `signed` adds a plus sign."""
    text = f"{value:+.{decimals}f}" if signed else f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def with_sign(value: float, decimals: int = 4) -> str:
    """Formats a difference with its sign and `decimals` decimals, or up to nine if these would show fewer than two
    digits: `+0.0000015`."""
    needed = 1 - math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return f"{value:+.{min(max(decimals, needed), 9)}f}"


def si(value: float, digits: int = 3) -> str:
    """Formats a quantity with `digits` significant figures and the suffix k, M, B or T, without trailing zeros:
    10646784 is 10.6M. Very large and very small numbers get an exponent."""
    rounded = float(f"{value:.{digits}g}")
    size = abs(rounded)
    if size >= 1e16 or 0 < size < 1e-4:
        mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    scale, suffix = next(((s, name) for s, name in _SUFFIXES if size >= s), (1.0, ""))
    scaled = rounded / scale
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(scaled)))) if scaled else 0
    text = f"{scaled:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−") + suffix


def count(value: float) -> str:
    """Formats a count: a whole number below 10,000, or any number from 100 to 10,000, as an integer; all others with
    three figures, and from 10,000 up with a suffix.

    4096 stays 4096, 49152 is 49.2k and 820864 is 821k."""
    if abs(value) >= 9_999.5:
        return si(value)
    return fixed(value, 0) if abs(value) >= 100 or value == round(value) else si(value)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Returns the labels of ticks, with the decimals that the smallest step between ticks needs; from 1000 up with a
    suffix and without trailing zeros, as in 500, 1k, 1.5k."""
    steps = [b - a for a, b in itertools.pairwise(ticks) if b > a]
    return [_tick_label(tick, min(steps, default=abs(tick) or 1.0)) for tick in ticks]


def _tick_label(tick: float, step: float) -> str:
    """Formats one tick with the decimals that `step` needs, and from 1000 up with a suffix."""
    size = max(abs(tick), step)
    if size >= 1e16 or size < 1e-4:
        return si(tick, 2) if tick else "0"
    scale, suffix = next(((s, name) for s, name in _SUFFIXES if abs(tick) >= s), (1.0, ""))
    decimals = min(6, max(0, math.ceil(-math.log10(step / scale) - 1e-9)))
    text = fixed(tick / scale, decimals)
    if "." in text and (suffix or tick == 0):
        text = text.rstrip("0").rstrip(".")
    return text + suffix


def seconds(value: float) -> str:
    """Formats a duration in seconds with its unit: 0.0123 is 12.3 ms, 99.1 is 99.1 s, 99107 is 99,107 s."""
    if value >= 1:
        return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms"


def days(value: float) -> str:
    """Formats a number of days: as an integer from 10 up, otherwise with two significant figures."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
