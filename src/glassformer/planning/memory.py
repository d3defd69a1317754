"""The memory of a rank at the moments of a training step.

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

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from glassformer.config import ModelConfig
from glassformer.parallel.layout import Layout
from glassformer.parallel.sums import bucket_of
from glassformer.parts.core.cost import Cost, Shape
from glassformer.planning.ranks import RankWeights, Share, for_gpu, owned, share
from glassformer.planning.trace import MicrobatchShare, Traced, adapted, trace
from glassformer.training.optimizers import OptimizerConfig

MARGIN = 0.06
"""What allocators reserve beyond what is used, as a share of it: 2 to 10 % where segments can grow."""
CONTEXT = 1_300_000_000
"""Bytes that a CUDA process takes beside its allocator, for driver and kernels (Hugging Face, "Model training anatomy":
1.3 GB on a V100, before there is any tensor)."""
COMMUNICATOR = 688_000_000
"""Bytes that NCCL takes for each group of ranks (NVIDIA/nccl issue 964: 544 MB for two A100, 688 MB for more)."""
PROCESS = 370_000_000
"""Bytes of a training process on a CPU without its tensors: Python, torch and the modules of training, and what the
libraries of matrix products keep."""
FRAGMENTS = 0.5
"""Memory that glibc's heap keeps in holes, as a share of what a step takes and gives back: a freed block whose edge a
small object has taken is too small for the next one of its size. Chosen on the processes that docs/planning-memory.md
lists; weights and the optimizer's states are taken once and leave no holes."""
FP32 = torch.float32.itemsize
BRANCHES = {"mixer", "ffn"}
Loss = Literal["chunked", "in_place", "fused", "whole"]
"""What the loss holds of logits, for all tokens of a microbatch:

chunked   ours: those of a chunk at a time, traced
in_place  logits in the products' dtype, which become their gradient
fused     logits and their gradient in the products' dtype, as a compiled cross-entropy has
whole     logits in that dtype and in fp32, their log-softmax and its gradient in fp32, as eager torch has; and where tp
          divides the vocabulary a fourth in fp32, as torch's `loss_parallel` has"""
LOSSES: tuple[Loss, ...] = ("chunked", "in_place", "fused", "whole")


def bytes_of_logit(loss: Loss, products: int, tp: int) -> int:
    """Of one logit, whose products have so many bytes; 0 where the loss is traced."""
    each = {"chunked": 0, "in_place": products, "fused": 2 * products}
    return each[loss] if loss in each else products + (3 + (tp > 1)) * FP32


def outside(layout: Layout, device: str, moments: Collection[TrainingMemory] = ()) -> int:
    """Returns the bytes of a rank beyond the tensors of its fullest moment and their margin."""
    if device == "cpu":
        holes = FRAGMENTS * max((one.passing for one in moments), default=0)
        return PROCESS + max(0, round(holes - MARGIN * max((one.total for one in moments), default=0)))
    groups = sum(size > 1 for size in (layout.sharing, layout.tp, layout.pp, layout.cp, layout.ep))
    return CONTEXT + groups * COMMUNICATOR


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank at one moment of a step, by what they are for.

    weights, gradients, optimizer, masters   what the rank keeps of them
    activations                              kept for the backward pass, of all microbatches in flight
    working                                  what a layer computes with, and makes again where it is recomputed
    loss                                     head and loss: logits of a chunk, gradients that the loss makes
    buffers                                  weights gathered from other ranks, and where these all have the gradients,
                                             the buckets in which they are added up (torch's DistributedDataParallel,
                                             and ours between replicas)
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

    @property
    def passing(self) -> int:
        """Bytes that a step takes and gives back: all but weights, masters and states of the optimizer."""
        return self.total - self.weights - self.masters - self.optimizer


@dataclass(frozen=True)
class LayoutMemory:
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
    at_once: bool
    """Whether the optimizer's step computes with the values of all weights at once."""
    by_value: bool
    """Whether it computes with a rank's piece of a weight alone."""
    logits: int
    """Bytes of a loss that has all logits at once; 0 for ours, which has a chunk of them."""
    adapters: tuple[int, ...]
    """Values that are trained of each layer, where that is not all."""
    bucket: int
    """Values that copies of the weights add up at once."""
    table: RankWeights
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
        loss: Loss,
        rank: int,
    ) -> LayoutMemory:
        sharded = layout.zero == 3 and layout.sharing > 1  # gathered in `dtype`: no autocast
        kept = dtype if sharded else weights
        mine = owned(config if device == "cpu" else for_gpu(config), layout.tp)
        rows, tokens = layout.microbatch(batch), context // layout.cp
        logits = rows * tokens * mine.vocab_size * bytes_of_logit(loss, dtype.itemsize, layout.tp)
        cost = mine.costs(Shape.training(rows, tokens, kept, dtype))
        return cls(
            layout, share(config, layout, optimizer, device),
            trace(mine, rows, tokens, kept, dtype, layout.recompute, rank, MicrobatchShare.of(layout)),
            tuple(cost["layers"].children.values()), layout.microbatches(batch),
            rows * tokens * config.d_model * kept.itemsize // (layout.tp if layout.sp else 1), kept.itemsize, weights,
            optimizer.steps_at_once(device), optimizer.by_value, logits,
            tuple(adapted(layer, rank) for layer in mine.outline().layers) if rank else (), bucket_of(device),
            _table(config, layout) if config.head.tied else RankWeights(),
        )  # fmt: skip

    def moments(self, stage: int) -> dict[str, TrainingMemory]:
        """Where a rank of this stage holds most: at the loss, in the backward pass of a layer, at the step."""
        found = {"step": self._state(stage, ready=1.0, stepping=True, working=self._stepping(stage))}
        trading = self._state(stage, ready=1.0, stepping=True, traded=self._traded(stage))
        found["step"] = max(found["step"], trading, key=lambda one: one.total)
        for flight, ready in self._passes(stage):
            for name, one in self._back(stage, flight, ready):
                if name not in found or one.total > found[name].total:
                    found[name] = one
        return {name: found[name] for name in ("loss", "backward", "step") if name in found}

    def _passes(self, stage: int) -> Iterator[tuple[float, float]]:
        """(microbatches in flight, share of the gradients that are there) where a backward pass begins.

        While forward passes go on between the backward ones, all that is ever in flight meets all gradients. Where all
        forward passes come first, the first backward pass finds no gradients, and the second a microbatch less."""
        m, whole = self.microbatches, 1 / self.chunks
        ahead = self.in_flight(stage)
        if ahead < m:
            yield ahead, whole
            return
        yield m, 0.0
        if m > 1:
            yield m - 1 / self.layout.interleave, whole

    @property
    def chunks(self) -> int:
        """Chunks of a stage of which one at a time has whole gradients: with no more microbatches than stages, a chunk
        has all of its backward passes, and hands its gradients on, before the chunk below begins."""
        return self.layout.interleave if self.microbatches <= self.layout.pp else 1

    def _back(self, stage: int, flight: float, ready: float) -> Iterator[tuple[str, TrainingMemory]]:
        """A microbatch at the loss, and back through the layers; of chunks that go one by one, those of the last."""
        layout, own = self.layout, self._own(stage)
        first, last = stage == 0, stage == layout.pp - 1
        begins = self.traced.embedding.kept if first else self.stream
        kept = [self._kept(layer) for layer in own]
        others = round((flight - 1) * (begins + sum(kept)))
        if last:
            loss = self.traced.loss
            cached = sum(self.traced.layers[layer].cached for layer in own)
            yield "loss", self._state(
                stage, ready, activations=others + begins + sum(kept) + cached,
                loss=self.logits or max(loss.forward, loss.kept + loss.backward),
                gathered=(self.share.layers[own[-1]],),
            )  # fmt: skip
        done = self.share.last + self.table if last else RankWeights()
        for i in reversed(range(len(own) - -(-len(own) // self.chunks), len(own))):
            layer, held = own[i], sum(kept[: i + 1])
            yield "backward", self._state(
                stage, ready, done, activations=others + begins + held, working=self.traced.layers[layer].backward,
                gathered=tuple(self.share.layers[one] for one in own[max(0, i - 1) : i + 1]),
                summed=self.share.layers[own[i + 1]] if i + 1 < len(own) else RankWeights(),
            )  # fmt: skip
            done += self.share.layers[layer]
        if first and self.chunks == 1:
            working = self.traced.embedding.backward
            yield "backward", self._state(stage, ready, done, activations=others + begins, working=working)

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations the rank holds: of 1F1B, those of the stages behind it; with v chunks,
        (2 (p - i - 1) + (v - 1) p + 1) / v."""
        p, v = self.layout.pp, self.layout.interleave
        ahead = p - stage if v == 1 else (2 * (p - stage - 1) + (v - 1) * p + 1) / v
        return min(ahead, self.microbatches)

    def _stepping(self, stage: int) -> int:
        """Bytes that the optimizer's step computes with: of what a rank steps, all weights at once or the largest."""
        whole = self._whole(stage)
        share = whole.divided if self.layout.zero and self.by_value else 1.0
        if self.adapters:
            share *= sum(self.adapters[layer] for layer in self._own(stage)) / max(1, whole.values)
        return round(FP32 * (whole.stepping if self.at_once else whole.largest) * share)

    def _traded(self, stage: int) -> int:
        """Bytes in which copies of the weights add up gradients, a bucket at a time: what a rank sends, and what it
        gets of the others, where it is added up."""
        copies, whole = max(self.layout.replicate, self.layout.cp), self._whole(stage)
        if copies == 1 or self.adapters:
            return 0
        held = whole.shards if self.layout.zero == 3 and self.layout.sharing > 1 else whole.values
        return round(FP32 * 2 * min(held, self.bucket))

    def _own(self, stage: int) -> list[int]:
        """Layers of a stage."""
        return self.layout.layers_of(stage, len(self.costs))

    def _ends(self, stage: int) -> RankWeights:
        """What a stage has besides layers."""
        first, last = stage == 0, stage == self.layout.pp - 1
        ends = (self.share.first if first else RankWeights()) + (self.share.last if last else RankWeights())
        return ends + self.table if last and not first else ends

    def _whole(self, stage: int) -> RankWeights:
        return sum((self.share.layers[layer] for layer in self._own(stage)), self._ends(stage))

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
        ready: float,
        done: RankWeights | None = None,
        gathered: tuple[RankWeights, ...] = (),
        summed: RankWeights | None = None,
        stepping: bool = False,
        traded: int = 0,
        **besides: int,
    ) -> TrainingMemory:
        """What is there all the time, and gradients: this share of them is `ready`, or those of the layers that are
        `done` are. With stage 3, layers that are `gathered`, and one whose gradients are `summed` over ranks meanwhile;
        at the step nothing is gathered any more."""
        layout, own, ends, whole = self.layout, self._own(stage), self._ends(stage), self._whole(stage)
        stays = layout.pp > 1 and not stepping  # a stage that gathered for every microbatch would wait for it each time
        states = (
            self._adapters(own, whole) if self.adapters else self._states(whole, done or RankWeights(), ready, stays)
        )
        buffers = traded
        if layout.zero == 3 and layout.sharing > 1:
            gathers = whole if stays else RankWeights() if stepping else sum(gathered, ends)
            buffers += self.itemsize * gathers.gathered
            buffers += FP32 * (summed or RankWeights()).gathered if not self.adapters else 0
        elif layout.zero == 0 and layout.sharing > 1:
            buffers = states["gradients"] if self.adapters else FP32 * whole.values
        return TrainingMemory(**states, buffers=buffers, **besides)

    def _states(self, whole: RankWeights, done: RankWeights, ready: float, stays: bool) -> dict[str, int]:
        """Weights, gradients, states of the optimizer, masters, where all weights are trained. A stage that `stays`
        gathered adds up whole gradients, and divides those of a chunk that is through."""
        layout = self.layout
        reached = whole if ready else done
        if layout.zero < 2 or (layout.zero == 3 and layout.sharing > 1 and stays):
            part = ready or 1.0
            gradients = part * reached.values + (1 - part) * (reached.shards if layout.zero >= 2 else reached.values)
        else:
            gradients = reached.shards
        masters = FP32 * whole.values if self.weights != torch.float32 else 0
        return {
            "weights": self.weights.itemsize * (whole.shards if layout.zero == 3 else whole.values),
            "gradients": round(FP32 * gradients),
            "optimizer": round(FP32 * whole.state * (whole.divided if layout.zero else 1)),
            "masters": round(masters * (whole.divided if layout.zero else 1)),
        }

    def _adapters(self, own: list[int], whole: RankWeights) -> dict[str, int]:
        """The same where adapters alone are trained, in fp32, beside weights that stay as they are."""
        trained = FP32 * sum(self.adapters[layer] for layer in own)
        shared = [self.layout.sharing if self.layout.zero >= stage else 1 for stage in (1, 2, 3)]
        weights = self.weights.itemsize * (whole.shards if self.layout.zero == 3 else whole.values)
        return {
            "weights": weights + trained // shared[2],
            "gradients": trained // shared[1],
            "optimizer": round(trained * whole.state / max(1, whole.values)) // shared[0],
        }


def _table(config: ModelConfig, layout: Layout) -> RankWeights:
    rows = -(-config.vocab_size // layout.tp)
    shard = -(-rows // layout.sharing) * config.d_model
    return RankWeights(rows * config.d_model, shard, shard * layout.sharing)
