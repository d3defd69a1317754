"""Process groups of a run: this rank's groups on each axis of the layout, and messages. A single process has groups of
one."""

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
"""Axes of a layout, from those whose ranks may be far apart to those whose ranks communicate most and share a machine.
`ep` is within `fsdp`, `edp` are the ranks of `fsdp` with the same experts, and `dp` is `replicate` and `fsdp`
together."""


class ProcessGroups:
    """One rank of a run of `world` processes, and the groups it belongs to.

    rank, world   index of this process, and number of processes
    layout        division of a step; its product is `world`
    device        device on which this rank computes
    store         torch store that the ranks of the run share; if None, no watchdog runs (`parallel/watchdog.py`)
    """

    def __init__(self, rank: int, layout: Layout, device: torch.device | str = "cpu", store: Store | None = None):
        """Creates the groups; a call of all ranks at the same time, after `torch.distributed.init_process_group`."""
        self.rank, self.world, self.layout, self.device = rank, layout.ranks, layout, torch.device(device)
        self.store = store
        self.moves = 0
        """Progress counter of this rank: microbatches and messages."""
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
        """Group of all ranks; None for torch's default group."""
        if self.world > 1:
            self._join(grid)
        self.at = dict(zip(AXES, (int(place) for place in (grid == rank).nonzero()[0]), strict=True))
        """Index of this rank on each axis."""
        self.sizes |= {"dp": layout.dp, "ep": layout.ep, "edp": layout.fsdp // layout.ep}
        dp = self.at["replicate"] * layout.fsdp + self.at["fsdp"]
        self.at |= {"dp": dp, "ep": dp % layout.ep, "edp": self.at["fsdp"] // layout.ep}

    @classmethod
    def alone(cls) -> ProcessGroups:
        """Returns the groups of a single process, without communication."""
        return cls(0, Layout())

    def _join(self, grid: Tensor) -> None:
        """Creates the process groups of every axis, in the same order on every rank. `grid`: ranks by their indices on
        AXES."""
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
        """True on rank 0, the only rank that writes, prints and reads the clock for decisions."""
        return self.rank == 0

    def group(self, axis: str) -> ProcessGroup | None:
        """Returns the group of ranks along an axis (fsdp, replicate, dp, tp, ep, edp, cp or pp) that this rank is in;
        None if this rank is its only member."""
        return self._groups.get(axis)

    @property
    def mesh(self) -> DeviceMesh | None:
        """Mesh of the ranks over which weights are sharded, for `fully_shard`; None if each rank has all weights."""
        return None if self._mesh is None or self.sizes["fsdp"] == 1 else self._mesh["fsdp"]

    @property
    def mesh_of_experts(self) -> DeviceMesh | None:
        """Mesh of the ranks over which the weights of the same experts are sharded; None if experts are not divided, or
        each rank has different ones."""
        if self.sizes["ep"] == 1 or (group := self.group("edp")) is None:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, self.device.type)

    def aside(self) -> ProcessGroups:
        """Returns a copy with a separate group of all ranks, for a thread that exchanges messages while the run
        continues."""
        other = copy(self)
        if self.world > 1:
            from torch.distributed import new_group

            other._everyone = new_group(backend="gloo")
        return other

    def gather(self, value: Any) -> list[Any]:
        """Returns the `value` of every rank, in rank order; values are plain JSON. A call of all ranks."""
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
        """Returns the numbers `mine` of every rank, in rank order, or of the ranks that share `axis`; all give equally
        many. Faster than `gather`."""
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
        """Returns `by([value of each rank])`, equal on all ranks: `agree(asked, any)`, `agree(due, first)`."""
        return by(self.gather(value))

    def mine(self, atoms: int) -> range:
        """Returns the indices of the microbatches that this rank computes, of `atoms` in a step. A replica has
        consecutive ones; within it the ranks of `fsdp` alternate, so that each round of theirs, and a replica's sum, is
        a subtree of the sum (`parallel/sums.py`)."""
        part = atoms // self.sizes["replicate"]
        first = self.at["replicate"] * part
        return range(first + self.at["fsdp"], first + part, self.layout.fsdp)

    def in_order(self, mine: Tensor) -> Tensor:
        """Returns the numbers of all microbatches of a step, (atoms,) in order of their index; `mine` (k,) are this
        rank's."""
        group = self.group("dp")
        if group is None:
            return mine
        from torch.distributed import all_gather

        found = [torch.empty_like(mine) for _ in range(self.layout.dp)]
        all_gather(found, mine, group=group)
        return torch.stack(found).view(-1, self.layout.fsdp, len(mine)).transpose(1, 2).flatten()

    def alike(self, what: str, value: Any) -> None:
        """Raises RequestError, on all ranks, unless `value` is equal on all; the message names the rank that differs
        and `what` differs."""
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
    """Returns the value of rank 0; a rule for `ProcessGroups.agree`."""
    return values[0]


ALONE = ProcessGroups.alone()
