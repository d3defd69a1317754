"""docs/experts.md: the load of experts that lie with several ranks, and what the ranks send each other.

python -m experiments.traffic measures, by four processes of this machine, and writes the page with its figure."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from experiments.docs import DOCS
from glassformer.figures import join, tag
from glassformer.figures.markup import Markup
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import experts
from glassformer.parts.core.reduce import reducing

RANKS, EXPERTS, CHOSEN, CONTEXT, ROWS = 4, 8, 2, 128, 8
EXPRESSION = f"llama@1m+layers=2+vocab_size=256+context={CONTEXT}+moe:{EXPERTS}:{CHOSEN}"
EXPRESSION += "+ffn.balance_rate=0.01+ffn.router_bias=true"
SKEW, UPDATES = 1.5, 150
"""Of the router's bias, from the first expert to the last; and of the selection bias, which then levels the load."""
PAGE, FIGURE = DOCS / "experts.md", DOCS / "figures" / "experts.svg"
COLOURS = ("#122da3", "#8ea0e6")
"""Of the two experts of a rank."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (folder,), nprocs=RANKS)
        ranks = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    FIGURE.write_text(drawing(ranks), encoding="utf-8")
    PAGE.write_text(page(ranks), encoding="utf-8")
    print(page(ranks))


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model = preset(EXPRESSION).build(seed=0)
    for layer in model.layers:
        with torch.no_grad():
            layer.ffn.router.bias.copy_(torch.linspace(SKEW, -SKEW, EXPERTS))  # type: ignore[union-attr, operator]
    experts.divide(model, dist.group.WORLD)
    text = torch.frombuffer(bytearray((DOCS / "decisions.md").read_bytes()), dtype=torch.uint8).long()

    def step(number: int) -> None:
        first = (number * RANKS + rank) * ROWS * CONTEXT % (len(text) - ROWS * CONTEXT - 1)
        some = text[first : first + ROWS * CONTEXT + 1]
        model.loss(some[:-1].view(ROWS, -1), some[1:].view(ROWS, -1))

    found = {"unbalanced": measured(model, step)}
    with reducing(_total):
        for number in range(UPDATES):
            step(number)
            for layer in model.layers:
                layer.ffn.router.after_step()  # type: ignore[union-attr, operator]
    found["balanced"] = measured(model, step)
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(model: Model, step: Any) -> dict[str, Any]:
    """Of one pass: what came for the experts of this rank in the first layer, and what this rank sent."""
    experts.traffic(model)
    step(0)
    seen = next(iter(experts.traffic(model).values()))
    return {"served": seen.served.tolist(), "sent": seen.sent.view(RANKS, -1).sum(1).tolist(), "bytes": seen.bytes}


def _total(x: Tensor) -> Tensor:
    summed = x.clone()
    dist.all_reduce(summed)
    return summed


def page(ranks: list[dict[str, Any]]) -> str:
    even = ROWS * CONTEXT * CHOSEN
    parts = [
        "# Experts over ranks",
        "With `ep=4` each of four ranks has two of eight experts, whole, and the tokens of its own sequences. In every "
        "layer the rows of tokens go to the ranks of their experts, and their results come back "
        "(`parallel/experts.py`): an all-to-all each, and two more backward.",
        "![Rows that each rank computes, before and after the load is level](figures/experts.svg)",
        f"Measured on four processes of one machine, one pass of {ROWS * CONTEXT:,} tokens on each rank, each of which "
        f"goes to {CHOSEN} of {EXPERTS} experts, in the first layer of `{EXPRESSION}`: a router whose bias falls from "
        f"{SKEW} to -{SKEW} over the experts, and the same one after {UPDATES} updates of its selection bias "
        f"(`ffn.balance_rate`), no weight being trained. Even were {even:,} rows on every rank. A step waits for the "
        "rank with the most. `python -m experiments.traffic` measures anew.",
    ]
    for name in ("unbalanced", "balanced"):
        of = [rank[name] for rank in ranks]
        loads = [sum(one["served"]) for one in of]
        lines = ["| rank | rows for its two experts | rows in all | most / even | sent to ranks 0 to 3 | kB sent |",
                 "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
        lines += [
            f"| {rank} | {' + '.join(f'{n:,}' for n in one['served'])} | {sum(one['served']):,} | "
            f"{sum(one['served']) / even:.2f} | {', '.join(f'{n:,}' for n in one['sent'])} | "
            f"{one['bytes'] / 1e3:,.0f} |"
            for rank, one in enumerate(of)
        ]
        told = f"**{name.capitalize()}**: the rank with the most computes {max(loads) / even:.2f} times its even share."
        parts += [told, "\n".join(lines)]
    parts.append(
        "Losses and gradients are those of one process that takes the tokens of each rank as a micro-batch, to 1e-13 "
        "in fp64 (`tests/parallel/test_experts.py`). `glassformer train ... --layout fsdp=4,ep=2` trains so: FSDP "
        "divides the experts among the ranks that have the same ones and all other weights among all ranks, and a run "
        "goes on in any other layout."
    )
    return "\n\n".join(parts) + "\n"


def drawing(ranks: list[dict[str, Any]]) -> str:
    """Bars of the rows that each rank computes, by expert, and a line where all would be even."""
    even, wide, high = ROWS * CONTEXT * CHOSEN, 720, 210
    most = max(sum(rank[name]["served"]) for rank in ranks for name in rank)
    panels = [_panel(name, [rank[name]["served"] for rank in ranks], 10 + i * 360, even, most)
              for i, name in enumerate(("unbalanced", "balanced"))]  # fmt: skip
    paper = tag("rect", width="100%", height="100%", fill="#fdfdfb")
    label = "Rows that each of four ranks computes: unbalanced and balanced routing of eight experts"
    inner = str(tag("svg", paper, *panels, viewBox=f"0 0 {wide} {high}", role="img", aria_label=label))
    head = 'xmlns="http://www.w3.org/2000/svg" style="font-family: system-ui, sans-serif; font-size: 12px"'
    return inner.replace("<svg ", f"<svg {head} ", 1) + "\n"


def _panel(name: str, loads: list[list[int]], left: float, even: int, most: int) -> Markup:
    floor, tall, step = 180.0, 140.0, 80.0
    made = [tag("text", f"{name} routing: rows on each rank", x=left, y=16.0, fill="#1a1e24")]
    for rank, load in enumerate(loads):
        x, y = left + rank * step, floor
        for colour, rows in zip(COLOURS, load, strict=True):
            size = tall * rows / most
            y -= size
            made.append(tag("rect", tag("title", f"rank {rank}: {rows:,} rows"), x=x, y=y, width=52.0, height=size,
                            fill=colour))  # fmt: skip
        made.append(tag("text", f"{sum(load):,}", x=x + 26, y=y - 4, text_anchor="middle", fill="#1a1e24"))
        made.append(tag("text", f"rank {rank}", x=x + 26, y=floor + 16, text_anchor="middle", fill="#59626d"))
    at = floor - tall * even / most
    made.append(tag("path", d=f"M{left},{at:.1f}H{left + 4 * step - 20}", stroke="#b02a2a", stroke_dasharray="4 3"))
    made.append(tag("text", "even", x=left + 4 * step - 16, y=at + 4, fill="#b02a2a"))
    return tag("g", join(made))


if __name__ == "__main__":
    main()
