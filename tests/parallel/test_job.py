"""Jobs of several processes as a user starts them, by the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from glassformer.cli import main
from glassformer.training import checkpoint

MODEL = "llama@1m+layers=2+d_model=32+heads=4"
DROPPING = f"{MODEL}+residual.dropout=0.2+mixer.dropout=0.2"
WORDS = (
    "--batch-size", "4", "--micro-batch", "1", "--context", "16", "--threads", "1", "--dtype", "float32",
    "--evaluate-every", "1000", "--checkpoint-seconds", "1e-6",
)  # fmt: skip


def words(place: Path, out: str, *more: str, model: str = MODEL, steps: int = 6) -> list[str]:
    given = () if "--pretrained" in more else ("--tokenizer", "char")
    text = ("--data", str(place / "text"), "--out", str(place / out))
    return ["train", model, *text, *given, "--steps", str(steps), *WORDS, *more]


def job(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "glassformer", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(place: Path, out: str, *more: str, model: str = MODEL, steps: int = 6) -> None:
    done = job(words(place, out, *more, model=model, steps=steps))
    said = done.communicate(timeout=300)[1]
    assert done.returncode == 0, said


def text(place: Path) -> None:
    """Writes a text of three words in any order, with a few lines of other characters in the middle."""
    draw = random.Random(0)
    plain = [draw.choice(["the ", "cat ", "sat "]) for _ in range(3000)]
    odd = "".join(draw.choice("tehcas ") for _ in range(60))
    (place / "text").write_text("".join(plain[:1500]) + odd + "".join(plain[1500:]), encoding="utf-8")


def curve(run: Path) -> list[tuple[float, ...]]:
    """Loss and norm of every step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def weights(run: Path) -> dict[str, Any]:
    """Returns the weights of the last checkpoint, by file and name."""
    path = checkpoint.latest(run)
    assert path is not None
    return {f"{file.name} {name}": one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


DAMAGE: dict[str, Callable[[bytes], bytes] | None] = {
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 4]) + data[-39:],
    "gone": None,
}


def test_two_processes_train_as_one_and_damaged_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text(tmp_path)
    assert main(words(tmp_path, "one", model=DROPPING)) == 0
    run(tmp_path, "two", "--processes", "2", "--async-save", model=DROPPING)
    assert curve(tmp_path / "one") == curve(tmp_path / "two") and len(curve(tmp_path / "two")) == 6

    last = checkpoint.latest(tmp_path / "two")
    assert last is not None and len(list(last.glob("*.safetensors"))) == 4  # two of weights, two of moments
    for older in last.parent.iterdir():
        if older != last:
            shutil.rmtree(older)
    for file in sorted(last.iterdir()):
        for what, damage in DAMAGE.items():
            if file.name == "watch.json" or (file.name == "state.json" and what == "flipped"):  # may be JSON still
                continue
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(tmp_path / "two", tmp_path / "damaged")
            path = tmp_path / "damaged" / last.relative_to(tmp_path / "two") / file.name
            path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
            capsys.readouterr()
            assert main(words(tmp_path, "damaged", "--resume", model=DROPPING)) == 2, (file.name, what)
            said = capsys.readouterr().err
            assert "no other checkpoint of this run is whole" in said and "Traceback" not in said, (file.name, said)
            assert file.name in said or (file.name == "state.json" and "latest names" in said), (file.name, what, said)


def test_other_commands_are_for_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, says in (("0", "plan is work for one process, and torchrun or srun has started 2"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["plan", "llama@1m"]) == 2
        told = capsys.readouterr()
        assert says in told.err and bool(says) == bool(told.err) and not told.out
    assert main(["--version"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert main(["presets"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2,tp=2", "cp=2,fsdp=2", "tp=2,fsdp=2", "pp=2,replicate=2"])
def test_each_layout_has_the_losses_of_one_process(layout: str, tmp_path: Path) -> None:
    text(tmp_path)
    run(tmp_path, "one")
    run(tmp_path, "four", "--processes", "4", "--layout", layout)
    for ours, theirs in zip(curve(tmp_path / "one"), curve(tmp_path / "four"), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)


@pytest.mark.slow
def test_trained_model_continues_in_two_processes(tmp_path: Path) -> None:
    text(tmp_path)
    run(tmp_path, "base")
    run(tmp_path, "one", "--pretrained", model=str(tmp_path / "base"))
    assert curve(tmp_path / "one")[0] != curve(tmp_path / "base")[0]
    for layout in ("fsdp=2", "tp=2"):
        run(tmp_path, layout, "--pretrained", "--processes", "2", "--layout", layout, model=str(tmp_path / "base"))
        for ours, theirs in zip(curve(tmp_path / "one"), curve(tmp_path / layout), strict=True):
            assert theirs == (ours if layout == "fsdp=2" else pytest.approx(ours, rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2"])
def test_watch_writes_the_rows_of_one_process(layout: str, tmp_path: Path) -> None:
    """Also where the run goes back at a spike, which the odd lines make."""

    def looks(out: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / out / "dynamics.jsonl").read_text().splitlines()]

    text(tmp_path)
    more = ("--watch-every", "40", "--on-spike", "roll_back")
    run(tmp_path, "one", *more, steps=160)
    run(tmp_path, "two", *more, "--processes", "2", "--layout", layout, steps=160)
    ours, theirs = looks("one"), looks("two")
    assert [(row["step"], row.get("event")) for row in ours] == [(row["step"], row.get("event")) for row in theirs]
    assert any(row.get("event") == "rolled_back" for row in ours)
    for one, other in zip(ours, theirs, strict=True):
        for statistic, places in one.get("statistics", {}).items():
            assert other["statistics"][statistic].keys() == places.keys()
            for where, values in places.items():
                assert other["statistics"][statistic][where] == pytest.approx(values, rel=2e-2, abs=1e-3), where
    if layout == "fsdp=2":
        assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_job_resumes_bit_for_bit(number: signal.Signals, tmp_path: Path) -> None:
    text(tmp_path)
    run(tmp_path, "one", steps=60)
    stopped = job(words(tmp_path, "two", "--processes", "2", steps=60))
    while stopped.poll() is None and checkpoint.latest(tmp_path / "two") is None:
        pass
    stopped.send_signal(number)
    said = stopped.communicate(timeout=120)[1]
    assert stopped.returncode in (1, 128 + number) and "Traceback" not in said, (stopped.returncode, said)
    assert len(curve(tmp_path / "two")) < 60
    run(tmp_path, "two", "--resume", steps=60)
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
