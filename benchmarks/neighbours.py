"""The speed that is left on a busy machine.

Each side is a separate process that waits for its turn. In every round each side does each task on the idle machine,
next to one and two busy processes (an empty loop), and next to a second process of ours that decodes. `1 thread` and
`2 threads` are ours with a fixed number of threads; the default chooses the number for each step.

decode    SmolLM2, 40 tokens after a short prompt, repeated for 1.5 s, without the prompts: ours in 4 bits with the
          compiled step, llama.cpp the same file, `transformers` in bf16
prefill   512 tokens up to the logits of the next, three times: ours in bf16, prepacked as `quantize="bf16"` does
train     a step of llama@10m on 16 x 256 tokens, bf16, compiled, AdamW; the mean of three. `transformers` with SDPA.
          The number of threads stays, as gradients depend on it; how they wait is chosen
load      SmolLM2's Q4_1 file to fp32. `transformers` unpacks it too (`gguf_file=`), once, in the first round

When `1 thread` decodes next to a second process of ours, the second has one thread as well: the sum of both is the
throughput of the machine with two such processes.

Medians over the rounds. `--only decode` measures one task; results are stored next to the page and joined.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import glassformer as gf
from benchmarks import among, generate, measured_before
from benchmarks import train as training
from benchmarks.peers.generating import LlamaCpp, answering
from glassformer import machine
from glassformer.conversion import locate
from glassformer.figures import Markup, tag
from glassformer.machine.threads import paced

OURS, ONE, TWO = "glassformer", "glassformer, 1 thread", "glassformer, 2 threads"
HF, LLAMA, SECOND = "transformers", "llama.cpp", "second"
TASKS = {
    "decode": (OURS, ONE, TWO, HF, LLAMA),
    "prefill": (OURS, ONE, TWO, HF, LLAMA),
    "train": (OURS, ONE, TWO, HF),
    "load": (OURS, ONE, TWO, HF),
}
UNITS = {"decode": "tokens/s", "prefill": "tokens/s", "train": "steps/s", "load": "loads/s"}
PLACES = ("alone", "next to one", "next to two", "next to a second of ours")
NEW, LENGTH, STEPS = 40, 512, 3
LEAST = 1.5
"""Minimum seconds of decoding that are timed."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"
"""Program that keeps one core busy until its parent process ends."""
WARM = 0.5
"""Seconds for which a competing process has run before the clock starts."""
COLOURS = ("#b5532a", "#e3b08f", "#c9c2b6", "#5a6f8c", "#8aa37b")


class Side:
    """The work of one side in its process: a method per task, which returns units per second (UNITS)."""

    def __init__(self, name: str, task: str, folder: str):
        self.name, self.facts = name, dict[str, Any]()
        threads = {ONE: 1, TWO: 2}.get(name)
        os.environ.pop("OMP_NUM_THREADS", None)
        machine.apply(machine.settings("cpu", threads=threads))
        getattr(self, f"_ready_to_{task}")(folder)

    def _ready_to_decode(self, folder: str) -> None:
        self.prompt = [504, 338, 253, 655, 665, 436]
        if self.name == LLAMA:
            self.peer: Any = LlamaCpp(str(locate(generate.MODEL)), 2)
        elif self.name == HF:
            self.peer = generate.Transformers(torch.bfloat16, folder)
        else:
            with asked_for(2):  # one library for all
                self.peer = generate.Glassformer("int4", compiled=True)

    def decode(self) -> float:
        rates, began = list[float](), time.perf_counter()
        while not rates or time.perf_counter() - began < LEAST:
            rates.append(self.peer.decode(self.prompt, NEW)["steps"])
        return statistics.harmonic_mean(rates)

    def _ready_to_prefill(self, folder: str) -> None:
        self.prompt = torch.randint(1000, 40_000, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
        if self.name == LLAMA:
            self.peer = LlamaCpp(str(locate(generate.MODEL)), 2)
        elif self.name == HF:
            self.peer = generate.Transformers(torch.bfloat16, folder)
        else:
            self.peer = generate.Glassformer("bf16", compiled=False)

    def prefill(self) -> float:
        return STEPS * LENGTH / sum(self.peer.prefill(self.prompt)["seconds"] for _ in range(STEPS))

    def _ready_to_train(self, folder: str) -> None:
        self.batch = training.batch()
        if self.name == HF:
            self.step = training.transformers("llama", "bfloat16", "sdpa")
        else:
            with asked_for(2):
                self.step = training.ours("llama", "bfloat16", True)
                self.step(*self.batch)

    def train(self) -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            with paced(self, "training step", free=False):  # as the loop of a run does
                self.step(*self.batch)
        return STEPS / (time.perf_counter() - began)

    def _ready_to_load(self, folder: str) -> None:
        if self.name == HF:
            import transformers

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()

    def load(self) -> float:
        path, began = Path(locate(generate.MODEL)), time.perf_counter()
        if self.name == HF:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
            AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        else:
            gf.load(str(path))
        return 1 / (time.perf_counter() - began)

    def go_on_until(self, flag: str) -> float:
        """Decodes until the file `flag` exists; returns tokens/s."""
        rates = []
        while not Path(flag).exists():
            rates.append(self.peer.decode(self.prompt, NEW)["steps"])
        return statistics.harmonic_mean(rates) if rates else 0.0


@contextmanager
def asked_for(threads: int) -> Iterator[None]:
    """Sets torch's number of threads inside the block: code compiled there is compiled for `threads`, and can still run
    with another number later."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Worker(generate.Worker):
    def __init__(self, side: str, task: str, folder: str):
        super().__init__(side, folder, 0, call=["-m", "benchmarks.neighbours", side, task, folder])


def serve(side: str, task: str, folder: str) -> None:
    answering(lambda: Side(side, task, folder))


@contextmanager
def neighbours(place: str, second: Worker | None, folder: str) -> Iterator[list[float]]:
    """Runs the competing processes of a place inside the block; afterwards the yielded list holds the tokens/s of
    `second` if it decoded."""
    busy, rates = [], list[float]()
    flag = Path(folder, "enough")
    if place == PLACES[3]:
        assert second is not None
        second.begin("go_on_until", flag=str(flag))
    else:
        busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(PLACES.index(place))]
    try:
        if place != PLACES[0]:
            time.sleep(WARM)
        yield rates
    finally:
        for one in busy:
            one.kill()
            one.wait()
        if place == PLACES[3] and second is not None:
            flag.touch()
            rates.append(second.answer())
            flag.unlink()


def run(rounds: int = 3, quiet: bool = False, only: str | None = None, out: str | None = None) -> dict[str, Any]:
    """Returns medians over `rounds` of each task; with `only`, the others come from the JSON file next to `out`."""
    names, here, kept = among(TASKS, only), machine.machine(), Path(out).with_suffix(".json") if out else None
    before = measured_before(kept) if kept is not None and only is not None else {}
    found: dict[str, dict[str, dict[str, float]]] = before.get("tasks", {})
    for name in names:
        found[name] = measured(name, rounds, quiet)
    found = {name: found[name] for name in TASKS if name in found}
    result: dict[str, Any] = {"machine": here, "rounds": rounds, "tasks": found, "table": page(found)}
    if kept is not None:
        kept.write_text(json.dumps({"machine": here, "tasks": found}, indent=1) + "\n", encoding="utf-8")
        kept.with_suffix(".svg").write_text(picture(found), encoding="utf-8")
        result["table"] = f"![Speed left on a busy machine]({kept.stem}.svg)\n\n" + result["table"]
    return result


def measured(task: str, rounds: int, quiet: bool) -> dict[str, dict[str, float]]:
    """Measures one task; returns {place: {side: units per second}}."""
    found: dict[str, dict[str, list[float]]] = {place: {} for place in PLACES}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        if task in ("decode", "prefill"):
            gf.save(gf.load(generate.MODEL).model, None, folder)
        try:
            for side in TASKS[task]:
                workers[side] = Worker(side, task, folder)
            workers[SECOND] = Worker(OURS, "decode", folder)
            seconds = dict.fromkeys(TASKS[task], workers[SECOND])
            if task == "decode":
                seconds[ONE] = workers[f"{ONE} {SECOND}"] = Worker(ONE, "decode", folder)
            for side in TASKS[task]:  # warm
                if task != "load" or side != HF:
                    workers[side].ask(task)
            for turn in range(rounds):
                for place in PLACES:
                    for side in TASKS[task]:
                        if task == "load" and side == HF and turn:
                            continue
                        with neighbours(place, seconds[side], folder) as beside:
                            rate = workers[side].ask(task)
                        found[place].setdefault(side, []).append(rate)
                        if beside:
                            found[place].setdefault(f"{side} {SECOND}", []).extend(beside)
                        if not quiet:
                            told = f"{task} {place}: {side} {rate:.2f} {UNITS[task]} {beside or ''}"
                            print(told, file=sys.stderr, flush=True)
        finally:
            for worker in workers.values():
                worker.close()
    return {place: {side: statistics.median(rates) for side, rates in sides.items()} for place, sides in found.items()}


def page(found: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for task, places in found.items():
        lines += ["", f"{task.capitalize()}, {UNITS[task]}:", ""]
        sides = TASKS[task]
        quiet = places[PLACES[0]][ONE]
        rows = []
        for place in PLACES:
            row = places[place]
            cells = [f"{row[side]:,.2f}" if row[side] < 10 else f"{row[side]:,.0f}" for side in sides]
            rows.append([place, *cells, f"{row[OURS] / quiet:.0%}",
                         *(f"{row[OURS] / row[peer]:.1f}" for peer in sides[3:])])  # fmt: skip
        heads = ["", *sides, "of one quiet thread", *(f"/ {peer}" for peer in sides[3:])]
        lines += generate.grid(heads, rows)
    if "decode" in found:
        row, alone = found["decode"][PLACES[3]], found["decode"][PLACES[0]][ONE]
        pairs = [(row[side], row[f"{side} {SECOND}"]) for side in (OURS, ONE)]
        of_two = [sum(pair) / (2 * alone) for pair in pairs]
        lines += ["", f"Two decodes of ours side by side: {pairs[0][0]:.0f} and {pairs[0][1]:.0f} tokens/s, together "
                  f"{of_two[0]:.0%} of two lone ones with one thread. With one thread asked of each: {pairs[1][0]:.0f} "
                  f"and {pairs[1][1]:.0f}, {of_two[1]:.0%}."]  # fmt: skip
    return "\n".join(lines).strip()


def picture(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Returns an SVG with a group of bars per task and place; bar heights are shares of the task's highest rate."""
    width, height, top, left = 250, 150, 46, 16
    pieces: list[Markup] = []

    def text(words: str, x: float, y: float, **more: Any) -> Markup:
        return tag("text", words, x=round(x, 1), y=round(y, 1), font_size=more.pop("size", 11), **more)

    for column, (task, places) in enumerate(found.items()):
        x0 = left + column * (width + 24)
        best = max(max(row[side] for side in TASKS[task]) for row in places.values())
        pieces.append(text(f"{task}, {UNITS[task]}", x0, top - 10, size=13, font_weight="600"))
        group, bar = width / len(PLACES), width / len(PLACES) / (len(TASKS[task]) + 1)
        for at, place in enumerate(PLACES):
            for i, side in enumerate(TASKS[task]):
                rate = places[place][side]
                tall = height * rate / best
                x = x0 + at * group + i * bar
                shown = f"{rate:.2f}" if rate < 10 else f"{rate:,.0f}"
                colour = COLOURS[(OURS, ONE, TWO, HF, LLAMA).index(side)]
                pieces.append(tag("rect", tag("title", f"{side}, {place}: {shown} {UNITS[task]}"), x=round(x, 1),
                                  y=round(top + height - tall, 1), width=round(bar - 1, 1), height=round(tall, 1),
                                  fill=colour))  # fmt: skip
            label = ("alone", "1 busy", "2 busy", "a second")[at]
            pieces.append(text(label, x0 + at * group, top + height + 16))
        pieces.append(tag("path", d=f"M{x0},{top + height}h{width}", stroke="#888", fill="none"))
    for i, side in enumerate((OURS, ONE, TWO, HF, LLAMA)):
        x = left + i * 190
        pieces.append(tag("rect", x=x, y=top + height + 32, width=10, height=10, fill=COLOURS[i]))
        pieces.append(text(side, x + 15, top + height + 41))
    whole = max(left + len(found) * (width + 24), 960)
    return str(
        tag("svg", tag("rect", width="100%", height="100%", fill="#fff"), *pieces, xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {whole} {top + height + 54}", width=whole, height=top + height + 54, role="img",
            aria_label="Speed left on a busy machine", font_family="system-ui, sans-serif", fill="#333")
    ) + "\n"  # fmt: skip


if __name__ == "__main__":
    serve(*sys.argv[1:])
