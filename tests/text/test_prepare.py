from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from glassformer import text
from glassformer.errors import Code
from glassformer.text import Batches, ByteTokenizer, CharTokenizer, choose_tokenizer, open_corpus, prepare
from glassformer.text import data as data_module
from tests.refused import refused


@pytest.fixture
def path(tmp_path: Path, story: str) -> Path:
    (tmp_path / "story.txt").write_text(story)
    return tmp_path / "story.txt"


def test_one_small_text_is_characters_divided_nine_to_one(path: Path, story: str) -> None:
    data = prepare(str(path))
    assert data.tokenizer.kind == "char" and data.tokenizer.vocab_size == len(set(story))
    assert data.tokenizer.eos_id is None
    together = [*data.train.tokens, *data.validation.tokens]
    assert data.tokenizer.decode(together) == story  # nothing lost, nothing added, and no token shared
    assert len(data.train) / len(together) == pytest.approx(0.9, abs=0.001)
    assert data.tokenizer.decode(data.train.tokens).endswith("\n")


def test_describe_is_plain_and_complete(path: Path, story: str) -> None:
    data = prepare(path, "bpe:300")
    found = json.loads(json.dumps(data.describe()))
    assert found["name"] == "story.txt" and found["documents"] == 1 and found["bytes"] == len(story)
    assert found["train_tokens"] == len(data.train) and found["validation_tokens"] == len(data.validation)
    assert (
        found["tokenizer"] == "bpe" and found["vocab_size"] == 300 and found["tokenizer_rule"] == "asked for: bpe:300"
    )
    assert found == prepare(path, "bpe:300").describe()  # from the cache as from the text
    total = data.token_bytes[data.train.tokens].sum() + data.token_bytes[data.validation.tokens].sum()
    assert total == len(story)


def test_notes_name_unread_text(path: Path, tmp_path: Path) -> None:
    assert prepare(path).notes == []
    (tmp_path / "image.png").write_bytes(b"png")
    (tmp_path / "other.txt").write_bytes("Чехов и другие писатели".encode("cp1251"))
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    data = prepare(tmp_path)
    assert data.notes == [
        f"Not UTF-8, and read as U+FFFD: 1 of the bytes of {tmp_path.name}.",
        f"Some files of {tmp_path.name} were skipped: 1 not UTF-8, 1 other suffixes (image.png, other.txt).",
    ]
    assert data.describe()["replaced_bytes"] == 1 and data.describe()["skipped"] == {
        "not UTF-8": 1,
        "other suffixes": 1,
    }
    assert prepare(tmp_path).notes == data.notes  # from the cache as from the text


def test_a_second_time_reads_no_document(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(path, "bpe:300")
    monkeypatch.setattr("glassformer.text.held_out._plan", lambda *_: pytest.fail("the text was divided again"))
    second = prepare(path, "bpe:300")
    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert second.tokenizer.fingerprint() == first.tokenizer.fingerprint()


def test_held_out_documents_teach_the_tokenizer_nothing(tmp_path: Path) -> None:
    secrets = ["secret" + letter * 3 for letter in "abcdefghijklmnopqrstuvwxyz"]
    for secret in secrets:
        (tmp_path / secret).write_text(f"{secret} " * 40)
    data = prepare(tmp_path, "bpe:2000")
    held = data.tokenizer.decode(data.validation.tokens[:20]).split()[0]
    tokens = {data.tokenizer.decode([i]).strip() for i in range(data.tokenizer.vocab_size)}
    assert held not in tokens  # while words of the training side did become tokens
    assert sum(secret in tokens for secret in secrets) >= 20


def test_several_documents_end_with_the_separator(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(50)))
    data = prepare(tmp_path / "a.jsonl")
    assert data.tokenizer.eos_id is not None
    assert np.count_nonzero(data.train.tokens == data.tokenizer.eos_id) == data.train.documents
    assert data.train.documents + data.validation.documents == data.describe()["documents"] == 50


def test_the_rule_of_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 257))))
    assert choose_tokenizer(open_corpus(path)) == (
        "bpe:4096",
        "auto: bpe:4096, as the text has more than 256 characters",
    )
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 256))))
    assert choose_tokenizer(open_corpus(path))[0] == "char"
    monkeypatch.setattr(data_module, "SMALL_BYTES", 3 * 256)
    assert choose_tokenizer(open_corpus(path))[0] == "bpe:4096"


def test_an_explicit_tokenizer_is_obeyed(path: Path, tmp_path: Path) -> None:
    assert prepare(path, "byte").tokenizer.kind == "byte"
    own = ByteTokenizer()
    assert prepare(path, own).tokenizer is own
    own.save(tmp_path / "saved")
    assert prepare(path, str(tmp_path / "saved")).tokenizer.fingerprint() == own.fingerprint()


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        ({"tokenizer": "cahr"}, "unknown", "tokenizer"),
        ({"held_out": 0.9}, "range", "held_out"),
        (
            {"context": 10**6},
            "range",
            "context",
        ),
        ({"context": 20_000}, "range", "context"),
        ({"data": "no such thing"}, "unknown", "data"),
    ],
)
def test_a_wrong_request_is_one_sentence(arguments: dict, code: Code, field: str, path: Path) -> None:
    with refused(code=code, field=field) as caught:
        prepare(**{"data": path, **arguments})
    assert "\n" not in str(caught.value)


def test_a_misspelt_tokenizer_is_refused_before_the_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "open_corpus", lambda *_: pytest.fail("the text was opened"))
    wrongs: dict[str, Code] = {"bep:300": "unknown", "bpe:0": "range", "bpe:256": "range", "bpe:1000001": "range"}
    for wrong, code in wrongs.items():
        with refused(code=code, field="tokenizer"):
            prepare("python-docs", wrong)


def test_progress_names_its_stages(path: Path) -> None:
    stages: list[str] = []
    prepare(path, "bpe:300", progress=lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == [
        "dividing",
        "training tokenizer",
        "tokenizing train",
        "tokenizing validation",
    ]


def test_batches_of_prepared_text(path: Path) -> None:
    data = prepare(path, context=64)
    inputs, targets = Batches(data.train, 4, 64)[3]
    assert inputs.shape == (4, 64) and data.tokenizer.decode(inputs[0])[1:] == data.tokenizer.decode(targets[0])[:-1]


def test_text_is_prepared_without_torch(path: Path, cache: Path) -> None:
    code = (
        "import sys; from glassformer.text import prepare; prepare(sys.argv[1], 'bpe:300');"
        "assert 'torch' not in sys.modules"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "GLASSFORMER_CACHE": str(cache)}
    subprocess.run([sys.executable, "-c", code, path], check=True, env=environment)


@pytest.mark.slow
def test_a_text_of_any_size_takes_the_same_memory(tmp_path: Path) -> None:
    """Preparation runs in a separate process, whose peak is measured: 64 MB of text within 40 MB more than 4
    MB take.
    """
    code = (
        "import resource, sys; from glassformer.text import prepare; prepare(sys.argv[1], 'byte');"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    line = b"one line of a long text that was never divided into documents\n"

    def peak(megabytes: int) -> int:
        path = tmp_path / f"{megabytes}.txt"
        with open(path, "wb") as file:
            for _ in range(megabytes):
                file.write(line * (1_000_000 // len(line)))
        environment = {"PYTHONPATH": ":".join(sys.path), "GLASSFORMER_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, env=environment)
        return int(done.stdout) // 1024

    assert peak(64) < peak(4) + 40


def test_note_reports_lost_text(path: Path) -> None:
    data = prepare(path, CharTokenizer("the cat\n", unknown=True))
    assert not data.token_bytes.any() and len(data.notes) == 1
    assert data.notes[0].startswith("The char tokenizer loses part of the held-out text (of ")
