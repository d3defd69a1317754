"""Token ids that a caller already has, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.text import ByteTokenizer, IdTokenizer, load_tokenizer, open_corpus, prepare_ids
from tests.refused import refused

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "ids",
    [IDS, np.array(IDS, np.uint16), torch.tensor(IDS), (i for i in IDS), [IDS[:4], IDS[4:]], iter([np.array(IDS)])],
)
def test_ids_of_every_kind_are_the_same_tokens(ids: Any) -> None:
    data = prepare_ids(ids)
    assert [*data.train.tokens.tolist(), *data.validation.tokens.tolist()] == IDS
    assert (len(data.validation), data.tokenizer.kind, data.tokenizer.vocab_size) == (1, "ids", 10)
    assert data.validation.lost and not data.token_bytes.any()


def test_ids_of_a_tokenizer_keep_its_text() -> None:
    tokenizer = ByteTokenizer()
    data = prepare_ids(tokenizer.encode("the cat sat on the mat"), tokenizer)
    assert tokenizer.decode(data.train.tokens) + tokenizer.decode(data.validation.tokens) == "the cat sat on the mat"
    assert (data.train.bytes, data.validation.bytes, data.validation.lost) == (19, 3, None)
    with refused(code="range", field="data"):
        prepare_ids([1, 2, 257], tokenizer)


@pytest.mark.parametrize("data", [[], [1], ["a", "b"], [0.5, 1.5], [-1, 2], 7, [{"text": "a"}] * 2])
def test_anything_else_is_refused(data: Any) -> None:
    with refused(code="type", field="data"):
        gf.train("llama@0.3m", data, steps=1)


def test_ids_without_a_text_are_written_as_numbers(tmp_path: Path) -> None:
    tokenizer = IdTokenizer(12)
    assert tokenizer.decode([7, 11]) == "7 11" and tokenizer.encode("7 11").tolist() == [7, 11]
    for text, code in (("7 x", "syntax"), ("12", "range")):
        with refused(code=code, field="tokens"):  # type: ignore[arg-type]
            tokenizer.encode(text)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint() and again.decode([3, 4]) == "3 4"
    theirs = load_tokenizer(tmp_path / "tokenizer.json")
    assert theirs.encode("7 11").tolist() == [7, 11] and theirs.decode([7, 11]) == "7 11"


def test_a_named_field_of_json_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "stories.jsonl"
    file.write_text("\n".join(json.dumps({"story": text, "text": "no"}) for text in ("once", "twice")))
    corpus = open_corpus(f"{file},column=story")
    assert [one.text for one in corpus.documents()] == ["once", "twice"]
    assert corpus.fingerprint != open_corpus(file).fingerprint
    assert [one.text for one in open_corpus(f"{tmp_path},column=story").documents()] == ["once", "twice"]
    with refused(code="missing", field="stories.jsonl:1.title"):
        open_corpus(f"{file},column=title")
    (tmp_path / "plain.txt").write_text("text")
    with refused(code="conflict", field="data.column"):
        open_corpus(f"{tmp_path / 'plain.txt'},column=story")
