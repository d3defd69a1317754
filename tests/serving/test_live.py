"""Streams, clients that leave, slow connections and the end of a server, on a real port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.generation.session import Session
from glassformer.loaded import Loaded
from glassformer.serving import computing, connections
from glassformer.serving.computing import Computer, Served
from glassformer.text import CharTokenizer
from tests.serving.conftest import LETTERS, TINY, listening_to, served

httpx = pytest.importorskip("httpx", reason="pip install httpx")


def open_texts(live: str) -> int:
    lines = httpx.get(f"{live}/metrics").text.splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("glassformer_texts{"))


def wait_for(live: str, count: int, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while open_texts(live) != count:
        assert time.monotonic() < until, open_texts(live)
        time.sleep(0.01)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "letters", "prompt": "once", "max_tokens": 40, "temperature": 1, "ignore_eos": True, **more}


def text(live: str, **more: Any) -> str:
    found = httpx.post(f"{live}/v1/completions", json=body(**more), timeout=120)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


def test_text_is_the_same_among_eight(live: str) -> None:
    """Requests of other lengths and samplings join and leave at the same time; one leaves in the middle."""
    asked = [{"seed": i, "prompt": "once upon a time, " * (1 + i % 4), "max_tokens": 8 + 4 * i} for i in range(8)]
    alone = [text(live, **one) for one in asked]
    with ThreadPoolExecutor(9) as pool:
        leaving = pool.submit(leave, live)
        together = list(pool.map(lambda one: text(live, **one), asked))
        leaving.result()
    assert together == alone


def leave(live: str, **more: Any) -> None:
    with httpx.stream(
        "POST", f"{live}/v1/completions", json=body(max_tokens=200, stream=True, **more), timeout=60
    ) as found:
        for line in found.iter_lines():
            if line.startswith("data: "):
                return


def test_row_is_free_once_the_client_of_a_stream_left(live: str) -> None:
    wait_for(live, 0)
    leave(live)
    wait_for(live, 0, 5)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_row_is_free_once_a_client_was_killed(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of its text is free after the step in which the server learns of it."""
    wait_for(live, 0)
    raw = json.dumps(body(max_tokens=200, stream=True))
    program = (
        "import http.client, sys\n"
        f"c = http.client.HTTPConnection('127.0.0.1', {live.rpartition(':')[2]})\n"
        f"c.request('POST', '/v1/completions', {raw!r}, {{'Content-Type': 'application/json'}})\n"
        "r = c.getresponse(); r.read(10); print('reading', flush=True); sys.stdin.read()"
    )
    steps: list[bool] = []
    """Whether a text ran after each step of a session."""
    known: list[int] = []
    """Number of steps at which the server ended a text."""
    step, cancel = Session.step, computing.ServedTask.cancel

    def slow_step(session: Session) -> bool:
        found = step(session)
        if found:
            time.sleep(0.02)  # so that 200 tokens take longer than the kill
            steps.append(bool(session._engine.running))
        return found

    def counted(task: computing.ServedTask) -> None:
        known.append(len(steps))
        cancel(task)

    monkeypatch.setattr(Session, "step", slow_step)
    monkeypatch.setattr(computing.ServedTask, "cancel", counted)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"reading\n"
        assert steps[-1]
    finally:
        process.kill()  # SIGKILL
        began = time.monotonic()
        process.wait()
    wait_for(live, 0, 5)
    print(f"the row was free {1000 * (time.monotonic() - began):.0f} ms after the kill")
    assert sum(steps[known[0] :]) <= 1, (known, steps)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_thousand_requests_leave_nothing_behind(live: str, count: int) -> None:
    """Open files, threads, tasks of the model and texts are as before."""
    psutil = pytest.importorskip("psutil", reason="pip install psutil")
    own = psutil.Process()
    kinds = [
        ("/v1/completions", body(max_tokens=1)),
        ("/v1/completions", body(max_tokens=1, stream=True)),
        ("/v1/completions", body(max_tokens=1, regex="[a-c]{9}", ignore_eos=None)),
        ("/v1/completions", {"model": "nothing"}),
        ("/tokenize", {"model": "letters", "prompt": "abc"}),
    ]

    def ask(count: int) -> None:
        with httpx.Client() as client:
            for i in range(count):
                path, asked = kinds[i % len(kinds)]
                client.post(f"{live}{path}", json=asked, timeout=60).read()

    ask(20)
    wait_for(live, 0)
    before = own.num_fds() if hasattr(own, "num_fds") else 0, threading.active_count(), own.memory_info().rss
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [count // 4] * 4))
    wait_for(live, 0)
    time.sleep(0.1)
    after = own.num_fds() if hasattr(own, "num_fds") else 0, threading.active_count(), own.memory_info().rss
    print(f"{count} requests: files, threads, bytes {before} before and {after} after")
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 8  # threads of the pool of the event loop
    assert after[2] < before[2] + (64 << 20), (before, after)


@pytest.mark.parametrize("stream", [False, True])
def test_row_is_free_once_a_connection_broke(live: str, stream: bool) -> None:
    wait_for(live, 0)
    # many texts, so that some run, some wait for a row, and a prompt is being read
    raw = json.dumps(body(prompt="a" * 200, max_tokens=50, n=60, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", int(live.rpartition(":")[2]))) as sock:
        sock.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        until = time.monotonic() + 10
        while not open_texts(live):
            assert time.monotonic() < until
    wait_for(live, 0, 5)


def test_slow_connections_do_not_stop_the_next_user(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.PatientProtocol, "seconds", 0.3)
    port = int(live.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    try:
        for sock in slow:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert text(live, max_tokens=3)
        slow[0].settimeout(20)
        assert slow[0].recv(1) == b""  # closed by the server
    finally:
        for sock in slow:
            sock.close()


def test_headers_over_the_limit(live: str) -> None:
    port = int(live.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(20)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 100_000)
        assert sock.recv(100).startswith(b"HTTP/1.1 4")


def test_full_queue_answers_429(client: Any, computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computer, "waiting", 0)
    response = client.post("/v1/completions", json=body(n=9))
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    monkeypatch.undo()
    assert client.post("/v1/completions", json=body(max_tokens=1)).status_code == 200


def test_model_that_fails_gives_an_error_and_the_next_request_works(
    client: Any, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = computer.models["letters"].session
    assert session is not None
    monkeypatch.setattr(session._engine, "_decode", lambda tokens: 1 / 0)
    whole = client.post("/v1/completions", json=body())
    assert whole.status_code == 500 and "Traceback" not in whole.text
    assert whole.json()["error"]["type"] == "server_error"
    streamed = client.post("/v1/completions", json=body(stream=True))
    assert '"error"' in streamed.text.split("\n\n")[-2] and "[DONE]" not in streamed.text
    monkeypatch.undo()
    assert client.post("/v1/completions", json=body()).status_code == 200


Z = int(CharTokenizer(LETTERS).encode("z")[0])
BUT_Z, THEN_Z = ({"logit_bias": {str(Z): bias}} for bias in (-100, 100))


@pytest.fixture(scope="module")
def fragile() -> Loaded:
    """Continues texts; its logits are not numbers after a z, which other texts are kept from by `BUT_Z`."""
    config = gf.preset(f"llama@1m+{TINY}+head.tied=false+vocab_size={len(LETTERS)}")
    model = config.build(seed=1).eval()
    with torch.no_grad():
        model.embedding.weight[Z] = float("nan")
    return Loaded(model, config, CharTokenizer(LETTERS))


def test_logits_that_are_not_numbers_fail_one_request(fragile: Loaded) -> None:
    """In its prompt, in a row next to others, in a stream and in a prompt that is read in pieces: the others' texts
    are as without company, and rows and kept prompts work again."""
    with listening_to([Served("letters", fragile, slots=4)]) as address:
        good = [{"prompt": f"once {name}", "seed": i, "max_tokens": 150, **BUT_Z} for i, name in enumerate("abc")]
        expected = [text(address, **one) for one in good]
        bad = [
            {"prompt": "fuzz"},
            {"prompt": "once ", **THEN_Z},
            {"prompt": "a" * 150 + "z"},
            {"prompt": "once ", "stream": True, **THEN_Z},
        ]

        def fail(one: dict[str, Any]) -> tuple[int, str]:
            found = httpx.post(f"{address}/v1/completions", json=body(**one), timeout=120)
            return found.status_code, found.text

        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(text, address, **one) for one in good]
            failed = [fail(one) for one in bad + bad]
            assert [one.result() for one in running] == expected
        for one, (status, answer) in zip(bad + bad, failed, strict=True):
            assert status == (200 if one.get("stream") else 500) and "server_error" in answer, (one, answer)
            assert "NaN" not in answer and "Traceback" not in answer and "[DONE]" not in answer
        wait_for(address, 0)
        assert [text(address, **one) for one in good] == expected
        assert text(address, prompt="once ", max_tokens=5, **BUT_Z)


def test_long_prompt_is_read_between_tokens(
    letters: Any, talker: Any, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tokens of a running text at most one piece of another's prompt is read."""
    monkeypatch.setattr(computing, "PIECE", 16)
    first = served(letters, talker, encoder)[0]
    session, model = first.session, first.loaded.model
    assert session is not None
    sizes: list[int] = []
    run = model.hidden_states
    monkeypatch.setattr(
        model, "hidden_states", lambda part, *a, **k: (sizes.append(part.shape[1]), run(part, *a, **k))[1]
    )
    by_layer = model.states_by_layer  # while another text runs
    monkeypatch.setattr(model, "states_by_layer", lambda part, *a: (sizes.append(part.shape[1]), by_layer(part, *a))[1])
    decode = session._engine._decode
    monkeypatch.setattr(session._engine, "_decode", lambda tokens: (sizes.append(0), decode(tokens))[1])
    running = session.submit("once", max_new_tokens=60)
    session.step()
    long = session.submit("a" * 200, max_new_tokens=2)
    while long.finish_reason is None:
        session.step()
    assert running.finish_reason is None
    sizes = sizes[sizes.index(0) :]
    between = "".join("." if size == 0 else "p" if size > 1 else "" for size in sizes)
    assert "pp" not in between and between.count("p") == 13 and max(sizes) == 16
    running.cancel()


def test_cancelled_prompt_is_read_no_further(
    letters: Any, talker: Any, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "PIECE", 16)
    session = served(letters, talker, encoder)[0].session
    assert session is not None
    reply = session.submit("a" * 200, max_new_tokens=2)
    session.step()
    reply.cancel()
    assert not session.step() or not session.step()
    assert reply.finish_reason == "cancelled" and session._engine._reading is None


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process of Windows at once")
def test_sigterm_lets_a_running_answer_end(tmp_path: Path) -> None:
    from tests.cli.conftest import saved

    model = saved(tmp_path / "model", "llama")
    process = subprocess.Popen(
        [sys.executable, "-m", "glassformer", "serve", model, "--port", "0", "--grace", "60", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        started = json.loads(process.stdout.readline())
        threading.Thread(target=process.stderr.read, daemon=True).start()
        asked = {"model": model, "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{started['address']}/completions", json=asked, timeout=120) as found:
            lines = found.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and process.wait(60) == 0
    finally:
        process.kill()
