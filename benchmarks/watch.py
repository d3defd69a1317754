"""The cost of watching a run: the calls of the watch inside real training steps.

Training steps of llama@10m and gpt2@10m (16 x 256 tokens, bf16, compiled regions, fused AdamW) call the watch as
`--watch` does: norms of weights and gradients at every step, activations and updates at every 25th, spectra of the
weights at every 200th. Each kind of call is timed separately within its step; the cost of watching is the sum of the
calls over 200 steps, against the time of 200 steps without. Medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.train import BATCH, CONTEXT, FAMILIES, batch, config
from glassformer import machine
from glassformer.dynamics.records import Records
from glassformer.dynamics.watch import SPECTRA, Moment, Watch
from glassformer.parts.region import compiled_regions
from glassformer.training import AdamWConfig
from glassformer.training.gradients import clip, gradient_norm
from glassformer.training.recipe import WATCH

KINDS = {"norms": WATCH + 1, "look": 2 * WATCH, "spectra": SPECTRA * WATCH}
"""Kind of observation -> number of a step at which the watch makes it."""


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    how = machine.settings("cpu", "bfloat16", threads=threads, compile=True)
    machine.apply(how)
    result: dict[str, Any] = {"machine": machine.machine(), "rounds": rounds, "threads": how.threads, "families": {}}
    lines = [
        f"{how.threads} threads, medians of {rounds} rounds; {BATCH} x {CONTEXT} tokens a step.",
        "",
        f"| model | step | norms, each step | look, each {WATCH}th | spectra, each {SPECTRA * WATCH}th | cost |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for family in FAMILIES:
        took = measure(family, how, rounds, quiet)
        step = statistics.median(took["step"])
        norms, look, spectra = (statistics.median(took[kind]) for kind in KINDS)
        share = (norms + (look - norms) / WATCH + (spectra - look) / (SPECTRA * WATCH)) / step
        result["families"][family] = {"seconds": took, "share": share}
        cells = [f"{1000 * value:.1f} ms" for value in (step, norms, look, spectra)]
        lines.append(f"| {family}@10m | {' | '.join(cells)} | **{100 * share:.2f} %** |")
    result["table"] = "\n".join(lines)
    return result


def measure(family: str, how: machine.Settings, rounds: int, quiet: bool) -> dict[str, list[float]]:
    """Seconds of a step without the watch, and of the watch's calls of each kind."""
    model = config(family).build(seed=0)
    optimizer = AdamWConfig().create(model, 1e-3, 0.1)
    inputs, targets = batch()
    took: dict[str, list[float]] = {name: [] for name in ("step", *KINDS)}
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(model, WATCH, Records.open(Path(folder), 0), how.autocast)
        for number in range(rounds + 1):
            for kind, step in KINDS.items():
                began = time.perf_counter()
                with compiled_regions(how.compile):
                    with how.autocast():
                        loss = model.loss(inputs, targets)
                    loss.backward()
                norm = gradient_norm(model.parameters())
                moment = Moment(step, 1.0, 1.0, 1e-3, inputs, targets, model, optimizer)
                passed = time.perf_counter()
                watch.before_update(moment)
                looked = time.perf_counter()
                clip(model.parameters(), 1.0, norm)
                optimizer.step()
                updated = time.perf_counter()
                watch.after_update(moment)
                seen = time.perf_counter()
                optimizer.zero_grad(set_to_none=True)
                ended = time.perf_counter()
                if number:  # the first round compiles
                    took["step"].append(passed - began + updated - looked + ended - seen)
                    took[kind].append(looked - passed + seen - updated)
            if not quiet:
                print(f"{family}: round {number} of {rounds}", file=sys.stderr, flush=True)
        assert watch.records is not None
        watch.records.close()
    return took
