"""Tools without a protocol: results, refusals, and comparisons of one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.agents import stdio
from glassformer.agents.comparisons import ASKED, Comparisons
from glassformer.agents.tools import TOOLS, Toolbox
from glassformer.comparison import Design
from glassformer.errors import RequestError
from glassformer.runs.files import write_results
from glassformer.runs.results import Results
from tests.report.sample import results

SMALL = {"models": ["gpt2@0.3m", "llama@0.3m"], "data": "python-docs", "tokens": 4000, "seeds": 2, "context": 32,
         "batch_size": 4}  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path) -> Toolbox:
    return Toolbox(Comparisons(tmp_path / "all"))


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    box = Toolbox(Comparisons(tmp_path / "all"), allow_runs=True)
    yield box
    box.comparisons.stop()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A folder with a complete comparison called `one`."""
    folder = tmp_path / "finished"
    (folder / "one").mkdir(parents=True)
    write_results(Results.of(results(3) | {"status": "complete"}), folder / "one")
    return folder


def test_plan_counts_as_the_library_does(reader: Toolbox) -> None:
    found = reader.call("plan", {"models": ["gpt2", "llama-3-8b"], "context": 1024})
    assert not found.refused
    expected = [gf.preset(name).num_params() for name in ("gpt2", "llama-3-8b")]
    assert [one["parameters"] for one in found.fields["plans"]] == expected == [124439808, 8030261248]
    assert "components" not in found.fields["plans"][0]
    assert "components" in reader.call("plan", {"models": ["gpt2"], "explain": True}).fields["plans"][0]


def test_diff_names_the_change(reader: Toolbox) -> None:
    found = reader.call("diff", {"a": "gpt2", "b": "gpt2+rope"}).fields
    assert "+rope" in [one["change"] for one in found["parts"]] and not found["equal"]
    assert reader.call("diff", {"a": "gpt2", "b": "gpt2"}).fields["equal"]


def test_presets_by_word(reader: Toolbox) -> None:
    assert "rope" in reader.call("presets", {"word": "rope"}).fields["changes"]
    assert "gpt2" in reader.call("presets", None).fields["presets"]


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "field"),
    [
        ("plan", {"models": ["/etc/passwd"]}, "unsupported", "model"),
        ("plan", {"models": ["hf:openai-community/gpt2"]}, "unsupported", "model"),
        ("plan", {"models": ["smollm2"]}, "unknown", "name"),
        ("plan", {"models": ["llamma"]}, "unknown", "name"),
        ("plan", {"models": ["gpt2+nothing"]}, "unknown", "change"),
        ("plan", {"models": ["gpt2"], "machine": "h1000"}, "unknown", "machine"),
        ("plan", {"models": []}, "type", "models"),
        ("plan", {"models": ["gpt2"], "batch": 0}, "type", "batch"),
        ("plan", {"models": ["gpt2"], "out": "page.html"}, "type", "out"),
        ("plan", [1], "type", "arguments"),
        ("presets", {"word": "zzzz"}, "unknown", "word"),
        ("diff", {"a": "gpt2", "b": "llama@9x"}, "unknown", "size"),
        ("results", {"name": "../one"}, "unknown", "name"),
        ("results", {"name": "one"}, "unknown", "name"),
        ("compare", SMALL, "unsupported", "tool"),
        ("delete", {}, "unknown", "tool"),
    ],
)
def test_wrong_call_is_refused_as_data(reader: Toolbox, tool: str, arguments: Any, code: str, field: str) -> None:
    found = reader.call(tool, arguments)
    assert found.refused and found.fields.keys() == {"refused"}
    refused = found.fields["refused"]
    assert (refused["code"], refused["field"]) == (code, field) and refused["message"]
    assert not reader.comparisons.folder.exists()


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"models": ["gpt2@0.3m", "llama@3m"]}, "conflict", "allow_unmatched"),
        ({"models": ["gpt2@0.3m", "llama@0.3m+recipe.seed=3"]}, "unsupported", "recipe.seed"),
        ({"models": ["gpt2@0.3m", "./folder"]}, "unsupported", "model"),
        ({"data": "/etc/passwd"}, "unsupported", "data"),
        ({"data": "hf:owner/name"}, "unsupported", "data"),
        ({"name": "../one"}, "syntax", "name"),
        ({"name": "a/b"}, "syntax", "name"),
        ({"seeds": 1000}, "type", "seeds"),
        ({"tokens": None}, "conflict", "budget"),
        ({"seed": 3}, "type", "seed"),
    ],
)
def test_unfair_or_outside_comparison_is_refused(runner: Toolbox, change: Any, code: str, field: str) -> None:
    found = runner.call("compare", {**SMALL, **change})
    assert found.refused, found
    assert (found.fields["refused"]["code"], found.fields["refused"]["field"]) == (code, field)
    assert not runner.comparisons.folder.exists()


def test_reader_offers_no_tool_that_writes(reader: Toolbox, runner: Toolbox) -> None:
    assert {one["name"] for one in reader.described()} == TOOLS.keys() - {"compare"}
    assert {one["name"] for one in runner.described()} == TOOLS.keys()
    assert all(one["schema"]["additionalProperties"] is False for one in runner.described())


def test_seeds_are_drawn_and_one_comparison_runs_at_a_time(runner: Toolbox) -> None:
    first = runner.call("compare", {**SMALL, "name": "first"})
    assert not first.refused, first
    again = runner.call("compare", {**SMALL, "name": "second"})
    assert again.fields["refused"]["code"] == "conflict"
    assert runner.call("results", {"name": "first"}).fields["state"] == "running"
    runner.comparisons.stop()
    taken = runner.call("compare", {**SMALL, "name": "first"})
    assert taken.fields["refused"]["code"] == "exists"
    second = runner.call("compare", SMALL)
    runner.comparisons.stop()
    assert second.fields["similar"] == ["first"]
    seeds = first.fields["seeds"], second.fields["seeds"]
    assert seeds[0] != seeds[1] and all(one == [one[0], one[0] + 1] for one in seeds)
    design = Design.from_file(runner.comparisons.folder / "first" / ASKED)
    assert design.first_seed == seeds[0][0] and design.seeds == 2
    states = {one["name"]: one["state"] for one in runner.call("runs", {}).fields["comparisons"]}
    assert states.keys() == {"first", second.fields["name"]} and "complete" not in states.values()


def test_results_show_verdicts_only_of_a_complete_comparison(finished: Path) -> None:
    box = Toolbox(Comparisons(finished))
    found = box.call("results", {"name": "one"}).fields
    assert found["state"] == "complete" and found["verdicts"][0]["seeds"] == 3
    assert [run["status"] for run in found["runs"]].count("diverged") == 3
    path = finished / "one" / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "3 of 4 runs"}))
    partly = box.call("results", {"name": "one"}).fields
    assert partly["state"] == "incomplete" and partly["runs_ended"] == 0
    assert not {"verdicts", "runs", "best"} & partly.keys()


def test_a_folder_of_others_is_not_opened(finished: Path, tmp_path: Path) -> None:
    """A link out of the folder, a damaged file, and a folder of other files."""
    box = Toolbox(Comparisons(tmp_path))
    (tmp_path / "notes").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "results.json").write_text("{")
    if hasattr(os, "symlink"):
        (tmp_path / "link").symlink_to(finished / "one")
    listed = box.call("runs", {}).fields["comparisons"]
    assert [(one["name"], one["state"]) for one in listed] == [("damaged", "failed")]
    assert box.call("results", {"name": "damaged"}).fields["refused"]["code"] == "damaged"
    assert box.call("results", {"name": "link"}).fields["refused"]["code"] == "unknown"


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "find_spec", lambda name: None)
    with pytest.raises(RequestError) as refused:
        stdio.serve_tools()
    assert (refused.value.code, refused.value.field) == ("missing", "mcp")


def test_process_ends_with_its_time(tmp_path: Path) -> None:
    box = Toolbox(Comparisons(tmp_path / "all", minutes=0.01), allow_runs=True)
    name = box.call("compare", SMALL).fields["name"]
    until = time.monotonic() + 60
    while box.comparisons.running(name):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert box.call("results", {"name": name}).fields["state"] in ("incomplete", "failed")


def call_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "glassformer", *arguments], capture_output=True, text=True, timeout=60)


def test_wrong_option_is_refused() -> None:
    found = call_program("mcp", "--most-minutes", "0")
    assert found.returncode == 2 and "most_minutes" in found.stderr
