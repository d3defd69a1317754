"""What this machine's processor takes for an operation: measured once.

Products are measured by their sides and by the working set, the bytes that are read before the same ones are read
again: decoding reads every weight once for a token, so that a small model stays in the caches and a large one comes
from memory. Everything is measured in bursts, in turn over several rounds, and the shortest burst counts: what disturbs
one makes it longer alone, and lasts longer than a burst.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import Value
from glassformer.planning.operations import Listed

VERSION = 2
"""Of what is measured, and how."""
ROWS, SIDES = (1, 16, 256, 4096), (64, 256, 1024, 4096)
"""Sides of the measured products (m, k) x (k, n)."""
FEW = 16
"""Rows up to which a product takes as long as reading its weights: those are measured by the working set."""
SETS = (1 << 21, 1 << 23, 1 << 25, 1 << 28)
"""Working sets, in bytes. All else is measured in the largest."""
HEADS = 16
"""Products in a batch, as attention's; of those with one in a batch the other operand is a weight."""
LARGEST = {1: 1 << 22, 16: 1 << 22, 256: 1 << 22, 4096: 1 << 20}
"""Most values of a measured weight, by rows."""
LARGEST_PATTERN = 1 << 19
BYTES = (1 << 14, 1 << 18, 1 << 22, 1 << 25)
"""Bytes that the measured elementwise operations read and write."""
MOST_IN_POOL = 255
"""Activations that are taken in turn."""
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x * 1.5,
    "curved": torch.nn.functional.gelu,
    "summed": lambda x: x.view(-1, 64).sum(-1),
    "softmax": lambda x: x.view(-1, 64).softmax(-1),
}
"""Elementwise operations that stand for their kind."""
OPTIMIZED = 1 << 21
ROUNDS, BURST = 2, 0.01
"""Bursts of each, and their least seconds."""
PATIENCE, SLICE = 4, 0.1
"""How many times as many bursts are made where others have the cores; and seconds in which one switch is no sign."""
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
K = TypeVar("K", bound=Hashable)


Seconds = Annotated[float, Field(ge=0, le=60, strict=True)]
PerSecond = Annotated[float, Field(gt=0, le=1e18, strict=True)]


class Measured(Value):
    """Seconds, and rates in a second, as they are kept in a file that anybody may write: what no processor takes is
    refused."""

    overhead: Seconds
    """Seconds of a call that computes next to nothing, autograd included."""
    view: Seconds
    """Seconds of one that only gives memory another shape."""
    products: dict[str, PerSecond]
    """FLOP/s by "dtype batch m k n set"."""
    moved: dict[str, PerSecond]
    """Bytes/s by "kind bytes"."""
    optimizer: Seconds
    """Seconds of a parameter, AdamW with clipping."""

    def has(self, dtype: str) -> bool:
        """Whether all is there that training with products in this dtype, and decoding, ask for."""
        products = {
            " ".join(map(str, key)) for each in ("float32", dtype) for key in _products(each, each == "float32")
        }
        return products <= set(self.products) and {f"{k} {of}" for k in KINDS for of in BYTES} <= set(self.moved)

    def rate_of_product(self, dtype: str, batch: int, m: float, k: float, n: float, working: float = math.inf) -> float:
        """FLOP/s of (m, k) x (k, n), between the measured sizes by their logarithms, in a working set of bytes."""
        rates = self._grids[dtype, batch > 1]
        for size, sides in ((m, ROWS), (k, SIDES), (n, SIDES), (working, SETS)):
            rates = _between(rates, size, sides)
        return float(np.exp(rates))

    @cached_property
    def _grids(self) -> dict[tuple[str, bool], np.ndarray]:
        """Logarithms of the rates by (m, k, n, set)."""
        found = {}
        for dtype in {key.split()[0] for key in self.products}:
            for heads in (1, HEADS):
                found[dtype, heads > 1] = np.log([
                    [[[self._at(dtype, heads, m, k, n, of) for of in SETS] for n in SIDES] for k in SIDES]
                    for m in ROWS
                ])  # fmt: skip
        return found

    def _at(self, dtype: str, heads: int, m: int, k: int, n: int, working: int) -> float:
        """As measured; where it was not, in the largest set, or with sides that were, or outside of a batch."""
        for batch, of in itertools.product(dict.fromkeys((heads, 1)), (working, SETS[-1])):
            a, b = k, n
            while True:
                if (rate := self.products.get(f"{dtype} {batch} {m} {a} {b} {of}")) is not None:
                    return rate
                if max(a, b) == SIDES[0]:
                    break
                a, b = (a, _next_smaller(b)) if b >= a else (_next_smaller(a), b)
        raise KeyError(f"{dtype} {m}")

    def rate_of_bytes(self, kind: str, size: float) -> float:
        """Bytes/s of so many."""
        return float(np.exp(_between(np.log([self.moved[f"{kind} {each}"] for each in BYTES]), size, BYTES)))


def _next_smaller(side: int) -> int:
    return SIDES[max(0, SIDES.index(side) - 1)]


def _between(values: Any, size: float, sides: tuple[int, ...]) -> Any:
    """Along the first axis, linear in log(size); at the ends, what is measured there."""
    place = float(np.interp(math.log(max(size, 1.0)), np.log(sides), range(len(sides))))
    low = min(int(place), len(sides) - 2)
    return values[low] + (place - low) * (values[low + 1] - values[low])


def shortest(runs: Mapping[K, Callable[[], Any]], rounds: int = ROUNDS, least: float = BURST) -> dict[K, float]:
    """Seconds of a call of each: the shortest of `rounds` bursts, of `least` seconds or one call. In turn, in another
    order every round, so that whatever else runs for a while meets one burst of many and not all of one. A burst in
    which this process lost its cores to others does not count as one of them, up to `PATIENCE` times as many."""
    times: dict[K, int] = {}
    for key, run in runs.items():
        run()
        began = time.perf_counter()
        run()
        times[key] = max(1, int(least / max(time.perf_counter() - began, 1e-7)))
    found, counted, draw = dict.fromkeys(runs, math.inf), dict.fromkeys(runs, 0), random.Random(0)
    for _ in range(PATIENCE * rounds):
        left = [key for key in runs if counted[key] < rounds]
        for key in draw.sample(left, len(left)):
            run, lost, began = runs[key], _lost(), time.perf_counter()
            for _ in range(times[key]):
                run()
            spent = time.perf_counter() - began
            found[key] = min(found[key], spent / times[key])
            counted[key] += _lost() - lost <= 1 + spent / SLICE
    return found


def _lost() -> int:
    """How often the threads of this process had to leave a core to others; 0 where the system does not say."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def least(found: dict[Any, float], seconds: Mapping[Any, float]) -> None:
    """Takes over what was shorter this time."""
    found.update({key: min(found.get(key, math.inf), each) for key, each in seconds.items()})


def seconds_of_operations(dtype: str) -> dict[Any, float]:
    """Of everything that `measured` is made of: products in fp32 and in `dtype`, with as many threads as torch has."""
    found: dict[Any, float] = {}
    for name in dict.fromkeys(("float32", dtype)):  # one after the other: each has a working set of the largest size
        arena = torch.full((SETS[-1] // getattr(torch, name).itemsize,), 0.5, dtype=getattr(torch, name))
        runs = {key: _product(arena, i, *key[1:]) for i, key in enumerate(_products(name, name == "float32"))}
        found |= shortest(runs)
    arena = torch.full((SETS[-1] // 4,), 0.5)
    elementwise = {
        (kind, size): _turning(_cut(arena, (size // 8,), SETS[-1])[:MOST_IN_POOL], run)
        for kind, run in KINDS.items()
        for size in BYTES
    }
    found |= shortest(elementwise)
    return found | shortest({"chain": _chain, "views": _views, "optimizer": _optimizer()})


def measured(seconds: Mapping[Any, float]) -> Measured:
    """What these seconds say."""
    with Listed() as ran:
        _chain()
    overhead = seconds["chain"] / sum(ran.calls.values())
    products = {key: each for key, each in seconds.items() if len(key) == 6 and isinstance(key, tuple)}
    moved = {key: each for key, each in seconds.items() if len(key) == 2}
    return Measured(
        overhead=overhead,
        view=max(seconds["views"] - 3 * overhead, 0.0) / 200,
        products={" ".join(map(str, key)): 2 * math.prod(key[1:5]) / each for key, each in products.items()},
        moved={f"{kind} {size}": size / each for (kind, size), each in moved.items()},
        optimizer=seconds["optimizer"] / OPTIMIZED,
    )


def _products(dtype: str, decoding: bool) -> Iterator[tuple[str, int, int, int, int, int]]:
    """(dtype, batch, m, k, n, set) of those that are measured; in the smaller sets those that decoding has."""
    for heads, m, k, n in itertools.product((1, HEADS), ROWS, SIDES, SIDES):
        if heads * k * n > LARGEST[m] * (4 if heads > 1 else 1) or (heads > 1 and m * max(k, n) > LARGEST_PATTERN):
            continue
        for of in SETS if decoding and m <= FEW else SETS[-1:]:
            yield dtype, heads, m, k, n, of


def _product(arena: Tensor, turn: int, heads: int, m: int, k: int, n: int, working: int) -> Callable[[], Any]:
    """a b^T of one operand with as many others as the working set holds; the first of them changes with `turn`."""
    a, others = torch.full((heads, m, k), 0.5, dtype=arena.dtype), _cut(arena, (heads, n, k), working)
    first = turn * 5 % len(others)
    others = [(one.mT if heads > 1 else one[0].T) for one in (*others[first:], *others[:first])]
    return _turning(others, (a if heads > 1 else a[0]).__matmul__)


def _cut(arena: Tensor, shape: tuple[int, ...], working: int) -> list[Tensor]:
    """Tensors of this shape that lie side by side, as many as the working set holds, and at least one."""
    size = math.prod(shape)
    count = max(1, working // (size * arena.element_size()))
    return [arena[i * size : (i + 1) * size].view(shape) for i in range(count)]


def _turning(pool: Sequence[Tensor], one: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """`one` of the next tensor at each call."""
    turn = itertools.cycle(pool)
    return lambda: one(next(turn))


def _chain() -> None:
    y = x = torch.zeros(8, requires_grad=True)
    for _ in range(50):
        y = y + 1.0
    y.sum().backward()
    x.grad = None


def _views() -> None:
    y = torch.zeros(8, requires_grad=True)
    for _ in range(50):
        y = y.view(2, 4).view(8)
    y.sum().backward()


def _optimizer() -> Callable[[], None]:
    """A step of AdamW with clipping over `OPTIMIZED` values."""
    weights = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(OPTIMIZED >> 16)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adamw = torch.optim.AdamW(weights, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adamw.step()

    return step
