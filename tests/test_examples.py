"""Every file of examples/ runs, prints what it is about, and is as short as a user would write it."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NEEDS = {"results": ("pandas", "matplotlib"), "own_part": ("pandas",)}
PRINTS = {
    "costs": "8,190,735,360 parameters",
    "design": "the same design: True",
    "retrieval": "argparse.py",
    "surgery": "runs in llama.cpp",
    "hooks": "layers.2.ffn (1, 12, 88) True",
    "own_callback": "step 4: loss",
    "own_data": "token ids: vocabulary",
    "own_loop": "loss 4.",
    "own_part": "llama@0.3m+snake against llama@0.3m: ",
    "own_sampler": "no repeated pair: ",
    "results": "curves.png",
    "text": "torch.Size([2, 88])",
}
LONGEST = 30
"""Lines of code of an example, without its docstring."""


SLOW = ("design", "own_part")
"""Examples that start processes."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PRINTS])
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in one namespace, from the top, as `Run All` does."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cells = json.loads((FOLDER / "first_transformer.ipynb").read_text(encoding="utf-8"))["cells"]
    known: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec("".join(cell["source"]).replace("steps=60", "steps=2"), known)
    shown = capsys.readouterr().out
    assert "logits (1, 22, 257)" in shown and "weight on later tokens 0.0" in shown


def test_each_is_tried_and_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert {file.stem for file in files} == set(PRINTS)
    for file in files:
        source = file.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)), file
        code = [line for line in source.split('"""', 2)[2].splitlines() if line.strip()]
        assert len(code) < LONGEST, (file, len(code))


def test_page_of_examples_names_each() -> None:
    page = (FOLDER.parent / "docs" / "reference" / "examples.md").read_text(encoding="utf-8")
    assert [file.name for file in FOLDER.glob("*.py") if f"examples/{file.name}" not in page] == []
