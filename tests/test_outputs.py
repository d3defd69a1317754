"""Outputs of verbs: no verb replaces a file that this program did not write, and none replaces what it reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.comparison.folder import refuse_other_files
from glassformer.errors import RequestError
from glassformer.files import output
from glassformer.text import ByteTokenizer
from tests.refused import refused
from tests.runs.stand_in import AT_ONCE

MODEL = "llama@0.3m+layers=1+d_model=16+heads=2+ffn.hidden=32+vocab_size=257"
TWO = [MODEL, f"{MODEL}+nope"]
TEXT = "\n".join(f"line {n} of a small text about cats and trees" for n in range(400))
RUN: dict[str, Any] = {"tokenizer": "byte", "batch_size": 2, "context": 16, "device": "cpu", "progress": False}
FEW: dict[str, Any] = {**RUN, "tokens": 320, "executor": AT_ONCE}
FOREIGN = b"written by somebody else\n"


@dataclass(frozen=True)
class Inputs:
    """Files that verbs read."""

    text: Path
    model: Path
    """A checkpoint with a tokenizer."""
    runs: Path
    """A table of finished runs."""
    lines: Path
    """Texts to embed."""
    config: Path
    """A config, without weights."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    place = tmp_path_factory.mktemp("inputs")
    (place / "text.txt").write_text(TEXT)
    rows = [
        f"{n},{d},{1.7 + 400 / n**0.34 + 410 / d**0.28}" for n in (1e6, 3e6, 1e7, 3e7) for d in (1e8, 3e8, 1e9, 3e9)
    ]
    (place / "runs.csv").write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    gf.save(gf.preset(MODEL).build(seed=0), ByteTokenizer(), place / "model")
    (place / "folder").mkdir()
    (place / "folder" / "text.txt").write_text(TEXT)
    (place / "texts.jsonl").write_text('{"text": "to be"}\n')
    gf.preset(MODEL).save(place / "model.yaml")
    return Inputs(*(place / name for name in ("text.txt", "model", "runs.csv", "texts.jsonl", "model.yaml")))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))


Verb = Callable[[Inputs, Path], object]
FOLDERS: dict[str, Verb] = {
    "save": lambda i, out: gf.save(gf.preset(MODEL).build(seed=0), ByteTokenizer(), out),
    "convert": lambda i, out: gf.convert(i.model, out, progress=False),
    "train": lambda i, out: gf.train(MODEL, i.text, steps=2, out=out, **RUN),
    "compare": lambda i, out: gf.compare(TWO, i.text, out=out, **FEW),
    "tune": lambda i, out: gf.tune(TWO, i.text, out=out, **FEW),
    "ablate": lambda i, out: gf.ablate(MODEL, i.text, changes="nope", seeds=2, out=out, **FEW),
    "scale": lambda i, out: gf.scale(
        ["llama+d_model=16"], i.text, sizes="0.1m,0.3m,0.6m", budgets="160,320,640", out=out, executor=AT_ONCE, **RUN
    ),
    "index": lambda i, out: gf.index(i.text, out, i.model, progress=False),
    "claims": lambda i, out: gf.claims("gqa-cache", out=out, progress=False),
    "inspect": lambda i, out: gf.inspect(i.model, "to be", reading="head_scores", out=out, progress=False),
}
"""Verbs whose output is a folder."""
FILES: dict[str, tuple[str, Verb]] = {
    "convert": ("x.gguf", lambda i, out: gf.convert(i.model, out, progress=False)),
    "embed": ("x.npy", lambda i, out: gf.embed(i.model, ["to be"], out=out, progress=False)),
    "embed lines": ("x.jsonl", lambda i, out: gf.embed(i.model, ["to be"], out=out, progress=False)),
    "plan": ("x.html", lambda i, out: gf.plan(MODEL, out=out)),
    "scale a table": ("x.html", lambda i, out: gf.scale(None, i.runs, out=out, progress=False)),
    "generate --state": ("x.state", lambda i, out: gf.load(i.model).generate("to be", state=out, max_new_tokens=2)),
}
"""Verbs whose output is a file."""


def contents(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_outputs_of_several_verbs_in_one_folder_stay_known(inputs: Inputs, tmp_path: Path) -> None:
    """A page, then vectors; then each again, without force."""
    out = tmp_path / "out"
    for _ in range(2):
        gf.inspect(inputs.model, "to be", out=out, progress=False)
        with output(out, "vectors.npy"):
            (out / "vectors.npy").write_bytes(b"vectors")
    (out / "inspect.html").write_text("another")
    with refused(code="exists", field="out"):
        gf.inspect(inputs.model, "to be", out=out, progress=False)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_file_of_other_origin_in_a_folder_is_replaced(name: str, inputs: Inputs, tmp_path: Path) -> None:
    """Each file that the verb writes to an empty folder, but for those of single runs, is planted in another one, with
    other bytes."""
    verb = FOLDERS[name]
    verb(inputs, tmp_path / "new")
    written = [Path(file) for file in contents(tmp_path / "new") if not Path(file).name.startswith(".")]
    near = {file if len(file.parts) < 3 else file.parts[0]: file for file in written if "runs" not in file.parts}
    assert near
    for i, planted in enumerate(near.values()):
        out = tmp_path / str(i)
        (out / planted).parent.mkdir(parents=True)
        (out / planted).write_bytes(FOREIGN)
        with pytest.raises(RequestError) as caught:
            verb(inputs, out)
            pytest.fail(str(planted))
        assert caught.value.code in ("exists", "damaged", "missing"), (planted, caught.value)
        assert contents(out) == {planted.as_posix(): FOREIGN}, planted


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_other_origin_is_replaced(name: str, inputs: Inputs, tmp_path: Path) -> None:
    file, verb = FILES[name]
    out = tmp_path / file
    out.write_bytes(FOREIGN)
    with pytest.raises(RequestError) as caught:
        verb(inputs, out)
    assert caught.value.code in ("exists", "damaged") and out.read_bytes() == FOREIGN


@pytest.mark.parametrize("name", ["save", "inspect", "convert", "embed", "embed lines", "plan", "scale a table"])
def test_own_output_is_replaced_until_it_changes(name: str, inputs: Inputs, tmp_path: Path) -> None:
    """Pages and figures are known by a mark in them, other files by their size and time of change."""
    file, verb = FILES[name] if name in FILES else ("folder", FOLDERS[name])
    out = tmp_path / file
    verb(inputs, out)
    verb(inputs, out)
    changed = out / sorted(os.listdir(out))[0] if out.is_dir() else out
    changed.write_bytes(FOREIGN)
    with refused(code="exists", field="out"):
        verb(inputs, out)
    assert changed.read_bytes() == FOREIGN


FORCED: dict[str, Callable[[Inputs, Path], object]] = {
    "save": lambda i, out: gf.save(gf.preset(MODEL).build(seed=0), None, out, force=True),
    "convert": lambda i, out: gf.convert(i.model, out, force=True, progress=False),
    "inspect": lambda i, out: gf.inspect(i.model, "to be", out=out, force=True, progress=False),
    "embed": lambda i, out: gf.embed(i.model, ["to be"], out=out, force=True, progress=False),
    "plan": lambda i, out: gf.plan(MODEL, out=out, force=True),
}


@pytest.mark.parametrize("name, file", [("save", "README.md"), ("convert", "README.md"), ("inspect", "inspect.html"),
                                        ("convert", "x.gguf"), ("embed", "x.npy"), ("plan", "x.html")])  # fmt: skip
def test_force_replaces_a_file_and_leaves_others(name: str, file: str, inputs: Inputs, tmp_path: Path) -> None:
    out = tmp_path / file if file.startswith("x.") else tmp_path
    (tmp_path / file).write_bytes(FOREIGN)
    (tmp_path / "notes.txt").write_bytes(FOREIGN)
    FORCED[name](inputs, out)
    assert (tmp_path / file).read_bytes() != FOREIGN == (tmp_path / "notes.txt").read_bytes()


@pytest.mark.parametrize("name", ["save", "convert"])
@pytest.mark.parametrize("other", ["notes.txt", "photos/cat.jpg"])
def test_no_checkpoint_is_mixed_with_other_files(name: str, other: str, inputs: Inputs, tmp_path: Path) -> None:
    """But for hidden files, as of a version control, and for those that came after an earlier checkpoint."""
    verb, taken, ours = FOLDERS[name], tmp_path / "taken", tmp_path / "ours"
    (taken / other).parent.mkdir(parents=True)
    (taken / other).write_bytes(FOREIGN)
    with refused(code="exists", field="out"):
        verb(inputs, taken)
    assert contents(taken) == {other: FOREIGN}
    FORCED[name](inputs, taken)
    assert contents(taken)[other] == FOREIGN and (taken / "config.json").is_file()
    ours.mkdir()
    (ours / ".gitattributes").write_bytes(FOREIGN)
    verb(inputs, ours)
    (ours / other).parent.mkdir(parents=True, exist_ok=True)
    (ours / other).write_bytes(FOREIGN)
    verb(inputs, ours)
    assert contents(ours)[other] == contents(ours)[".gitattributes"] == FOREIGN


def test_run_in_the_folder_of_another_model_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    """Though this program wrote that model: a run would replace its tokenizer."""
    place = tmp_path / "model"
    gf.convert(inputs.model, place, progress=False)
    before = {path: path.read_bytes() for path in place.iterdir()}
    with refused(code="exists", field="out"):
        gf.train(MODEL, inputs.text, **RUN, steps=1, out=place)
    assert {path: path.read_bytes() for path in place.iterdir()} == before
    gf.train(MODEL, inputs.text, **RUN, steps=1, out=tmp_path / "run")
    with refused(code="exists", field="out"):
        gf.convert(inputs.model, tmp_path / "run", progress=False)


def test_runs_of_other_origin_are_not_taken_for_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "notes.txt").write_text("precious")
    with refused(code="exists", field="out"):
        refuse_other_files(tmp_path / "out")


def test_a_sharded_checkpoint_is_not_removed(inputs: Inputs, tmp_path: Path) -> None:
    """A reader would take the index of an earlier checkpoint for the new one's, so that it would be removed."""
    held = {f"model-0000{i}-of-00002.safetensors": FOREIGN for i in (1, 2)} | {"model.safetensors.index.json": b"{}"}
    for file, content in held.items():
        (tmp_path / file).write_bytes(content)
    with refused(code="exists", field="out"):
        gf.convert(inputs.model, tmp_path, progress=False)
    assert contents(tmp_path) == held


def spellings(place: Path, tmp_path: Path) -> list[Path]:
    """Names of one place: as it is, over its parent, relative, through a link, and for a file a hard link."""
    links = [tmp_path / "link", tmp_path / "hard"]
    links[0].symlink_to(place)
    if place.is_file():
        os.link(place, links[1])
    linked = [link.with_name(link.name + place.suffix) for link in links if os.path.lexists(link)]
    for link, named in zip(links, linked, strict=False):
        link.rename(named)
    over = place.parent / ".." / place.parent.name / place.name
    return [place, over, Path(os.path.relpath(place)), *linked]


READS: dict[str, tuple[str, Verb]] = {
    "convert": ("model", FORCED["convert"]),
    "plan": ("model.yaml", lambda i, out: gf.plan(i.config, out=out, force=True)),
    "embed": ("texts.jsonl", lambda i, out: gf.embed(i.model, file=i.lines, out=out, force=True, progress=False)),
    "scale a table": ("runs.csv", FILES["scale a table"][1]),
    "train": ("folder", lambda i, out: gf.train(MODEL, i.text.parent / "folder", steps=2, out=out, **RUN)),
    "compare": (
        "folder",
        lambda i, out: gf.compare(TWO, i.text.parent / "folder", out=out, **FEW),
    ),
    "index": ("folder", lambda i, out: gf.index(i.text.parent / "folder", out, i.model, progress=False)),
}
"""Verb -> what it reads, and a call that would write there; with force, if the verb has it."""


@pytest.mark.parametrize("name", READS)
def test_nothing_replaces_its_source(name: str, inputs: Inputs, tmp_path: Path) -> None:
    source, verb = inputs.text.parent / READS[name][0], READS[name][1]
    before = contents(inputs.text.parent)
    for out in spellings(source, tmp_path):
        with pytest.raises(RequestError) as caught:
            verb(inputs, out)
        assert (caught.value.code, caught.value.field) == ("conflict", "out"), (out, caught.value)
    assert contents(inputs.text.parent) == before


def test_a_folder_inside_the_source_is_refused_and_a_new_file_is_not(inputs: Inputs, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(inputs.model, source)
    for out, to in ((source / "deep" / "er", "hf"), (source / "model.safetensors", "gguf")):
        with refused(code="conflict", field="out"):
            gf.convert(source, out, to=to, force=True, progress=False)
    assert contents(source) == contents(inputs.model)
    for _ in range(2):
        gf.convert(source, source / "x.gguf", progress=False)


def test_the_command_line_has_force(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from glassformer.cli import main

    (tmp_path / "x.gguf").write_bytes(FOREIGN)
    asked = ["convert", str(inputs.model), str(tmp_path / "x.gguf")]
    assert main(asked) == 2 and (tmp_path / "x.gguf").read_bytes() == FOREIGN
    assert main([*asked, "--force"]) == 0 and (tmp_path / "x.gguf").read_bytes()[:4] == b"GGUF"


def test_without_a_cache_nothing_is_taken_for_ours(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(inputs.text / "nowhere"))
    gf.convert(inputs.model, tmp_path / "x.gguf", progress=False)
    with refused(code="exists", field="out"):
        gf.convert(inputs.model, tmp_path / "x.gguf", progress=False)
    gf.plan(MODEL, out=tmp_path / "x.html")
    gf.plan(MODEL, out=tmp_path / "x.html")  # a page has its mark


KILLED = """
import os, signal, sys
from glassformer.cli import main
from glassformer.conversion.storage import safetensors

def ended(*given):
    os.kill(os.getpid(), signal.SIGTERM)

safetensors._write_file = ended
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_during_a_write_leaves_no_files_and_is_reported(inputs: Inputs, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, "convert", str(inputs.model), str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM and "SIGTERM" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "stopped"
    assert contents(tmp_path) == {}
