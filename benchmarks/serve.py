"""SmolLM2-135M served over HTTP: us, llama.cpp's server and vLLM in turn, the same prompts, 1 to 16 streams.

Each server is a process that is idle between its turns: `glassformer serve` with `--quantize int4`, and llama.cpp's
(`xllamacpp`) with the Q4_1 file of the wheel, which ours reads too; both with the same number of threads and 16 slots.
`session` is our server without HTTP: the session that it serves from, in a separate process. VLLM_PYTHON names an
interpreter that has vLLM's CPU build, which reads the same weights unpacked, from the folder that we save, in float32
(bf16 is slower on a processor that emulates it), compiled, with all cores; without it its rows are left out. The load
generator is another process with plain sockets, which only notes times while it reads. A stream is a POST to
/v1/completions with `stream`, a prompt of some 60 tokens that no other stream has, and 64 new tokens
(`ignore_eos`, temperature 0).

`first` is the time from the request to the first token, `between` the time between two tokens of a stream, in
milliseconds; `tokens/s` counts the new tokens of all streams from the first request to the last token. The figures are
medians over rounds. `step` of the last table is the median time between tokens of one running stream, `gap` the longest
one while the prompt of another request (some 1,900 tokens) is read, and `reading` the time from that request to its
first token.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import glassformer as gf
from benchmarks.generate import ROOT, Worker
from benchmarks.peers.generating import answering
from glassformer import machine
from glassformer.conversion import locate
from glassformer.errors import WorkError
from glassformer.text.corpora import open_corpus

MODEL = "smollm2"
OURS, SESSION, LLAMA, VLLM = "glassformer int4", "session int4", "llama.cpp Q4_1", "vLLM float32"
INTERPRETER = "VLLM_PYTHON"
STREAMS = (1, 2, 4, 8, 16)
SLOTS, CONTEXT = max(STREAMS), 2048
CHARACTERS, LONG = 240, 7000
"""Characters of a prompt, and of the long one: some 60 and 1,900 tokens."""
TOKENS = 64


def prompts(count: int, characters: int, first: int = 0) -> list[str]:
    """Returns texts of one length from python-docs, none twice."""
    text = "".join(document.text for document in open_corpus("python-docs").documents())
    start = 20_000 + first * characters
    return [text[start + i * characters :][:characters] for i in range(count)]


def share(values: Sequence[float], part: float) -> float:
    """Returns the value that a part of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def figures(stamps: Sequence[Sequence[float]], new: int) -> dict[str, float]:
    """Returns the figures of streams, each the time of its request and of its tokens."""
    between = [b - a for times in stamps for a, b in pairwise(times[1:])]
    first = [times[1] - times[0] for times in stamps]
    seconds = max(times[-1] for times in stamps) - min(times[0] for times in stamps)
    return {
        "first": statistics.median(first), "p50": statistics.median(between), "p99": share(between, 0.99),
        "rate": new * len(stamps) / seconds,
    }  # fmt: skip


def stamped(pieces: Sequence[tuple[float, bytes]], new: int) -> list[float]:
    """Returns the time of each piece of text in what a stream received. Raises WorkError for another number of
    tokens."""
    lines, rest = list[tuple[float, bytes]](), b""
    for at, raw in pieces:
        *whole, rest = (rest + raw).split(b"\n")
        lines.extend((at, line[6:]) for line in whole if line.startswith(b"data: {"))
    events = [(at, json.loads(line)) for at, line in lines]
    usage = next((event["usage"]["completion_tokens"] for _, event in events if event.get("usage")), 0)
    if usage != new:
        raise WorkError(f"a stream of {new} tokens had {usage}: {lines[-1:]}", code="failed")
    return [at for at, event in events if event.get("choices") and not event["choices"][0].get("finish_reason")]


def streams(port: int, model: str, texts: Sequence[str], new: Sequence[int], wait: float = 0.0) -> list[list[float]]:
    """Returns the time of each request and of the pieces of its text; a request follows `wait` seconds after the one
    before it. Reads with plain sockets and takes nothing apart before the end, because the servers use all cores."""
    started, received, found = list[float](), [list[tuple[float, bytes]]() for _ in texts], selectors.DefaultSelector()
    with contextlib.ExitStack() as stack:
        stack.callback(found.close)
        while len(started) < len(texts) or found.get_map():
            due = started[0] + wait * len(started) if started else 0.0
            if len(started) < len(texts) and time.perf_counter() >= due:
                i = len(started)
                body = {
                    "model": model, "prompt": texts[i], "max_tokens": new[i], "temperature": 0, "stream": True,
                    "ignore_eos": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                raw = json.dumps(body).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                head += f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=600))
                started.append(time.perf_counter())
                one.sendall(head.encode() + raw)
                found.register(one, selectors.EVENT_READ, (i, one))
                continue
            for key, _ in found.select(max(0.0, due - time.perf_counter()) if len(started) < len(texts) else 600):
                i, one = key.data
                raw = one.recv(1 << 16)
                received[i].append((time.perf_counter(), raw))
                if not raw:
                    found.unregister(one)
    return [[at, *stamped(pieces, n)] for at, pieces, n in zip(started, received, new, strict=True)]


def joined(port: int, model: str, short: str, long: str, new: int) -> dict[str, float]:
    """Returns the time between tokens of a running stream, before and while a long prompt is read."""
    running, other = streams(port, model, [short, long], [new, 2], wait=1.0)
    return gaps(running, other[0], other[1])


def gaps(times: Sequence[float], start: float, ended: float) -> dict[str, float]:
    """Returns the median time between tokens until `start`, and the longest one between `start` and `ended`."""
    pairs = list(pairwise(times[1:]))
    before = [b - a for a, b in pairs if b <= start]
    during = [b - a for a, b in pairs if start < b and a < ended]
    if len(before) < 3 or not during:
        raise WorkError("the running stream is too short for the prompt that joins it", code="failed")
    step = statistics.median(before)
    return {"step": step, "gap": max(during), "steps": max(during) / step, "reading": ended - start}


class SessionSide:
    """The session that the server serves from, without HTTP."""

    def __init__(self, threads: int):
        from glassformer.serving.computing import Served

        machine.apply(machine.settings("cpu", threads=threads))
        served = Served(MODEL, gf.load(MODEL, quantize="int4", dtype="bfloat16"), slots=SLOTS, context=CONTEXT)
        assert served.session is not None
        self.session = served.session
        self.facts: dict[str, Any] = {}

    def together(self, texts: list[str], new: int) -> list[list[float]]:
        start = time.perf_counter()
        asked = [
            self.session.submit(text, max_new_tokens=new, temperature=0.0, stop_at_eos=False) for text in texts
        ]  # fmt: skip
        stamps = [[start] for _ in asked]
        while self.session.step():
            now = time.perf_counter()
            for times, reply in zip(stamps, asked, strict=True):
                times.extend(now for piece in reply.take() if piece.id is not None)
        return stamps

    def joined(self, short: str, long: str, new: int) -> dict[str, float]:
        running = self.session.submit(short, max_new_tokens=new, temperature=0.0, stop_at_eos=False)
        times, other, start, ended = [time.perf_counter()], None, 0.0, 0.0
        while self.session.step():
            now = time.perf_counter()
            times.extend(now for piece in running.take() if piece.id is not None)
            if other is None and len(times) == 12:
                start, other = now, self.session.submit(long, max_new_tokens=2, temperature=0.0, stop_at_eos=False)
            if other is not None and not ended and other.take():
                ended = now
        return gaps(times, start, ended)


class LlamaSide:
    """llama.cpp's server, which listens on a free port."""

    def __init__(self, threads: int):
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path, p.n_parallel, p.n_ctx, p.verbosity, p.warmup = (
            str(locate(MODEL)),
            SLOTS,
            SLOTS * CONTEXT,
            -1,
            True,
        )
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
        p.hostnames, p.port, p.model_alias, p.ui = ["127.0.0.1"], 0, {MODEL}, False
        with contextlib.suppress(AttributeError):
            p.cache_prompt = False
        self.server = xllamacpp.Server(p)
        self.facts: dict[str, Any] = {"port": int(self.server.listening_address.rpartition(":")[2].strip("/"))}


def contestant(side: str, threads: str) -> None:
    """Answers for one side on standard input and output."""
    answering(lambda: SessionSide(int(threads)) if side == SESSION else LlamaSide(int(threads)))


@contextlib.contextmanager
def our_server(threads: int) -> Iterator[int]:
    """Gives the port of `glassformer serve`."""
    call = [
        sys.executable, "-m", "glassformer", "serve", MODEL, "--quantize", "int4", "--slots", str(SLOTS), "--ctx",
        str(CONTEXT), "--threads", str(threads), "--port", "0", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise WorkError("glassformer serve did not start", code="failed")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield int(json.loads(line)["address"].split(":")[2].split("/")[0])
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def vllm_server(threads: int, folder: str) -> Iterator[int]:
    """Gives the port of vLLM's server, after it has compiled its step."""
    loaded = gf.load(MODEL)
    gf.save(loaded.model, loaded.tokenizer, f"{folder}/model")
    del loaded
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = [
        os.environ[INTERPRETER], "-m", "vllm.entrypoints.openai.api_server", "--model", f"{folder}/model",
        "--served-model-name", MODEL, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching",
    ]  # fmt: skip
    told = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    log = Path(folder, "vllm.log")
    with log.open("w") as out:
        process = subprocess.Popen(
            call, cwd=folder, stdout=out, stderr=out, env={**os.environ, **told}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 900
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines() or ["no reason given"]
                raise WorkError(f"vLLM's server did not start: {said[-1][:300]}", code="failed")
            time.sleep(1)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def run(rounds: int = 3, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    """Medians over `rounds` of each side, taken in turn. `quick`: few tokens and streams, to see that it runs."""
    how = machine.settings("cpu", threads=threads or os.cpu_count())
    counts, new = ((1, 2), 8) if quick else (STREAMS, TOKENS)
    sides = (OURS, SESSION, LLAMA, *([VLLM] if os.environ.get(INTERPRETER) else []))
    found: dict[str, dict[int, list[dict[str, float]]]] = {side: {} for side in sides}
    joining: dict[str, list[dict[str, float]]] = {side: [] for side in found}
    used = 0

    def fresh(count: int, characters: int = CHARACTERS) -> list[str]:
        nonlocal used
        used += count * -(-characters // CHARACTERS)
        return prompts(count, characters, (used - 1) // -(-characters // CHARACTERS) + 1)

    with tempfile.TemporaryDirectory() as folder, our_server(how.threads) as port, contextlib.ExitStack() as stack:
        call = ["-c", "import sys; from benchmarks.serve import contestant; contestant(*sys.argv[1:])"]
        workers = {
            side: Worker(side, folder, how.threads, [*call, side, str(how.threads)]) for side in (SESSION, LLAMA)
        }
        for worker in workers.values():
            stack.callback(worker.close)
        ports = {OURS: port, LLAMA: workers[LLAMA].facts["port"]}
        if VLLM in found:
            ports[VLLM] = stack.enter_context(vllm_server(how.threads, folder))
        elif not quiet:
            print(f"{VLLM}: left out, because {INTERPRETER} names no interpreter", file=sys.stderr, flush=True)
        for turn in range(rounds + 1):  # 0 warms up
            for count in counts if turn else counts[:1]:
                texts = fresh(count)
                for side in found:
                    if side == SESSION:
                        stamps = workers[side].ask("together", texts=texts, new=new)
                    else:
                        stamps = streams(ports[side], MODEL, texts, [new] * count)
                    if turn:
                        found[side].setdefault(count, []).append(figures(stamps, new))
                        if not quiet:
                            rate = found[side][count][-1]["rate"]
                            print(f"{turn}: {side}, {count} streams: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
            if turn and not quick:
                short, long = fresh(1)[0], fresh(1, LONG)[0]
                for side in found:
                    many = (4 if side == VLLM else 12) * TOKENS  # longer than the other prompt is read
                    if side == SESSION:
                        joining[side].append(workers[side].ask("joined", short=short, long=long, new=many))
                    else:
                        joining[side].append(joined(ports[side], MODEL, short, long, many))
                    if not quiet:
                        print(f"{turn}: {side}: {joining[side][-1]}", file=sys.stderr, flush=True)
    rows = {
        side: {count: medians(some) for count, some in by_count.items()} for side, by_count in found.items()
    }  # fmt: skip
    waits = {side: medians(some) for side, some in joining.items() if some}
    return {
        "machine": machine.machine(),
        "threads": how.threads,
        "serve": rows,
        "joining": waits,
        "table": table(rows, waits),
    }


def medians(some: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    rows = list(some)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def table(rows: dict[str, dict[int, dict[str, float]]], waits: dict[str, dict[str, float]]) -> str:
    """Returns both tables as Markdown."""
    lines = ["| streams | side | first ms | between p50 ms | between p99 ms | tokens/s |", "|---|---|---|---|---|---|"]
    for count in rows[OURS]:
        for side, by_count in rows.items():
            one = by_count[count]
            ms = " | ".join(f"{1000 * one[name]:.0f}" for name in ("first", "p50", "p99"))
            lines.append(f"| {count} | {side} | {ms} | {one['rate']:.1f} |")
    if waits:
        lines += [
            "",
            "| while a prompt is read | step ms | gap ms | gap in steps | reading s |",
            "|---|---|---|---|---|",
        ]
        for side, one in waits.items():
            gap = f"{1000 * one['step']:.0f} | {1000 * one['gap']:.0f} | {one['steps']:.1f}"
            lines.append(f"| {side} | {gap} | {one['reading']:.2f} |")
    return "\n".join(lines) + "\n"
