"""One of several processes is killed repeatedly, also while they save; a resumed job ends with the same weights.

GLASSFORMER_KILLS=200 pytest -m slow tests/parallel/test_kills.py       as often as that
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glassformer.training import checkpoint

KILLS = int(os.environ.get("GLASSFORMER_KILLS", "4"))
STEPS = 8 * KILLS
WORLDS = (2, 1, 4)
MODEL = "gpt2@1m+dropout:0.1+layers=2+d_model=32+heads=2"


def started(place: Path, out: Path, world: int) -> subprocess.Popen[str]:
    words = [
        "train", MODEL, "--data", str(place / "text"), "--out", str(out), "--tokenizer", "char",
        "--steps", str(STEPS), "--batch-size", "4", "--micro-batch", "1", "--context", "16", "--threads", "1",
        "--dtype", "float32", "--evaluate-every", str(STEPS), "--checkpoint-seconds", "1e-6",
        *(["--async-save"] if world == 2 else []), *(["--resume"] if (out / "latest").exists() else []),
        *(["--processes", str(world)] if world > 1 else []),
    ]  # fmt: skip
    command = [sys.executable, "-m", "glassformer", *words]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def saved(out: Path) -> int:
    """The step of the latest checkpoint."""
    with contextlib.suppress(OSError):
        return int((out / "latest").read_text().strip().removeprefix("step_"))
    return 0


def kill_one(process: subprocess.Popen[str], draw: random.Random) -> None:
    """A rank: the process itself, or one that it has started."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(draw.choice(children or [str(process.pid)])), signal.SIGKILL)


@pytest.mark.slow
def test_killed_at_any_instant_and_continued_by_others_it_ends_the_same(tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "text").write_text("".join(draw.choice("abcdefgh ") for _ in range(9000)), encoding="utf-8")
    straight = started(tmp_path, tmp_path / "straight", 1)
    assert straight.communicate()[1] is not None and straight.returncode == 0
    out, kills, while_saving = tmp_path / "killed", 0, 0
    while kills < KILLS:
        process, before = started(tmp_path, out, WORLDS[kills % len(WORLDS)]), saved(out)
        while process.poll() is None and saved(out) <= before:
            time.sleep(0.001)
        if kills % 2:
            while process.poll() is None and not list(out.glob("checkpoints/.step_*.tmp")):
                pass
            time.sleep(draw.uniform(0, 0.001))  # a save may take no longer than a few of these
        else:
            time.sleep(draw.uniform(0, 0.2))
        while_saving += bool(list(out.glob("checkpoints/.step_*.tmp")))
        assert process.poll() is None, (saved(out), process.communicate()[1])
        kill_one(process, draw)
        said = process.communicate()[1]
        assert process.returncode != 0 and "Traceback" not in said, said
        kills += 1
        assert saved(out) < STEPS, "it was over before it had been killed often enough"
    last = started(tmp_path, out, 1)
    said = last.communicate()[1]
    assert last.returncode == 0, said
    assert while_saving > KILLS // 4
    paths = [checkpoint.latest(tmp_path / run) for run in ("straight", "killed")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((path / file).read_bytes() for path in paths if path)
        assert one == other, file
