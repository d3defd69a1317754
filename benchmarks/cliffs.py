"""Training steps with each part, optimizer and objective, and those that cost over twice what their FLOPs explain.

A row is one step of llama@1m with one change, on 4 texts of 64 characters: forward, backward, clipping, update, as a
run takes it, eager, with one thread, in turn with a step of the unchanged model. Figures are the least processor time
of the rounds, as other programs on the machine only add. `fp32` is the step's time divided by that of the unchanged
model, and by the ratio of their FLOPs; `bf16` is the time in bf16 divided by that in fp32, and by this ratio of the
unchanged model. An entry above 2 is a cliff. The processor itself is measured, and older ones that torch can play on
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.naming.changes import words
from glassformer.training.loop import begin, one_step
from glassformer.training.optimizers import OptimizerConfig
from glassformer.training.request import prepare_run
from glassformer.training.state import Training

ROOT = Path(__file__).resolve().parents[1]
BASE = "llama@1m"
RECIPE: dict[str, Any] = {"tokens": 1_000_000, "batch_size": 4, "context": 64, "device": "cpu", "compile": False,
                          "threads": 1}  # fmt: skip
DTYPES = ("float32", "bfloat16")
AXES = ("mixer", "position", "visibility", "ffn", "norm", "residual", "reparam", "head", "model")
VALUES = {"window": "16", "chunked": "16", "bigbird": "16", "dilated": "16:2", "longformer": "16:2", "linformer": "16",
          "xl_memory": "64", "performer": "64", "mup": "32"}  # fmt: skip
"""Values of words whose usual one is longer than the texts."""
OBJECTIVES = {"masked": f"{BASE}+bidirectional", "prefix": f"{BASE}+prefix", "infill": BASE, "span": "t5@1m"}
"""Objectives of plain text, each with a model that it trains."""
PLAYED = {
    "this processor": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Environments of the processors that a process can play."""
CLIFF = 2.0
"""Ratio above which a row is a cliff."""


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns expression and recipe of each row, by name; the first is the unchanged model."""
    found: dict[str, tuple[str, dict[str, Any]]] = {BASE: (BASE, {})}
    known = words()
    for axis in AXES:
        for word in known[axis]:
            value = VALUES.get(word.name, word.example if word.read is not None and not word.optional else "")
            found[f"{axis} {word.name}"] = (f"{BASE}+{word.name}" + (f":{value}" if value else ""), {})
    for kind in OptimizerConfig.choices():
        found[f"optimizer {kind}"] = (BASE, {"optimizer": kind})
    for kind, expression in OBJECTIVES.items():
        found[f"objective {kind}"] = (expression, {"objective": kind})
    return found


def step_of(expression: str, recipe: dict[str, Any], dtype: str, text: Path) -> tuple[Callable[[], None], float]:
    """Returns a function that takes one step, and the FLOPs of the model for a token. Raises RequestError for a model
    that cannot be trained so."""
    request = prepare_run(preset(expression), str(text), {**RECIPE, **recipe, "dtype": dtype}, tokenizer="char")
    machine.apply(request.how)
    run = Training(request)
    begin(run, request, ())
    return lambda: one_step(run), request.config.flops(RECIPE["context"])


def measure(rounds: int, quiet: bool) -> dict[str, Any]:
    """Returns milliseconds of processor time and FLOPs of each row on the processor of this process."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(
            "".join(f"line {i} of a text with {i * i} and {i % 7}\n" for i in range(4000)), encoding="utf-8"
        )
        unchanged = {dtype: step_of(BASE, {}, dtype, text)[0] for dtype in DTYPES}
        for name, (expression, recipe) in rows().items():
            row: dict[str, Any] = {"expression": expression}
            for dtype in DTYPES:
                try:
                    step, row["flops"] = step_of(expression, recipe, dtype, text)
                    turns = [(milliseconds(unchanged[dtype]), milliseconds(step)) for _ in range(rounds + 1)]
                    row[f"unchanged {dtype}"], row[dtype] = map(min, zip(*turns[1:], strict=True))
                except RequestError as problem:
                    row["refused"] = str(problem)
                    break
            found[name] = row
            if not quiet:
                print(name, row, file=sys.stderr, flush=True)
    return found


def milliseconds(step: Callable[[], None]) -> float:
    """Takes a step; returns its processor time in milliseconds."""
    began = time.process_time()
    step()
    return 1000 * (time.process_time() - began)


def ratios(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the ratios of time to what is expected, in fp32 and in bf16, of each measured row."""
    made = {}
    for name, row in found.items():
        if "refused" not in row:
            single, half = (row[dtype] / row[f"unchanged {dtype}"] for dtype in DTYPES)
            made[name] = single * found[BASE]["flops"] / row["flops"], half / single
    return made


def run(rounds: int = 5, quiet: bool = False) -> dict[str, Any]:
    """Measures all rows on each processor that this one can play; returns them with a table."""
    own = torch.backends.cpu.get_cpu_capability()
    found = {}
    for label, environment in PLAYED.items():
        if environment.get("ATEN_CPU_CAPABILITY", "").upper() == own:
            continue
        call = [sys.executable, "-m", "benchmarks.cliffs", str(rounds), str(int(quiet))]
        done = subprocess.run(call, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        found[f"{label} ({own})" if not environment else label] = json.loads(done.stdout)
    return {"machine": machine.machine(), "rounds": rounds, "rows": found, "table": table(found)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Returns the table of all rows, cliffs in bold, and the rows that cannot be trained so."""
    head = [f"| {label}: ms | fp32 | bf16 " for label in found]
    lines = ["| change " + "".join(head) + "|", "|---" + "|--:|--:|--:" * len(found) + "|"]
    compared = {label: ratios(one) for label, one in found.items()}
    first = next(iter(found.values()))
    for name in first:
        if all(name in one for one in compared.values()):
            cells = [
                f"{found[label][name]['float32']:.1f} | {_bold(one[name][0])} | {_bold(one[name][1])}"
                for label, one in compared.items()
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    left = [f"- {name}: {row['refused']}" for name, row in first.items() if "refused" in row]
    return "\n".join([*lines, "", "Not measured:", "", *left] if left else lines)


def _bold(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio > CLIFF else f"{ratio:.2f}"


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2] == "1")))
