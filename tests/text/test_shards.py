from __future__ import annotations

import errno
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from glassformer import files
from glassformer.errors import RequestError
from glassformer.text import shards
from glassformer.text.documents import Document
from glassformer.text.shards import TokenShards, token_shards
from glassformer.text.storage import digest
from glassformer.text.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, FileTokenizer
from tests.refused import failed, refused

BYTE = ByteTokenizer()


def documents(*texts: str) -> list[Document]:
    return [Document(str(index), text) for index, text in enumerate(texts)]


@given(
    st.lists(st.text("abé\n ", max_size=30), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=40)
def test_every_token_of_every_document_in_order(texts: list[str], batch: int, piece: int) -> None:
    # A document is cut into pieces and batches wherever they end; the tokens must not show it.
    sources = [
        Document(str(i), lambda t=text: [t[j : j + piece] for j in range(0, len(t), piece)])
        for i, text in enumerate(texts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH", batch)
        found = token_shards(lambda: sources, BYTE, f"{texts} {batch} {piece}")
    present = [text for text in texts if text]
    expected = [np.append(BYTE.encode(text), 256) for text in present]
    assert found.tokens.tolist() == np.concatenate(expected).tolist()
    assert found.document_starts.tolist() == np.cumsum([0, *map(len, expected[:-1])]).tolist()
    assert (
        found.documents == len(present)
        and found.bytes == len("".join(texts).encode())
        and len(found) == len(found.tokens)
    )


@pytest.fixture(autouse=True)
def _module_cache_for_hypothesis(cache: Path) -> None:
    """The cache of conftest also serves the examples of one property."""


def test_without_a_separator_documents_follow_each_other() -> None:
    found = token_shards(lambda: documents("ab", "ba"), CharTokenizer("ab"), "f")
    assert found.tokens.tolist() == [0, 1, 1, 0] and found.document_starts.tolist() == [0, 2]


def test_the_type_follows_the_vocabulary() -> None:
    assert token_shards(lambda: documents("ab"), BYTE, "f").tokens.dtype == np.dtype("<u2")
    wide = CharTokenizer(map(chr, range(0x10000, 0x10000 + 65_537)))
    found = token_shards(lambda: documents(chr(0x10000 + 65_536)), wide, "f")
    assert found.tokens.dtype == np.dtype("<u4") and found.tokens.tolist() == [65_536]


def test_shards_are_found_again_by_corpus_and_tokenizer(cache: Path) -> None:
    reads = []

    def source() -> list[Document]:
        reads.append(1)
        return documents("some text")

    first = token_shards(source, BYTE, "f")
    again = token_shards(source, BYTE, "f")
    assert isinstance(again.tokens, np.memmap) and again.tokens.tolist() == first.tokens.tolist() and len(reads) == 1
    token_shards(source, BYTE, "g")
    token_shards(source, CharTokenizer("some text"), "f")
    assert len(reads) == 3
    assert len(list((cache / "shards").iterdir())) == 3  # and no temporary


def truncate(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-1])


def lengthen(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes() + b"\0\0")


def put(name: str, at: int, content: bytes):
    def apply(folder: Path) -> None:
        with open(folder / name, "r+b") as file:
            file.seek(at)
            file.write(content)

    return apply


def edit(**fields: object):
    def apply(folder: Path) -> None:
        path = folder / "shards.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


def overwrite(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


DAMAGES = {
    "truncated": truncate,
    "lengthened": lengthen,
    "no tokens": lambda folder: (folder / "tokens.bin").unlink(),
    "no sidecar": lambda folder: (folder / "shards.json").unlink(),
    "not json": overwrite("shards.json", b"{"),
    "deep json": overwrite("shards.json", b"[" * 100_000),
    "large json": overwrite("shards.json", b" " * (2 << 20)),
    "a list": overwrite("shards.json", b"[]"),
    "another version": edit(glassformer_shards=99),
    "a huge count": edit(tokens=10**18),
    "a negative count": edit(tokens=-1),
    "a count in a string": edit(tokens="12"),
    "no count": edit(documents=0),
    "a foreign type": edit(dtype="object"),
    "another type": edit(dtype="uint32"),
    "ids outside": edit(vocab_size=50),
    "another id of the vocabulary": put("tokens.bin", 10, b"\5\0"),
    "a later start": put("documents.bin", 8, b"\x0b"),
    "no hashes": edit(sha256=None),
    "hashes of another type": edit(sha256={"tokens.bin": 1}),
    "documents out of order": overwrite("documents.bin", np.array([0, 9, 4], "<u8").tobytes()),
    "documents beyond the end": overwrite("documents.bin", np.array([0, 9, 4000], "<u8").tobytes()),
    "documents not from 0": overwrite("documents.bin", np.array([1, 2, 3], "<u8").tobytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_refused_and_repaired(damage: str) -> None:
    def source() -> list[Document]:
        return documents("some text", "more", "end")

    good = token_shards(source, BYTE, "f")
    expected = good.tokens.tolist()
    DAMAGES[damage](good.folder)
    with pytest.raises(RequestError) as caught:
        TokenShards.open(good.folder)
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="written again"):
        assert token_shards(source, BYTE, "f").tokens.tolist() == expected
    assert TokenShards.open(good.folder).tokens.tolist() == expected


def test_damage_in_the_middle_of_a_long_text_is_repaired() -> None:
    def source() -> list[Document]:
        return documents("x" * 300_000)

    good = token_shards(source, BYTE, "f")
    expected = good.tokens.tolist()
    put("tokens.bin", 300_000, b"\xff" * 1000)(good.folder)  # ids of 65535, far from both ends
    with pytest.warns(UserWarning, match=r"written again \(.*tokens\.bin is not as it was written"):
        assert token_shards(source, BYTE, "f").tokens.tolist() == expected


def words(vocabulary: dict[str, int], split: dict, **parts: object) -> FileTokenizer:
    """A tokenizer.json of whole words."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return FileTokenizer(
        Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model, **parts}))
    )


THE_AND = {"[UNK]": 0, "the": 1, "and": 2, " ": 3}
WHITESPACE = {"type": "Whitespace"}
SPACES_KEPT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}


def test_shards_of_an_earlier_format_are_written_again_under_their_name() -> None:
    """A run identifies its text by the name of the shards: under another name, no earlier run could resume."""
    first = token_shards(lambda: documents("some text"), BYTE, "f")
    assert first.folder.name == digest(1, "f", BYTE.fingerprint())
    described = json.loads((first.folder / "shards.json").read_text())
    described |= {"glassformer_shards": 1}
    described.pop("sha256")
    (first.folder / "shards.json").write_text(json.dumps(described))
    with pytest.warns(UserWarning, match="or of an earlier version, and are written again"):
        again = token_shards(lambda: documents("some text"), BYTE, "f")
    assert again.folder == first.folder and again.tokens.tolist() == first.tokens.tolist()


def test_a_tokenizer_that_loses_text_counts_no_bytes() -> None:
    for tokenizer, text, lost in (
        (words(THE_AND, WHITESPACE), "the cat and the dog " * 50, "of 750 characters 300 do not come back"),
        (words(THE_AND, WHITESPACE), "the and " * 50, "its tokens cover 300 of 400 bytes"),
        (words(THE_AND, SPACES_KEPT, normalizer={"type": "Lowercase"}), "The and " * 50, "of 300 characters 50 do not"),
        (CharTokenizer("ab", unknown=True), "ab" * 400 + "c", "of 801 characters 1 do not come back"),
    ):
        for _ in range(2):  # as written and as found again
            found = token_shards(lambda: documents(text), tokenizer, text)  # noqa: B023 - called at once
            assert found.lost is not None and found.lost.startswith(lost)
            assert found.token_bytes(tokenizer).tolist() == [0] * tokenizer.vocab_size


def test_a_tokenizer_that_keeps_the_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the and the " * 50
    tokenizer = words(THE_AND, SPACES_KEPT)
    found = token_shards(lambda: documents(text), tokenizer, "f")
    assert found.lost is None and found.token_bytes(tokenizer).tolist() == [0, 3, 3, 1]
    assert tokenizer.token_bytes()[found.tokens].sum() == found.bytes == len(text)
    rare = "the and " * 1000 + "cat"  # a lost character in a thousand is accepted, so that one accent blocks no text
    assert token_shards(lambda: documents(rare), tokenizer, "g").lost is None


class FullDisk:
    """A file on a disk with room for some bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH", 100)

    def small(*arguments):
        return FullDisk(open(*arguments), 1000)

    monkeypatch.setattr(shards, "open", small, raising=False)
    with failed(code="disk") as caught:
        token_shards(lambda: documents("x" * 5000), BYTE, "f")
    assert "\n" not in str(caught.value)
    assert list((cache / "shards").iterdir()) == []


def test_an_interrupted_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH", 10)

    def source() -> Iterator[Document]:
        yield Document("a", "x" * 100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_shards(source, BYTE, "f")
    assert list((cache / "shards").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with failed(code="disk"):
        token_shards(lambda: documents("x"), BYTE, "f", cache_dir=tmp_path / "file")


def test_leftovers_of_a_killed_process_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "shards" / ".glassformer-tmp-old").mkdir(parents=True)
    token_shards(lambda: documents("x"), BYTE, "f")
    assert (cache / "shards" / ".glassformer-tmp-old").exists()  # it may still be at work
    monkeypatch.setattr(files, "STALE_SECONDS", -1)
    token_shards(lambda: documents("x"), BYTE, "g")
    assert not (cache / "shards" / ".glassformer-tmp-old").exists()


def test_another_process_may_be_faster(cache: Path) -> None:
    def source() -> Iterator[Document]:
        yield Document("a", "text")
        if len(list((cache / "shards").iterdir())) == 1:  # our temporary: the other one starts and ends during ours
            token_shards(lambda: documents("text"), BYTE, "f")

    assert token_shards(source, BYTE, "f").tokens.tolist() == [*b"text", 256]
    assert len(list((cache / "shards").iterdir())) == 1


def test_documents_without_text_are_refused(cache: Path) -> None:
    with refused(code="missing", field="data"):
        token_shards(lambda: documents("", ""), BYTE, "f")
    assert list((cache / "shards").iterdir()) == []


def test_progress_counts_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH", 100)
    seen: list[tuple[str, int, int | None]] = []
    token_shards(
        lambda: documents(*["é" * 30] * 20), BYTE, "f", total_bytes=lambda: 1200, stage="here",
        progress=lambda *values: seen.append(values),
    )  # fmt: skip
    assert len(seen) > 3 and seen[-1] == ("here", 1200, 1200)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("kind", ["byte", pytest.param("bpe", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_text(kind: str) -> None:
    tokenizer = BYTE if kind == "byte" else BPETokenizer.train(["the cat sat on the mat\n"] * 9, 300)
    count = 12 if kind == "byte" else 6

    def peak(repeat: int) -> int:
        line = "the cat sat on the mat\n" * 10_000  # 230 kB
        source = [Document("d", lambda: (line for _ in range(repeat)))]
        tracemalloc.start()
        token_shards(lambda: source, tokenizer, f"{kind} {repeat}")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # once the batch is full, four times the text takes no more
    assert peak(count * 4) < 1.3 * peak(count) + 1_000_000
