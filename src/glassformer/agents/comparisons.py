"""Comparisons in one folder, under names without paths, computed by a process, at most one at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from glassformer.comparison import Design
from glassformer.comparison.design import FILE
from glassformer.comparison.result import row_of
from glassformer.errors import RequestError, WorkError, shown
from glassformer.files import being_written, disk_errors, replace_text
from glassformer.runs.files import read_results
from glassformer.runs.results import Results

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
"""Pattern of the name of a comparison, which cannot be a path."""
ASKED, ANSWER, PROGRESS, PROCESS = "asked.yaml", "answer.json", "progress.txt", "process.txt"
"""Files of a comparison that was started here: design; standard output, progress and number of its process."""
MOST_LISTED = 200
"""Largest number of comparisons that are listed."""
MOST_ROWS = 400
"""Largest number of reported runs of one comparison."""
STOP_SECONDS = 20.0
"""Seconds that a process has to save its run after SIGTERM, before it is killed."""

State = Literal["running", "complete", "incomplete", "failed"]


@dataclass
class Comparisons:
    """Folder of comparisons, with the process that computes one of them, which is stopped after `minutes`."""

    folder: Path
    minutes: float = 60.0
    detached: bool = False
    """True if the process may outlive this one, without a time limit."""
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _name: str = field(init=False, default="")
    _timer: threading.Timer | None = field(init=False, default=None)
    _designs: dict[Path, tuple[tuple[int, int], Any]] = field(init=False, default_factory=dict)
    """Content of design files with their time and size, because every view of one comparison needs all of them."""

    def place(self, name: str) -> Path:
        """Returns the folder of a comparison. Raises RequestError for a name that is a path or not a plain name."""
        place = self.folder / name
        if NAME.fullmatch(name) is None or place.is_symlink():
            raise RequestError(
                f"{shown(repr(name))} is not a name of a comparison: letters, digits, - and _, at most 64",
                code="syntax", field="name", value=name, expected="a name that runs lists",
            )  # fmt: skip
        return place

    def names(self) -> list[str]:
        """Returns the names of the comparisons in the folder, the latest first, at most `MOST_LISTED`."""
        self._end_removed()
        found: list[tuple[float, str]] = []
        with suppress(OSError):
            for entry in self.folder.iterdir():
                if NAME.fullmatch(entry.name) and not entry.is_symlink():
                    times = [
                        file.stat().st_mtime
                        for file in (entry / "results.json", entry / ASKED, entry / FILE)
                        if file.is_file()
                    ]
                    found += [(max(times), entry.name)] if times else []
        return [name for _, name in sorted(found, reverse=True)[:MOST_LISTED]]

    def results_of(self, name: str) -> Results | None:
        """Returns the content of a comparison's results.json; None without the file. Raises RequestError for a damaged
        one."""
        return read_results(self.place(name))

    def design_of(self, name: str) -> dict[str, Any]:
        """Returns the design of a comparison as plain values; empty without one."""
        for file in (self.place(name) / ASKED, self.place(name) / FILE):
            with suppress(OSError, ValueError, yaml.YAMLError):
                facts = file.stat()
                stamp = facts.st_mtime_ns, facts.st_size
                known = self._designs.get(file)
                if known is None or known[0] != stamp:
                    known = self._designs[file] = stamp, yaml.safe_load(file.read_text(encoding="utf-8"))
                if isinstance(known[1], dict):
                    return known[1]
        return {}

    def running(self, name: str) -> bool:
        """Returns True while a process computes the comparison."""
        mine = self._name == name and self._process is not None and self._process.poll() is None
        return mine or being_written(self.place(name))

    def state(self, name: str, found: Results | None) -> State:
        """Returns the state of a comparison whose results are `found` (None without any): running, complete, failed (an
        error ended its process), or else incomplete."""
        if self.running(name):
            return "running"
        if found is not None and found.status == "complete":
            return "complete"
        return "failed" if self._failure(name) else "incomplete"

    def listed(self) -> list[dict[str, Any]]:
        """Returns a dict for each comparison: name, state, models, seeds and created (date); for one with a damaged
        results.json name, state and refused (error)."""
        rows: list[dict[str, Any]] = []
        for name in self.names():
            try:
                found = self.results_of(name)
            except RequestError as problem:
                rows.append({"name": name, "state": "failed", "refused": problem.to_dict()})
                continue
            design = self.design_of(name)
            models = found.names if found is not None else design.get("models", [])
            seeds = found.budget.seeds if found is not None else design.get("seeds", 1)
            created = found.created if found is not None else ""
            state = self.state(name, found)
            rows.append({"name": name, "state": state, "models": models, "seeds": seeds, "created": created})
        return rows

    def start(self, design: Design, name: str | None) -> dict[str, Any]:
        """Draws seeds and starts a process that computes a comparison; returns its name (made up if None), state,
        design, seeds, similar comparisons and largest number of minutes.

        Raises RequestError for a name that is taken, and while another comparison is computed."""
        self._refuse_second()
        design = design.replace(seed=secrets.randbelow(1 << 31))
        name = name or f"comparison-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        place = self.place(name)
        if place.exists():
            raise RequestError(
                f"{name} is taken; a comparison is not repeated under its name. Leave the name out for a new one",
                code="exists", field="name", value=name,
            )  # fmt: skip
        similar = self.similar(name, design.to_dict())
        with disk_errors(place, "nothing was started"):
            place.mkdir(parents=True)
        try:
            replace_text(place / ASKED, yaml.safe_dump(design.to_dict(), sort_keys=False))
        except WorkError:
            with suppress(OSError):
                place.rmdir()
            raise
        self._spawn(name)
        first = design.first_seed
        return {
            "name": name, "state": "running", "design": design.to_dict(),
            "seeds": list(range(first, first + design.seeds)), "similar": similar,
            "most_minutes": self.minutes,
        }  # fmt: skip

    def resume(self, name: str) -> None:
        """Starts a process that continues a comparison; finished runs are kept. Raises RequestError while another
        comparison is computed, and for one whose folder has no asked.yaml, because no server started it."""
        self._refuse_second()
        if not (self.place(name) / ASKED).is_file():
            raise RequestError(
                f"{shown(repr(name))} was not started here; glassformer run continues it", code="unknown", field="name",
                value=name,
            )  # fmt: skip
        self._spawn(name)

    def _refuse_second(self) -> None:
        if busy := next((one for one in self.names() if self.running(one)), None):
            raise RequestError(
                f"{busy} is being computed, and two at once would share the processor; ask again once results says "
                "that it is complete",
                code="conflict", field="name", value=busy,
            )  # fmt: skip

    def _spawn(self, name: str) -> None:
        place, self._name = self.place(name), name
        command = [sys.executable, "-m", "glassformer", "run", str(place / ASKED), "--out", str(place), "--json"]
        with (
            disk_errors(place), (place / ANSWER).open("wb") as answer, (place / PROGRESS).open("wb") as progress
        ):  # fmt: skip
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=answer, stderr=progress, start_new_session=self.detached
                )
            except OSError as problem:
                raise WorkError(f"the comparison could not be started: {problem.strerror}", code="process") from None
        try:
            replace_text(place / PROCESS, f"{self._process.pid}\n")
        except WorkError:  # no later server could stop it
            self.stop()
            raise
        if not self.detached:
            self._timer = threading.Timer(60 * self.minutes, self.stop)
            self._timer.daemon = True
            self._timer.start()

    def _end_removed(self) -> None:
        """Kills the detached process of a comparison whose folder was removed: it would train until its next save, and
        make the folder again."""
        process = self._process
        if self.detached and process is not None and process.poll() is None and not self.place(self._name).is_dir():
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop_named(self, name: str) -> None:
        """Asks the process of a comparison to save its run and end, also if another server started it."""
        if not self.running(name):
            return
        with suppress(OSError, ValueError):
            os.kill(int((self.place(name) / PROCESS).read_text()), signal.SIGTERM)

    def similar(self, name: str, design: dict[str, Any]) -> list[str]:
        """Returns the names of other comparisons of the same models on the same text, whatever their seeds and budget.

        A reader who sees one of them needs the others too: the best of several is not evidence."""

        def kind(tree: dict[str, Any]) -> tuple[Any, ...]:
            models = tree.get("models")
            names = models.values() if isinstance(models, dict) else models if isinstance(models, list) else ()
            return sorted(map(str, names)), tree.get("data")

        return [one for one in self.names() if one != name and kind(self.design_of(one)) == kind(design)]

    def outcome(self, name: str, seconds: float = 0.0) -> dict[str, Any]:
        """Returns the state of a comparison; once it is complete its models, budget, verdicts and runs, before only the
        number of ended runs and its progress or error. `seconds` is the longest wait for the end.

        No loss is shown before all runs have ended, so that no one stops at a result that suits them. Raises
        RequestError for an unknown name."""
        if name not in self.names():
            raise RequestError(
                f"no comparison is named {shown(repr(name))}; runs lists them", code="unknown", field="name", value=name
            )
        until = time.monotonic() + seconds
        while self.running(name) and time.monotonic() < until:
            time.sleep(0.1)
        found = self.results_of(name)
        state = self.state(name, found)
        similar = self.similar(name, self.design_of(name))
        answer: dict[str, Any] = {"name": name, "state": state, "similar": similar}
        if state != "complete" or found is None:
            ended = len(list(self.place(name).glob("runs/*/result.json")))
            answer["runs_ended"] = ended
            if state == "running":
                answer["progress"] = self._last_line(name)
            elif failure := self._failure(name):
                answer["refused"] = failure
            return answer
        rows = [row_of(run) for run in found.paced]
        return {
            **answer,
            "models": found.names, "best": found.best, "created": found.created, "command": found.command,
            "data": found.data.root,
            "budget": found.budget.to_dict(),
            "verdicts": [one.to_dict() for one in found.verdicts],
            "looks": found.looks, "planned_looks": found.planned_looks,
            "runs": rows[:MOST_ROWS], "runs_not_listed": max(0, len(rows) - MOST_ROWS),
        }  # fmt: skip

    def stop(self) -> None:
        """Stops the process of this object, if it runs: it saves its run, which `resume` or `glassformer run`
        continues."""
        process, timer = self._process, self._timer
        if timer is not None:
            timer.cancel()
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _failure(self, name: str) -> dict[str, str] | None:
        """Returns code, field and message of the error that ended the process of a comparison; None without an error
        and for one that was stopped."""
        with suppress(OSError, ValueError, IndexError):
            lines = (self.place(name) / ANSWER).read_text(encoding="utf-8").splitlines()
            error = json.loads(lines[-1]).get("error")
            if isinstance(error, dict) and error.get("code") == "stopped":
                return None  # as a person asked
            if isinstance(error, dict):
                return {key: str(error.get(key, "")) for key in ("code", "field", "message")}
        line = self._last_line(name)
        return {"code": "failed", "field": "", "message": line} if "glassformer: " in line else None

    def _last_line(self, name: str) -> str:
        with suppress(OSError):
            lines = (self.place(name) / PROGRESS).read_bytes()[-4096:].decode(errors="replace").splitlines()
            return shown(next((line for line in reversed(lines) if line.strip()), ""), 300)
        return ""
