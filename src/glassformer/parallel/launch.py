"""Start of a run's processes, or entry of a process into a run that torchrun or SLURM has started.

--processes 2          this command again for each rank, on this machine
torchrun ...           RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
srun ...               SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; MASTER_ADDR and MASTER_PORT if they are set,
                       else the first machine of the step and a port derived from the job's number
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any

from glassformer.errors import RequestError, WorkError, error_of, plain_error, shown
from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.watchdog import LOST

STARTED = ("RANK", "WORLD_SIZE")
LAUNCHED = "GLASSFORMER_LAUNCHED"
"""Environment variable that `spawn` sets in the processes it starts."""
LISTENING = "GLASSFORMER_LISTENING"
"""Environment variable of rank 0 of a run started by `spawn`: file descriptor of a socket that listens at MASTER_PORT.
The parent opens it, so that no other process can take the port while rank 0 imports torch."""
PREPARING = timedelta(days=7)
"""Longest time that the other ranks wait for rank 0 to prepare the text."""
MEETING = timedelta(minutes=5)
"""Longest time that the processes of a run wait for each other at its start."""
PATIENCE = timedelta(minutes=30)
"""Timeout of a collective operation."""
READY = "glassformer/ready"
"""Key of the store whose value is empty once rank 0 has prepared the run, or has the reason for its refusal."""
_TURNS = count()
"""Counter of the preparations of runs in this process; all ranks count alike."""
_RUNS = count()
"""Counter of the runs that this process has joined; all ranks count alike."""
QUIET_SECONDS = 0.5
"""Seconds to wait after a process has ended, because others may end for the same reason, before the reason is
determined."""


@dataclass(frozen=True)
class ProcessPlace:
    """Place of this process among the processes of a run: `rank` of `world`."""

    rank: int
    world: int
    local: int
    """Index among the processes on this machine."""
    machine: int
    """Number of processes on this machine."""


def joined(environment: Mapping[str, str] = os.environ) -> ProcessPlace | None:
    """Returns this process's place in a run that torchrun, srun or `spawn` started, from the environment; None for a
    process that runs by itself. Raises RequestError."""
    names = {"rank": "RANK", "world": "WORLD_SIZE", "local": "LOCAL_RANK", "machine": "LOCAL_WORLD_SIZE"}
    if "RANK" not in environment and int(_number(environment, "SLURM_NTASKS", "1")) > 1 and _in_step(environment):
        names = {"rank": "SLURM_PROCID", "world": "SLURM_NTASKS", "local": "SLURM_LOCALID", "machine": ""}
    elif "RANK" not in environment:
        return None
    rank, world = (int(_number(environment, names[name])) for name in ("rank", "world"))
    local = int(_number(environment, names["local"], str(rank)))
    machine = int(_number(environment, names["machine"], _of_machine(environment) or str(world)))
    if not 0 <= rank < world:
        raise RequestError(
            f"{names['rank']}={rank} must lie between 0 and {names['world']} - 1 = {world - 1}",
            code="range", field=names["rank"], value=rank,
        )  # fmt: skip
    return ProcessPlace(rank, world, local, machine)


def _of_machine(environment: Mapping[str, str]) -> str | None:
    """Returns the largest number of processes that a SLURM step has on one machine, as text: "8" for `8(x2),4`; None
    outside of a step."""
    told = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    return str(max(map(int, numbers))) if (numbers := re.findall(r"(\d+)(?:\(x\d+\))?", told)) else None


def _in_step(environment: Mapping[str, str]) -> bool:
    """Returns True if srun started this process; a batch script is not counted, being one process whatever the job
    has."""
    return "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "") not in ("", "batch", "4294967291")


def _number(environment: Mapping[str, str], name: str, usual: str | None = None) -> str:
    value = environment.get(name) or usual
    if value is None or not value.isdecimal():
        raise RequestError(
            f"{name}={shown(value)} is not a number; start with torchrun, srun or --processes",
            code="type", field=name, value=value, expected="a whole number",
        )  # fmt: skip
    return value


def meet(place: ProcessPlace, environment: dict[str, str] | os._Environ[str] = os.environ) -> Any:
    """Returns a torch store that all processes of the run reach. Rank 0 waits for the others."""
    from torch import distributed as dist

    environment.setdefault("MASTER_ADDR", _first_machine(environment))
    if "MASTER_PORT" not in environment:
        job, step = (int(_number(environment, name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        environment["MASTER_PORT"] = str(20000 + (job + 97 * step) % 20000)
    if place.rank == 0 and (listening := environment.get(LISTENING)):
        address, port = environment["MASTER_ADDR"], int(_number(environment, "MASTER_PORT"))
        return dist.TCPStore(
            address, port, place.world, True, MEETING, master_listen_fd=int(listening), multi_tenant=True
        )  # fmt: skip
    where = f"env://?rank={place.rank}&world_size={place.world}"
    store, _, _ = next(dist.rendezvous(where, timeout=MEETING))
    return store


_met = cache(meet)


def _first_machine(environment: Mapping[str, str]) -> str:
    """Returns the first machine's name in SLURM's list of nodes, gpu003 for gpu[003-007,11],login1; 127.0.0.1 without
    SLURM."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "127.0.0.1"
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return nodes if first is None else first[1] + (first[2] or "")


def spawn(arguments: Sequence[str], processes: int, again: Sequence[str] = ("--resume",)) -> None:
    """Runs `python -m glassformer ARGUMENTS` as each rank of a run on this machine, and waits. Rank 0 has the terminal.

    If a process dies the others are stopped, and WorkError names it and the command that resumes, ARGUMENTS and
    `again`. Ctrl-C and SIGTERM reach all of them, once. If rank 0 refuses the request itself, having printed the
    reason, this process exits with its status."""
    command = [sys.executable, "-m", "glassformer", *arguments]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // processes))
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=processes) as listening,
    ):
        port, listens = listening.getsockname()[1], listening.fileno()
        ranks: list[subprocess.Popen[bytes]] = []
        files: list[IO[bytes]] = []
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            environment = {
                **os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads, LAUNCHED: "1",
            }  # fmt: skip
            own: dict[str, Any] = {}
            files.append((Path(folder) / str(rank)).open("wb"))
            if rank == 0:
                environment[LISTENING], own["pass_fds"] = str(listens), (listens,)
            else:
                own |= {"stdout": subprocess.DEVNULL, "stderr": files[rank]}
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True, **own))
        listening.close()  # only rank 0 may answer at this port
        try:
            statuses = _watch_over(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for file in files:
                file.close()
        if (dead := _first_to_die(statuses)) is None:
            return
        status = statuses[dead] or 0
        if dead == 0 and status > 0:  # it has printed the reason
            raise SystemExit(1 if status == LOST else status)
        said = (Path(folder) / str(dead)).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    why = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    last = f": {said[-1][:300]}" if said and (status > 0 or -status == signal.SIGABRT) else ""
    words = ["glassformer", *arguments, *(word for word in again if word not in arguments)]
    if status == LOST and said:  # another rank has named rank 0, which does not respond
        raise WorkError(
            f"{said[-1].removeprefix('glassformer: ').split(';')[0][:300]}; resume with: {shlex.join(words)}",
            code="process",
        )  # fmt: skip
    raise WorkError(
        f"rank {dead} on {socket.gethostname()} {why}{last}; resume with: {shlex.join(words)}", code="process"
    )


def _watch_over(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Waits until all processes have ended well, or until one has failed and the others had time to report; returns
    their exit statuses, None for a process that still runs. Passes SIGINT and SIGTERM to all."""
    asked = 0

    def pass_on(number: int, frame: Any) -> None:
        nonlocal asked
        asked += 1
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while None in (statuses := [process.poll() for process in ranks]):
            if any(statuses):
                time.sleep(QUIET_SECONDS if not asked else 10 * QUIET_SECONDS)
                return [process.poll() for process in ranks]
            time.sleep(0.05)
        return statuses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_to_die(statuses: Sequence[int | None]) -> int | None:
    """Returns the rank to blame: one that was killed, else one that failed by itself, else one that ended because it
    lost another; the lowest of several, because rank 0 reports the reason. None if no process failed."""
    killed = [rank for rank, status in enumerate(statuses) if status is not None and status < 0]
    failed = [rank for rank, status in enumerate(statuses) if status is not None and status > 0]
    return next(iter(killed + [rank for rank in failed if statuses[rank] != LOST] + failed), None)


@contextmanager
def leader_first(place: ProcessPlace | None) -> Iterator[Any]:
    """Runs the block, the preparation of a run, on rank 0 first and then on the others, which wait without a process
    group, because a group would time out. If rank 0 raises, all do. Yields the ranks' store, None for a single
    process."""
    store = None if place is None or place.world == 1 else _met(place)
    turn = next(_TURNS)
    ready = f"{READY}/{turn}"
    if store is None or place is None:
        yield None
        return
    if place.rank:
        store.wait([ready], PREPARING)
        if refused := store.get(ready).decode():
            raise error_of(json.loads(refused))
        yield store
        return
    try:
        yield store
    except Exception as error:  # the others wait for a result, whatever the error
        store.set(ready, json.dumps(plain_error(error)))
        raise
    store.set(ready, "")


def enlist(place: ProcessPlace | None, store: Any, layout: Layout, device: str) -> ProcessGroups:
    """Returns this process's groups in a layout, among the ranks that have met in `store`; for a single process, groups
    of one."""
    if place is None or store is None:
        return ProcessGroups.alone()
    from torch import distributed as dist

    if not dist.is_initialized():
        _begin(place, store, device)
    return ProcessGroups(
        place.rank, layout, device.split(":")[0], dist.PrefixStore(f"glassformer/groups/{next(_RUNS)}", store)
    )


def _begin(place: ProcessPlace, store: Any, device: str) -> None:
    from torch import distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=PATIENCE)


def one_voice() -> bool:
    """Returns True in the one process of a run that prints and writes shared output: rank 0, or the only process."""
    place = joined()
    return place is None or place.rank == 0
