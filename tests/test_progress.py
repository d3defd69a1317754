"""Progress of long work reaches its listener, and lines on standard error tell the time left."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassformer as gf
from glassformer import progress
from glassformer.progress import line_on_terminal, listened, tell
from glassformer.runs import live
from glassformer.runs.events import ReadingEvent
from glassformer.runs.live import View, shown
from glassformer.text import ByteTokenizer


@pytest.mark.parametrize("terminal", [True, False])
def test_line_is_shown_only_without_a_listener(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with line_on_terminal():
        tell("loading x", 1, 2)
    assert capsys.readouterr().err == ("\r\x1b[2Kloading x: 50%\r\x1b[2K" if terminal else "")
    heard: list[str] = []
    with listened(lambda stage, done, total: heard.append(stage)), line_on_terminal():
        tell("loading x", 1, 2)
    assert heard == ["loading x"] and not capsys.readouterr().err


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_reading_and_writing_report_each_tensor(name: str, tmp_path: Path) -> None:
    """Up to the number of tensors that the file has, by the library that defines the format."""
    told: list[tuple[str, int, int | None]] = []
    model = gf.preset("llama@0.1m+vocab_size=257").build(seed=0)
    with listened(lambda *row: told.append(row)):
        gf.convert(gf.Loaded(model, model.config, ByteTokenizer()), tmp_path / name, progress=lambda event: None)
    assert told == []  # the function that was given hears it
    heard: list[ReadingEvent] = []
    gf.convert(
        gf.Loaded(model, model.config, ByteTokenizer()),
        tmp_path / "again" / name,
        progress=heard.append,  # type: ignore[arg-type]
    )
    written = [(one.done, one.total) for one in heard if one.stage.startswith("writing ")]
    with listened(lambda *row: told.append(row)):
        gf.load(tmp_path / name)
    read = [(done, total) for stage, done, total in told if stage.startswith("loading ")]
    for rows in (written, read):
        count = rows[-1][1]
        assert count is not None and count > 10 and rows == [(done, count) for done in range(count + 1)]


def test_time_left_follows_the_pace_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter in 30 seconds leaves 90."""
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    with View():
        tell("embedding", 0, 400)
        clock[0] = 0.9
        tell("embedding", 1, 400)
        clock[0] = 30.0
        tell("embedding", 100, 400)
        clock[0] = 31.0
        tell("embedding", 110, 400)
        clock[0] = 120.0
        tell("embedding", 400, 400)
    assert capsys.readouterr().err.splitlines() == ["embedding: 25%, 1:30 left", "embedding: 100%"]


@pytest.mark.parametrize(("progress", "lines"), [(True, 1), (False, 0)])
def test_python_shows_the_progress_of_the_command_line(
    progress: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "FIRST", -1.0)
    monkeypatch.setattr(live, "PATIENCE", 0.0)
    with shown(progress) as notify:
        notify(ReadingEvent(stage="reading", done=1, total=2))
    assert len(capsys.readouterr().err.splitlines()) == lines
