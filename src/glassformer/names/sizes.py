"""Sizes of an expression: those of a table, and any between them by rule."""

from __future__ import annotations

import math
from itertools import pairwise

from glassformer.errors import RequestError
from glassformer.units import quantity

# size: (layers, d_model, heads). The name counts the layers' own parameters, about 12 L d^2, not the vocabulary's.
SIZES: dict[str, tuple[int, int, int]] = {
    "1m": (4, 128, 4),
    "3m": (4, 256, 4),
    "10m": (6, 384, 6),
    "30m": (10, 512, 8),
    "60m": (12, 640, 10),
    "124m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "3b": (36, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (60, 6656, 52),
    "70b": (80, 8192, 64),
}
SMALLEST, LARGEST = 1e4, 1e11
"""Parameters of the layers of a size that is not in the table."""
WIDE = 256
"""From this width on heads have about 64 channels and widths are multiples of 32; below, 32 and 8."""


def is_size(text: str) -> bool:
    """Returns True for a size of the table, and for a number of parameters such as 0.3m."""
    try:
        shape(text)
    except RequestError:
        return False
    return True


def shape(size: str) -> tuple[int, int, int]:
    """Returns (layers, d_model, heads) of a size: a name in the table, or a number N of parameters in the layers, 2.5m.

    For a number, the layers L are interpolated log-linearly between the table's sizes, and grow as the cube root of N
    below the table; the width is the allowed one nearest to sqrt(N / 12 L).

    >>> shape("10m"), shape("0.1m")
    ((6, 384, 6), (2, 64, 2))

    Raises RequestError for any other text."""
    named = size.strip().lower()
    if named in SIZES:
        return SIZES[named]
    wrong = RequestError(
        f"no size is named {size!r}; sizes are {', '.join(SIZES)}, or any number from 10k to 100b of parameters in "
        "the layers: 0.3m",
        code="unknown", field="size", value=size,
    )  # fmt: skip
    if not named.endswith(("k", "m", "b")):
        raise wrong
    try:
        params = quantity(named, field="size")
    except RequestError:
        raise wrong from None
    if not SMALLEST <= params <= LARGEST:
        raise RequestError(code="range", field="size", value=size, expected="from 10k to 100b parameters")
    layers = max(1, round(_layers(params)))
    wanted = math.sqrt(params / (12 * layers))
    step, channels = (32, 64) if wanted >= WIDE else (8, 32)
    width = step * max(1, round(wanted / step))
    return layers, width, min(_divisors(width), key=lambda n: abs(math.log(width / n / channels)))


def _layers(params: float) -> float:
    """Returns layers: by logarithms between the table's sizes, by the third root below."""
    known = sorted((12 * layers * width**2, layers) for layers, width, _ in SIZES.values())
    if params <= known[0][0]:
        return known[0][1] * (params / known[0][0]) ** (1 / 3)
    for (small, few), (large, many) in pairwise(known):
        if params <= large:
            share = math.log(params / small) / math.log(large / small)
            return few * (many / few) ** share
    return known[-1][1]


def _divisors(width: int) -> list[int]:
    """Numbers of heads whose channels are even, as rotations need."""
    return [n for n in range(1, width // 2 + 1) if width % (2 * n) == 0]
