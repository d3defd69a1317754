"""Tensor parallelism: a rank's share of a model, divided as its parts declare.

>>> model = divide(config.outline(), group).to_empty(device="cpu")
>>> fill_pieces(model, config.initial_weights(0))       # drawn in pieces; the bits are those of config.build(seed=0)
>>> model.loss(tokens, targets).backward()             # the same tokens on every rank of the group
>>> sum_partial(model)                                 # now each gradient is that of the loss of one process

A part that declares how an owner takes its share (`parts/core/owner.py`) is divided by its cuts
(`parts/core/shard.py`); any other is computed whole by each rank, which is correct though wasteful. Shoeybi et al.
2019, 1909.08053.

With `sequence` the ranks also share the tokens of the stream between the branches: norms and residual additions are of
a rank's tokens, each sum at a branch's end leaves a rank its tokens, and the branches' inputs are gathered (Korthikanti
et al. 2022, 2205.05198).

Gradients of replicated weights that meet divided ones are partial: `sum_partial` sums them over ranks, once a step,
after the last backward pass. Ranks capture and edit sites together, because the value is joined from their pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Block, Model, Tower
from glassformer.parallel.seams import Group, Seams
from glassformer.parts.core.owner import Owner, is_branch, says_how, take_share
from glassformer.parts.core.shard import REPLICATED, Region, Shards, declared, piece_of, regions
from glassformer.parts.core.site import Site

CUT = "ngfc"
"""Axis letters of heads, groups, hidden units and channels: the axes along which values inside a branch are divided."""
STREAM = "bsd"


@dataclass
class Division:
    """Record of how a model was divided: the rank is owner `number` of `of`; cuts of each divided parameter by name,
    and shapes of the whole parameters."""

    number: int
    of: int
    cuts: Shards = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    """Names of replicated parameters whose gradient on each rank is a partial sum."""
    group: Group | None = None

    def regions(self, name: str) -> list[Region]:
        """Returns the regions of the whole parameter `name` that this rank holds, one per matrix; its part stacks them
        by rows."""
        return regions(self.shapes[name], self.cuts.get(name, (REPLICATED,)), self.number, self.of)

    @torch.no_grad()
    def join(self, name: str, values: Tensor) -> Tensor:
        """Returns the whole parameter `name`, or a gradient or moment of its shape, joined from the parts `values` of
        all ranks."""
        if name not in self.cuts or self.group is None:
            return values
        maps, made = values.split([rows[1] - rows[0] for rows, *_ in self.regions(name)]), []
        whole = self.shapes[name]
        for shard, part in zip(self.cuts[name], maps, strict=True):
            size = shard.rows if len(maps) > 1 and shard.axis == 0 else whole[shard.axis]
            alone = shard.cut == "replicated"
            made.append(part if alone else self.group.gathered(part.contiguous(), shard.axis, int(size or 0)))
        return torch.cat(made)


def check(config: ModelConfig, tp: int) -> None:
    """Raises RequestError, before anything is allocated, if `tp` ranks cannot share a model of `config`."""
    if tp > 1:
        cut(config.outline(), Owner(0, tp))


def divide(model: Model, group: Any, sequence: bool = False) -> Model:
    """Reduces a model to this rank's share, in place, and returns it; its parameters may be on the meta device.

    `group`: the ProcessGroup of the ranks that share the model; `sequence`: True to divide the stream by tokens too.
    Raises RequestError if they cannot share a part."""
    across = Group(group)
    seams = Seams(across)
    owner = Owner(
        across.number, across.of, seams.enter, seams.leave, seams.enter, seams.mix, across.largest, seams.join
    )  # fmt: skip
    return cut(model, owner, seams, sequence)


def division_of(model: nn.Module) -> Division:
    """Returns the record of how a model was divided. Raises RequestError for an undivided model."""
    division: Division | None = getattr(model, "division", None)
    if division is None:
        raise RequestError("this model is whole; parallel.tensor.divide cuts it", code="missing", field="model")
    return division


@torch.no_grad()
def cut(model: Model, owner: Owner, seams: Seams | None = None, sequence: bool = False) -> Model:
    """Reduces a model to the share of `owner`, as `divide` does; without seams it can only be checked, not run."""
    division = Division(owner.number, owner.of, group=None if seams is None else seams.group)
    division.shapes = {name: weight.shape for name, weight in model.named_parameters()}
    streams: dict[int, SpreadTokens] = {}
    for tower in (model, model.encoder):
        if sequence and seams is not None and tower is not None:
            streams.update(_spread(tower, owner, seams))
    for path, part in divided_parts(model):
        _cut_part(part, path, owner, division, seams, streams.get(id(part)))
    if sequence:
        division.partial += tuple(_between_branches(model))
    model.division = division
    return model


def divided_parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, part) of the outermost parts that declare how an owner takes its share."""
    if says_how(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from divided_parts(child, f"{path}.{name}".removeprefix("."))


def _cut_part(
    part: Any, path: str, owner: Owner, division: Division, seams: Seams | None, tokens: SpreadTokens | None
) -> None:
    """Keeps one rank's share of the weights of a part and of all modules inside, in place, and records in `division`
    how each weight was divided. `owner`: the rank's number and collectives; with `tokens`, the part's input and result
    are slices of a sequence."""
    if tokens is not None:
        owner = replace(owner, enter=tokens.enter, leave=tokens.leave)
    part.divide(owner)
    branch = is_branch(part)  # weights in a branch meet divided ones, those around a vocabulary do not
    for inner, module in part.named_modules(prefix=path):
        shards = declared(module)
        for name, weight in list(module.named_parameters(recurse=False)):
            cuts = shards.get(name, (REPLICATED,))
            if any(one.cut != "replicated" and one.axis < weight.dim() for one in cuts):
                division.cuts[f"{inner}.{name}"] = cuts
                made = piece_of(weight.data, cuts, owner.number, owner.of).clone()
                setattr(module, name, nn.Parameter(made, weight.requires_grad))
            # a bias, added after the sum
            elif branch and (tokens is not None or all(one.cut != "row" for one in cuts)):
                division.partial += (f"{inner}.{name}",)
        if module is not part:
            take_share(module, owner)
        if isinstance(module, Site) and seams is not None:
            axis = next((i for i, letter in enumerate(module.axes) if letter in CUT), None)
            if axis is not None:
                module.joint = JoinedSite(seams, axis)
            elif tokens is not None and module.axes == STREAM:
                module.joint = JoinedSite(seams, 1, tokens)


def _spread(tower: Tower, owner: Owner, seams: Seams) -> dict[int, SpreadTokens]:
    """Makes the ranks share the tokens of a tower's stream; returns {id of a branch: tokens} of the divided
    branches."""
    tokens = tower.sequence = SpreadTokens(seams)
    found: dict[int, SpreadTokens] = {}
    for block in tower.layers:
        assert isinstance(block, Block)
        owner.refuse("residual.dropout", block.residual.dropout, "would drop the same of each rank's tokens (sp=1)")
        for branch in filter(None, (block.mixer, block.ffn)):
            if says_how(branch):
                found[id(branch)] = tokens
            else:
                tokens.wrap(branch)
        for site in _own_sites(block):
            site.joint = JoinedSite(seams, 1, tokens)
    return found


def _own_sites(block: Block) -> Iterator[Site]:
    """Yields the block's sites of the stream, outside of its branches."""
    for module in (block, block.residual):
        yield from (child for child in module.children() if isinstance(child, Site))


def _between_branches(model: Model) -> Iterator[str]:
    """Yields the names of parameters of wirings and final norms, which see only a rank's own tokens."""
    for path, module in model.named_modules():
        for name, child in module.named_children() if isinstance(module, (Tower, Block)) else ():
            if name in ("residual", "final_norm"):
                prefix = f"{path}.{name}".removeprefix(".")
                yield from (name for name, _ in child.named_parameters(prefix=prefix))


class SpreadTokens:
    """Sequence parallelism of a stream: outside of the branches each rank has only a slice of the tokens, and a
    branch reads the tokens of all ranks; a `parts.core.owner.Spread`."""

    def __init__(self, seams: Seams):
        self.seams, self.size = seams, 0

    def spread(self, x: Tensor) -> Tensor:
        self.size = x.shape[1]
        return self.seams.spread(x, 1)

    def gather(self, x: Tensor) -> Tensor:
        return self.seams.join(x, 1, self.size)

    def enter(self, x: Tensor) -> Tensor:
        """Returns the input (b, s, d) of a divided branch, gathered from the ranks' slices of tokens."""
        return self.seams.gather(x, 1, self.size)

    def leave(self, x: Tensor) -> Tensor:
        """Returns this rank's slice of tokens of the summed result (b, s, d) of a divided branch."""
        return self.seams.scatter(x, 1)

    def wrap(self, branch: nn.Module) -> None:
        """Makes a replicated branch read all tokens, and return only the rank's tokens. Uses hooks, not a wrapper
        module, so that weights and sites keep their names."""
        branch.register_forward_pre_hook(self._read_all)
        branch.register_forward_hook(self._return_own)

    def _read_all(self, branch: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.gather(given[0]), *given[1:]

    def _return_own(self, branch: nn.Module, given: tuple[Any, ...], result: Tensor) -> Tensor:
        return self.seams.spread(result, 1)


class JoinedSite:
    """Access to the value of a site that ranks hold in slices along `axis`; a `parts.core.site.Joint`."""

    def __init__(self, seams: Seams, axis: int, tokens: SpreadTokens | None = None):
        self.seams, self.axis, self.tokens = seams, axis, tokens

    def gather(self, x: Tensor) -> Tensor:
        size = x.shape[self.axis] * self.seams.group.of if self.tokens is None else self.tokens.size
        return self.seams.gather(x, self.axis, size)

    def cut(self, x: Tensor) -> Tensor:
        first, last = self.seams.group.span(x.shape[self.axis])
        return x.narrow(self.axis, first, last - first)


@torch.no_grad()
def sum_partial(model: Model) -> None:
    """Sums the partial gradients of a divided model over its ranks, in place: once a step, after the last backward
    pass."""
    division = division_of(model)
    weights = dict(model.named_parameters())
    grads = [weights[name].grad for name in division.partial]
    found = [getattr(grad, "_local_tensor", grad) for grad in grads if grad is not None]
    if division.group is None or not found:
        return
    summed = division.group.summed(torch.cat([grad.flatten() for grad in found]))
    for grad, whole in zip(found, summed.split([grad.numel() for grad in found]), strict=True):
        grad.copy_(whole.view_as(grad))
