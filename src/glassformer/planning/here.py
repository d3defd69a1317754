"""What this machine's processor takes for a training step and for a token of decoding, before the model is built.

Measured once and kept (products by size, elementwise operations by bytes, the overhead of a call, the optimizer), then
summed over the operations of a step, which a pass on fake tensors lists:

seconds = factor x sum of FLOPs / rate of a product of that size
        + factor x sum of bytes / rate of an operation of that kind on so many
        + factor x calls x overhead

The factors, one set for training and one for decoding, make these sums the measured times of a few small models
(`REFERENCES`): what caches and autograd do is in them. Eager, on the processor, with weights in fp32 and products in
the dtype that `train` chooses here.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from glassformer import machine
from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig, Stage
from glassformer.folders import remember, remembered
from glassformer.planning.trace import faked

REFERENCES = (
    ("gpt2", 192, 4, 512, 4, 128), ("gpt2", 384, 6, 2048, 2, 256), ("smollm2-135m", 288, 6, 512, 8, 64),
    ("smollm2-135m", 576, 4, 4096, 2, 128), ("bloom-560m", 256, 6, 1024, 4, 128), ("gpt2", 768, 4, 1024, 2, 256),
)  # fmt: skip
"""(preset, width, layers, vocabulary, batch, context) of the models whose steps are measured besides."""
RIDGE = 0.3
VERSION = 1
"""Of the kept file's fields."""
ROWS, SIDES = (1, 16, 256, 4096), (64, 256, 1024)
"""Sides of the measured products (m, k) x (k, n)."""
HEADS = 16
"""Products in a batch, as attention's; of those with one in a batch the other operand is a weight."""
LARGEST_PATTERN = 1 << 19
COLD, MOST_IN_POOL = 1 << 28, 255
"""Bytes of a pool of tensors that are taken in turn, and its most tensors."""
BYTES = (1 << 14, 1 << 18, 1 << 22, 1 << 25)
"""Bytes that the measured elementwise operations read and write."""
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x * 1.5,
    "curved": torch.nn.functional.gelu,
    "summed": lambda x: x.view(-1, 64).sum(-1),
    "softmax": lambda x: x.view(-1, 64).softmax(-1),
}
"""Elementwise operations that stand for their kind."""
KIND_OF = {
    "curved": ("gelu", "silu", "exp", "tanh", "sigmoid", "log", "erf", "pow", "sqrt", "cos", "sin", "softplus"),
    "summed": ("sum", "mean", "norm", "var", "max", "amax", "cumsum", "logsumexp"),
    "softmax": ("softmax",),
}


@dataclass(frozen=True)
class Profile:
    """What was measured: seconds, and rates in a second."""

    processor: str
    torch: str
    threads: int
    dtype: str
    overhead: float
    """Seconds of a call that computes next to nothing, autograd included."""
    view: float
    """Seconds of one that only gives memory another shape."""
    products: dict[str, float]
    """FLOP/s by "dtype batch m k n"."""
    moved: dict[str, float]
    """Bytes/s by "kind bytes"."""
    optimizer: float
    """Seconds of a parameter, AdamW with clipping."""
    step_factors: dict[str, float]
    token_factors: dict[str, float]

    def rate_of_product(self, dtype: str, batch: int, m: float, k: float, n: float) -> float:
        """FLOP/s, between the measured sizes by their logarithms."""
        heads = HEADS if batch > 1 else 1

        def at(a: int, b: int, c: int) -> float:
            return self.products.get(f"{dtype} {heads} {a} {b} {c}", self.products[f"{dtype} 1 {a} {b} {c}"])

        grid = np.array([[[at(a, b, c) for c in SIDES] for b in SIDES] for a in ROWS])
        rates = np.log(grid)
        for size, sides in ((m, ROWS), (k, SIDES), (n, SIDES)):
            rates = _between(rates, size, sides)
        return float(np.exp(rates))

    def rate_of_bytes(self, kind: str, size: float) -> float:
        """Bytes/s of so many."""
        return float(np.exp(_between(np.log([self.moved[f"{kind} {each}"] for each in BYTES]), size, BYTES)))


def _between(values: Any, size: float, sides: tuple[int, ...]) -> Any:
    """Along the first axis, linear in log(size); at the ends, what is measured there."""
    place = float(np.interp(math.log(max(size, 1.0)), np.log(sides), range(len(sides))))
    low = min(int(place), len(sides) - 2)
    return values[low] + (place - low) * (values[low + 1] - values[low])


def profile(again: bool = False) -> Profile:
    """This machine's, measured in some ten seconds and kept in the cache folder by processor, torch, threads, dtype."""
    how = machine.settings("cpu", compile=False)
    named: dict[str, Any] = {"processor": str(machine.machine()["processor"]), "torch": torch.__version__,
             "threads": torch.get_num_threads(), "dtype": how.dtype}  # fmt: skip
    key = json.dumps([VERSION, *named.values()])
    known = None if again else remembered("planned.json", key)
    if isinstance(known, dict):
        try:
            return Profile(**known)
        except TypeError:  # written by another version
            pass
    found = _calibrated(Profile(**named, **_measure(how.dtype), step_factors={}, token_factors={}))
    remember("planned.json", key, asdict(found))
    return found


def _measure(dtype: str) -> dict[str, Any]:
    machine.keep_freed_memory()
    products = {}
    for name, heads in itertools.product(dict.fromkeys(("float32", dtype)), (1, HEADS)):
        for m, k, n in itertools.product(ROWS, SIDES, SIDES):
            if heads > 1 and m * max(k, n) > LARGEST_PATTERN:
                continue
            a = _drawn(getattr(torch, name), heads, m, k)
            weights = _pool(partial(_drawn, getattr(torch, name), heads, n, k))
            run = _turning(weights, partial(_product, a))
            products[f"{name} {heads} {m} {k} {n}"] = 2 * heads * m * k * n / seconds(run)
    moved = {}
    for kind, one in KINDS.items():
        for size in BYTES:
            pool = _pool(partial(_drawn, torch.float32, size // 8))
            moved[f"{kind} {size}"] = size / seconds(_turning(pool, one))
    x = torch.zeros(8, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y + 1.0
        y.sum().backward()

    def views() -> None:
        y = x
        for _ in range(50):
            y = y.view(2, 4).view(8)
        y.sum().backward()

    with Listed() as ran:
        chain()
    calls = sum(ran.calls.values())
    overhead = seconds(chain) / calls
    weights = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(32)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adamw = torch.optim.AdamW(weights, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adamw.step()

    each = seconds(step) / (32 << 16)
    return {"overhead": overhead, "view": max(seconds(views) - 3 * overhead, 0.0) / 200, "products": products,
            "moved": moved, "optimizer": each}  # fmt: skip


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of batches; of a batch of one, without the batch."""
    return a @ b.mT if len(a) > 1 else a[0] @ b[0].T


def _pool(make: Callable[[], Tensor]) -> list[Tensor]:
    """So many tensors that no cache holds them all, as the weights and activations of a step."""
    first = make()
    return [first, *(make() for _ in range(min(COLD // (first.numel() * first.element_size()), MOST_IN_POOL)))]


def _turning(pool: list[Tensor], one: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """`one` of the next tensor at each call."""
    turn = itertools.cycle(pool)
    return lambda: one(next(turn))


def _calibrated(by: Profile) -> Profile:
    """With the factors that make of the sums what the references take."""
    sums: dict[str, list[list[float]]] = {"step": [], "token": []}
    taken: dict[str, list[float]] = {"step": [], "token": []}
    for name, width, layers, vocabulary, batch, context in REFERENCES:
        config = PRESETS[name]()
        stack = (Stage(repeat=layers, blocks=config.stack[0].blocks),)
        config = config.vary(d_model=width, vocab_size=vocabulary, stack=stack)
        step, token = steps(config, batch, context, by.dtype)
        planned = time_of(calls_of_step(config, batch, context, getattr(torch, by.dtype)), by, {})
        sums["step"].append(list(planned.values()))
        taken["step"].append(seconds(step, 0.3) - config.num_params() * by.optimizer)
        sums["token"].append(list(time_of(calls_of_token(config, batch, context), by, {}).values()))
        taken["token"].append(seconds(token, 0.1))
    factors: dict[str, Any] = {}
    for what, rows in sums.items():
        a, b = np.array(rows), np.array(taken[what])
        factors[f"{what}_factors"] = dict(zip(PARTS, _towards_one(a / b[:, None]).tolist(), strict=True))
    return replace(by, **factors)


def _towards_one(a: np.ndarray) -> np.ndarray:
    """Factors with which the rows of `a` add up to 1: one for all columns, and as much of their own as few rows tell
    (ridge regression)."""
    sums = a.sum(1)
    shared = sums.sum() / (sums @ sums)
    weight = RIDGE * np.square(a).sum() / a.size
    own = np.linalg.solve(a.T @ a + weight * np.eye(a.shape[1]), a.T @ (1 - shared * sums))
    return np.maximum(shared + own, 0)


def steps(config: ModelConfig, batch: int, context: int, dtype: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(a training step, a step of decoding at the end of the context), to be measured."""
    model = config.build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.train()
        with torch.autocast("cpu", getattr(torch, dtype)) if dtype != "float32" else nullcontext():
            loss = model.loss(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    state = model.init_state(batch, context)

    @torch.no_grad()
    def token() -> None:
        model.eval()
        state.length = context - 1
        model(tokens[:, :1], state)

    with torch.no_grad():
        model.eval()(tokens[:, :-1], state)
    return step, token


def seconds(run: Callable[[], Any], least: float = 0.02) -> float:
    """Of a call: the shortest of five bursts, after one that warms up; what disturbs a burst makes it longer alone."""
    run()
    began = time.perf_counter()
    run()
    times = max(1, int(least / 5 / max(time.perf_counter() - began, 1e-7)))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - began) / times)
    return min(found)


PARTS = ("products", "elementwise", "calls")
Call = tuple[str, tuple[tuple[tuple[int, ...], int], ...], int, int]
"""(operation, (shape, bytes of a value) of its tensors, FLOPs, bytes moved)."""


class Listed(TorchDispatchMode):
    """Counts the operations that run inside, by name, shapes, FLOPs and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        out = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if func.is_view or not out:
            self.calls["view", (), 0, 0] += 1
            return made
        counts = flop_registry.get(func.overloadpacket)
        flops = int(counts(*args, **(kwargs or {}), out_val=made)) if counts is not None else 0
        moved = sum(one.numel() * one.element_size() for one in (*given, *out))
        shapes = tuple((tuple(one.shape), one.element_size()) for one in given) if flops else ()
        self.calls[func.overloadpacket.__name__, shapes, flops, moved] += 1
        return made


@lru_cache(maxsize=64)
def calls_of_step(config: ModelConfig, batch: int, context: int, products: torch.dtype) -> dict[Call, int]:
    """Operations of a forward and a backward pass, on fake tensors."""
    model = config.outline().train()
    with FakeTensorMode():
        faked(model, torch.float32)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        with Listed() as ran:
            with torch.autocast("cpu", products) if products != torch.float32 else nullcontext():
                loss = model.loss(tokens, tokens, source=tokens if model.encoder is not None else None)
            loss.backward()
    return dict(ran.calls)


@lru_cache(maxsize=64)
def calls_of_token(config: ModelConfig, batch: int, context: int) -> dict[Call, int]:
    """Operations of a step of decoding at the end of `context` tokens, in fp32."""
    model = config.outline().eval()
    with FakeTensorMode(), torch.no_grad():
        faked(model, torch.float32)
        state = model.init_state(batch, context)
        state.length = context - 1
        with Listed() as ran:
            model(torch.zeros(batch, 1, dtype=torch.int64), state)
    return dict(ran.calls)


def time_of(calls: dict[Call, int], by: Profile, factors: dict[str, float]) -> dict[str, float]:
    """Seconds by what they go to: products, elementwise, calls."""
    found = dict.fromkeys(PARTS, 0.0)
    for (name, shapes, flops, moved), times in calls.items():
        if name == "view":
            found["calls"] += times * by.view
            continue
        found["calls"] += times * by.overhead
        if flops:
            found["products"] += times * flops / _rate(by, shapes, flops)
        else:
            kind = next((kind for kind, names in KIND_OF.items() if any(one in name for one in names)), "plain")
            found["elementwise"] += times * moved / by.rate_of_bytes(kind, moved)
    return {part: factors.get(part, 1.0) * value for part, value in found.items()}


def _rate(by: Profile, shapes: tuple[tuple[tuple[int, ...], int], ...], flops: int) -> float:
    """FLOP/s of a product of these operands; of batched ones, that of each."""
    first = shapes[-2] if len(shapes) >= 2 else shapes[0]
    a = first[0]
    dtype = by.dtype if first[1] < 4 else "float32"
    batch = math.prod(a[:-2]) if len(a) > 2 else 1
    m, k = (a[-2], a[-1]) if len(a) >= 2 else (1, a[-1])
    return by.rate_of_product(dtype, batch, m, k, max(flops / (2 * batch * m * k), 1.0))


@dataclass(frozen=True)
class Here:
    """Planned on this machine."""

    step: dict[str, float]
    """Seconds of a training step, by what they go to."""
    tokens: int
    """Of a step."""
    token: dict[str, float] | None
    """Seconds of a step of decoding; None for a model that does not decode."""
    batch: int
    by: Profile

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @property
    def token_seconds(self) -> float | None:
        return None if self.token is None else sum(self.token.values())

    def to_dict(self) -> dict[str, Any]:
        measured = {"processor": self.by.processor, "torch": self.by.torch, "threads": self.by.threads}
        return {
            "step": self.step, "step_seconds": self.step_seconds, "tokens_per_second": self.tokens / self.step_seconds,
            "token": self.token, "token_seconds": self.token_seconds, "dtype": self.by.dtype, **measured,
        }  # fmt: skip


def here(config: ModelConfig, batch: int, context: int, by: Profile | None = None) -> Here:
    """A training step of `batch` sequences of `context` tokens, and a step of decoding as many at that context."""
    by = by or profile()
    step = time_of(calls_of_step(config, batch, context, getattr(torch, by.dtype)), by, by.step_factors)
    step["optimizer"] = config.num_params() * by.optimizer
    token = time_of(calls_of_token(config, batch, context), by, by.token_factors) if config.causal else None
    return Here(step, batch * context, token, batch, by)
