"""Largest resident size of processes that train on a CPU, measured and planned.

>>> python -m experiments.plan.process                                # measures each model not in process.csv, a table
>>> python -m experiments.plan.process MODEL BATCH CONTEXT DTYPE      # bytes of this process, of one model
"""

from __future__ import annotations

import csv
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step

import glassformer as gf
from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.planning.memory import FRAGMENTS, PROCESS
from glassformer.training import Recipe, loop  # noqa: F401  # the modules that training loads
from glassformer.training.gradients import clip, gradient_norm

STEPS = 3
VOCABULARY = 257
"""Tokens, unless a model's name says how many."""
ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).parent / "process.csv"
"""Model, batch, context, dtype, MB measured."""

EXPLAINED = f"""Largest resident size of a process that trains on a CPU, in MB, against
`gf.plan(config, train=True, ...).memory["needed"]`: Linux, glibc 2.36, torch 2.13, eager, AdamW, {VOCABULARY} tokens
unless the name says how many, after two to five steps.
`python -m experiments.plan.process` measures more of them and other kinds.
The first six rows are of `gf.train`; the others are of copies of a process that has all modules, with 62 MB of mapped
files added, which a copy lacks.

```
needed    base + weights + states of the optimizer + (1 + holes) passing
base      {PROCESS / 1e6:,.0f} MB: Python, torch, training and what its libraries keep for products
passing   most that a step takes and gives back at any moment: activations, what layers and loss compute with, gradients
holes     {FRAGMENTS:g} of it
```

Holes are the allocator's. torch asks for blocks at multiples of 64 bytes, for which glibc takes 96 bytes more and gives
the ends back. A small object in such an end leaves a hole too small for the next block of the same
size. A simulated heap takes 225 MB for the 208 MB of tensors of `llama@3m+gqa:2` (8 x 256, float32) if no end is ever
taken, and 333 MB if one in twenty is for good; the process took about 310. Blocks of more than 1 MB that are mapped on
their own leave no holes, and steps take 12 to 17 % longer. Copies that the libraries make for products of large
matrices are in no plan: five processes of the model with 32,000 tokens took 672, 690, 691, 742 and 755 MB, up to two
chunks of logits (66 MB each) more than planned. Compiled steps were not measured."""
_FORKS = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Process:
    """A process that trains a model, of `VOCABULARY` tokens unless its name says how many, and the MB that it held."""

    model: str
    batch: int
    context: int
    dtype: str
    measured: float | None = None

    @property
    def config(self) -> ModelConfig:
        config = gf.preset(self.model)
        size = config.vocab_size if "vocab_size" in self.model else VOCABULARY
        return config.replace(vocab_size=size, context=self.context)

    @property
    def planned(self) -> float:
        """MB of the process by its plan."""
        plan = gf.plan(self.config, train=True, batch=self.batch, context=self.context, dtype=self.dtype)
        return plan.memory["needed"] / 1e6


SAMPLES = (
    Process("llama@1m", 8, 128, "float32"), Process("llama@1m", 16, 128, "bfloat16"),
    Process("gpt2@1m", 16, 128, "float32"), Process("gpt2@10m", 2, 128, "float32"),
    Process("gpt2@10m", 4, 128, "bfloat16"), Process("llama@3m+gqa:2", 8, 256, "float32"),
    Process("llama@3m+gqa:2", 8, 128, "bfloat16"), Process("qwen3-0.6b@3m", 4, 256, "float32"),
    Process("llama@10m+moe:8:2", 2, 128, "float32"), Process("llama@1m+moe:8:2", 4, 128, "bfloat16"),
    Process("mamba@3m", 2, 64, "float32"), Process("deepseek-v2-lite@3m", 2, 128, "float32"),
    Process("llama@3m+linear_attention", 4, 128, "float32"), Process("llama@3m+linear_attention", 4, 128, "bfloat16"),
    Process("bert@3m", 8, 128, "float32"), Process("t5-small@3m", 4, 128, "float32"),
    Process("llama@1m+vocab_size=32000", 4, 128, "float32"), Process("gpt2@1m+vocab_size=50257", 4, 128, "bfloat16"),
    Process("llama@3m+layers=24+d_model=96+heads=4", 4, 128, "float32"),
    Process("llama@10m+layers=2+d_model=512+heads=8", 4, 128, "bfloat16"), Process("llama@30m", 1, 128, "float32"),
    Process("gpt2@60m", 1, 64, "float32"), Process("qwen3-0.6b@30m", 1, 64, "bfloat16"),
)  # fmt: skip


TRAINED = (
    Process("llama@1m", 8, 128, "float32", 452), Process("gpt2@1m", 16, 128, "float32", 508),
    Process("gpt2@3m", 8, 128, "float32", 512), Process("llama@1m", 32, 256, "float32", 1009),
    Process("llama@3m+gqa:2", 20, 256, "float32", 1074), Process("llama@1m+moe:8:2", 8, 160, "float32", 501),
    Process("llama@3m+gqa:2", 8, 128, "float32", 515), Process("llama@3m+gqa:2", 8, 256, "float32", 680),
    Process("llama@3m+gqa:2", 8, 128, "bfloat16", 490), Process("gpt2@10m", 2, 128, "float32", 575),
    Process("llama@10m+moe:8:2", 2, 128, "float32", 965), Process("llama@1m+vocab_size=32000", 4, 128, "float32", 672),
)  # fmt: skip
"""Processes of `gf.train`, the first six, and copies of one in the loop of training, with a text and a byte tokenizer,
after two to five steps."""


def held(one: Process) -> int:
    """Returns the bytes that this process has held at most, after a backward pass without a step, which training
    starts with, and `STEPS` steps."""
    config = one.config
    how = machine.settings("cpu", one.dtype, compile=False)
    machine.apply(how)
    model = config.build(seed=0).train()
    optimizer = Recipe.of(tokens=1).optimizer.create(model, 1e-3, 0.1)
    tokens = torch.randint(config.vocab_size, (one.batch, one.context))
    given: dict[str, Any] = {} if config.encoder is None else {"source": tokens}
    for step in range(STEPS + 1):
        with how.autocast():
            loss = model.loss(tokens, tokens, **given)
        loss.backward()
        if step:
            clip(model.parameters(), 1.0, gradient_norm(model.parameters()))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return machine.peak_memory("cpu")


def fresh(one: Process) -> int:
    """Returns the bytes that a new process holds."""
    command = [sys.executable, "-m", "experiments.plan.process"]
    arguments = [one.model, f"{one.batch}", f"{one.context}", one.dtype]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.split()[-1])


def forked(one: Process) -> int:
    """Returns the bytes that a copy of this process holds, which has all modules and no threads yet. They are fewer
    than those of a new process: pages of files that this one has mapped are missing in a copy."""
    ours, theirs = _FORKS.Pipe()
    child = _FORKS.Process(target=lambda: theirs.send(held(one)))
    child.start()
    theirs.close()
    found: int = ours.recv()
    child.join()
    return found


def recorded() -> Iterator[Process]:
    """Yields the processes that this file's command has measured."""
    with MEASURED.open(encoding="utf-8", newline="") as rows:
        for model, batch, context, dtype, measured in csv.reader(rows):
            yield Process(model, int(batch), int(context), dtype, float(measured))


def section() -> str:
    """Returns the part of docs/planning-memory.md on processes: measured, planned, and how far these are apart."""
    rows = [*TRAINED, *recorded()]
    errors = [one.planned / one.measured - 1 for one in rows if one.measured]
    near = sum(abs(error) <= 0.1 for error in errors)
    return f"""{EXPLAINED}
Within 10 %: {near} of {len(errors)}; furthest below {min(errors):+.1%}, above {max(errors):+.1%}.

{table(rows)}"""


def table(rows: Sequence[Process]) -> str:
    """Returns the processes with what was measured and what is planned."""
    lines = ["| model | batch | dtype | measured | planned | error |", "|---|---|---|---:|---:|---:|"]
    for one in rows:
        assert one.measured is not None
        lines.append(
            f"| `{one.model}` | {one.batch} x {one.context} | {one.dtype} "
            f"| {one.measured:,.0f} | {one.planned:,.0f} | {one.planned / one.measured - 1:+.1%} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments:
        model, batch, context, dtype = arguments
        print(held(Process(model, int(batch), int(context), dtype)))
        return
    done = {(one.model, one.batch, one.context, one.dtype) for one in recorded()} if MEASURED.exists() else set()
    files = fresh(SAMPLES[0]) - forked(SAMPLES[0])
    with MEASURED.open("a", encoding="utf-8", newline="") as file:
        for one in SAMPLES:
            what = (one.model, one.batch, one.context, one.dtype)
            if what not in done:
                csv.writer(file, lineterminator="\n").writerow((*what, round((files + forked(one)) / 1e6)))
                file.flush()
    print(section())


if __name__ == "__main__":
    main(sys.argv[1:])
