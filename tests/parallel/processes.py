"""Ranks as processes with gloo between them, for what threads cannot do: sending from one to another."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups


def as_processes(layout: str, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Returns, by rank, the result of `work(groups, *given)`, a function of a module, in a process for each rank."""
    ranks = Layout.of(layout).ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        calls = [pool.apply_async(_one, (rank, layout, port, work, given)) for rank in range(ranks)]
        return [call.get(timeout=300) for call in calls]


def _one(rank: int, layout: str, port: int, work: Callable[..., Any], given: Any) -> Any:
    torch.set_num_threads(1)
    shape = Layout.of(layout)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=shape.ranks)
    try:
        return work(ProcessGroups(rank, shape), *given)
    finally:
        dist.destroy_process_group()
