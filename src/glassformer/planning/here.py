"""What this machine's processor takes for a training step and for a token of decoding, before the model is built.

seconds = factor x sum of FLOPs / rate of a product of that size, in that working set
        + factor x sum of bytes / rate of an operation of that kind on so many
        + factor x calls x overhead

Over the operations of a step (`planning/operations.py`), at the rates that the processor was measured at
(`planning/processor.py`). The factors, one set for training and one for decoding, make these sums the measured times of
a few small models (`REFERENCES`): what the model's own Python, caches and autograd do is in them. Eager, on the
processor, with weights in fp32 and products in the dtype that `train` chooses here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator

from glassformer import machine
from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig, Stage
from glassformer.files import remember, remembered
from glassformer.parts.core.base import Value
from glassformer.planning.operations import VIEW, Call, calls_of_step, calls_of_token
from glassformer.planning.processor import VERSION, Measured, least, measured, seconds_of_operations, shortest
from glassformer.planning.training import check_workload
from glassformer.version import __version__

REFERENCES = (
    ("gpt2", 192, 4, 512, 4, 128), ("gpt2", 384, 6, 2048, 2, 256), ("smollm2-135m", 288, 6, 512, 8, 64),
    ("smollm2-135m", 576, 4, 4096, 2, 128), ("bloom-560m", 256, 6, 1024, 4, 128), ("gpt2", 768, 4, 1024, 2, 256),
    ("gpt2", 96, 8, 256, 1, 64), ("smollm2-135m", 144, 8, 256, 1, 64),
)  # fmt: skip
"""(preset, width, layers, vocabulary, batch, context) of the models whose steps are measured besides; the last two are
hardly more than calls."""
RIDGE = 0.3
TURNS = 3
"""How often everything is measured, some twenty seconds apart."""
KIND_OF = {
    "softmax": {"softmax"},
    "summed": {"sum", "mean", "norm", "var", "max", "amax", "cumsum", "logsumexp"},
    "curved": {
        "gelu", "silu", "exp", "tanh", "sigmoid", "log", "erf", "pow", "sqrt", "rsqrt", "cos", "sin", "softplus",
    },
}  # fmt: skip
"""Which measured elementwise operation stands for one that has such a word in its name, the first that does; others are
plain."""
PARTS = ("products", "elementwise", "calls")


Factors = Annotated[
    dict[Literal["products", "elementwise", "calls"], Annotated[float, Field(ge=0, le=1e3, strict=True)]],
    Field(min_length=len(PARTS)),
]


class Profile(Value):
    """What was measured of a processor, and the factors."""

    processor: str
    torch: str
    threads: int
    dtype: str
    """Of products in training."""
    measured: Measured
    step_factors: Factors
    token_factors: Factors

    @model_validator(mode="after")
    def _whole(self) -> Profile:
        if not self.measured.has(self.dtype):
            raise ValueError("a rate is missing")
        return self


def profile(again: bool = False, threads: int | None = None) -> Profile:
    """This machine's, measured in about a minute with the threads that `train` takes, and kept in the cache folder by
    processor, torch, threads, dtype and our version. `again` measures it anew."""
    how, named, key = _named(threads)
    if not again and (known := known_profile(threads)) is not None:
        return known
    before = torch.get_num_threads()
    torch.set_num_threads(how.threads)
    try:
        found = Profile(**named, **_calibrated(how.dtype))
    finally:
        torch.set_num_threads(before)
    remember("planned.json", key, found.model_dump())
    return found


def known_profile(threads: int | None = None) -> Profile | None:
    """This machine's where it was measured before; None where it was not, and nothing is measured."""
    _, named, key = _named(threads)
    known = remembered("planned.json", key)
    if isinstance(known, dict):
        try:
            return Profile.model_validate(known | named)
        except ValidationError:  # damaged, or written by nobody
            pass
    return None


def _named(threads: int | None) -> tuple[machine.Settings, dict[str, Any], str]:
    """How a step is computed here, what a profile is of, and the key under which it is kept."""
    how = machine.settings("cpu", threads=threads, compile=False)
    named = {"processor": str(machine.machine()["processor"]), "torch": torch.__version__, "threads": how.threads,
             "dtype": how.dtype}  # fmt: skip
    return how, named, json.dumps([VERSION, __version__, *named.values()])


def _calibrated(dtype: str) -> dict[str, Any]:
    """What was measured of the processor, and the factors that make of its sums what the references take. Both in
    turn, as what is slower for some seconds should not be slower for one of them alone."""
    machine.keep_freed_memory()
    configs = references()
    runs = [steps(*one, dtype) for one in configs]
    of_steps = {("step", i): step for i, (step, _) in enumerate(runs)}
    of_tokens = {("token", i): token for i, (_, token) in enumerate(runs)}
    operations: dict[Any, float] = {}
    taken: dict[tuple[str, int], float] = {}
    for _ in range(TURNS):
        least(operations, seconds_of_operations(dtype))
        least(taken, shortest(of_steps, rounds=2))
        least(taken, shortest(of_tokens, rounds=8))
    by = measured(operations)
    factors: dict[str, Any] = {}
    for what in ("step", "token"):
        rows = []
        for i, (config, batch, context) in enumerate(configs):
            calls = _calls(what, config, batch, context, dtype)
            spent = taken[what, i] - (config.num_params() * by.optimizer if what == "step" else 0)
            rows.append([value / spent for value in time_of(calls, by, dtype, {}, working(what, calls)).values()])
        factors[f"{what}_factors"] = dict(zip(PARTS, _towards_one(np.array(rows)).tolist(), strict=True))
    return {"measured": by, **factors}


def references() -> list[tuple[ModelConfig, int, int]]:
    """(config, batch, context) of each."""
    found = []
    for name, width, layers, vocabulary, batch, context in REFERENCES:
        config = PRESETS[name]()
        stack = (Stage(repeat=layers, blocks=config.stack[0].blocks),)
        found.append((config.vary(d_model=width, vocab_size=vocabulary, stack=stack), batch, context))
    return found


def _calls(what: str, config: ModelConfig, batch: int, context: int, dtype: str) -> dict[Call, int]:
    """Of a "step" of training, or of a "token"."""
    if what == "token":
        return calls_of_token(config, batch, context)
    return calls_of_step(config, batch, context, getattr(torch, dtype))


def working(what: str, calls: dict[Call, int]) -> float:
    """Bytes that are read before the same ones are read again: of a "token" all that its products read; a training step
    comes back to nothing before it has written over the caches."""
    if what == "step":
        return math.inf
    return float(sum(times * call.moved for call, times in calls.items() if call.flops))


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
        if model.training:
            model.eval()
        state.seek(context - 1)
        model(tokens[:, :1], state)

    with torch.no_grad():
        model.eval()(tokens[:, :-1], state)
    return step, token


def kind_of(name: str) -> str:
    """Which measured elementwise operation stands for one of ATen."""
    words = set(name.split("_"))
    return next((kind for kind, of in KIND_OF.items() if words & of), "plain")


def time_of(
    calls: dict[Call, int], of: Measured, dtype: str, factors: Mapping[Any, float], working: float = math.inf
) -> dict[str, float]:
    """Seconds by what they go to: products, of narrow values in `dtype`; elementwise; calls."""
    found = dict.fromkeys(PARTS, 0.0)
    for call, times in calls.items():
        found["calls"] += times * (of.view if call == VIEW else of.overhead)
        if call.flops:
            found["products"] += times * _product_seconds(call, of, dtype, working)
        elif call != VIEW:
            found["elementwise"] += times * call.moved / of.rate_of_bytes(kind_of(call.name), call.moved)
    return {part: factors.get(part, 1.0) * value for part, value in found.items()}


def _product_seconds(call: Call, by: Measured, products: str, working: float) -> float:
    """Of a product of these operands, of each of a batch; of fused attention, half with queries, half with patterns."""
    dtype = products if call.itemsize < 4 else "float32"

    def seconds(flops: float, batch: int, m: int, k: int, n: float) -> float:
        return flops / by.rate_of_product(dtype, batch, m, k, n, working)

    if "scaled_dot_product" in call.name:
        queries, keys = call.shapes[0], max((one for one in call.shapes if len(one) == 4), key=lambda one: one[-2])
        batch, (s, h), t = math.prod(queries[:-2]), queries[-2:], keys[-2]
        return seconds(call.flops / 2, batch, s, h, t) + seconds(call.flops / 2, batch, s, t, h)
    a = call.shapes[-2] if len(call.shapes) >= 2 else call.shapes[0]
    batch = math.prod(a[:-2]) if len(a) > 2 else 1
    m, k = (a[-2], a[-1]) if len(a) >= 2 else (1, a[-1])
    return seconds(call.flops, batch, m, k, max(call.flops / (2 * batch * m * k), 1.0))


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
        known = {"processor": self.by.processor, "torch": self.by.torch, "threads": self.by.threads}
        return {
            "step": self.step, "step_seconds": self.step_seconds, "tokens_per_second": self.tokens / self.step_seconds,
            "token": self.token, "token_seconds": self.token_seconds, "dtype": self.by.dtype, **known,
        }  # fmt: skip


def here(config: ModelConfig, batch: int, context: int, by: Profile | None = None) -> Here:
    """A training step of `batch` sequences of `context` tokens, and a step of decoding as many at that context."""
    check_workload(config, batch, context)
    by = by or profile()

    def planned(what: str, factors: Mapping[Any, float]) -> dict[str, float]:
        calls = _calls(what, config, batch, context, by.dtype)
        return time_of(calls, by.measured, by.dtype, factors, working(what, calls))

    step = {**planned("step", by.step_factors), "optimizer": config.num_params() * by.measured.optimizer}
    return Here(step, batch * context, planned("token", by.token_factors) if config.writes else None, batch, by)
