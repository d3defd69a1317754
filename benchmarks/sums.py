"""Sums over processes whose order is fixed, and the engine's own in turn.

Gradients are added up as a binary tree in the order of the ranks, so that their bits do not depend on how many
processes share the sum: an all-to-all of shards, which each rank then adds up. `reduce_scatter_tensor` and `all_reduce`
of torch.distributed (gloo) add up in another order. `fsdp` is what FSDP2 does with the gradients of a layer in
a backward, `replicas` what copies of the weights do after it; `step` is a training step of a llama under `fsdp`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

from benchmarks import printed
from glassformer import machine

SIZES = (1 << 18, 1 << 22, 1 << 24)
"""Values in fp32: 1, 17 and 67 MB."""
QUICK = (1 << 12,)
MODEL, QUICK_MODEL = "llama@10m", "llama@1m"
WORLDS = (2, 4)
ENGINE = "torch.distributed"

# Run in each process of a job: argv = model, rank, world, rounds, folder, threads, sizes. Rank 0 prints seconds.
PROBE = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
model, rank, world, rounds, folder, threads = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6])
import torch
import torch.distributed as dist
torch.set_num_threads(threads)
import glassformer as gf
from glassformer.parallel.apply import TreeReduceScatter, add_up, spread, units
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.layout import Layout
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
group, took = dist.group.WORLD, {}

def timed(name, work):
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    took.setdefault(name, []).append(time.perf_counter() - start)

for size in map(int, sys.argv[7].split(",")):
    values, shard = torch.randn(size), torch.empty(size // world)
    pieces = [torch.randn(size // 8) for _ in range(8)]
    for _ in range(rounds + 1):
        timed(f"fsdp {size} tree", lambda: TreeReduceScatter()(shard, values, group, None))
        timed(f"fsdp {size} engine", lambda: dist.reduce_scatter_tensor(shard, values, group=group))
        timed(f"replicas {size} tree", lambda: add_up(pieces, group))
        timed(f"replicas {size} engine", lambda: [dist.all_reduce(one, group=group) for one in pieces])

class Engine(TreeReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

models = {}
for name, sums in (("tree", TreeReduceScatter), ("engine", Engine)):
    models[name] = spread(gf.preset(model).build(seed=0), ProcessGroups(rank, Layout.of(f"fsdp={world}")))
    for unit in units(models[name]):
        unit.set_custom_reduce_scatter(sums())
tokens = torch.randint(256, (4, 257))
def step(model):
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    model.zero_grad()
for _ in range(rounds + 1):
    for name, one in models.items():
        timed(f"step {name}", lambda: step(one))
if rank == 0:
    print(json.dumps({name: values[1:] for name, values in took.items()}))  # the first wakes everything up
"""


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    rows = [row for world in WORLDS for row in measured(world, rounds, threads or 1, quiet, quick)]
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


def measured(world: int, rounds: int, threads: int, quiet: bool, quick: bool) -> list[dict[str, Any]]:
    """Medians of one job, in seconds."""
    sizes, model = (QUICK, QUICK_MODEL) if quick else (SIZES, MODEL)
    with tempfile.TemporaryDirectory() as folder:
        told = printed(PROBE, model, world, rounds, folder, threads, ",".join(map(str, sizes)))
    found = {name: statistics.median(values) for name, values in json.loads(told).items()}
    sums = [(what, size) for what in ("fsdp", "replicas") for size in sizes]
    named = {f"{what} {size}": {"what": what, "values": size} for what, size in sums}
    named["step"] = {"what": f"step of {model}", "values": None}
    rows = [
        {"processes": world, **row, "tree": found[f"{name} tree"], "engine": found[f"{name} engine"]}
        for name, row in named.items()
    ]
    if not quiet:
        print(table(rows), file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| processes | sum | MB | tree | {ENGINE} | ratio |", "|--:|---|--:|--:|--:|--:|"]
    for row in rows:
        size = f"{row['values'] * 4 / 1e6:.0f}" if row["values"] else ""
        times = f"{row['tree'] * 1e3:.1f} ms | {row['engine'] * 1e3:.1f} ms"
        ratio = row["tree"] / row["engine"]
        lines.append(f"| {row['processes']} | {row['what']} | {size} | {times} | **{ratio:.2f}** |")
    return "\n".join(lines)
