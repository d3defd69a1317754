"""What a training step takes: the memory of the fullest rank at its moments, and FLOPs.

States in bytes, N parameters, W ranks (Rajbhandari et al. 2020, 1910.02054, fp32 weights in place of master copies):

weights     4 N, from stage 3 on 4 N / W
gradients   4 N, from stage 2 on 4 N / W
optimizer   4 values, from stage 1 on over W; AdamW has 2 N values
masters     of weights kept in 16 bits: 4 N, from stage 1 on over W

The peak is the most of any moment, and no sum of what each moment has at most: at the loss no gradient is there yet,
and when most gradients are, the activations are gone. What layers and loss hold is traced (`planning/trace.py`), what
ranks divide is what modules declare (`planning/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch

from glassformer.config import MAX_CONTEXT, ModelConfig
from glassformer.errors import RequestError, check_whole
from glassformer.parts.cost import Cost, Shape
from glassformer.planning.counts import Counts, Flops
from glassformer.planning.layout import Layout
from glassformer.planning.machines import Cluster
from glassformer.planning.ranks import Held, Share, for_gpu, owned, share, stages
from glassformer.planning.time import Run, StepTime, step_time, workload
from glassformer.planning.trace import Traced, adapted, trace
from glassformer.training.optimizers import OptimizerConfig

MARGIN = 0.06
"""What allocators reserve beyond what is used, as a share of it: 2 to 10 % where segments can grow."""
FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank at one moment of a step, by what they are for.

    weights, gradients, optimizer, masters   what the rank keeps of them
    activations                              kept for the backward pass, of all microbatches in flight
    working                                  what a layer computes with, and makes again where it is recomputed
    loss                                     head and loss: logits of a chunk, gradients that the loss makes
    buffers                                  weights gathered from other ranks
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    activations: int = 0
    working: int = 0
    loss: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class TrainingPlan:
    """A training step of `batch` sequences of `context` tokens over all ranks."""

    config: ModelConfig
    batch: int
    context: int
    dtype: torch.dtype
    optimizer: str
    layout: Layout
    moments: dict[str, TrainingMemory]
    """Of the fullest rank: "loss", "backward", "step", each where it holds most."""
    flops: Flops
    """Of a token."""
    on: Cluster | None = None
    """The machines that it is planned on."""
    tokens: float | None = None
    """To train on."""

    @cached_property
    def time(self) -> StepTime | None:
        """Of a step, on the plan's machines; None without any."""
        if self.on is None:
            return None
        return step_time(workload(self.config, self.context, self.dtype), self.batch, self.layout, self.on)

    @property
    def run(self) -> Run | None:
        """Training on `tokens`; None without them, or without a machine."""
        return None if self.time is None or self.tokens is None else self.time.run(self.tokens)

    def placed(self, on: Cluster | None, tokens: float | None = None) -> TrainingPlan:
        """The same on these machines. Raises RequestError where the layout has more or fewer ranks than they are."""
        ranks = self.layout.ranks
        if on is not None and on.exact and on.count != ranks:
            raise RequestError(
                f"layout: {ranks} ranks on {on.count} accelerators; give a layout of {on.count}",
                code="conflict", field="layout", value=ranks, expected=f"{on.count} ranks",
            )  # fmt: skip
        return replace(self, on=on if on is None or on.exact else on.of(ranks), tokens=tokens)

    @property
    def peak(self) -> TrainingMemory:
        return max(self.moments.values(), key=lambda one: one.total)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank by what they are for, each at its most; `total`, the peak, which is less than their
        sum; `margin`, what an allocator reserves beyond it; `reserved`, both."""
        most = {
            field.name: max(getattr(one, field.name) for one in self.moments.values())
            for field in fields(TrainingMemory)
        }
        total = self.peak.total
        margin = round(MARGIN * total)
        return {**most, "total": total, "margin": margin, "reserved": total + margin}

    @property
    def recompute(self) -> str:
        return self.layout.recompute

    @property
    def microbatch(self) -> int:
        """Sequences that a rank computes at once."""
        return self.layout.microbatch(self.batch)

    @property
    def microbatches(self) -> int:
        """Of a rank in a step."""
        return self.layout.microbatches(self.batch)

    @property
    def step_flops(self) -> float:
        """Of a step over all ranks, what is recomputed included."""
        again = self.flops.recomputed if self.recompute == "full" else 0.0
        return self.batch * self.context * (self.flops.training + again)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "context": self.context, "dtype": str(self.dtype).removeprefix("torch."),
            "optimizer": self.optimizer, "recompute": self.recompute, "layout": self.layout.model_dump(),
            "memory": self.memory, "moments": {name: asdict(one) for name, one in self.moments.items()},
            "flops_per_token": self.flops.training, "step_flops": self.step_flops,
            **({} if self.time is None else {"time": self.time.to_dict()}),
            **({} if self.run is None else {"run": self.run.to_dict()}),
        }  # fmt: skip


def plan_training(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    optimizer: OptimizerConfig,
    layout: Layout | None = None,
    weights: torch.dtype = torch.float32,
    device: str = "cpu",
    loss: Literal["chunked", "in_place", "whole"] = "chunked",
    rank: int = 0,
) -> TrainingPlan:
    """What a step takes. Raises RequestError for a context, layout or policy that cannot be.

    weights  what they are kept in; in bfloat16 with fp32 masters beside the optimizer's state
    device   whose kernels of attention count
    loss     "chunked", ours; "in_place": logits in `dtype`, and in fp32 where they become their gradient; "whole": in
             `dtype` and fp32, their log-softmax and its gradient, and where tp divides the vocabulary a fourth in fp32,
             as torch's `loss_parallel` has
    rank     of adapters, which alone are trained (LoRA): in fp32, beside weights that stay in `dtype`"""
    layout = layout or Layout()
    check_whole("batch", batch)
    limit = config.embedding.limit(config.ctx)
    if not 1 <= context <= min(MAX_CONTEXT, limit or MAX_CONTEXT):
        most = min(MAX_CONTEXT, limit or MAX_CONTEXT)
        raise RequestError(
            code="range", field="context", value=context, expected=f"a number of tokens from 1 to {most:,}"
        )
    layout.check(config, batch, context)
    ranks = Ranks.of(config, batch, context, dtype, optimizer, layout, dtype if rank else weights, device, loss, rank)
    moments = max(map(ranks.moments, range(layout.pp)), key=lambda of: max(one.total for one in of.values()))
    return TrainingPlan(config, batch, context, dtype, optimizer.kind, layout, moments, Counts(config).flops(context))


@dataclass(frozen=True)
class Ranks:
    """The memory of the stages of a layout."""

    layout: Layout
    share: Share
    traced: Traced
    costs: tuple[Cost, ...]
    """Of the layers of one owner."""
    microbatches: int
    stream: int
    """Bytes of the residual stream of a microbatch."""
    itemsize: int
    """Of the weights that a rank gathers, and of their gradients before they are added up."""
    weights: torch.dtype
    working: int
    """Bytes that the optimizer's step computes with."""
    logits: int
    """Bytes of a loss that has all logits at once; 0 for ours, which has a chunk of them."""
    adapters: tuple[int, ...]
    """Values that are trained of each layer, where that is not all."""
    table: Held
    """What a tied head has of the embedding: its gradient waits for the embedding's."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        batch: int,
        context: int,
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        layout: Layout,
        weights: torch.dtype,
        device: str,
        loss: str,
        rank: int,
    ) -> Ranks:
        sharded = layout.zero == 3 and layout.sharing > 1  # gathered in `dtype`: no autocast
        kept = dtype if sharded else weights
        mine = owned(config if device == "cpu" else for_gpu(config), layout.tp)
        rows, tokens = layout.microbatch(batch), context // layout.cp
        logits = (
            rows * tokens * mine.vocab_size * (dtype.itemsize + (3 + (layout.tp > 1)) * FP32) if loss == "whole" else 0
        )
        cost = mine.costs(Shape.training(rows, tokens, kept, dtype))
        return cls(
            layout, share(config, layout, optimizer), trace(mine, rows, tokens, kept, dtype, layout.recompute, rank),
            tuple(cost["layers"].children.values()), layout.microbatches(batch),
            rows * tokens * config.d_model * kept.itemsize // (layout.tp if layout.sp else 1), kept.itemsize, weights,
            FP32 * optimizer.step_values(config.outline()), logits,
            tuple(adapted(layer, rank) for layer in mine.outline().layers) if rank else (),
            _table(config, layout) if config.head.tied else Held(),
        )  # fmt: skip

    def moments(self, stage: int) -> dict[str, TrainingMemory]:
        """Where a rank of this stage holds most: at the loss, in the backward pass of a layer, at the step."""
        found = {"step": self._state(stage, all_of=True, working=self.working)}
        for name, one in self._through(stage):
            if name not in found or one.total > found[name].total:
                found[name] = one
        return {name: found[name] for name in ("loss", "backward", "step") if name in found}

    def _through(self, stage: int) -> Iterator[tuple[str, TrainingMemory]]:
        """The last microbatch of a step that a rank has most of in flight: at the loss, and back through the layers."""
        layout, own = self.layout, stages(len(self.costs), self.layout.pp)[stage]
        first, last = stage == 0, stage == layout.pp - 1
        begins = self.traced.embedding.kept if first else self.stream
        kept = [self._kept(layer) for layer in own]
        others = round((self.in_flight(stage) - 1) * (begins + sum(kept)))
        all_of = self.microbatches > 1
        if last:
            loss = self.traced.loss
            most = self.logits or max(loss.forward, loss.kept + loss.backward)
            cached = sum(self.traced.layers[layer].cached for layer in own)
            yield "loss", self._state(
                stage, all_of, activations=others + begins + sum(kept) + cached, loss=most,
                gathered=self.share.layers[own.stop - 1 : own.stop],
            )  # fmt: skip
        above = self.share.last + self.table if last else Held()
        for layer in reversed(own):
            held = sum(kept[: layer - own.start + 1])
            part = self.traced.layers[layer]
            yield "backward", self._state(
                stage, all_of, above, activations=others + begins + held, working=part.backward,
                gathered=self.share.layers[max(own.start, layer - 1) : layer + 1],
                summed=self.share.layers[layer + 1] if layer + 1 in own else Held(),
            )  # fmt: skip
            above += self.share.layers[layer]
        if first:
            yield (
                "backward",
                self._state(
                    stage,
                    all_of,
                    above,
                    activations=others + begins,
                    working=self.traced.embedding.backward,
                ),
            )

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations the rank holds: of 1F1B, those of the stages behind it; with v chunks,
        (2 (p - i - 1) + (v - 1) p + 1) / v."""
        p, v = self.layout.pp, self.layout.interleave
        ahead = p - stage if v == 1 else (2 * (p - stage - 1) + (v - 1) * p + 1) / v
        return min(ahead, self.microbatches)

    def _kept(self, layer: int) -> int:
        """Bytes of a layer that wait for its backward pass; with `sp`, what is not inside the branches is divided by
        tokens."""
        cost, layout, kept = self.costs[layer], self.layout, self.traced.layers[layer].kept
        if not layout.sp:
            return kept
        policy = "selective" if layout.recompute == "alternate" else layout.recompute
        inside = sum(part.activation_bytes(policy) for name, part in cost.children.items() if name in BRANCHES)
        return kept - (cost.activation_bytes(policy) - inside) * (layout.tp - 1) // layout.tp

    def _state(
        self,
        stage: int,
        all_of: bool,
        done: Held | None = None,
        gathered: tuple[Held, ...] = (),
        summed: Held | None = None,
        **besides: int,
    ) -> TrainingMemory:
        """What is there all the time, and gradients: all of them, or of the layers that are done. With stage 3, layers
        that are `gathered`, and one whose gradients are `summed` over ranks meanwhile."""
        layout, own = self.layout, stages(len(self.costs), self.layout.pp)[stage]
        first, last = stage == 0, stage == layout.pp - 1
        ends = (self.share.first if first else Held()) + (self.share.last if last else Held())
        if last and not first:
            ends += self.table
        whole = sum((self.share.layers[layer] for layer in own), ends)
        divided = whole.shards / max(1, whole.values)
        reached = whole if all_of else done or Held()
        sharded = layout.zero == 3 and layout.sharing > 1
        stays = layout.pp > 1  # a stage that gathered for every microbatch would wait for it each time
        gradients = reached.shards if layout.zero >= 2 and not (sharded and stays) else reached.values
        gathers = whole if stays else sum(gathered, ends)
        if self.adapters:
            trained = FP32 * sum(self.adapters[layer] for layer in own)
            shared = [layout.sharing if layout.zero >= stage_of else 1 for stage_of in (1, 2, 3)]
            return TrainingMemory(
                weights=self.weights.itemsize * (whole.shards if layout.zero == 3 else whole.values)
                + trained // shared[2],
                gradients=trained // shared[1],
                optimizer=round(trained * whole.state / max(1, whole.values)) // shared[0],
                buffers=self.itemsize * gathers.gathered if sharded else 0,
                **besides,
            )
        masters = FP32 * whole.values if self.weights != torch.float32 else 0
        return TrainingMemory(
            weights=self.weights.itemsize * (whole.shards if layout.zero == 3 else whole.values),
            gradients=FP32 * gradients,
            optimizer=round(FP32 * whole.state * (divided if layout.zero else 1)),
            masters=round(masters * (divided if layout.zero else 1)),
            buffers=(self.itemsize * gathers.gathered + FP32 * (summed or Held()).gathered) if sharded else 0,
            **besides,
        )  # fmt: skip


def _table(config: ModelConfig, layout: Layout) -> Held:
    rows = -(-config.vocab_size // layout.tp)
    shard = -(-rows // layout.sharing) * config.d_model
    return Held(rows * config.d_model, shard, shard * layout.sharing)


BRANCHES = {"mixer", "ffn"}
