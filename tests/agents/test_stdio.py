"""The server of tools as a process: by the client of the `mcp` package, and by lines of JSON-RPC."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="pip install 'glassformer[mcp]'")
if not hasattr(mcp, "Client"):
    pytest.skip("mcp has no Client before version 2", allow_module_level=True)


def started(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "glassformer", "mcp", "--folder", str(folder), *more]


def test_client_of_the_package(tmp_path: Path) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        command, *arguments = started(tmp_path / "all")
        server = mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        async with mcp.Client(mcp.stdio_client(server)) as client:
            listed = await client.list_tools()
            calls = [
                ("plan", {"models": ["gpt2"]}),
                ("plan", {"models": ["gpt2+nothing"]}),
                ("compare", {"models": ["gpt2@1m", "llama@1m"], "data": "python-docs", "tokens": 1000}),
                ("runs", {}),
            ]
            return listed, [await client.call_tool(name, arguments) for name, arguments in calls]

    listed, (plan, wrong, compare, runs) = asyncio.run(asyncio.wait_for(ask(), 120))
    assert {one.name for one in listed.tools} == {"plan", "presets", "diff", "results", "runs"}
    assert all(one.annotations.read_only_hint and one.description for one in listed.tools)
    assert plan.structured_content["plans"][0]["parameters"] == 124439808 and not plan.is_error
    assert json.loads(plan.content[0].text) == plan.structured_content
    assert wrong.is_error and wrong.structured_content["refused"]["code"] == "unknown"
    assert compare.is_error and compare.structured_content["refused"]["field"] == "tool"
    assert runs.structured_content == {"comparisons": []} and not (tmp_path / "all").exists()


class Lines:
    """Messages as lines on the pipes of a process."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            started(folder, *more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.asked = 0

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def call(self, method: str, parameters: Any) -> dict[str, Any]:
        self.asked += 1
        message = {"jsonrpc": "2.0", "id": self.asked, "method": method, "params": parameters}
        self.send(json.dumps(message))
        while True:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, self.process.stderr and self.process.stderr.read()
            found: dict[str, Any] = json.loads(line)
            if found.get("id") == self.asked:
                return found

    def begin(self) -> dict[str, Any]:
        who = {"name": "test", "version": "1"}
        found = self.call("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": who})
        self.send('{"jsonrpc": "2.0", "method": "notifications/initialized"}')
        return found


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    found = Lines(tmp_path / "all", "--allow-runs")
    yield found
    if found.process.poll() is None:
        found.process.kill()
    found.process.wait(20)
    for pipe in (found.process.stdin, found.process.stdout, found.process.stderr):
        assert pipe is not None
        pipe.close()


def test_lines_of_json(lines: Lines) -> None:
    """Handshake of 2025-06-18, a call, broken lines, and the end of input ends the program."""
    begun = lines.begin()["result"]
    assert begun["protocolVersion"] == "2025-06-18" and begun["serverInfo"]["name"] == "glassformer"
    names = {one["name"] for one in lines.call("tools/list", {})["result"]["tools"]}
    assert "compare" in names
    lines.send("not JSON")
    lines.send('{"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": {"name": "plan", "arguments": 7}}')
    found = lines.call("tools/call", {"name": "diff", "arguments": {"a": "gpt2", "b": "gpt2"}})["result"]
    assert found["structuredContent"]["equal"] is True and not found.get("isError")
    assert "error" in lines.call("nothing/known", {})
    assert lines.process.stdin is not None
    lines.process.stdin.close()
    assert lines.process.wait(30) == 0
