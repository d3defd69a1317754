"""Paths that are refused: files without a model, and places that cannot be written. One sentence, exit 2, nothing read
or changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import RequestError
from glassformer.laboratory import exporting
from glassformer.text import ByteTokenizer

VERBS = {
    "convert": lambda name: ["convert", name, "out"],
    "check": lambda name: ["check", name],
    "exports": lambda name: ["inspect", name, "--exports"],
    "expression": lambda name: ["inspect", f"{name}+rope"],
}


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one-sentence error of the program; asserts exit status 2."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working folder, with files of weights that cannot be loaded as models."""
    monkeypatch.chdir(tmp_path)
    weights = {"a": torch.ones(2)}
    for name in ("model.bin", "model.pt", "nameless"):
        torch.save(weights, name)
    torch.save(weights, "old.pth", _use_new_zipfile_serialization=False)
    save_file(weights, "model.safetensors")
    save_file(weights, "anonymous")
    Path("empty.gguf").touch()
    Path("pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    for folder, name in (("bin2", "pytorch_model.bin"), ("lone", "model.safetensors"), ("gguf", "x.gguf")):
        Path(folder).mkdir()
        (Path(folder) / name).write_bytes(Path("model.safetensors" if folder == "lone" else "model.bin").read_bytes())
    return tmp_path


PICKLE, LONE = "weights_only=True", "holds tensors and no config; give the folder that has the config.json too"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.bin", PICKLE),
        ("model.pt", PICKLE),
        ("old.pth", PICKLE),
        ("nameless", PICKLE),
        ("bin2", PICKLE),
        ("model.safetensors", LONE),
        ("anonymous", LONE),
        ("lone", LONE),
        ("gguf", "'x.gguf', which it holds"),
        ("empty.gguf", "neither a safetensors nor a GGUF file"),
        ("pointer.safetensors", "git lfs pull"),
    ],
)
def test_weights_without_a_config(
    name: str, says: str, verb: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in said(VERBS[verb](f"./{name}"), capsys)
    assert not (place / "out").exists()


@pytest.mark.parametrize("text", ["config: {a: 1}", "PK: 1", "lmg: 1", ""])
def test_yaml_of_text_is_read_as_a_config(text: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "model.yaml").write_text(text)
    line = said(["check", "./model.yaml"], capsys)
    assert PICKLE not in line and LONE not in line
    gf.preset("llama@1m").save(place / "sound.bin.yaml")
    assert gf.preset("./sound.bin.yaml") == gf.preset("llama@1m")


@pytest.fixture
def patience() -> Iterator[None]:
    """Twenty seconds: what hangs by then fails."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["f.gguf", "f.safetensors", "f.yaml"])
def test_a_pipe_does_not_hang(name: str, verb: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(place / name)
    said(VERBS[verb](f"./{name}"), capsys)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("out", "more", "says"),
    [
        ("taken", [], "is a file"),
        ("taken/deeper", [], "is a file"),
        ("", [], "is empty"),
        ("", ["--to", "gguf"], "is empty"),
        ("/proc/nope", [], "cannot be written"),
        ("/proc/nope/deeper.gguf", [], "cannot be written"),
        ("folder", ["--to", "gguf"], "is a folder"),
        (".", ["--to", "gguf"], "is a folder"),
        ("folder.gguf", [], "is a folder"),
        ("taken/model.gguf", [], "is a file"),
        ("pipe.gguf", [], "is not a regular file"),
        ("x" * 300, [], "cannot be written"),
        ("x\0y", [], "cannot be written"),
    ],
)
def test_unwritable_place_is_refused_before_reading_weights(
    out: str, more: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("taken", "README.md"):
        Path(name).write_text("mine")
    for name in ("folder", "folder.gguf"):
        Path(name).mkdir()
    os.mkfifo("pipe.gguf")
    gf.save(gf.preset("llama@1m+layers=1+vocab_size=257").build(), ByteTokenizer(), "source")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "resolve", lambda *_, **__: pytest.fail("the weights were read"))
        assert says in said(["convert", "source", out, *more], capsys)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if not more and not out.endswith(".gguf"):
        with pytest.raises(RequestError, match=says):
            gf.save(gf.preset("llama@1m+layers=1").build(), None, out)


def test_refused_conversion_creates_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trial of writing a folder leaves no files if the source is missing."""
    said(["convert", str(tmp_path / "nothing"), str(tmp_path / "a" / "b")], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [10**20, 1 << 63, -(1 << 63)])
def test_a_seed_that_no_generator_holds(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"seed={seed} must be a whole number" in said(["check", "llama@1m", "--seed", str(seed)], capsys)
    gf.save(gf.preset("llama@1m+layers=1+vocab_size=257").build(seed=(1 << 63) - 1), ByteTokenizer(), tmp_path)
    assert f"seed={seed} must be a whole number" in said(["check", str(tmp_path), "--seed", str(seed)], capsys)
