"""A model spread over the ranks of a run by FSDP2, and gradients that are reduced as trees between them.

Each layer is a unit whose weights are gathered when it computes; embedding, final norm and head are another unit. Parts
get whole, plain tensors in `forward`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from glassformer.config import ModelConfig
from glassformer.model import Model, Tower
from glassformer.parallel import context, experts, tensor
from glassformer.parallel.filling import fill_pieces
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.seams import all_gather
from glassformer.parallel.sharing import Sharing, squares_here
from glassformer.parallel.sums import bucket_of, buckets, local, tree_sum
from glassformer.parts.core.reduce import reducing
from glassformer.parts.linear import Linear


class Ranks(Sharing):
    """The work of one rank among several processes: weights are sharded over the ranks of `fsdp`, with a copy for each
    of `replicate`."""

    def __init__(self, groups: ProcessGroups):
        self.groups = groups

    def build(
        self,
        config: ModelConfig,
        seed: int,
        device: str,
        autocast: torch.dtype | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Model:
        model = self._divided(config.outline(), autocast).to_empty(device=device)
        fill_pieces(model, config.initial_weights(seed), given)
        return model

    def _divided(self, model: Model, autocast: torch.dtype | None) -> Model:
        """Returns this rank's part of a model on the meta device, divided by tensor, context, pipeline, expert
        parallelism and FSDP as the layout says; `autocast`: dtype in which FSDP transfers matrices, None for their
        own."""
        if (group := self.groups.group("tp")) is not None:
            tensor.divide(model, group, self.groups.layout.sp)
        if (group := self.groups.group("cp")) is not None:
            context.divide(model, group)
        if (group := self.groups.group("pp")) is not None:
            from glassformer.parallel.stages import Stages

            return Stages(model, self.groups.at["pp"], group.size(), self.groups.layout.interleave, group)
        if (group := self.groups.group("ep")) is not None:
            experts.divide(model, group)
        return spread(model, self.groups, autocast, {weight for _, weight in self._own(model)})

    def _own(self, model: Model) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, weight) of this rank's experts; no items without expert parallelism."""
        return iter(()) if self.groups.group("ep") is None else experts.own(model)

    def add_up(self, model: Model) -> None:
        for _, weight in self._own(model):  # all ranks exchange equal buckets, with tokens or without
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for axis in ("replicate", "cp"):
            if (group := self.groups.group(axis)) is not None:
                add_up((local(one.grad) for one in model.parameters() if one.grad is not None), group)
        if self.groups.group("tp") is not None:
            tensor.sum_partial(model)

    def squares(self, model: Model) -> Sequence[Tensor]:
        found = squares_here(model)
        if self.groups.at["tp"]:  # counts replicated weights only on the first owner
            found = {name: one for name, one in found.items() if name in tensor.division_of(model).cuts}
        rows = torch.cat([*found.values(), torch.zeros(0, dtype=torch.float64, device=self.groups.device)])
        for axis in ("fsdp", "tp", "pp"):
            rows = _joined(rows, self.groups.group(axis))
        return [rows]

    def counted(self) -> AbstractContextManager[None]:
        return self._summing("dp", "cp")

    def passing(self) -> AbstractContextManager[None]:
        return self._summing("cp")

    @contextmanager
    def _summing(self, *axes: str) -> Iterator[None]:
        shared = [group for axis in axes if (group := self.groups.group(axis)) is not None]

        def total(x: Tensor) -> Tensor:
            summed = x.clone()
            for group in shared:
                dist.all_reduce(summed, group=group)
            return summed

        with reducing(total):
            yield

    def settle(self, model: nn.Module) -> None:
        """Reshards weights that a forward pass without a backward has left gathered; otherwise the next pass would
        reuse them although they have changed."""
        for unit in units(model):
            unit.reshard()


def spread(
    model: Model, groups: ProcessGroups, autocast: torch.dtype | None = None, own: Collection[nn.Parameter] = ()
) -> Model:
    """Shards the weights of a model in place among the ranks of `fsdp`, and those of its `own` experts among the ranks
    with the same experts (`edp`); returns the model. Matrices of the layers that autocast would round are transferred
    in `autocast`, with the same bits as rounding after the transfer."""
    if (mesh := groups.mesh) is None:
        return model
    apart, alike = set(own), groups.mesh_of_experts
    ignored = apart if alike is None else set()  # weights without a copy on another rank
    half = None if autocast is None else MixedPrecisionPolicy(autocast, torch.float32, cast_forward_inputs=False)
    towers: list[Tower] = [model] if model.encoder is None else [model.encoder, model]
    for layer in (layer for tower in towers for layer in tower.layers):
        linears: list[Any] = [one for one in layer.modules() if isinstance(one, Linear)]
        travel = [one for one in linears if half and travels_in_half(one) and one.weight not in apart]
        here = [one for one in linears if alike and one.weight in apart]
        for some, among, policy in ((travel, mesh, half), (here, alike, half)):
            if some:
                fully_shard(some, mesh=among, mp_policy=policy or MixedPrecisionPolicy(), ignored_params=ignored)
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_reduce_scatter(TreeReduceScatter())
    return model


def travels_in_half(module: nn.Module) -> bool:
    """Returns True for a linear layer whose stored matrix autocast would round before every matmul, so that it can be
    transferred in half precision."""
    return isinstance(module, Linear) and module.in_half and module.reparam is None


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """Yields the FSDP modules of a model, whose weights are gathered and resharded together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter that sums as a binary tree, in the order of the ranks: each rank receives its shard from every
    other rank and sums the shards. Sends the number of bytes of a ring."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(_sum_here(received, group))


@torch.no_grad()
def add_up(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums each tensor over all ranks of the group in place, as a binary tree in rank order."""
    every = list(tensors)
    flat = [one.contiguous().view(-1) for one in every]
    most = bucket_of(flat[0].device.type) if flat else 1
    for bucket in buckets((one.numel() for one in flat), most):
        _add_up([flat[number][piece] for number, piece in bucket], group)
    for one, summed in zip(every, flat, strict=True):
        if one.data_ptr() != summed.data_ptr():  # a contiguous copy was summed
            one.copy_(summed.view_as(one))


def _add_up(pieces: list[Tensor], group: dist.ProcessGroup) -> None:
    sizes = [one.numel() for one in pieces]
    end = -sum(sizes) % group.size()
    traded = pieces[0] if len(pieces) == 1 and not end else torch.cat([*pieces, pieces[0].new_zeros(end)])
    received = torch.empty_like(traded)
    dist.all_to_all_single(received, traded, group=group)
    all_gather(traded, _sum_here(received, group), group=group)
    if traded is not pieces[0]:
        torch._foreach_copy_(pieces, list(traded[: sum(sizes)].split(sizes)))


def _sum_here(received: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of a received tensor's equal parts, one per rank, computed in place as a binary tree."""
    return tree_sum(received.view(group.size(), -1).unbind(), Tensor.add_)


def _joined(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the concatenated values (k,) of all ranks of a group, each padded with zeros to the longest, which change
    no sum; for group None the values themselves."""
    if group is None:
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device), group=group)
    padded = nn.functional.pad(rows, (0, int(max(sizes)) - len(rows)))
    found = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(found, padded, group=group)
    return torch.cat(found)
