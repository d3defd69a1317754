"""Fenced blocks of a page of Markdown, and a shell and an interpreter that run them in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docs import prompt

FENCE = re.compile(
    r"^(?:<!--\s*(?P<mark>(?:(?!-->).)*?)\s*-->\n+)?"
    r"^(?P<fence>```+)(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"not run: *(.+)", re.DOTALL)
VARIES = "varies"
"""The comment before an output that differs from machine to machine, such as a text that a model writes."""
FAILS = "fails"
"""The comment before a command that the page shows for its error."""
LONGEST = 300
"""Seconds of a block."""
FEW = 0.8
"""Share of the words of a printed output that a run must print."""
COLUMNS = 100
"""Width of the terminal, so that tables break as they did in the run that was pasted."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, line, text, and the comment before it."""

    language: str
    line: int
    code: str
    mark: str = ""

    @property
    def reason(self) -> str | None:
        """Reason of a block that is not run, of `<!-- not run: REASON -->`."""
        match = NOT_RUN.match(self.mark)
        return " ".join(match[1].split()) if match else None


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a page."""
    return [
        Block(found["language"], text.count("\n", 0, found.start("fence")) + 1, found["code"], found["mark"] or "")
        for found in FENCE.finditer(text)
    ]


def words(text: str) -> set[str]:
    """Words of an output of three letters and more; figures and drawn lines are left out."""
    return set(re.findall(r"[^\W\d_]{3,}", text))


class Page:
    """A folder, a shell and an interpreter in which the blocks of one page run.

    programs: the folder of `python` and other commands, the first on PATH after that of `glassformer`
    """

    def __init__(self, folder: Path, programs: Path, server: Path | None = None) -> None:
        self.folder, self.printed = folder / "page", ""
        self.folder.mkdir()
        path = [str(programs), os.environ["PATH"]]
        if server is not None:
            (folder / "bin").mkdir()
            client = folder / "bin" / "glassformer"
            client.write_text(prompt.CLIENT.format(python=sys.executable, socket=str(server)))
            client.chmod(0o755)
            path.insert(0, str(folder / "bin"))
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NO_COLOR")}
        self.environment = kept | {
            "PATH": os.pathsep.join(path),
            "COLUMNS": str(COLUMNS),
            "GLASSFORMER_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        self.interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Runs a block of `bash` or `python` and keeps what it prints. Raises AssertionError with its output."""
        self.printed = self._python(block) if block.language == "python" else self._bash(block)

    def _bash(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code], cwd=self.folder, env=self.environment, timeout=LONGEST,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        good = (done.returncode != 0) == (block.mark == FAILS)
        assert good, f"line {block.line} ends with {done.returncode}\n{block.code}\n{done.stdout}"
        return done.stdout

    def _python(self, block: Block) -> str:
        if self.interpreter is None:
            self.interpreter = subprocess.Popen(
                ["glassformer", prompt.BLOCKS], cwd=self.folder, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                executable=str(self.folder.parent / "bin" / "glassformer"),
            )  # fmt: skip
        assert self.interpreter.stdin is not None and self.interpreter.stdout is not None
        self.interpreter.stdin.write(json.dumps(block.code) + "\n")
        self.interpreter.stdin.flush()
        shown, error = json.loads(self.interpreter.stdout.readline() or '["", "the interpreter has ended"]')
        assert error is None, f"line {block.line}\n{block.code}\n{shown[-2000:]}\n{error}"
        return shown

    def close(self) -> None:
        """Ends the interpreter."""
        if self.interpreter is not None:
            self.interpreter.communicate()


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """Starts `prompt.serve`; yields its socket, and ends it with all that it started."""
    path = folder / "socket"
    server = subprocess.Popen([sys.executable, prompt.__file__, str(path)], start_new_session=True, cwd=folder)
    try:
        until = time.monotonic() + LONGEST
        while not path.exists():
            assert server.poll() is None and time.monotonic() < until, "the server of commands does not listen"
            time.sleep(0.1)
        yield path
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
