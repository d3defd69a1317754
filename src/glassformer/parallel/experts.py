"""Expert parallelism: each rank has some experts and some sequences, and exchanges rows of tokens with the others.

>>> model = divide(config.build(seed=0), group)         # group: the ranks that share the experts (ep)
>>> model.loss(tokens, targets).backward()              # each rank its own tokens

The rows that a rank's tokens send to experts are sorted by expert, hence by owner; each owner gets its rows of all
ranks, sorts them by expert, computes, and sends the results back: two exchanges (all-to-all) a layer forward, two
backward. Every token is served, however uneven the load. Lepikhin et al. 2020, 2006.16668; Gale et al. 2022,
2211.15841.

The gradient of an expert's matrix is then the sum over the tokens of all ranks of the group, and is not reduced again.
Replicated weights (router, shared experts, attention) have a partial gradient on each rank, as in data parallelism. The
losses of the router are those of each rank's tokens, as of microbatches in one process; the load that moves the
selection bias is summed over ranks (`parts/core/reduce.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parallel.layout import Layout
from glassformer.parallel.seams import Group
from glassformer.parallel.tensor import Division
from glassformer.parts.core.exchange import Exchanging
from glassformer.parts.core.heads import divisors
from glassformer.parts.core.shard import declared
from glassformer.parts.grouped import BLOCK, Groups, wants_blocks


def check(config: ModelConfig, layout: Layout) -> None:
    """Raises RequestError, before anything is allocated, if the layout cannot divide the experts of a model of `config`
    among `ep` ranks."""
    ep = layout.ep
    if ep == 1:
        return
    if layout.fsdp % ep:
        raise RequestError(
            f"ep={ep} does not divide fsdp={layout.fsdp}, whose ranks share the experts; use "
            f"{_choices(layout.fsdp)}, or fsdp={ep}",
            code="conflict", field="ep", value=ep, expected=_choices(layout.fsdp),
        )  # fmt: skip
    for word in ("tp", "cp"):
        if (ranks := getattr(layout, word)) > 1:
            message = f"ep={ep} and {word}={ranks} do not go together yet; use one of them"
            raise RequestError(message, code="conflict", field="ep", value=ep, expected=f"{word}=1")
    _parts(config.outline(), ep)


def divide(model: Model, group: Any) -> Model:
    """Removes the experts of other ranks from a model, in place, and returns it. `group`: the ProcessGroup of the ranks
    that share the experts.

    Raises RequestError if the ranks do not divide the experts."""
    across = Group(group)
    division = Division(across.number, across.of, group=across)
    division.shapes = {name: weight.shape for name, weight in model.named_parameters()}
    for path, part in _parts(model, across.of):
        first, last = across.span(part.n_experts)
        before = dict(part.named_parameters())
        part.keep(first, last, Trade(across, part.n_experts))
        cut = [name for name, weight in part.named_parameters() if weight is not before[name]]
        shards = {f"{inner}.{name}".removeprefix("."): cuts
                  for inner, module in part.named_modules() for name, cuts in declared(module).items()}  # fmt: skip
        division.cuts |= {f"{path}.{name}": shards[name] for name in cut}
    model.division = division
    return model


def _parts(model: nn.Module, ep: int) -> list[tuple[str, Any]]:
    """Returns (path, part) of the model's mixtures of experts. Raises RequestError if `ep` ranks cannot divide their
    experts."""
    found: list[tuple[str, Any]] = [
        (path, part) for path, part in model.named_modules() if isinstance(part, Exchanging)
    ]
    inside = {id(module) for _, part in found for module in part.modules()}
    for path, module in model.named_modules():
        of_experts = any(one.cut == "expert" for cuts in declared(module).values() for one in cuts)
        if of_experts and id(module) not in inside:
            raise RequestError(
                f"ep={ep}: the experts of {path.rpartition('.')[0]} choose among the tokens of one rank, and cannot "
                "be on another; use ep=1",
                code="conflict", field="ep", value=ep, expected="1",
            )  # fmt: skip
    if not found:
        raise RequestError(
            f"ep={ep} is for models with experts, and this one is dense; add +moe:8:2, or leave ep out",
            code="conflict", field="ep", value=ep, expected="1",
        )  # fmt: skip
    for _, part in found:
        if part.n_experts % ep:
            use = _choices(part.n_experts)
            message = f"ep={ep} does not divide n_experts={part.n_experts}; use {use}"
            raise RequestError(message, code="conflict", field="ep", value=ep, expected=use)
    return found


def _choices(count: int) -> str:
    *most, last = [str(n) for n in divisors(count)]
    return f"{', '.join(most)} or {last}" if most else last


def own(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) of the matrices of this rank's experts; no items for an undivided model."""
    cuts = model.division.cuts if model.division is not None else {}
    return ((name, weight) for name, weight in model.named_parameters() if name in cuts)


@dataclass
class Trade:
    """Exchange of rows between the ranks of `group`, which own equal parts of `experts` experts; a
    `parts.core.exchange.Exchange`."""

    group: Group
    experts: int

    @torch.no_grad()
    def __call__(self, by_expert: Tensor) -> Trip:
        of, own = self.group.of, self.experts // self.group.of
        counts = torch.bincount(by_expert, minlength=self.experts)
        theirs = torch.empty_like(counts)
        # (of own,): rows from each rank for each of this rank's experts
        dist.all_to_all_single(theirs, counts, group=self.group.group)
        sent, came = (one.view(of, own).sum(1).tolist() for one in (counts, theirs))
        expert = torch.arange(own, device=counts.device).repeat(of).repeat_interleave(theirs)
        expert, place = expert.sort(stable=True)
        return Trip(self.group.group, sent, came, place, Groups.sorted(expert, own))


class Trip:
    """Routes of the rows of one pass to the owners of their experts (`there`) and back (`back`)."""

    def __init__(self, group: Any, sent: list[int], came: list[int], place: Tensor, groups: Groups):
        self.group, self.sent, self.came = group, sent, came
        self.place, self.order, self.groups = place, place.argsort(), groups
        self.filled: Tensor | None = None

    def there(self, rows: Tensor) -> tuple[Tensor, Groups]:
        got = self._exchanged(rows, self.sent, self.came).index_select(0, self.place)
        if self.filled is None and wants_blocks(rows, len(got), len(self.groups.ends)):
            self.groups, self.filled = self.groups.in_blocks(BLOCK)
        if self.filled is not None:
            got = got.new_zeros(len(self.groups.of), got.shape[1]).index_copy(0, self.filled, got)
        return got, self.groups

    def back(self, rows: Tensor) -> Tensor:
        if self.filled is not None:
            rows = rows.index_select(0, self.filled)
        return self._exchanged(rows.index_select(0, self.order), self.came, self.sent)

    def _exchanged(self, rows: Tensor, sent: list[int], came: list[int]) -> Tensor:
        return _Exchanged.apply(rows, sent, came, self.group)


class _Exchanged(torch.autograd.Function):
    """Differentiable all-to-all: sends `sent[r]` rows to rank r and receives `came[r]` rows from it, in rank order;
    gradients take the reverse way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.how = sent, came, group
        made = rows.new_empty(sum(came), *rows.shape[1:])
        dist.all_to_all_single(made, rows.contiguous(), came, sent, group=group)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, came, group = ctx.how
        made = grads[0].new_empty(sum(sent), *grads[0].shape[1:])
        dist.all_to_all_single(made, grads[0].contiguous(), sent, came, group=group)
        return made, None, None, None
