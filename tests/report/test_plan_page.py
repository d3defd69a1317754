"""The page of a plan holds its figures, escaped, and opens without anything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glassformer.cli import main
from glassformer.report.plan_page import render_plan

TRAIN = ["plan", "llama-3-8b", "--train", "--gpu", "h100:8", "--batch", "16", "--layout", "dp=2,tp=2,pp=2,zero=1",
         "--recompute", "full", "--tokens", "1T"]  # fmt: skip


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    asked = {"train": TRAIN, "generate": ["plan", "gpt2", "llama@1m", "--gpu", "h100", "--price", "2USD"]}
    for name, command in asked.items():
        assert main([*command, "--out", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").read_text(encoding="utf-8") for name in asked}


def test_training_plan_page_shows_memory_and_time(pages: dict[str, str]):
    page = pages["train"]
    for words in ("Parameters", "Memory", "Time", "Layout", "bubble", "L * (3 * f * d)", "2 pipeline", "USD"):
        assert words in page
    assert page.count('role="img"') == 4 and "<details>" in page


def test_the_memory_of_a_rank_adds_up(pages: dict[str, str]):
    """Its bar is that of one moment, and not what each part has at most."""
    memory = pages["train"].split('id="memory"')[1].split('id="time"')[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", memory)]
    assert len(shares) > 5 and sum(shares) == pytest.approx(100, abs=0.5)


def test_a_plan_of_several_models_names_each(pages: dict[str, str]):
    page = pages["generate"]
    assert "<h3>gpt2</h3>" in page and "<h3>llama@1m</h3>" in page and "a million tokens" in page
    assert 'id="memory"' not in page and "2.00 to" not in page.split("a million")[0]


def test_names_are_words():
    one = {"name": "<script>", "parameters": 1, "symbols": {}, "components": []}
    assert "<script>&" not in render_plan([one], "glassformer plan '<script>'")
    assert "&lt;script&gt;" in render_plan([one], "glassformer plan '<script>'")


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert main(["plan", "gpt2", "--out", str(tmp_path / "file" / "plan.html")]) == 1
    assert "plan.html" in capsys.readouterr().err
