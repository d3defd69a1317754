"""Ranks as threads of one process, with collectives that are copies: eight ranks in milliseconds."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parts.core.reduce import Reduce, reducing

T = TypeVar("T")


def as_threads(layout: str, work: Callable[[ProcessGroups], T], reduce: Reduce | None = None) -> list[T]:
    """Returns the results of `work` on each rank of the layout, by rank; on each, parts sum counts by `reduce`. Raises
    the error of the first rank that failed."""
    shape = Layout.of(layout)
    if shape.ranks == 1:
        return [work(ProcessGroups.alone())]
    found: list[Any] = [None] * shape.ranks
    failed: list[BaseException] = []
    store = dist.HashStore()

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=shape.ranks, store=store)
            with nullcontext() if reduce is None else reducing(reduce):
                found[rank] = work(ProcessGroups(rank, shape))
        except BaseException as error:
            failed.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    # With nnsight imported, `backward` parses its caller's source, which CPython 3.11 cannot do in two threads at once.
    plain = patch.object(torch.Tensor, "backward", inspect.unwrap(torch.Tensor.backward))
    try:
        ranks = [threading.Thread(target=one, args=(rank,)) for rank in range(shape.ranks)]
        with plain:
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if failed:
        raise failed[0]
    return found
