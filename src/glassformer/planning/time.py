"""Time of a training step: for each kind of work, the time of the roofline times a measured factor.

Per rank; k = 1, or 4/3 if layers are recomputed. The roofline is that of Williams, Waterman and Patterson 2009; the
factors are in `machines.yaml`, fitted on the runs that docs/planning.md lists.

products      k FLOPs of weights / peak
scores        k FLOPs of queries against the keys that they attend to, and of patterns against values / peak
elementwise   k 3 x bytes kept for the backward pass / bandwidth: written, read, and their gradients written
optimizer     weights, gradients and states, read and written / bandwidth
sharding      ZeRO 3: 2 N bytes gathered twice and 4 N of gradients reduced per microbatch (pipeline stages, which stay
              gathered: 2 N and 4 N per step); without ZeRO 3: 8 N per step / link
tensor        4 all-reduces of a layer's residual stream, 6 with recomputation / link
experts       4 exchanges of the routed tokens / link
context       keys and values of the other shards of the sequence, three times / link
stages        the residual stream between stages / link
bubble        (p - 1) / (m v) of a microbatch's time, m microbatches, p stages, v chunks (Narayanan et al. 2021)

Times of the kinds are added; overlap is part of the measured factors. Each routed expert is held whole by its owner:
tensor parallelism divides the tokens of experts if it divides the residual stream by tokens, and otherwise nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from glassformer.config import ModelConfig
from glassformer.parallel.layout import Layout
from glassformer.parts.core.cost import Shape
from glassformer.parts.linear import linears
from glassformer.planning.counts import Counts
from glassformer.planning.machines import Cluster, TimeFactors, machines
from glassformer.planning.ranks import share
from glassformer.planning.trace import adapted
from glassformer.training.optimizers import AdamWConfig

LINKS = ("sharding", "tensor", "experts", "context", "stages")
FACTOR_OF = {"products": "products", "scores": "scores", "elementwise": "elementwise"} | dict.fromkeys(LINKS, "links")
"""Kind of work -> its measured factor in `TimeFactors`; other kinds are not scaled."""
AGAIN: dict[str, tuple[float | None, float, float]] = {
    "none": (0.0, 0.0, 0.0), "selective": (0.0, 0.0, 1.0), "alternate": (None, 0.0, 1.0), "full": (1.0, 1.0, 1.0),
}  # fmt: skip
"""Recomputation policy -> shares of the layers' forward pass that it recomputes: matmuls, scores, elementwise parts.
None means the share of every second matmul of a layer."""
REPLICATED = 10 / 34
"""Share of a layer's kept bytes that tensor parallelism without `sp` does not divide (Korthikanti et al. 2022)."""
BEYOND = (0.59, 1.24)
"""10th and 90th percentile, over published runs whose tensors, layers or sequences are divided, of measured / planned
time, planned with factors fitted on undivided runs (`experiments.plan.published`, `beyond`). docs/planning.md reports
the check with sources left out, and the runs outside this range."""
EXPERT_AXES = 3
"""Number of axes of a parameter with the matrices of all experts: experts, rows, columns. Their biases have two
axes."""
ELSEWHERE = (0.96, 1.29)
"""Factors that widen the planned range of times, (lowest, highest), on a machine without measured factors: 5th
percentile of measured / lowest and 95th of measured / highest, each measured machine left out in turn and planned with
the factors of the others (`experiments.plan.mpt`, `elsewhere`)."""
DAY = 86_400.0


@dataclass(frozen=True)
class Workload:
    """Work per token of a training step (FLOPs and bytes), for a model, a context and a dtype of matmuls."""

    config: ModelConfig
    context: int
    dtype: torch.dtype
    products: float
    """FLOPs forward and backward per token, without `scores`."""
    again: float
    """FLOPs of a forward pass within the layers, which a policy may recompute."""
    scores: float
    """FLOPs against the keys that a query attends to."""
    model_flops: float
    """FLOPs as MFU counts them: every query against all keys."""
    kept: float
    """Bytes kept for the backward pass with the fused kernels of accelerators."""
    layer_kept: float
    parameters: int
    expert_parameters: int
    experts_met: float
    """Experts that a token is routed to, summed over layers."""
    routed: float
    """Forward FLOPs of the routed experts, a part of `again`."""
    exchanged: float
    """Bytes of the residual stream of one token."""
    keys: float
    """Bytes of keys and values of one token, over all layers."""
    trained: int
    """Number of trained values: all parameters, or only the adapters."""

    second: float
    """Share of `again` that the policy "alternate" recomputes: every second matmul of a layer, and all routed
    experts."""
    passes: int
    """Matmuls per matrix in a step, in units of the forward pass: 3; 2 for a frozen matrix."""

    @property
    def layers(self) -> int:
        return self.config.n_layers

    def repeats(self, recompute: str) -> tuple[float, float, float]:
        """Returns the shares of the layers' forward pass that a policy recomputes: matmuls, scores, elementwise
        parts."""
        products, scores, elementwise = AGAIN[recompute]
        return self.second if products is None else products, scores, elementwise


@lru_cache(maxsize=64)
def workload(config: ModelConfig, context: int, dtype: torch.dtype, rank: int = 0) -> Workload:
    """Returns the work per token. FLOPs, as in `config.flops`, are those of matmuls. With a `rank`, adapters are on
    every linear layer: a frozen matrix has no weight gradient, so it costs two matmuls of three, and each adapter value
    adds 6 FLOPs."""

    def spent(tokens: int, every_key: bool) -> tuple[float, float]:
        cost = config.costs(Shape(s=tokens, t=tokens, phase="prefill", every_key=every_key))
        return cost.flops / tokens, cost["layers"].flops / tokens

    (alone, layers_alone), (seen, _), (full, _) = spent(1, True), spent(context, False), spent(context, True)
    kept = config.costs(replace(Shape.training(1, context, dtype), device="cuda"))
    idle = config.num_params() - config.active_params()
    spread = [one for one in Counts(config).weights if one.component == "experts"] if idle else []
    experts, of_layer = sum(one.values for one in spread), {one.layer: one.dims[0][1] for one in spread}
    chosen = 1 - idle / experts if experts else 0.0
    met = sum(of_layer.values()) * chosen
    routed = 2 * chosen * sum(one.values for one in spread if len(one.dims) == EXPERT_AXES)
    trained = sum(adapted(layer, rank) for layer in config.outline().layers) if rank else config.num_params()
    passes, own = (2, 6 * trained) if rank else (3, 0)
    return Workload(
        config, context, dtype,
        products=passes * alone + own, again=layers_alone + own / 3,
        scores=max(3 * (seen - alone), 0.0), model_flops=3 * full - (3 - passes) * alone + own,
        kept=kept.kept / context, layer_kept=kept["layers"].kept / context,
        parameters=config.num_params(), expert_parameters=experts, experts_met=met, routed=routed,
        exchanged=config.d_model * dtype.itemsize,
        keys=config.state_bytes(context, dtype) / context, trained=trained, passes=passes,
        second=_second(config, routed / 2),
    )  # fmt: skip


def _second(config: ModelConfig, routed: float) -> float:
    """Returns the share of the layers' matmul weights that the policy "alternate" recomputes: those of every second
    linear layer in a block, and all of routed experts, because no policy keeps the results of grouped matmuls.
    `routed`: number of weights of the experts that a token is routed to."""
    maps = [[one.weight.numel() for one in linears(layer)] for layer in config.outline().layers]
    whole = sum(map(sum, maps)) + routed
    return (sum(sum(layer[1::2]) for layer in maps) + routed) / whole if whole else 0.0


@dataclass(frozen=True)
class Work:
    """One kind of work of a rank in a step: FLOPs or bytes, and the seconds of the roofline."""

    kind: str
    amount: float
    unit: str
    rate: float
    """Units of `unit` per second."""
    formula: str
    roof: float
    """Seconds at `rate`."""
    seconds: float
    """Seconds of the roofline times the measured factor."""


@dataclass(frozen=True)
class StepTime:
    """Time of a training step on a cluster."""

    work: Workload
    batch: int
    layout: Layout
    cluster: Cluster
    kinds: tuple[Work, ...]
    measured: bool
    """True if the factors were fitted on this machine and this kind of layout; otherwise only the interval is known."""
    low: float
    high: float

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step; for a machine without measured factors, the mean over the factors of all measured
        machines."""
        return sum(one.seconds for one in self.kinds)

    @property
    def tokens(self) -> int:
        return self.batch * self.work.context

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def peak(self) -> float:
        """FLOP/s of all ranks."""
        return self.layout.ranks * self.cluster.machine.peak_of(str(self.work.dtype).removeprefix("torch."))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: share of the peak that the model's FLOPs take (Chowdhery et al. 2022, 2204.02311,
        appendix B)."""
        return self.work.model_flops * self.tokens_per_second / self.peak

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: as `mfu`, recomputed FLOPs included."""
        return self.mfu * (1 + again(self.work, self.layout) / 3)

    @property
    def bound(self) -> str:
        """Name of the kind of work that takes the most time of a step."""
        return max(self.kinds, key=lambda one: one.seconds).kind

    def run(self, tokens: float) -> RunTime:
        """Returns time, energy and cost of training on `tokens` tokens."""
        steps = tokens / self.tokens
        return RunTime(self, tokens, steps * self.seconds, steps * self.low, steps * self.high)

    def to_dict(self) -> dict[str, Any]:
        named = ("seconds", "low", "high", "measured", "tokens_per_second", "mfu", "hfu", "bound")
        return {
            "machine": self.cluster.name, "ranks": self.layout.ranks,
            **{name: getattr(self, name) for name in named},
            "kinds": [vars(one) for one in self.kinds],
        }  # fmt: skip


@dataclass(frozen=True)
class RunTime:
    """Time, energy and cost of a whole training run, without the time that failures take."""

    step: StepTime
    tokens: float
    seconds: float
    low: float
    high: float

    @property
    def hours(self) -> float:
        """Accelerator-hours of the whole run."""
        return self.seconds / 3600 * self.step.layout.ranks

    @property
    def energy(self) -> float:
        """Energy of the accelerators in kWh, at their rated (highest) power."""
        return self.hours * self.step.cluster.machine.power / 1000

    def cost(self) -> tuple[float, float, str] | None:
        """Returns (least, most, currency) at the machine's prices and the interval's ends; None without a price."""
        price = self.step.cluster.machine.price
        if price is None:
            return None
        hours = (self.low / 3600 * self.step.layout.ranks, self.high / 3600 * self.step.layout.ranks)
        return hours[0] * price.low, hours[1] * price.high, price.currency

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "days": self.seconds / DAY, "days_low": self.low / DAY,
            "days_high": self.high / DAY, "hours": self.hours, "energy_kwh": self.energy, "cost": self.cost(),
        }  # fmt: skip


def again(work: Workload, layout: Layout) -> float:
    """Returns the FLOPs that recomputation of activations adds, as a share of the FLOPs of a forward pass."""
    products, scores, _ = work.repeats(layout.recompute)
    return (products * 3 * work.again + scores * work.scores) / (work.products + work.scores)


def step_time(work: Workload, batch: int, layout: Layout, cluster: Cluster) -> StepTime:
    """Returns the time of a step of `batch` sequences over all ranks of `layout`, on machines of the kind of `cluster`.

    Raises RequestError if the machine has no matmuls in the dtype."""
    kinds = _roofline(work, batch, layout, cluster)
    own = cluster.machine.measured
    known = [own] if own else [one.measured for one in machines().values() if one.measured]
    sums = [sum(_taken(kinds, factors).values()) for factors in known]
    low = min(total / (1 + factors.error[1]) for total, factors in zip(sums, known, strict=True))
    high = max(total / (1 + factors.error[0]) for total, factors in zip(sums, known, strict=True))
    if own is None:
        low, high = low * ELSEWHERE[0], high * ELSEWHERE[1]
    fitted = layout.tp == layout.pp == layout.cp == layout.ep == 1
    if not fitted:
        low, high = low * BEYOND[0], high * BEYOND[1]
    taken = [_taken(kinds, factors) for factors in known]
    middle = {one.kind: sum(each[one.kind] for each in taken) / len(taken) for one in kinds}
    timed = tuple(replace(one, seconds=middle[one.kind]) for one in kinds)
    return StepTime(work, batch, layout, cluster, timed, fitted and own is not None, low, high)


def _taken(kinds: Iterable[Work], factors: TimeFactors) -> dict[str, float]:
    """Returns {kind of work: seconds}: the seconds of the roofline times these measured factors. The idle time of the
    pipeline (bubble) scales with the work that it waits for."""
    kinds = list(kinds)
    seconds = {
        one.kind: one.roof * (getattr(factors, FACTOR_OF[one.kind]) if one.kind in FACTOR_OF else 1.0)
        for one in kinds
        if one.kind != "bubble"
    }
    waited = sum(value for kind, value in seconds.items() if kind not in ("optimizer", "sharding"))
    seconds |= {one.kind: one.amount * waited for one in kinds if one.kind == "bubble"}
    return {one.kind: seconds[one.kind] for one in kinds}


def _roofline(work: Workload, batch: int, layout: Layout, cluster: Cluster) -> list[Work]:
    """Returns the kinds of work in one step of the rank with most layers, each with its roofline time."""
    machine = cluster.machine
    peak = machine.peak_of(str(work.dtype).removeprefix("torch."))
    dp, tp, pp, ep, cp = layout.dp, layout.tp, layout.pp, layout.ep, layout.cp
    tokens = batch * work.context / (dp * cp)
    micro = layout.microbatches(batch)
    most = max(-(-work.layers // pp) / work.layers, 1 / pp)
    of_products, of_scores, of_kept = (share / 3 for share in work.repeats(layout.recompute))
    of_experts = tp if layout.sp else 1  # owners hold experts whole: tp divides their tokens, if anything
    routed = work.routed * (work.passes + of_products * 3)
    others = work.products + of_products * 3 * work.again - routed
    products = tokens * most * (others / tp + routed / of_experts)
    scores = tokens * most / tp * (1 + of_scores) * work.scores
    whole = 1.0 if layout.sp or tp == 1 else (1 - REPLICATED) + REPLICATED * tp
    kept = tokens * most / tp * whole * 3 * (work.kept + of_kept * work.layer_kept)
    held = _held(work.config, tp, ep, pp, layout.interleave)
    shared = layout.sharing
    read = f"{tokens:,.0f} tokens"
    trained = held * work.trained / work.parameters
    states = 28 * trained / (shared if layout.zero else 1)
    found = [
        _work("products", products, "FLOP", peak, f"{_made_again(of_products)}{work.products:.4g} x {read}"),
        _work("scores", scores, "FLOP", peak, f"{_made_again(of_scores)}{work.scores:.4g} x {read}"),
        _work("elementwise", kept, "B", machine.bandwidth, f"3 x {work.kept:,.0f} B x {read}"),
        _work("optimizer", states, "B", machine.bandwidth, "28 B for a trained parameter of the rank"),
    ]
    inside = tp * cp
    gathers, times = (2 * micro, micro) if pp == 1 else (1, 1)  # a stage stays gathered
    of_weights = float(work.dtype.itemsize * gathers) if layout.zero == 3 else 0.0
    of_gradients = {0: 8.0, 1: 8.0, 2: 4.0 + 4.0 * micro, 3: 4.0 * times}[layout.zero]
    per_step = of_weights + of_gradients * work.trained / work.parameters
    stream = tokens * work.exchanged
    linked = {
        "sharding": (shared, inside if shared == dp else tp, per_step * held, f"{per_step:g} B for a parameter"),
        "tensor": (tp, 1, (6 if of_scores else 4) * 2 * stream * work.layers * most, "4 x 2 residual streams a layer"),
        "context": (cp, tp, 3 * tokens * cp * work.keys * most / tp, "3 x keys and values of all pieces"),
        "stages": (pp, inside * dp, 2 * stream * layout.interleave / tp, "2 residual streams a stage"),
    }
    for kind, (size, stride, amount, formula) in linked.items():
        if size > 1:
            found.append(_linked(kind, amount, cluster, size, stride, formula, kind == "stages"))
    if ep > 1 and work.experts_met:
        traded = (6 if of_scores else 4) * work.experts_met * tokens * work.exchanged * most / of_experts
        found.append(_linked("experts", traded, cluster, ep, inside, "4 x the residual stream of a choice", True))
    if pp > 1:
        share = (pp - 1) / (micro * layout.interleave)
        found.append(Work("bubble", share, "", 1.0, f"({pp} - 1) / ({micro} x {layout.interleave})", 0.0, 0.0))
    return found


@lru_cache(maxsize=256)
def _held(config: ModelConfig, tp: int, ep: int, pp: int, interleave: int) -> int:
    """Returns the number of weights that the fullest rank holds before ZeRO divides them."""
    layout = Layout(dp=ep, tp=tp, ep=ep, pp=pp, interleave=interleave)
    of_rank = share(config, layout, AdamWConfig())
    each = (layout.layers_of(stage, config.n_layers) for stage in range(pp))
    found = [sum(of_rank.layers[layer].values for layer in own) for own in each]
    found[0] += of_rank.first.values
    found[-1] += of_rank.last.values
    return max(found)


def _made_again(repeat: float) -> str:
    return f"{1 + repeat:.3g} of layers x " if repeat else ""


def _work(kind: str, amount: float, unit: str, rate: float, formula: str) -> Work:
    return Work(kind, amount, unit, rate, formula, amount / rate, amount / rate)


def _linked(
    kind: str, amount: float, cluster: Cluster, size: int, stride: int, formula: str, traded: bool = False
) -> Work:
    """Returns the `Work` of a communication: each of `size` ranks, which are `stride` apart, exchanges `amount` bytes.
    Collectives reduce within a node before they cross nodes; `traded` bytes (all-to-all) cross separately."""
    machine, node = cluster.machine, cluster.node
    near = max(1, min(size, node // stride)) if stride < node else 1
    far = size / near
    outside = (1 - 1 / far) / (1 if traded else near) / machine.between
    within = (near - 1) / size if traded else (size - 1) / size
    roof = amount * max(outside, within / machine.inside if near > 1 else 0.0)
    return Work(kind, amount, "B", amount / roof if roof else float("inf"), formula, roof, roof)
