"""A training step of llama@10m and gpt2@10m against Hugging Face transformers.

All sides train models of one shape (6 layers, width 384, 6 heads, 65 characters, 16 x 256 tokens, no dropout) in one
process, step by step in turn, with fused AdamW and gradients clipped at 1. Reported are medians, ratios of medians,
the share of the machine's bf16 matmul peak, and the memory each side adds in a separate process. Ratios are of our side
as the defaults choose it: compiled, in bf16 if its matmuls are faster than fp32 here.

The same rounds also time a user's loop over `model.loss`, plain and in `gf.fast_training()`, each in a separate process
because the settings are those of a process; for gpt2 the model of nanoGPT (benchmarks/nanogpt.py) under
`torch.compile`, as its `train.py` runs it; and only the matmuls of the step, a lower bound of its time.
Which dtype is the faster one depends on the processor: train.md and train_zen4.md are two of them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import glassformer as gf
from benchmarks.nanogpt import GPT
from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.naming import preset
from glassformer.parts.linear import Linear
from glassformer.parts.region import compiled_regions
from glassformer.training import AdamWConfig
from glassformer.training.gradients import clip, gradient_norm

BATCH, CONTEXT, VOCAB = 16, 256, 65
ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("llama", "gpt2")

RATE, DECAY = 1e-3, 0.1
"""Learning rate and weight decay of AdamW."""

Step = Callable[[torch.Tensor, torch.Tensor], float]
LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def config(family: str) -> ModelConfig:
    return preset(f"{family}@10m+vocab_size={VOCAB}+context={CONTEXT}")


def trained(config: ModelConfig, dtype: str, compile: bool) -> Step:
    """Returns a training step of our side, as in a run."""
    how = machine.settings("cpu", dtype, compile=compile)
    model = config.build(seed=0)
    optimizer = AdamWConfig().create(model, RATE, DECAY)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with compiled_regions(compile):
            with how.autocast():
                loss = model.loss(inputs, targets)
            loss.backward()
        clip(model.parameters(), 1.0, gradient_norm(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def loop(model: torch.nn.Module, how: machine.Settings, loss_of: LossOf) -> Step:
    """Returns the training step that a user of torch writes around a loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with how.autocast():
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def ours(family: str, dtype: str, compile: bool) -> Step:
    return trained(config(family), dtype, compile)


def transformers(family: str, dtype: str, attention: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {"vocab_size": VOCAB, "attn_implementation": attention, "use_cache": False}
    if family == "llama":
        model: Any = LlamaForCausalLM(
            LlamaConfig(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
                        max_position_embeddings=CONTEXT, **shared)
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=384, n_layer=6, n_head=6, n_positions=CONTEXT, resid_pdrop=0.0, embd_pdrop=0.0,
                       attn_pdrop=0.0, **shared)
        )  # fmt: skip

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())

    return loop(model, machine.settings("cpu", dtype, compile=False), loss)


FAST = ExitStack()
"""Holds `gf.fast_training()` open until the process ends."""


def own(family: str, fast: bool) -> Step:
    """Returns the training step that a user writes over `model.loss`, in the dtype that is faster here; if `fast`, in
    `gf.fast_training()` for the rest of the process."""
    how = FAST.enter_context(gf.fast_training()) if fast else machine.settings("cpu")
    model = config(family).build(seed=0)
    return loop(model, how, model.loss)


def nanogpt(dtype: str) -> Step:
    model = GPT(VOCAB, CONTEXT, n_layer=6, n_head=6, n_embd=384)
    return loop(model, machine.settings("cpu", dtype, compile=False), torch.compile(model))


OWN = {"own loop, plain": False, "own loop, fast_training": True}
"""Side -> True if it uses `gf.fast_training`. Settings are those of a process: each side runs in a separate one."""


class Worker:
    """A side in a separate process, step by step."""

    def __init__(self, family: str, side: str):
        call = [sys.executable, "-m", "benchmarks.train", family, side, "step by step"]
        self.process = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def sides(family: str) -> dict[str, Callable[[], Step]]:
    return {
        "glassformer bf16 compiled": lambda: ours(family, "bfloat16", True),
        "glassformer bf16 eager": lambda: ours(family, "bfloat16", False),
        "glassformer fp32 compiled": lambda: ours(family, "float32", True),
        "transformers bf16 sdpa": lambda: transformers(family, "bfloat16", "sdpa"),
        "transformers bf16 eager": lambda: transformers(family, "bfloat16", "eager"),
        "transformers fp32 sdpa": lambda: transformers(family, "float32", "sdpa"),
        "transformers fp32 eager": lambda: transformers(family, "float32", "eager"),
        **({"nanoGPT bf16 torch.compile": lambda: nanogpt("bfloat16")} if family == "gpt2" else {}),
        **({"nanoGPT fp32 torch.compile": lambda: nanogpt("float32")} if family == "gpt2" else {}),
    }


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def peak_flops(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Returns the median FLOP/s of a (4096, 384) x (384, 1536) matmul, a shape of the model, over `seconds`."""
    a, b = torch.randn(BATCH * CONTEXT, 384).to(dtype), torch.randn(1536, 384).to(dtype)
    took = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        took.append(time.perf_counter() - start)
    return 2 * BATCH * CONTEXT * 384 * 1536 / statistics.median(took)


def products(size: ModelConfig, batch: int, dtype: torch.dtype) -> Callable[[], float]:
    """Returns a function that times the matmuls in `dtype` of a step of `batch` texts, each with its operands in
    memory: one forward and two backward of every linear layer and the head, two forward and four backward of attention
    over half of the pairs."""
    context = size.context
    rows = batch * context
    model = size.outline()
    matrices = [one.weight for one in model.modules() if isinstance(one, Linear)]
    maps = Counter([*((weight.shape[0], weight.shape[1]) for weight in matrices), (size.vocab_size, size.d_model)])
    mixer: Any = model.layers[0].mixer

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    linear = [(n, some(rows, i), some(o, i), some(rows, o)) for (o, i), n in maps.items()]
    q = some(batch * mixer.n_heads, context, mixer.head_dim)
    pattern = some(batch * mixer.n_heads, context, context)

    def once() -> float:
        seconds = 0.0
        for n, x, w, g in linear:
            began = time.perf_counter()
            F.linear(x, w), g @ w, g.T @ x
            seconds += n * (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(2):
            q @ q.mT, pattern @ q, pattern.mT @ q
        return seconds + size.n_layers * (time.perf_counter() - began) / 2

    once()
    return once


def memory(benchmark: str, *side: str) -> int:
    """Returns the bytes that some steps of a benchmark's side add to a separate process."""
    call = [sys.executable, "-m", f"benchmarks.{benchmark}", *side]
    return int(subprocess.run(call, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()[-1])


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    how = machine.settings("cpu", threads=threads)
    machine.apply(how)
    best, chosen = f"glassformer {SHORT[how.dtype]} compiled", machine.DTYPES[how.dtype]
    inputs, targets = batch()
    result: dict[str, Any] = {
        "machine": machine.machine(),
        "rounds": rounds,
        "threads": how.threads,
        "families": {},
    }
    lines = []
    for family in FAMILIES:
        steps = {}
        makers: dict[str, Callable[[], Step]] = {**sides(family)}
        makers |= {name: partial(Worker, family, name) for name in OWN}
        for name, make in makers.items():
            steps[name] = make()
            began = time.perf_counter()
            steps[name](inputs, targets)
            first = time.perf_counter() - began
            steps[name](inputs, targets)
            if not quiet:
                print(f"{family}: {name}: first step {first:.1f} s", file=sys.stderr, flush=True)
        took: dict[str, list[float]] = {name: [] for name in steps}
        peaks, bare, alone = [], products(config(family), BATCH, chosen), []
        for _ in range(rounds):
            peaks.append(peak_flops(torch.bfloat16, 0.3))
            alone.append(bare())
            for name, step in steps.items():
                began = time.perf_counter()
                step(inputs, targets)
                took[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(values) for name, values in took.items()}
        peak = statistics.median(peaks)
        result["families"][family] = found = summary(family, best, medians, peak, statistics.median(alone))
        found["seconds"] = took
        found["memory_bytes"] = {name: memory("train", family, name) for name in steps}
        lines += table(family, medians, found)
    result["table"] = "\n".join(lines)
    return result


SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def summary(family: str, best: str, medians: dict[str, float], peak: float, alone: float) -> dict[str, Any]:
    tokens = BATCH * CONTEXT
    size = config(family)
    work = 6 * size.num_params() + 12 * size.n_layers * size.d_model * CONTEXT  # per token, causal pairs in full
    peers = {}
    for dtype in SHORT.values():
        them = [name for name in medians if name.startswith(f"transformers {dtype}")]
        peers[dtype] = min(them, key=lambda name: medians[name])
    bf16, fp32 = medians[peers["bf16"]], medians[peers["fp32"]]
    return {
        "ours": best,
        "peers": peers,
        "tokens_per_second": {name: tokens / value for name, value in medians.items()},
        "against_transformers_bf16": bf16 / medians[best],
        "against_transformers_fp32": fp32 / medians[best],
        "bf16_peak_gflops": peak / 1e9,
        "share_of_peak": work * tokens / medians[best] / peak,
        "products_seconds": alone,
        "products_against_transformers_bf16": bf16 / alone,
        "products_against_transformers_fp32": fp32 / alone,
    }


def table(family: str, medians: dict[str, float], found: dict[str, Any]) -> list[str]:
    memory = found["memory_bytes"]
    lines = [
        f"{family}@10m, {BATCH} x {CONTEXT} tokens a step",
        "",
        "| side | tokens/s | ms/step | memory added |",
        "|---|--:|--:|--:|",
    ]
    for name, value in medians.items():
        added = f"{memory[name] / 1e6:,.0f} MB"
        lines.append(f"| {name} | {BATCH * CONTEXT / value:,.0f} | {1000 * value:.0f} | {added} |")
    ours, bf16, fp32 = (memory[name] / 1e6 for name in (found["ours"], *found["peers"].values()))
    lines += [
        "",
        f"{found['ours']}: {found['against_transformers_bf16']:.2f} times {found['peers']['bf16']}, "
        f"{found['against_transformers_fp32']:.2f} times {found['peers']['fp32']}, each with its faster attention; "
        f"adds {ours:,.0f} MB, these two {bf16:,.0f} and {fp32:,.0f}; {found['share_of_peak']:.0%} of the bf16 product "
        f"peak of {found['bf16_peak_gflops']:.0f} GFLOP/s (6 N + 12 L d t per token)",
        "",
        f"The matmuls of such a step take {1000 * found['products_seconds']:.0f} ms: with everything else free "
        f"that would be {found['products_against_transformers_bf16']:.2f} times transformers bf16 and "
        f"{found['products_against_transformers_fp32']:.2f} times its fp32",
        "",
    ]
    return lines


def main(family: str, side: str, mode: str = "") -> None:
    inputs, targets = batch()
    if mode:
        step = own(family, OWN[side])
        for _ in sys.stdin:
            print(step(inputs, targets), flush=True)
        return
    if side in OWN:
        print(grown(lambda: own(family, OWN[side]), inputs, targets))
        return
    machine.apply(machine.settings("cpu"))
    if side.startswith("transformers"):
        import transformers  # noqa: F401  # not what is measured
    print(grown(sides(family)[side], inputs, targets))


def grown(make: Callable[[], Step], inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes that this process grows by."""
    before = machine.peak_memory("cpu")
    step = make()
    for _ in range(6):  # until it grows no more
        step(inputs, targets)
    return machine.peak_memory("cpu") - before


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:])
    else:
        print(json.dumps(run()))
