"""Tutorials: pages have the code and words of their sources, and each source runs as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.docs.tutorials import FIGURES, OUTPUT, PAGES, Tutorial, notebook, tutorials, without_outputs, written
from tests.docs.blocks import blocks

pytest.importorskip("jupytext")
ALL = list(tutorials().values())
every_tutorial = pytest.mark.parametrize("tutorial", ALL, ids=lambda one: one.name)


@every_tutorial
def test_page_has_code_and_words_of_its_source(tutorial: Tutorial):
    text = tutorial.page.read_text(encoding="utf-8")
    fresh = written(tutorial, notebook(tutorial))
    assert without_outputs(text) == fresh, f"python -m experiments.docs tutorials {tutorial.name}"
    assert not OUTPUT.search(fresh), "blocks of text are outputs only"
    assert text.count("```text\n") >= 3, "a tutorial shows what it computes"


@every_tutorial
def test_figures_are_those_of_the_page(tutorial: Tutorial):
    named = re.findall(r"^!\[(.+)\]\(\.\./figures/tutorials/(\S+)\)$", tutorial.page.read_text(encoding="utf-8"), re.M)
    drawn = sorted(path.name for path in FIGURES.glob(f"{tutorial.name}-*.png"))
    assert [name for _, name in named] == drawn and drawn
    for words, name in named:
        assert len(words.split()) >= 8, "the words say what is seen"
        assert (FIGURES / name).stat().st_size < 100_000


@every_tutorial
def test_tutorial_has_its_sections(tutorial: Tutorial):
    source = tutorial.source.read_text(encoding="utf-8")
    headings = re.findall(r"^# (#+ .+)$", source, re.MULTILINE)
    assert headings[0].startswith("# ")
    for needed in ("## Exercise", "### A solution", "## The same as a command", "## Where to go from here"):
        assert [one for one in headings if one.startswith(needed)], needed
    assert "assert " in source.split("### A solution")[1], "the answer is checked"
    imports = re.findall(r"^(?:from|import) (glassformer\S*)", source, re.MULTILINE)
    assert set(imports) <= {"glassformer", "glassformer.parts.own", "glassformer.text"}


@every_tutorial
def test_links_lead_to_files(tutorial: Tutorial):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", tutorial.page.read_text(encoding="utf-8").replace("\n", " "))
    assert links and not [one for one in links if not (PAGES / one).exists()]


def test_no_page_without_a_source():
    assert {path.stem for path in PAGES.glob("[0-9]*.md")} == set(tutorials())


@pytest.mark.slow
@every_tutorial
def test_tutorial_runs(tutorial: Tutorial, tmp_path: Path):
    environment = {**os.environ, "MPLBACKEND": "agg", "GLASSFORMER_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, tutorial.source], cwd=tmp_path, env=environment, check=True, timeout=600)


@pytest.mark.slow
@every_tutorial
def test_commands_of_the_page_run(tutorial: Tutorial, tmp_path: Path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(tutorial.page.read_text(encoding="utf-8")):
        if block.language == "bash" and block.reason is None:
            subprocess.run(["bash", "-ec", block.code], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
