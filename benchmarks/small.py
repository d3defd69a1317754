"""Training steps of small models, 0.1m to 10m parameters, against transformers, nanoGPT, JAX, MLX and their products.

All sides train 8 texts of 128 characters in fp32 with AdamW and gradients clipped at 1. Each is a process, and they
take steps in turn; figures are medians of rounds. Ours takes the step of a run, with its records and its schedule.
nanoGPT is of GPT-2's shape, under `torch.compile`; JAX and MLX compile the whole step. The limit is the time of a
step's matrix products, each with its operands at hand. PEER_PYTHON names an interpreter that has jax, optax and mlx,
and BEFORE a checkout of an earlier version; without them their rows are left out.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.nanogpt import GPT
from benchmarks.train import Step, loop, products
from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.naming import preset

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("0.1m", "0.3m", "1m", "3m", "10m")
BATCH, CONTEXT, VOCAB = 8, 128, 65
TOKENS = BATCH * CONTEXT
STEPS = {"0.1m": 20, "0.3m": 12, "1m": 6, "3m": 3, "10m": 2}
"""Steps of a side in one round."""
PEERS = {"JAX, step compiled": "jax_llama.py", "MLX, step compiled": "mlx_llama.py"}
"""Sides that need an interpreter of PEER_PYTHON, each with its file in benchmarks/peers."""
INTERPRETER = "PEER_PYTHON"
OURS = {"glassformer, eager": (0, False), "glassformer, regions compiled": (1, False),
        "glassformer before, regions compiled": (1, True)}  # fmt: skip
"""Sides of ours: 1 where regions are compiled, and True for the checkout of BEFORE."""
BEFORE = "BEFORE"
LIMIT = "matrix products"


def config(size: str) -> ModelConfig:
    """Returns the llama that all sides but nanoGPT train."""
    return preset(f"llama@{size}+vocab_size={VOCAB}+context={CONTEXT}")


def on_tokens(step: Step) -> Callable[[], Any]:
    """Returns a step without arguments, on drawn tokens."""
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return lambda: step(tokens[:, :-1], tokens[:, 1:])


def transformers(size: str) -> Callable[[], Any]:
    """Returns the step of transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, ffn = shape(size)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": CONTEXT, "use_cache": False,
        "attn_implementation": "sdpa",
    }  # fmt: skip
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())

    return on_tokens(loop(model, machine.settings("cpu", "float32", compile=False), loss))


def nanogpt(size: str) -> Callable[[], Any]:
    """Returns the step of a GPT-2 of this depth and width, compiled as a whole."""
    layers, width, heads, _ = shape(size)
    model = GPT(VOCAB, CONTEXT, n_layer=layers, n_head=heads, n_embd=width)
    return on_tokens(loop(model, machine.settings("cpu", "float32", compile=False), torch.compile(model)))


SIDES: dict[str, Callable[[str], Callable[[], Any]]] = {
    "transformers, eager": transformers,
    "nanoGPT, torch.compile": nanogpt,
    LIMIT: lambda size: products(config(size), BATCH, torch.float32),
}


def shape(size: str) -> tuple[int, int, int, int]:
    """Returns layers, width, heads and the inner width of the feed-forward network."""
    one = config(size)
    layer: Any = one.outline().layers[0]
    return one.n_layers, one.d_model, layer.mixer.n_heads, layer.ffn.down_proj.weight.shape[1]


class Side:
    """A side in a separate process, which takes a step for each line that it receives and prints the seconds."""

    def __init__(self, name: str, size: str, threads: int):
        tree = ROOT
        if name in OURS:
            compiled, before = OURS[name]
            tree = Path(os.environ[BEFORE]).absolute() if before else ROOT
            numbers = map(str, (VOCAB, BATCH, CONTEXT, threads, compiled))
            call = [sys.executable, str(ROOT / "benchmarks" / "peers" / "our_llama.py"), f"llama@{size}", *numbers]
        elif name in PEERS:
            numbers = map(str, (*shape(size), VOCAB, BATCH, CONTEXT))
            call = [os.environ[INTERPRETER], str(ROOT / "benchmarks" / "peers" / PEERS[name]), *numbers]
        else:
            call = [sys.executable, "-m", "benchmarks.small", name, size, str(threads)]
        env = {**os.environ, "PYTHONPATH": str(tree / "src")}
        self.process = subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )

    def seconds(self) -> float:
        """Takes a step; returns its seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False, out: str | None = None) -> dict[str, Any]:
    """Measures all sides at all sizes; returns tokens per second with a table, and draws a picture next to `out`."""
    count = machine.settings("cpu", threads=threads).threads
    asked = {**OURS, **dict.fromkeys(SIDES), **dict.fromkeys(PEERS)}
    needs = {name: BEFORE for name, (_, before) in OURS.items() if before} | dict.fromkeys(PEERS, INTERPRETER)
    names = [name for name in asked if name not in needs or os.environ.get(needs[name])]
    rows: dict[str, dict[str, float]] = {name: {} for name in names}
    for size in SIZES:
        sides = {name: Side(name, size, count) for name in names}
        took: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):  # the first compiles and warms up
            for name, side in sides.items():
                steps = [side.seconds() for _ in range(STEPS[size] if turn else 3)]
                took[name] += [statistics.median(steps)] if turn else []
        for name, side in sides.items():
            rows[name][size] = TOKENS / statistics.median(took[name])
            side.close()
        if not quiet:
            print(size, {name: round(row[size]) for name, row in rows.items()}, file=sys.stderr, flush=True)
    text = table(rows)
    if out:
        picture = Path(out).with_suffix(".svg")
        draw(rows, picture)
        text = f"![Tokens per second by size]({picture.name})\n\n{text}"
    return {"machine": machine.machine(), "rounds": rounds, "threads": count, "rows": rows, "table": text}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Returns a table of tokens per second, with the share of the limit in brackets."""
    lines = ["Tokens per second, and the share of the limit:", "", "| side | " + " | ".join(SIZES) + " |",
             "|---" + "|--:" * len(SIZES) + "|"]  # fmt: skip
    for name, row in rows.items():
        cells = (f"{row[size]:,.0f} ({row[size] / rows[LIMIT][size]:.2f})" for size in SIZES)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Writes a picture of tokens per second against parameters, with the limit as a dashed line."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    from glassformer.lens import style

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    ax = style.axes(figure, 1, 1, title="Training small models: tokens per second")
    at = [config(size).num_params() for size in SIZES]
    for i, (name, row) in enumerate(rows.items()):
        limit = name == LIMIT
        ax.plot(at, [row[size] for size in SIZES], "--" if limit else "-", marker=None if limit else "os^DvP*X"[i],
                color=style.INK if limit else style.COLOURS[i % 8], label=name, markersize=5)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(at, SIZES)
    ax.minorticks_off()
    ax.set_xlabel("parameters", color=style.INK, fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "glassformer", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def main(name: str, size: str, threads: str) -> None:
    """Takes a step of a side for each line of standard input, and prints its seconds."""
    machine.apply(machine.settings("cpu", "float32", threads=int(threads)))
    step = SIDES[name](size)
    for _ in sys.stdin:
        began = time.perf_counter()
        known = step()
        print(known if name == LIMIT else time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
