"""A folder of passages and their vectors, with exact search.

DIR/  index.json       the data and the encoder, the sizes, and the SHA-256 of the other files; written last
      passages.jsonl   {"document", "start", "text"}, one line each
      offsets.npy      (n + 1,) int64: the start of each line in bytes
      vectors.npy      (n, d) fp32, of length 1
      building.json    only during the build: the request, and the number of vectors on disk
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch.nn.functional as F

from glassformer.errors import RequestError, check_whole, shown
from glassformer.figures.terminal import Printed
from glassformer.files import SCHEMAS, atomic_file, check_schema, disk_errors, only_writer, refuse_foreign
from glassformer.generation.prompt_cache import fingerprint
from glassformer.generation.vectors import Embedder
from glassformer.loaded import Loaded
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.retrieval.passages import Passage, Splitter, special_tokens
from glassformer.runs import live
from glassformer.runs.events import Notify, reading
from glassformer.text import OnProgress
from glassformer.text.corpora import open_corpus
from glassformer.text.documents import Corpus
from glassformer.typed import typed

META, BUILDING = "index.json", "building.json"
PASSAGES, OFFSETS, VECTORS = FILES = ("passages.jsonl", "offsets.npy", "vectors.npy")
DTYPES = {OFFSETS: "<i8", VECTORS: "<f4"}
BLOCK = 1024
"""Number of passages between two points at which an interrupted run can resume"""
LARGEST_META = 1 << 20
LARGEST_LINE = 1 << 22
"""Largest line of passages.jsonl in bytes"""
EXTRA = "pip install 'glassformer[retrieval]'"
WORDS = {
    "data": "other data", "passage_tokens": "passages of another length", "encoder": "another encoder",
    "schema": "another version of this program",
}  # fmt: skip
"""Ways in which an index can differ from the requested one"""


@dataclass(frozen=True, slots=True)
class Found:
    """A passage, its number in the index, and its cosine similarity with the question."""

    score: float
    number: int
    passage: Passage


@typed
def index(
    data: str | Path,
    out: str | Path,
    encoder: ModelLike = "minilm",
    *,
    passage_tokens: int | None = None,
    progress: bool | Notify = True,
    cache_dir: str | Path | None = None,
) -> Index:
    """Cuts documents into passages at paragraph boundaries and embeds them, for `gf.ask`.

    The same call resumes an interrupted run, and computes nothing if the index is complete.

    Parameters
    ----------
    data
        Text as `gf.train` takes it: a file, a folder, python-docs.
    out
        Folder of the index.
    encoder
        Encoder with weights, as `gf.load` takes it, or a loaded one.
    passage_tokens
        Largest number of the encoder's tokens in a passage; by default the encoder's context.
    progress
        False for silence, or a function that receives events; by default bars in a terminal or notebook.
    cache_dir
        Folder for prepared data; by default the user's cache.

    Returns
    -------
    Index
        The index, open; `search` finds passages.

    Raises
    ------
    RequestError
        For data without text, a folder with other files or another index, and passages longer than the context.

    Examples
    --------
    >>> import glassformer as gf
    >>> index = gf.index("python-docs", "docs.index")  # doctest: +SKIP
    >>> index.search("how do I read a file line by line?", k=3)  # doctest: +SKIP
    """
    began = time.perf_counter()
    need_faiss()
    out = Path(out)
    check_place(out)
    embedder = Embedder(resolve(encoder, weights=True))
    most = longest_passage(embedder, passage_tokens)
    name = str(encoder) if isinstance(encoder, str | Path) else ""
    with live.shown(progress) as notify:
        corpus = open_corpus(data, cache_dir, reading(notify))
        asked = {
            "schema": SCHEMAS["index"], "data": corpus.describe(), "passage_tokens": most, "metric": "cosine",
            "encoder": {"name": name, "identity": identity(embedder)},
        }  # fmt: skip
        asked = json.loads(json.dumps(asked))
        if (out / META).exists():
            check_same(out, read_signed(out / META), asked)
        else:
            with only_writer(out), disk_errors(out):
                build(out, asked, corpus, embedder, reading(notify))
    found = Index(out, embedder)
    found.seconds = time.perf_counter() - began
    return found


def build(out: Path, asked: dict[str, Any], corpus: Corpus, embedder: Embedder, progress: OnProgress) -> None:
    """Builds the index of `corpus` in the folder `out`. After an interruption at any step, the next call continues."""
    if (out / BUILDING).exists():
        begun = read_signed(out / BUILDING)
        check_same(out, begun, asked)
        check_files(out, begun)
    else:
        passages = write_passages(out, corpus, Splitter(embedder.tokenizer, asked["passage_tokens"]), progress)
        begun = {**asked, "passages": passages, "dimensions": embedder(["a"]).shape[1], "vectors": 0}
        begun["files"] = measured(out, (PASSAGES, OFFSETS))
        write_signed(out / BUILDING, begun)
    total, width = begun["passages"], begun["dimensions"]
    offsets, header = np.load(out / OFFSETS, allow_pickle=False), npy_header(total, width)
    row = width * np.dtype(DTYPES[VECTORS]).itemsize
    with open(out / VECTORS, "r+b" if begun["vectors"] else "wb") as vectors:
        vectors.write(header)
        vectors.truncate(len(header) + begun["vectors"] * row)  # vectors after this point are not recorded
        for first in range(begun["vectors"], total, BLOCK):
            progress("embedding passages", first, total)
            with open(out / PASSAGES, "rb") as file:
                texts = [read_passage(file, offsets, i).text for i in range(first, min(first + BLOCK, total))]
            vectors.seek(len(header) + first * row)
            vectors.write(F.normalize(embedder(texts), dim=-1).numpy().astype(DTYPES[VECTORS]).tobytes())
            vectors.flush()
            os.fsync(vectors.fileno())
            write_signed(out / BUILDING, {**begun, "vectors": first + len(texts)})
    progress("embedding passages", total, total)
    del begun["vectors"]
    write_signed(out / META, {**begun, "files": measured(out, FILES)})
    (out / BUILDING).unlink()


def write_passages(out: Path, corpus: Corpus, splitter: Splitter, progress: OnProgress) -> int:
    """Writes the passages of the corpus and their offsets; returns their number. Raises RequestError if there are
    none."""
    offsets = array("q", [0])
    with atomic_file(out / PASSAGES) as temporary:
        with open(temporary, "wb") as file:
            for document in corpus.documents():
                for passage in splitter(document):
                    fields = {"document": passage.document, "start": passage.start, "text": passage.text}
                    file.write(json.dumps(fields).encode("ascii") + b"\n")
                    offsets.append(file.tell())
                progress("cutting into passages", min(file.tell(), corpus.size or file.tell()), corpus.size)
        if len(offsets) == 1:
            raise RequestError(
                f"data={shown(corpus.name)!r} has no text, so there is nothing to index",
                code="missing", field="data", value=corpus.name, expected="documents with text",
            )  # fmt: skip
    with atomic_file(out / OFFSETS) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array(file, np.array(offsets, DTYPES[OFFSETS]), allow_pickle=False)
    return len(offsets) - 1


class Index(Printed):
    """An open index for searches: `index.search("...", k=4)`.

    Raises RequestError for a folder without an index, a damaged file, an incomplete index, and an encoder other than
    the one that made it. By default the encoder is the one named in the index."""

    def __init__(self, folder: str | Path, encoder: ModelLike | Embedder | None = None):
        need_faiss()
        self.folder = Path(folder)
        if not (self.folder / META).is_file():
            raise RequestError(
                f"{self.folder} is not a complete index; glassformer index DATA --out {self.folder} makes one, or "
                "resumes an interrupted one",
                code="missing", field="index", value=str(self.folder), expected=f"a folder with {META}",
            )  # fmt: skip
        self.meta = read_signed(self.folder / META)
        check_files(self.folder, self.meta)
        self.offsets = self._array(OFFSETS, (self.meta["passages"] + 1,))
        self.vectors = self._array(VECTORS, (self.meta["passages"], self.meta["dimensions"]))
        self.embedder = encoder if isinstance(encoder, Embedder) else Embedder(self._encoder(encoder))
        if identity(self.embedder) != self.meta["encoder"]["identity"]:
            name = shown(self.meta["encoder"]["name"]) or "one without a name"
            raise RequestError(
                f"{self.folder} was made by another encoder ({name}), whose vectors do not compare; give that one, or "
                "index the data again",
                code="conflict", field="encoder", expected=name,
            )  # fmt: skip

    seconds: float | None = None
    """Time of making the index; None if it was opened"""

    def lines(self) -> Iterator[str]:
        """Yields the size of the index."""
        took = "" if self.seconds is None else f", {self.seconds:.1f} s"
        yield f"{self.folder}: {len(self):,} passages, vectors of {self.meta['dimensions']}{took}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the `--json` output."""
        sizes = {"passages": len(self), "dimensions": self.meta["dimensions"], "seconds": self.seconds}
        return {"index": str(self.folder), **sizes, "encoder": self.meta["encoder"], "data": self.meta["data"]}

    def __len__(self) -> int:
        return self.meta["passages"]

    def search(self, question: str, k: int = 4) -> list[Found]:
        """Returns the k passages with the largest cosine similarity to the question, best first."""
        return self.search_all([question], k)[0]

    def search_all(self, questions: Sequence[str], k: int = 4) -> list[list[Found]]:
        """Runs `search` for several questions in one pass over the vectors."""
        rows = self.nearest(questions, k)
        with open(self.folder / PASSAGES, "rb") as file:
            return [
                [Found(float(score), int(i), read_passage(file, self.offsets, int(i))) for score, i in row]
                for row in rows
            ]

    def nearest(self, questions: Sequence[str], k: int = 4) -> list[list[tuple[float, int]]]:
        """Returns [(cosine, number)] of the k best passages for each question."""
        return self.near(F.normalize(self.embedder(questions), dim=-1).numpy(), k)

    def near(self, vectors: np.ndarray, k: int = 4) -> list[list[tuple[float, int]]]:
        """Runs `nearest` for vectors (n, d) of length 1."""
        check_whole("k", k)
        faiss = import_module("faiss")
        scores, numbers = faiss.knn(vectors, self.vectors, min(k, len(self)), metric=faiss.METRIC_INNER_PRODUCT)
        return [list(zip(*row, strict=True)) for row in zip(scores.tolist(), numbers.tolist(), strict=True)]

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        try:
            found = np.load(self.folder / name, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError):
            raise damaged(self.folder, name) from None
        if found.dtype != np.dtype(DTYPES[name]) or found.shape != shape:
            raise damaged(self.folder, name)
        return found

    def _encoder(self, given: ModelLike | None) -> Loaded:
        if given is not None:
            return resolve(given, weights=True)
        name = self.meta["encoder"]["name"]
        if not name or name.startswith("hf:"):  # an index from elsewhere must not start a download
            raise RequestError(
                f"{self.folder} was made by {shown(name) or 'an encoder without a name'}; give it with --encoder",
                code="missing", field="encoder", expected="the encoder that made the index",
            )  # fmt: skip
        return resolve(name, weights=True)


# Files


def read_signed(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file that `write_signed` wrote, with the fields of an index. Raises RequestError."""
    try:
        if path.stat().st_size > LARGEST_META:
            raise ValueError
        found = json.loads(path.read_bytes())
        check = found.pop("check")
        whole = (
            "schema" in found
            and check == digest(found)
            and all(isinstance(found["files"][name]["bytes"], int) for name in found["files"])
        )
        whole &= isinstance(found["encoder"]["name"], str) and set(found["files"]) <= set(FILES)
        numbers = [found["passages"], found["dimensions"], found.get("vectors", 0)]
        whole &= all(type(n) is int and 0 <= n < 1 << 40 for n in numbers) and numbers[2] <= numbers[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise damaged(path.parent, path.name)
    check_schema("index", found["schema"], path)
    return found


def write_signed(path: Path, fields: dict[str, Any]) -> None:
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({**fields, "check": digest(fields)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def measured(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns size in bytes and SHA-256 of files."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = {"bytes": file.tell(), "sha256": sha}
    return found


def check_files(folder: Path, meta: dict[str, Any]) -> None:
    """Raises RequestError for a file that has changed since it was written."""
    for name, was in meta["files"].items():
        try:
            same = (folder / name).stat().st_size == was["bytes"] and measured(folder, [name])[name] == was
        except OSError:
            same = False
        if not same:
            raise damaged(folder, name)
    if (done := meta.get("vectors", 0)) and not (folder / VECTORS).exists():
        raise damaged(folder, VECTORS)
    if done:
        least = len(npy_header(meta["passages"], meta["dimensions"])) + done * meta["dimensions"] * 4
        if (folder / VECTORS).stat().st_size < least:
            raise damaged(folder, VECTORS)


def damaged(folder: Path, name: str) -> RequestError:
    return RequestError(
        f"{folder} is damaged: its {name} is not as it was written; delete the folder and index the data again",
        code="damaged", field="index", value=name, expected="the file that was written",
    )  # fmt: skip


def npy_header(rows: int, width: int) -> bytes:
    """Returns the header of an .npy file of (rows, width) vectors."""
    written = BytesIO()
    described = {"descr": DTYPES[VECTORS], "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(written, described)
    return written.getvalue()


def read_passage(file: IO[bytes], offsets: np.ndarray, i: int) -> Passage:
    """Returns passage i of an open passages.jsonl. Raises RequestError if the file has no such passage."""
    begin, end = int(offsets[i]), int(offsets[i + 1])
    try:
        if not 0 <= begin < end <= begin + LARGEST_LINE:
            raise ValueError
        file.seek(begin)
        fields = json.loads(file.read(end - begin))
        document, start, text = fields["document"], fields["start"], fields["text"]
        if not (isinstance(document, str) and type(start) is int and isinstance(text, str)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(Path(file.name).parent, PASSAGES) from None
    return Passage(document, start, text)


# Checks of a request


def need_faiss() -> None:
    """Raises RequestError if the library for vector search is not installed."""
    if find_spec("faiss") is None:
        raise RequestError(
            f"an index needs faiss, which is not installed; {EXTRA}",
            code="missing", field="index", expected="faiss-cpu",
        )  # fmt: skip


def check_place(out: Path) -> None:
    """Raises RequestError if `out` is a file, or a folder with other contents."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; name a folder", code="range", field="out", value=str(out))
    known = {META, BUILDING, *FILES}
    other = (
        sorted(path.name for path in out.iterdir() if path.name not in known and path.name[0] != ".")
        if out.exists()
        else []
    )
    ours = (out / META).exists() or (out / BUILDING).exists() or _has_passages(out)
    refuse_foreign(out, *FILES, ours=ours, remedy="name an empty folder")
    if other:
        raise RequestError(
            f"{out} holds {shown(other[0])}, which is not of an index; name an empty folder",
            code="conflict", field="out", value=str(out), expected="an empty folder, or that of this index",
        )  # fmt: skip


def _has_passages(out: Path) -> bool:
    """Returns True if a killed process left its passages, before the first record of the index."""
    try:
        with open(out / PASSAGES, "rb") as file:
            passage = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(passage, dict) and passage.keys() == {"document", "start", "text"}


def check_same(out: Path, begun: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises RequestError if the folder belongs to another request."""
    for field, words in WORDS.items():
        was, now = ({k: v for k, v in one.items() if k != "name"} if isinstance(one, dict) else one
                    for one in (begun.get(field), asked[field]))  # fmt: skip
        if was != now:
            raise RequestError(
                f"{out} is an index of {words}, or a part of one; name another folder",
                code="conflict", field=field, value=str(out), expected="an empty folder, or that of this index",
            )  # fmt: skip


def longest_passage(embedder: Embedder, asked: int | None) -> int:
    """Returns the largest number of tokens of a passage. Raises RequestError if `asked` is more than the encoder
    reads."""
    room = embedder.limit - special_tokens(embedder.tokenizer, embedder.limit)
    if asked is None:
        return room
    check_whole("passage_tokens", asked)
    if asked > room:
        raise RequestError(
            f"passage_tokens={asked} is more than the {room} tokens that this encoder reads; use at most {room}",
            code="range", field="passage_tokens", value=asked, expected=f"1 to {room}",
        )  # fmt: skip
    return asked


def identity(embedder: Embedder) -> str:
    """Returns a hash of everything that determines a text's vector: model, tokenizer, pooling, and length limit."""
    pooling = "own" if embedder.own else f"{embedder.pooling.how} {embedder.pooling.normalize}"
    parts = (fingerprint(embedder.model), embedder.tokenizer.fingerprint(), pooling, embedder.limit)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
