"""`glassformer embed`: reads texts, calls the library, writes vectors."""

from __future__ import annotations

import json as json_
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from glassformer.errors import RequestError
from glassformer.files import atomic_file

KINDS = (".npy", ".jsonl")


def embed_texts(model: str, texts: Sequence[str], file: str | None, out: str | None, json: bool) -> None:
    from glassformer.retrieval import embed
    from glassformer.runs.live import View

    texts = [*texts, *(read_texts(file) if file else ())]
    if not texts:
        raise RequestError(
            "no text to embed; give --text TEXT or --file FILE",
            code="missing", field="text", expected="--text or --file",
        )  # fmt: skip
    if out is not None:
        check_out(out)
    began = time.perf_counter()
    with View(quiet=json) as view:
        vectors = embed(model, texts, view.progress).numpy()
    seconds = time.perf_counter() - began
    if out is not None:
        write(Path(out), texts, vectors)
    said = {"texts": len(vectors), "width": vectors.shape[1], "seconds": seconds, "out": out}
    if json:
        print(json_.dumps({**said, **({} if out else {"vectors": vectors.tolist()})}))
    elif out is None:
        sys.stdout.writelines(f"{line}\n" for line in lines(texts, vectors))
    else:
        print(f"{out}: {len(vectors):,} vectors of {vectors.shape[1]} in {seconds:.1f} s")


def read_texts(file: str) -> list[str]:
    """The texts of a file, a line each; empty lines are left out. Only a newline ends one: a text may hold U+2028 or a
    form feed. Raises RequestError."""
    path = Path(file)
    try:
        read = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, ValueError) as problem:
        raise RequestError(
            f"--file {file} cannot be read: {problem}", field="file", value=file, code="missing"
        ) from None
    rows = [(number, row.removesuffix("\r")) for number, row in enumerate(read, 1) if row.strip()]
    if path.suffix != ".jsonl":
        return [row for _, row in rows]
    found = []
    for number, row in rows:
        try:
            text = json_.loads(row)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise RequestError(
                f'{file}: line {number} is no JSON object with a string "text"',
                code="type", field="file", value=file, expected='{"text": "..."}',
            )  # fmt: skip
        found.append(text)
    return found


def check_out(out: str) -> None:
    """Raises RequestError for a place that cannot be written, before anything is computed."""
    path = Path(out)
    if path.suffix not in KINDS:
        raise RequestError(
            f"--out {out}: the name of a file ends in {' or '.join(KINDS)}",
            code="range", field="out", value=out, expected=" or ".join(KINDS),
        )  # fmt: skip
    if not path.parent.is_dir() or path.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise RequestError(f"--out {out}: {what}; name a file", code="range", field="out", value=out, expected="a file")


def write(path: Path, texts: Sequence[str], vectors: np.ndarray) -> None:
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        if path.suffix == ".npy":
            np.save(file, vectors, allow_pickle=False)
        else:
            file.writelines(f"{line}\n".encode() for line in lines(texts, vectors))


def lines(texts: Sequence[str], vectors: np.ndarray) -> Iterator[str]:
    """A JSON object for each text, in ASCII, so that nothing but the end of a line can be taken for one: {"text",
    "vector"}."""
    for text, vector in zip(texts, vectors.tolist(), strict=True):
        yield json_.dumps({"text": text, "vector": vector})
