"""`glassformer why`: its output, and its error for a folder that is not a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli.show import show
from glassformer.dynamics.diagnosis import BARS, sparkline
from glassformer.dynamics.records import NAME
from glassformer.figures.terminal import one_line
from glassformer.naming import preset
from glassformer.training import Recipe
from tests.refused import refused

STEPS = 200


def show_why(run: str, as_json: bool) -> None:
    show(gf.why(run), as_json)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one bad batch, written by hand."""
    folder = tmp_path / "run"
    folder.mkdir()
    preset("llama@1m+layers=2+d_model=32+heads=2+vocab_size=65+context=32").save(folder / "config.yaml")
    Recipe.of(tokens=STEPS * 128, batch_size=4, context=32, watch=10).save(folder / "recipe.yaml")
    rows = []
    for step in range(1, STEPS + 1):
        loss = 2 + 2 * 0.97**step + 0.02 * ((step * 37) % 11 - 5)
        rows.append(
            {"step": step, "tokens": step * 128, "seconds": step, "loss": 9.0 if step == 150 else loss,
             "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 128.0}
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spike = {
        "step": 150,
        "event": "spike",
        "what": "loss",
        "value": 9.0,
        "sigmas": 70.0,
        "batch": ["x\x1b[31my\nz" * 20],
    }
    (folder / NAME).write_text(json.dumps(spike) + "\n")
    return folder


def test_a_paragraph_a_table_a_curve_and_the_batch(run: Path, capsys: pytest.CaptureFixture[str]):
    show_why(str(run), as_json=False)
    said = capsys.readouterr().out
    assert "bad batch" in said
    assert "recipe.on_spike=skip" in said
    assert "the batch:\n  x·[31my⏎zx" in said
    assert "\x1b[31m" not in said, "a text of the corpus must not command the terminal"
    assert any(bar in said for bar in BARS)
    assert "--watch" in said


def test_moved_statistics_are_a_table(run: Path, capsys: pytest.CaptureFixture[str]):
    norms = {step: 1.0 + 0.01 * ((step * 7) % 5) for step in range(2, STEPS + 1, 2)}
    rows = [
        {"step": step, "statistics": {"gradient_norm": {"layers.1.ffn.up": norm * (50 if step > 140 else 1)}}}
        for step, norm in norms.items()
    ]
    (run / NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row | {"loss": row["loss"] + 4 * (row["step"] > 150)} for row in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    show_why(str(run), as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    _, _, moved = said.partition("what moved first:")
    assert "142" in moved
    assert "gradient_norm" in moved
    assert "layers.1.ffn.up" in moved
    show_why(str(run), as_json=True)
    (first,) = json.loads(capsys.readouterr().out)["moved"]
    assert (first["site"], first["layer"], first["head"], first["step"]) == ("layers.1.ffn.up", 1, None, 142)


def test_json_is_exactly_the_diagnosis(run: Path, capsys: pytest.CaptureFixture[str]):
    show_why(str(run), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"verdict", "causes", "moved", "notes"}
    assert found["moved"] == []
    (note,) = found["notes"]
    assert note.startswith("Without statistics only the loss was judged")
    (cause,) = found["causes"]
    assert set(cause) == {"cause", "layer", "site", "statistic", "step", "sigmas", "confidence", "try"}
    assert (cause["cause"], cause["step"], cause["layer"]) == ("bad batch", 150, None)


def test_the_arm_of_a_comparison(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arm = tmp_path / "comparison" / "runs" / "llama-seed0"
    arm.mkdir(parents=True)
    shutil.move(run, arm / "run")
    show_why(str(arm), as_json=True)
    assert json.loads(capsys.readouterr().out)["causes"]
    with refused(code="conflict", field="run"):
        show_why(str(tmp_path / "comparison"), as_json=True)


def test_a_run_without_statistics_is_judged_by_its_loss(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / NAME).unlink()
    show_why(str(run), as_json=False)
    assert "Without statistics only the loss was judged" in " ".join(capsys.readouterr().out.split())


def test_a_truncated_file_is_read_as_far_as_it_goes(run: Path, capsys: pytest.CaptureFixture[str]):
    with (run / NAME).open("a") as file:
        file.write('{"step": 151, "event": "spi')
    show_why(str(run), as_json=True)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["causes"]
    assert said.err == ""
    assert any("1 lines of" in note for note in found["notes"])
    assert any("Without statistics" in note for note in found["notes"])


def test_a_wrong_folder_is_one_sentence(run: Path, tmp_path: Path):
    with refused(code="missing", field="run"):
        show_why(str(tmp_path / "nowhere"), as_json=False)
    (tmp_path / "empty").mkdir()
    with refused(code="missing", field="run"):
        show_why(str(tmp_path / "empty"), as_json=False)
    (run / "recipe.yaml").write_text("minutes: many")
    with refused(code="type", field="minutes"):
        show_why(str(run), as_json=False)
    (run / "metrics.jsonl").write_text("")
    (run / NAME).unlink()
    Recipe.of(tokens=128, batch_size=4, context=32).save(run / "recipe.yaml")
    with refused(code="missing", field="steps"):
        show_why(str(run), as_json=False)


def test_the_verb(run: Path, capsys: pytest.CaptureFixture[str]):
    from glassformer.cli import main

    assert main(["why", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"]
    assert main(["why", str(run / "nowhere")]) == 2


def test_a_curve_in_a_line():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert sparkline([3.0, 3.0]) == BARS[0] * 2
    assert len(sparkline([float(n) for n in range(1000)])) == 60
    assert sparkline([0.0] * 500 + [1.0] * 500, 2) == BARS[0] + BARS[7]


def test_nothing_commands_the_terminal():
    assert one_line("a\x1b[2Jb\n\x00é\u202e") == "a·[2Jb⏎·é·"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train gpt2@1m+relu --data x --on-spike go_on --out r", "train gpt2@1m+relu+{} --data x --out r-2"),
        (
            "train --watch gpt2@1m --on-spike=go_on --data=x --out=r --resume",
            "train --watch gpt2@1m+{} --data=x --out=r-2",
        ),
        (
            "train --data llama gpt2@1m+recipe.clip=2+recipe.on_spike=go_on",
            "train --data llama gpt2@1m+recipe.clip=2+{}",
        ),
        ("train gpt2@1m --data -", None),
        ("run design.yaml", None),
    ],
)
def test_the_remedy_is_a_whole_command(run: Path, typed: str, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.parent)
    (run / "command.txt").write_text(f"glassformer {typed}\n")
    found = gf.why(run)
    first = found.causes[0].tries[0]
    assert first == "recipe.on_spike=skip"
    assert found.to_dict().get("command") == (None if expected is None else f"glassformer {expected.format(first)}")


def test_the_remedy_of_an_arm_is_one_more_arm(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its comparison keeps the other runs."""
    arm = tmp_path / "all" / "runs" / "b-seed0"
    arm.mkdir(parents=True)
    shutil.move(run, arm / "run")
    (arm / "request.json").write_text('{"name": "gpt2@1m"}')
    (tmp_path / "all" / "results.json").write_text(
        '{"command": "glassformer compare llama@1m gpt2@1m --data x --out all"}'
    )
    show_why(str(arm), as_json=False)
    command = "glassformer compare llama@1m gpt2@1m gpt2@1m+recipe.on_spike=skip --data x --out all"
    assert capsys.readouterr().out.splitlines()[-1] == f"next: {command}"
