"""Processes that share a run: their ranks, groups, and messages. One process has groups of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "replicate", "fsdp", "cp", "tp")
"""Axes of a layout, from those whose ranks are furthest apart to those of neighbours: ranks that trade most share a
machine. `ep` lies within `fsdp`, `edp` are the ranks of `fsdp` that have the same experts, and `dp` is `replicate` and
`fsdp` together."""


class ProcessGroups:
    """A rank among `world`, and the groups in which a layout places it.

    rank, world   this process, and how many there are
    layout        how they divide a step; its product is `world`
    device        where this rank computes
    store         of the ranks that share this run; None: nothing watches over them (`parallel/watchdog.py`)
    """

    def __init__(self, rank: int, layout: Layout, device: torch.device | str = "cpu", store: Store | None = None):
        """All ranks make their groups at the same time, after `torch.distributed.init_process_group`."""
        self.rank, self.world, self.layout, self.device = rank, layout.ranks, layout, torch.device(device)
        self.store = store
        self.moves = 0
        """How often this rank has come further: pieces of a batch, and words with the others."""
        self.sizes = {
            "pp": layout.pp,
            "replicate": layout.dp // layout.fsdp,
            "fsdp": layout.fsdp,
            "cp": layout.cp,
            "tp": layout.tp,
        }
        grid = torch.arange(self.world).view([self.sizes[axis] for axis in AXES])
        self._mesh: DeviceMesh | None = None
        self._groups: dict[str, ProcessGroup] = {}
        self._everyone: ProcessGroup | None = None
        """All ranks; None: torch's own group of them."""
        if self.world > 1:
            self._join(grid)
        self.at = dict(zip(AXES, (int(place) for place in (grid == rank).nonzero()[0]), strict=True))
        """The place of this rank on every axis."""
        self.sizes |= {"dp": layout.dp, "ep": layout.ep, "edp": layout.fsdp // layout.ep}
        dp = self.at["replicate"] * layout.fsdp + self.at["fsdp"]
        self.at |= {"dp": dp, "ep": dp % layout.ep, "edp": self.at["fsdp"] // layout.ep}

    @classmethod
    def alone(cls) -> ProcessGroups:
        """One process, which needs no group."""
        return cls(0, Layout())

    def _join(self, grid: Tensor) -> None:
        """Makes the groups, in the same order on every rank."""
        from torch.distributed import new_group
        from torch.distributed.device_mesh import init_device_mesh

        shape = [self.sizes[axis] for axis in AXES]
        self._mesh = init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=AXES)
        self._groups = {axis: self._mesh.get_group(axis) for axis in AXES if self.sizes[axis] > 1}
        data = grid.permute(0, 3, 4, 1, 2).reshape(-1, self.layout.dp)
        ep, edp = self.layout.ep, self.layout.fsdp // self.layout.ep
        alike = data.reshape(-1, edp, ep).transpose(1, 2).reshape(-1, edp) if ep > 1 else data.reshape(-1, 1)
        for axis, rows in {"dp": data, "ep": data.reshape(-1, ep), "edp": alike}.items():
            for row in rows.tolist():
                made = new_group(row) if len(row) > 1 else None
                if made is not None and self.rank in row:
                    self._groups[axis] = made

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone writes, prints and decides by the clock."""
        return self.rank == 0

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks beside this one on an axis: fsdp, replicate, dp, tp, ep, edp, cp or pp. None where it is alone."""
        return self._groups.get(axis)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that share the weights, as `fully_shard` takes them; None where each has all of them."""
        return None if self._mesh is None or self.sizes["fsdp"] == 1 else self._mesh["fsdp"]

    @property
    def mesh_of_experts(self) -> DeviceMesh | None:
        """The ranks that share the weights of the same experts; None where experts are not spread, or each rank has
        its own."""
        if self.sizes["ep"] == 1 or (group := self.group("edp")) is None:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, self.device.type)

    def aside(self) -> ProcessGroups:
        """The same ranks in a group of its own, for a thread that gathers while the run goes on."""
        other = copy(self)
        if self.world > 1:
            from torch.distributed import new_group

            other._everyone = new_group(backend="gloo")
        return other

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, by rank: plain values, as JSON has them."""
        self.moves += 1
        if self.world == 1:
            return [value]
        from torch.distributed import all_gather

        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        all_gather(sizes, torch.tensor([len(text)]), group=self._everyone)
        longest = int(max(sizes))
        padded = torch.nn.functional.pad(text, (0, longest - len(text)))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        all_gather(texts, padded, group=self._everyone)
        return [json.loads(bytes(given[: int(size)].tolist())) for given, size in zip(texts, sizes, strict=True)]

    def numbers(self, *mine: float, axis: str | None = None) -> list[list[float]]:
        """What each rank gives, by rank or by the place on an axis: as many numbers from each, faster than `gather`."""
        self.moves += 1
        group = None if axis is None else self.group(axis)
        if self.world == 1 or (axis is not None and group is None):
            return [list(mine)]
        from torch.distributed import all_gather

        size = self.world if group is None else group.size()
        found = [torch.zeros(len(mine), dtype=torch.float64) for _ in range(size)]
        all_gather(found, torch.tensor(mine, dtype=torch.float64), group=group)
        return [one.tolist() for one in found]

    def agree(self, value: Any, by: Callable[[Sequence[Any]], Any]) -> Any:
        """One value on all ranks, made of what each gives: `agree(asked, any)`, `agree(due, first)`."""
        return by(self.gather(value))

    def mine(self, atoms: int) -> range:
        """The atoms of a step that this rank computes, of `atoms`. A group of `replicate` has neighbours, and within it
        the ranks of `fsdp` take turns: each round of theirs is a part of the tree, and so is what a group adds up
        (`parallel/sums.py`)."""
        part = atoms // self.sizes["replicate"]
        first = self.at["replicate"] * part
        return range(first + self.at["fsdp"], first + part, self.layout.fsdp)

    def in_order(self, mine: Tensor) -> Tensor:
        """(k,) numbers of this rank's atoms -> (K,) of all data ranks, in the order of the atoms (`mine`)."""
        group = self.group("dp")
        if group is None:
            return mine
        from torch.distributed import all_gather

        found = [torch.empty_like(mine) for _ in range(self.layout.dp)]
        all_gather(found, mine, group=group)
        return torch.stack(found).view(-1, self.layout.fsdp, len(mine)).transpose(1, 2).flatten()

    def alike(self, what: str, value: Any) -> None:
        """Raises RequestError, on all ranks, unless they all give the same plain value; names the odd rank."""
        values = self.gather(value)
        texts = [json.dumps(one, sort_keys=True) for one in values]
        usual = max(texts, key=texts.count)
        for rank, text in enumerate(texts):
            if text != usual:
                raise RequestError(
                    f"rank {rank} has {what} {values[rank]}, and rank {texts.index(usual)} has "
                    f"{values[texts.index(usual)]}; start all ranks from the same installation and command",
                    code="conflict", field=what, value=str(values[rank]), expected=str(values[texts.index(usual)]),
                )  # fmt: skip


def first(values: Sequence[Any]) -> Any:
    """Rank 0's, for `ProcessGroups.agree`."""
    return values[0]


ALONE = ProcessGroups.alone()
