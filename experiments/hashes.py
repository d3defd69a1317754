"""One sum a row: the same run in one, two and four processes, and with processes killed between.

python -m experiments.hashes                 writes the table of docs/determinism.md (some minutes on two cores)
python -m experiments.hashes --rows 2        the first rows, and writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from glassformer.naming import preset
from glassformer.parallel.stored import StoredPieces
from glassformer.training import train

EXPRESSIONS = [
    "llama@1m",
    "gpt2@1m+dropout:0.1",
    "llama@1m+moe:4:2+ffn.balance_rate=0.01",
    "llama@1m+tied+head.z_loss=0.0001",
    "llama@1m+mamba",
    "llama@1m+gqa:1+qknorm",
    "bloom@1m",
    "gpt2@1m+moe:4:2+ffn.balance_loss=0.01+dropout:0.1",
]
SMALL = "+layers=2+d_model=64+heads=2"
"""Wide enough that no rank has fewer than eight values of a vector (docs/determinism.md)."""
WORLDS = (1, 2, 4)
STEPS = 8
KILLS = ((2, 2), (4, 5))
"""Processes, and the step after which one of them is killed; one process ends the run."""
KILLED = 3
"""Number of expressions whose runs are also killed; few, because each takes three starts."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "sums", "are", "trees", "of", "bits")
PAGE = Path(__file__).parents[1] / "docs" / "determinism.md"
MARK = "<!-- table -->"
Row = tuple[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2 * len(EXPRESSIONS))
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train_rows(json.loads(given.train))
        return
    rows = [(expression, dtype) for expression in EXPRESSIONS for dtype in ("float32", "bfloat16")][: given.rows]
    found: dict[Row, dict[str, str]] = {row: {} for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        draw = random.Random(0)
        (place / "text").write_text(" ".join(draw.choice(WORDS) for _ in range(8000)), encoding="utf-8")
        for world in WORLDS:
            wait_for(start(place, rows, str(world), world))
            for row in rows:
                found[row][str(world)] = sum_of(run_of(place, row, str(world)))
        for row in rows[: 2 * KILLED]:
            found[row]["killed"] = killed(place, row)
    for row, sums in found.items():
        print(*row, sums)
    if len(rows) == 2 * len(EXPRESSIONS):
        write(found)
    if any(len(set(sums.values())) > 1 for sums in found.values()):
        sys.exit("the sums differ")


def train_rows(asked: dict[str, object]) -> None:
    """Trains the runs of the rows in `asked`, one after the other; runs in each process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for expression, dtype in asked["rows"]:  # type: ignore[attr-defined]
        out = run_of(Path(str(asked["place"])), (expression, dtype), str(asked["name"]))
        recipe = {
            "steps": STEPS, "batch_size": 8, "micro_batch": 2, "context": 32, "dtype": dtype, "threads": 1, "clip": 0.5,
            "compile": False, "evaluate_every": STEPS, "checkpoint_seconds": 1e-6 if asked["name"] == "killed" else 60,
        }  # fmt: skip
        text = Path(str(asked["place"])) / "text"
        train(
            preset(expression.replace("@1m", "@1m" + SMALL)),
            text,
            recipe,
            out,
            resume=(out / "latest").exists(),
            tokenizer="char",
        )


def run_of(place: Path, row: Row, name: str) -> Path:
    return place / f"{EXPRESSIONS.index(row[0])}-{row[1]}-{name}"


def start(place: Path, rows: list[Row], name: str, world: int) -> list[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "experiments.hashes", "--train"]
    words.append(json.dumps({"rows": rows, "name": name, "place": str(place)}))
    port, ranks = str(free_port()), []
    for rank in range(world):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        told = {name: str(value) for name, value in where.items()} if world > 1 else {}
        more = {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(words, env={**os.environ, **more}))
    return ranks


def wait_for(ranks: list[subprocess.Popen[bytes]]) -> None:
    while None in (statuses := [process.poll() for process in ranks]) and not any(statuses):
        time.sleep(0.05)
    if any(statuses):
        for process in ranks:
            process.kill()
        sys.exit("a process failed")


def killed(place: Path, row: Row) -> str:
    """Returns the sum of a run that is ended by SIGKILL once for each entry of KILLS, last rank first, and that one
    process then finishes."""
    out = run_of(place, row, "killed")
    for world, step in KILLS:
        ranks = start(place, [row], "killed", world)
        while ranks[0].poll() is None and steps_saved(out) < step:
            time.sleep(0.01)
        for process in reversed(ranks):
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGKILL)
            process.wait()
    wait_for(start(place, [row], "killed", 1))
    return sum_of(out)


def steps_saved(out: Path) -> int:
    try:
        return int((out / "latest").read_text().strip().removeprefix("step_"))
    except (OSError, ValueError):
        return 0


def sum_of(out: Path) -> str:
    """Returns 16 digits of the SHA-256 of all weights, buffers and moments, whole and in the order of their names, and
    of losses and gradient norms."""
    checkpoint, digest = out / "checkpoints" / (out / "latest").read_text().strip(), hashlib.sha256()
    for kind in ("model", "optimizer"):
        with StoredPieces(sorted(checkpoint.glob(f"{kind}*.safetensors"))) as stored:
            for name in sorted(stored.shapes):
                whole = stored.like(name, torch.empty(stored.shapes[name]))
                digest.update(f"{kind} {name} ".encode() + whole.numpy().tobytes())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row]
    held = [row["validation"]["loss"] for row in rows if "validation" in row][-1]
    digest.update(json.dumps([told, held]).encode())
    return digest.hexdigest()[:16]


def write(found: dict[Row, dict[str, str]]) -> None:
    head = "| model | products in | 1 process | 2 | 4 | 2, killed, 4, killed, 1 |\n|---|---|---|---|---|---|\n"
    names = (*map(str, WORLDS), "killed")
    table = "".join(
        f"| `{expression}` | {dtype} | {' | '.join(sums.get(name, '') for name in names)} |\n"
        for (expression, dtype), sums in found.items()
    )
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{head}{table}\n{MARK}{rest.partition(MARK)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
