"""Saving and loading 1 GB: ours and torch.distributed.checkpoint in turn.

A llama of 83M parameters in fp32 with both moments of AdamW, in one process and spread by FSDP2 over two (gloo). Both
sides write the same tensors to the same disk and flush them. We also hash the written files (SHA-256), compare the
hashes when loading, and check that the shards tile every tensor; torch.distributed.checkpoint does neither. Loading
fills a built model from files that are in the page cache. `copying` is the time for which `--async-save` holds up
training: a copy of all tensors.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

from benchmarks import printed
from glassformer import machine

MODEL = "llama@45m"
QUICK = "llama@1m"
PEER = "torch.distributed.checkpoint"

# Run in each process of a job: argv = model, rank, world, rounds, folder, threads. Rank 0 prints seconds.
PROBE = """
import json, shutil, sys, time, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
model, rank, world, rounds, folder, threads = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]), int(sys.argv[6])
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
torch.set_num_threads(threads)
import glassformer as gf
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.layout import Layout
from glassformer.training import checkpoint
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
groups = ProcessGroups(rank, Layout.of(f"fsdp={world}")) if world > 1 else ProcessGroups.alone()
model = gf.preset(model).build(seed=0)
if world > 1:
    from torch.distributed.fsdp import fully_shard
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=groups.mesh)
optimizer = torch.optim.AdamW(model.parameters())
for weight in model.parameters():
    moments = {name: torch.rand_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
def theirs():
    moments = {f"{part}.{name}": value for name, weight in model.named_parameters()
               for part, value in optimizer.state[weight].items()}
    return {"model": model.state_dict(), "optimizer": moments}
def ours_save():
    checkpoint.save(folder / "ours", number, model, optimizer, {}, None, groups)
def ours_load():
    found = checkpoint.latest(folder / "ours")
    checkpoint.load_model(found, model, groups)
    checkpoint.load_optimizer(found, model, optimizer, groups)
def peer_save():
    dcp.save(theirs(), checkpoint_id=folder / f"peer{number}", no_dist=world == 1)
def peer_load():
    dcp.load(theirs(), checkpoint_id=folder / f"peer{number}", no_dist=world == 1)
def copying():
    checkpoint.Snapshot.of(number, model, optimizer, {}, None, groups).copied(room)
room, took = {}, {}
for number in range(rounds + 1):
    groups.gather(None)
    for work in (ours_save, peer_save, ours_load, peer_load, copying):
        start = time.perf_counter()
        work()
        groups.gather(None)
        if number:  # the first round wakes everything up
            took.setdefault(work.__name__, []).append(time.perf_counter() - start)
    if rank == 0:
        shutil.rmtree(folder / f"peer{number}")
if rank == 0:
    size = sum(file.stat().st_size for file in checkpoint.latest(folder / "ours").glob("*.safetensors"))
    print(json.dumps({"bytes": size, **took}))
"""


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    rows = [measured(QUICK if quick else MODEL, world, rounds, threads or 1, quiet) for world in (1, 2)]
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


def measured(model: str, world: int, rounds: int, threads: int, quiet: bool) -> dict[str, Any]:
    """Medians of one job, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = json.loads(printed(PROBE, model, world, rounds, folder, threads))
    medians = {name: statistics.median(values) for name, values in found.items() if name != "bytes"}
    if not quiet:
        print(f"{world} processes: {medians}", file=sys.stderr)
    return {"processes": world, "bytes": found["bytes"], "seconds": found, **medians}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| processes | what | glassformer | {PEER} | ratio |",
        "|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        for what in ("save", "load"):
            ours, peer = row[f"ours_{what}"], row[f"peer_{what}"]
            size = f"{what}, {row['bytes'] / 1e9:.2f} GB"
            lines.append(f"| {row['processes']} | {size} | {ours:.2f} s | {peer:.2f} s | **{ours / peer:.2f}** |")
        lines.append(f"| {row['processes']} | copying | {row['copying']:.2f} s | | |")
    return "\n".join(lines)
