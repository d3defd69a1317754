"""`glassformer inspect EXPR --text`: what is read, what is printed, what is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glassformer.cli import look, main, show
from glassformer.cli.look import show_inspection
from glassformer.errors import RequestError, WorkError
from glassformer.expression import load
from glassformer.lens.inspection import inspect

TEXT = "the cat sat on the mat, the cat sat on"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(capsys: pytest.CaptureFixture[str], name: str, text: str, out: str | None = None) -> dict[str, Any]:
    show_inspection(name, text, out, as_json=True, threads=1)
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_a_reading_and_its_page(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    show_inspection(model, TEXT, threads=1)
    out = capsys.readouterr().out
    for words in ("38 tokens", "nats per token", "most surprising:", "heads that stand out", "looks at",
                  "what each depth would say after ‘n’", "embedding", "layer 1"):  # fmt: skip
        assert words in out
    assert TEXT in out.replace("\n", "")
    page = tmp_path / "inspection" / "inspect.html"
    assert out.splitlines()[-1].startswith("page: inspection/inspect.html (")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_folder_is_chosen(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    show_inspection(model, TEXT, out="a/b", threads=1)
    assert (tmp_path / "a/b/inspect.html").is_file() and not (tmp_path / "inspection").exists()


@pytest.mark.parametrize("asked", [["--text", TEXT], ["--coord-check"]])
def test_an_empty_folder_is_refused(model: str, asked: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", model, *asked, "--out", ""]) == 2
    assert "--out is empty; give a folder" in capsys.readouterr().err


def test_json(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = read(capsys, model, TEXT)
    loaded = load(model)
    seen = inspect(loaded.model, loaded.tokenizer.encode(TEXT), loaded.tokenizer, name=model)  # type: ignore[union-attr,arg-type]
    expected = json.loads(json.dumps(seen.to_dict()))
    assert found.pop("page") is None and list(tmp_path.iterdir()) == []
    assert found["words"] == list(TEXT) and len(found["heads"]) == 8 and found["trained"] is True
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found.keys() == expected.keys()
    with torch.no_grad():
        logits = loaded.model(torch.tensor(loaded.tokenizer.encode(TEXT)).long()[None])[0]  # type: ignore[union-attr]
    last = found["lens"]["predictions"][-1]
    assert [one["id"] for one in last] == logits[-1].topk(5).indices.tolist()
    assert read(capsys, model, TEXT, "here")["page"] == "here/inspect.html"


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_where_the_text_comes_from(
    how: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    found = read(capsys, model, {"file": "@text.txt", "stdin": "-"}[how])
    assert "".join(found["words"]) == TEXT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--text is empty"),
        ("@missing.txt", "--text @missing.txt cannot be read"),
        ("@.", "cannot be read"),
        ("@a\x00b", "cannot be read"),
        ("@latin.txt", "byte 0xe9; utf-8 text is right"),
        ("a\ud800", "surrogate"),
    ],
)
def test_text_that_cannot_be_read(text: str, says: str, model: str, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(RequestError) as refused:
        show_inspection(model, text, as_json=True, threads=1)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_text_longer_than_the_context_is_cut(learned: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(learned, TEXT * 3, as_json=False, threads=1)
    out, err = capsys.readouterr()
    assert "40 tokens" in out
    assert "the first 40 of 114 tokens are read" in " ".join(err.split()) and "context of 40" in " ".join(err.split())


def test_a_text_longer_than_the_page_is_cut(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "LONGEST", 10)
    assert read(capsys, model, TEXT)["tokens"] == 10


def test_progress_where_there_is_no_terminal(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Three depths and the end; the clock begins with the first."""
    show_inspection(model, TEXT, threads=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(show, "PATIENCE", 0.0)
    show_inspection(model, TEXT, threads=1)
    assert capsys.readouterr().err.splitlines() == ["reading: 33%", "reading: 67%", "reading: 100%"]
    assert read(capsys, model, TEXT)["tokens"] == len(TEXT)


def test_an_expression_has_random_weights_and_reads_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    expression = "llama@1m+layers=2+d_model=32+heads=4+vocab_size=256"
    show_inspection(expression, "é!", threads=1)
    out, err = capsys.readouterr()
    assert "random weights" in out and "3 tokens" in out and "its weights are random" in " ".join(err.split())
    assert "Not trained." in (tmp_path / "inspection/inspect.html").read_text(encoding="utf-8")
    assert read(capsys, expression, "ab")["trained"] is False
    with pytest.raises(RequestError, match=r"vocab_size=65 .* too small for bytes"):
        show_inspection("llama@1m+vocab_size=65", "ab", threads=1)


def test_changes_to_a_checkpoint(model: str, capsys: pytest.CaptureFixture[str]):
    found = read(capsys, f"{model}+window:3", TEXT)
    assert found["trained"] is True
    sinks = [head["sink_mass"] for head in found["heads"]]
    assert max(sinks) <= 3 / len(TEXT)


def test_tokens_do_not_speak_to_the_terminal(model: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(model, "a\x1b[31m\x07\u202eb [bold]c[/bold] [/] \n\t", threads=1)
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\u202e", "\t"}
    assert "[bold]c[/bold]" in out and "⟨U+001B⟩" in out


def test_one_token(model: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(model, "a", threads=1)
    assert "1 token\n" in capsys.readouterr().out
    assert read(capsys, model, "a")["loss"] is None


def test_a_place_that_cannot_be_written_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(look, "inspect", lambda *_, **__: pytest.fail("the text was read"))
    with pytest.raises(WorkError, match=r"file cannot be written \("):
        show_inspection("llama@1m", "words", out=str(tmp_path / "file"), threads=1)
