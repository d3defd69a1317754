"""Files of token ids as data: nanoGPT's, llm.c's, numpy's and those of the package datasets."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.text import CharTokenizer, open_corpus, read_data
from tests.refused import refused

TEXT = "the cat sat on the mat, and the mat sat on the cat. " * 40
CHARS = sorted(set(TEXT))
IDS = np.array([CHARS.index(character) for character in TEXT], np.uint16)
CUT = int(0.9 * len(IDS))
PLAN = {"steps": 2, "context": 16, "batch_size": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))


class Bomb:
    def __reduce__(self) -> Any:
        return open, ("/tmp/glassformer-was-unpickled", "w")


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """The folder that nanoGPT's data/shakespeare_char/prepare.py writes: `train_ids = np.array(ids, dtype=np.uint16);
    train_ids.tofile('train.bin')`, the same for val.bin, and a pickle of {vocab_size, itos, stoi}."""
    folder = tmp_path / "nano"
    folder.mkdir()
    IDS[:CUT].tofile(folder / "train.bin")
    IDS[CUT:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    return folder


def test_folder_of_nanogpt_is_read_and_its_pickle_is_not(nano: Path) -> None:
    for data in (nano / "train.bin", str(nano / "train.bin"), nano):
        tokens = read_data(data)
        assert tokens.train.tokens.tolist() == IDS[:CUT].tolist()
        assert tokens.validation.tokens.tolist() == IDS[CUT:].tolist()
        assert tokens.tokenizer.vocab_size == len(CHARS) and "pickle" in tokens.notes[0]
        assert not tokens.token_bytes.any() and not Path("/tmp/glassformer-was-unpickled").exists()


def test_id_file_with_a_tokenizer_trains_as_its_text(nano: Path) -> None:
    """The alphabet of nanoGPT is sorted as that of a char tokenizer: text and ids train alike, bits per byte too."""
    CharTokenizer(TEXT).save(nano)
    (nano / "input.txt").write_text(TEXT)
    tokens = read_data(nano / "train.bin")
    assert tokens.tokenizer.decode(tokens.train.tokens) == TEXT[:CUT] and tokens.token_bytes.all()
    of_ids = gf.train("llama@0.1m", nano / "train.bin", **PLAN)
    of_text = gf.train("llama@0.1m", nano / "input.txt", tokenizer="char", **PLAN)
    assert of_ids.validation["bits_per_byte"] == pytest.approx(of_text.validation["bits_per_byte"], rel=0.02)


def _llmc(path: Path, magic: int, version: int, ids: np.ndarray) -> Path:
    """llm.c, dev/data/data_common.py: 256 int32 with magic, version and the number of ids, then the ids."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())
    return path


def test_every_file_of_the_same_ids_is_the_same_data(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS.astype(np.int64))
    np.save(tmp_path / "rows.npy", IDS.reshape(-1, 10).astype(np.int32))
    IDS.tofile(tmp_path / "ids.bin")
    IDS.astype(np.uint32).tofile(tmp_path / "wide.bin")
    _llmc(tmp_path / "gpt2.bin", 20240520, 1, IDS)
    _llmc(tmp_path / "llama3.bin", 20240801, 7, IDS.astype(np.uint32))
    files = ["ids.npy", "rows.npy", "ids.bin", "wide.bin,dtype=uint32", "gpt2.bin", "llama3.bin"]
    expected = read_data(IDS).train.info["sha256"]
    for one in [*(f"{tmp_path}/{name}" for name in files), IDS.tolist(), torch.tensor(IDS.astype(int)), iter(IDS)]:
        assert read_data(one).train.info["sha256"] == expected, one


def test_dataset_saved_to_disk_is_read_by_its_ids_or_its_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [part.tolist() for part in np.array_split(IDS[:CUT], 7)]})
    rest = datasets.Dataset.from_dict({"input_ids": [IDS[CUT:].tolist()]})
    datasets.DatasetDict({"train": rows, "validation": rest}).save_to_disk(str(tmp_path / "ids"))
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.Dataset.from_dict({"story": TEXT.split(". "), "n": [1] * len(TEXT.split(". "))}).save_to_disk(
        str(tmp_path / "text")
    )
    for name in ("ids", "ids,column=input_ids"):
        for data in (f"{tmp_path}/{name}", f"hf:{tmp_path}/{name}"):
            tokens = read_data(data)
            assert tokens.train.tokens.tolist() == IDS[:CUT].tolist()
            assert tokens.validation.tokens.tolist() == IDS[CUT:].tolist()
    rows_only = read_data(tmp_path / "rows")
    assert len(rows_only.train) == int(0.9 * CUT) and len(rows_only.train) + len(rows_only.validation) == CUT
    assert next(open_corpus(tmp_path / "text").documents()).text == TEXT.split(". ")[0]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("empty.bin", b"", "missing"), ("odd.bin", b"abc", "damaged"), ("wide.bin", IDS.astype("<u4"), "type"),
        ("float.npy", np.ones(9), "type"), ("negative.npy", -np.arange(9), "type"), ("bool.npy", IDS > 3, "type"),
        ("objects.npy", np.array([{}], object), "damaged"), ("text.npy", b"not numpy", "damaged"),
        ("one.bin", IDS[:1], "type"),
    ],
)  # fmt: skip
def test_damaged_ids_are_refused_before_anything_is_computed(tmp_path: Path, name: str, content: Any, code: Any):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)
    else:
        content.tofile(path)
    for verb in (gf.train, lambda model, data, **plan: gf.compare([model], data, **plan)):
        with refused(code=code, field="data"):
            verb("llama@0.1m", path, **PLAN)  # type: ignore[operator]


def test_ids_that_do_not_match_are_refused(tmp_path: Path, nano: Path) -> None:
    cut = _llmc(tmp_path / "cut.bin", 20240520, 1, IDS)
    cut.write_bytes(cut.read_bytes()[:-2])
    IDS.tofile(tmp_path / "megatron.bin")
    (tmp_path / "megatron.idx").write_bytes(b"MMIDIDX")
    np.array([1, 2, 300] * 99, np.uint16).tofile(tmp_path / "far.bin")
    for name, code, asked in (
        ("cut.bin", "damaged", {}), ("megatron.bin", "unsupported", {}), ("far.bin", "range", {"tokenizer": "byte"}),
    ):  # fmt: skip
        with refused(code=code, field="data"):  # type: ignore[arg-type]
            gf.train("llama@0.1m", tmp_path / name, **PLAN, **asked)  # type: ignore[arg-type]
    with refused(code="conflict", field="tokenizer"):
        gf.train("llama@0.1m", nano, tokenizer="bpe:300", **PLAN)
    with refused(code="range", field="context"):
        gf.train("llama@0.1m", nano, steps=1, context=4096)
    with refused(code="type", field="data"):
        open_corpus(nano / "train.bin")


def test_text_of_a_folder_is_read_and_files_of_ids_are_named(nano: Path) -> None:
    (nano / "a.txt").write_text(TEXT)
    notes = read_data(nano).notes
    assert any("train.bin" in note and "val.bin" in note for note in notes), notes


def test_all_verbs_read_ids_alike(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["--data", "nano/train.bin", "--context", "16", "--batch-size", "2"]
    assert main(["train", "llama@0.1m", *train, "--steps", "2", "--out", "run"]) == 0
    assert main(["compare", "llama@0.1m", *train, "--tokens", "64", "--out", "compared"]) == 0
    found = json.loads((tmp_path / "compared" / "results.json").read_text())
    assert found["data"]["tokenizer"] == "ids" and found["data"]["vocab_size"] == len(CHARS)
    assert found["runs"][0]["validation"]["bits_per_byte"] is None
    page = (tmp_path / "compared" / "report.html").read_text().split('<script type="application/json"')[0]
    assert "Validation loss" in page and "Bits per byte" not in page
    printed = str(gf.compare(["llama@0.1m"], nano / "train.bin", tokens=64, context=16, batch_size=2))
    assert "bits/byte" not in printed and "loss" in printed
    assert main(["run", "compared/design.yaml", "--out", "again"]) == 0


def test_field_of_json_lines_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"content": line}) + "\n" for line in TEXT.split(". ")))
    train = ["train", "llama@0.1m", "--data", str(file), "--steps", "1", "--context", "16", "--out", f"{tmp_path}/r"]
    assert main(train) == 2 and "--field" in capsys.readouterr().err
    assert main([*train, "--field", "content"]) == 0


@pytest.mark.parametrize("data", [[0.5] * 10_000, ["word " * 50] * 99, np.ones((300, 300)), torch.ones(9, 9), object()])
def test_foreign_data_is_named_in_few_characters(data: Any) -> None:
    for verb in (gf.train, gf.compare, gf.tune, gf.ablate, gf.scale):
        with pytest.raises(gf.RequestError) as caught:
            verb("llama@0.1m" if verb in (gf.train, gf.ablate) else ["llama@0.1m"], data, tokens=64)  # type: ignore[operator]
        assert caught.value.field == "data" and len(str(caught.value)) < 300
