"""Memory of a rank at the moments of a training step.

Bytes of the training state, N parameters, W ranks (Rajbhandari et al. 2020, 1910.02054, fp32 weights in place of master
copies):

weights     4 N, from stage 3 on 4 N / W
gradients   4 N, from stage 2 on 4 N / W
optimizer   4 values, from stage 1 on over W; AdamW has 2 N values
masters     of weights kept in 16 bits: 4 N, from stage 1 on over W

The peak is the maximum over moments, not the sum of each part's maximum: at the loss no gradients exist yet, and once
most gradients exist, the activations are freed. Memory of layers and loss is traced (`planning/trace.py`); division
among ranks is what modules declare (`planning/ranks.py`).
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
"""Memory that allocators reserve beyond the used memory, as a share of the used memory: 2 to 10 % if segments can
grow."""
CONTEXT = 1_300_000_000
"""Bytes of a CUDA process outside its allocator, for driver and kernels (Hugging Face, "Model training anatomy": 1.3 GB
on a V100, before any tensor exists)."""
COMMUNICATOR = 688_000_000
"""Bytes that NCCL takes for each process group (NVIDIA/nccl issue 964: 544 MB for two A100, 688 MB for more)."""
PROCESS = 370_000_000
"""Bytes of a training process on a CPU without its tensors: Python, torch, the training modules, and buffers of the
matmul libraries."""
FRAGMENTS = 0.5
"""Fragmentation of glibc's heap, as a share of the memory that a step allocates and frees: a freed block whose edge
holds a new small object is too small for the next tensor of equal size. Chosen on the processes that
docs/planning-memory.md lists. Weights and optimizer states are allocated once and cause no fragmentation."""
FP32 = torch.float32.itemsize
BRANCHES = {"mixer", "ffn"}
Loss = Literal["chunked", "in_place", "fused", "whole"]
"""Memory of the logits in the loss, for all tokens of a microbatch:

chunked   our loss: one chunk of logits at a time, traced
in_place  logits in the matmul dtype, overwritten by their gradient
fused     logits and their gradient in the matmul dtype, as in a compiled cross-entropy
whole     logits in the matmul dtype and in fp32, their log-softmax and its gradient in fp32, as in eager torch; if tp
          divides the vocabulary, a fourth fp32 copy, as in torch's `loss_parallel`"""
LOSSES: tuple[Loss, ...] = ("chunked", "in_place", "fused", "whole")


def bytes_of_logit(loss: Loss, products: int, tp: int) -> int:
    """Returns the bytes per logit if matmuls have `products` bytes an element; 0 for "chunked", which is traced."""
    each = {"chunked": 0, "in_place": products, "fused": 2 * products}
    return each[loss] if loss in each else products + (3 + (tp > 1)) * FP32


def outside(layout: Layout, device: str, moments: Collection[TrainingMemory] = ()) -> int:
    """Returns the bytes of a rank beyond its tensors and the allocator's margin: on GPUs the CUDA context and NCCL's
    buffers, on CPUs the process, and the heap's fragments at the worst of `moments`."""
    if device == "cpu":
        holes = FRAGMENTS * max((one.passing for one in moments), default=0)
        return PROCESS + max(0, round(holes - MARGIN * max((one.total for one in moments), default=0)))
    groups = sum(size > 1 for size in (layout.sharing, layout.tp, layout.pp, layout.cp, layout.ep))
    return CONTEXT + groups * COMMUNICATOR


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank at one moment of a step, by purpose.

    weights, gradients, optimizer, masters   the rank's share of each
    activations                              kept for the backward pass, of all microbatches in flight
    working                                  temporaries of a layer, recomputed activations included
    loss                                     head and loss: logits of a chunk, gradients that the loss computes
    buffers                                  weights gathered from other ranks; if gradients are not sharded, the
                                             buckets of their reduction (torch's DistributedDataParallel, and ours
                                             between replicas)
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
        """Bytes that a step allocates and frees: all but weights, masters and optimizer states."""
        return self.total - self.weights - self.masters - self.optimizer


@dataclass(frozen=True)
class LayoutMemory:
    """Memory of each pipeline stage of a layout."""

    layout: Layout
    share: Share
    traced: Traced
    costs: tuple[Cost, ...]
    """Cost of each layer, after tensor parallelism."""
    microbatches: int
    stream: int
    """Bytes of the residual stream of a microbatch."""
    itemsize: int
    """Bytes per element of gathered weights, and of their gradients before reduction."""
    weights: torch.dtype
    at_once: bool
    """True if the optimizer's step has temporaries for all weights at once."""
    by_value: bool
    """True if the optimizer's step can run on a rank's shard of a weight."""
    logits: int
    """Bytes of all logits of a microbatch; 0 for the chunked loss."""
    adapters: tuple[int, ...]
    """Trained values of each layer's adapters; empty if all weights are trained."""
    bucket: int
    """Elements in one bucket of the gradient reduction."""
    table: RankWeights
    """The embedding table that a tied head shares: its gradient is kept until the embedding's backward pass."""

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
        """Returns {moment: memory} of a rank of this stage when it is fullest: at the loss, in the backward pass of a
        layer, and at the optimizer's step."""
        found = {"step": self._state(stage, ready=1.0, stepping=True, working=self._stepping(stage))}
        trading = self._state(stage, ready=1.0, stepping=True, traded=self._traded(stage))
        found["step"] = max(found["step"], trading, key=lambda one: one.total)
        for flight, ready in self._passes(stage):
            for name, one in self._back(stage, flight, ready):
                if name not in found or one.total > found[name].total:
                    found[name] = one
        return {name: found[name] for name in ("loss", "backward", "step") if name in found}

    def _passes(self, stage: int) -> Iterator[tuple[float, float]]:
        """Yields (microbatches in flight, share of the gradients that exist) at the starts of backward passes.

        If forward and backward passes alternate, all gradients exist while the most microbatches are in flight. If all
        forward passes come first, no gradients exist at the first backward pass; at the second one they exist, and one
        microbatch less is in flight."""
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
        """Number of groups of a stage's layers whose full gradients exist one group after the other. It is the number
        of chunks of an interleaved pipeline if microbatches are at most as numerous as stages, because a chunk then
        finishes all its backward passes and reduces its gradients before the chunk below starts; otherwise 1."""
        return self.layout.interleave if self.microbatches <= self.layout.pp else 1

    def _back(self, stage: int, flight: float, ready: float) -> Iterator[tuple[str, TrainingMemory]]:
        """Yields (name of the moment, memory) of a microbatch's backward pass: at the loss, then at each layer, last to
        first; if `chunks` exceeds 1, only at the layers of the last chunk. `flight`: microbatches in flight;
        `ready`: share of the gradients that exist before."""
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
        """Returns the number of microbatches whose activations a rank of stage i of p holds: p - i with 1F1B; with v
        chunks per stage, (2 (p - i - 1) + (v - 1) p + 1) / v; at most all microbatches."""
        p, v = self.layout.pp, self.layout.interleave
        ahead = p - stage if v == 1 else (2 * (p - stage - 1) + (v - 1) * p + 1) / v
        return min(ahead, self.microbatches)

    def _stepping(self, stage: int) -> int:
        """Returns the bytes of temporaries of the optimizer's step: for all weights of a rank at once, or for the
        largest."""
        whole = self._whole(stage)
        share = whole.divided if self.layout.zero and self.by_value else 1.0
        if self.adapters:
            share *= sum(self.adapters[layer] for layer in self._own(stage)) / max(1, whole.values)
        return round(FP32 * (whole.stepping if self.at_once else whole.largest) * share)

    def _traded(self, stage: int) -> int:
        """Returns the bytes of the send and receive buffers in which replicas reduce gradients, one bucket at a
        time."""
        copies, whole = max(self.layout.replicate, self.layout.cp), self._whole(stage)
        if copies == 1 or self.adapters:
            return 0
        held = whole.shards if self.layout.zero == 3 and self.layout.sharing > 1 else whole.values
        return round(FP32 * 2 * min(held, self.bucket))

    def _own(self, stage: int) -> list[int]:
        """Returns the indices of the layers of a pipeline stage."""
        return self.layout.layers_of(stage, len(self.costs))

    def _ends(self, stage: int) -> RankWeights:
        """Returns the weights that a pipeline stage has outside its layers, such as embedding and head."""
        first, last = stage == 0, stage == self.layout.pp - 1
        ends = (self.share.first if first else RankWeights()) + (self.share.last if last else RankWeights())
        return ends + self.table if last and not first else ends

    def _whole(self, stage: int) -> RankWeights:
        return sum((self.share.layers[layer] for layer in self._own(stage)), self._ends(stage))

    def _kept(self, layer: int) -> int:
        """Returns the bytes that a layer keeps for its backward pass; with `sp`, ranks divide all activations outside
        the branches by tokens."""
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
        """Returns the memory of a rank of a stage: weights and optimizer state, the share `ready` of all gradients, or
        the gradients of the layers in `done`; with ZeRO 3, the layers in `gathered` and the unreduced gradients of the
        layer `summed`, but no gathered layers in the optimizer's step (`stepping`). `traded`: bytes of reduction
        buffers; further arguments: bytes of other fields of `TrainingMemory`."""
        layout, own, ends, whole = self.layout, self._own(stage), self._ends(stage), self._whole(stage)
        stays = layout.pp > 1 and not stepping  # gathering for every microbatch would stall the pipeline
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
        """Returns the bytes of weights, gradients, optimizer states and masters if all weights are trained. If a
        stage's weights stay gathered for all microbatches (`stays`), gradients accumulate whole, and those of finished
        chunks are shards. `whole`: all weights of the stage; `done`, `ready`: as in `_state`."""
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
        """Returns the bytes of weights, gradients and optimizer states if only adapters are trained, in fp32, and all
        other weights are frozen."""
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
