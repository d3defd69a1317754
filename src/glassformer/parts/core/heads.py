from __future__ import annotations

from typing import NamedTuple

from glassformer.errors import RequestError


class Heads(NamedTuple):
    """Numbers of the heads of a mixer: n query heads, g KV heads, h elements in each."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, d_model: int, n_heads: int, n_kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
        """Returns the numbers of the heads of a mixer of width d; g is by default n, and h is d / n. Raises
        RequestError, with numbers that would fit, if g does not divide n, or n does not divide d when h is not
        given."""
        n, g = n_heads, n_kv_heads or n_heads
        if n % g:
            fitting = _either(divisors(n))
            raise RequestError(
                f"n_kv_heads={g} does not divide n_heads={n}; use {fitting}",
                code="range", field="n_kv_heads", value=g, expected=fitting,
            )  # fmt: skip
        if head_dim is None and d_model % n:
            near = sorted(divisors(d_model), key=lambda i: abs(i - n))[:4]
            fitting = _either(sorted(near))
            raise RequestError(
                f"n_heads={n} does not divide d_model={d_model}; use {fitting} heads, or set head_dim",
                code="range", field="n_heads", value=n, expected=fitting,
            )  # fmt: skip
        return cls(n, g, head_dim or d_model // n)

    @staticmethod
    def fitting(d_model: int, head_dim: int = 64) -> int:
        """Returns the largest number of heads that divides the width d_model and leaves at least `head_dim` elements
        per head."""
        return max((n for n in divisors(d_model) if n * head_dim <= d_model), default=1)


def nearest_groups(n_heads: int, n: int, g: int | None) -> int | None:
    """Returns the number of KV heads for `n_heads` query heads that keeps the ratio g / n of an old mixer as nearly as
    a divisor of `n_heads` allows. g = 1 gives 1, and None (one KV head per query head) gives None."""
    share = n / (g or n)
    nearest = min(divisors(n_heads), key=lambda i: (abs(i - n_heads / share), -i))
    return {None: None, 1: 1}.get(g, nearest)


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _either(options: list[int]) -> str:
    *most, last = [str(option) for option in options]
    return f"{', '.join(most)} or {last}" if most else last
