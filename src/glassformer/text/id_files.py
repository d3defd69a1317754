"""Files of token ids: nanoGPT's train.bin, shards of llm.c, .npy, and columns of ids in a dataset saved to disk.

    data          ids to train on                     held out
    FILE.bin      raw uint16 or `,dtype=uint32`        val.bin, if FILE is train.bin
    FILE.npy      any integers, rows one after another val.npy, if FILE is train.npy
    FOLDER        its train.bin or train.npy, if it has no text
    hf:FOLDER     a column of ids (`hub.py`)           the split named validation

A tokenizer.json in the same folder is the tokenizer. Files are mapped into memory; nothing is unpickled, so that
nanoGPT's meta.pkl is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import RequestError, shown
from glassformer.text.files import ID_SUFFIXES, has_text, is_saved
from glassformer.text.vocabulary import TOKENIZER_FILES

HEADERS = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}
"""Magic number of llm.c's files of tokens -> (dtype of the ids, version) (karpathy/llm.c, dev/data/data_common.py)."""
HEADER_BYTES = 1024
RAW = {"uint16": "<u2", "uint32": "<u4"}
HELD_OUT = ("val", "validation")
"""Stems of the file with held-out ids, next to a file whose stem is train."""
SAMPLE = 1 << 16
"""Number of ids at the start of a file that are checked for a wrong dtype."""


@dataclass(frozen=True)
class IdSource:
    """Token ids to train on, held-out ids, if any, and the folder of their tokenizer, if any."""

    name: str
    train: Any
    validation: Any = None
    """Held-out ids. If None, the end of `train` is held out."""
    tokenizer: Path | None = None
    """Folder of the ids, if it has a tokenizer; None otherwise."""
    notes: tuple[str, ...] = ()


def open_ids(data: str) -> IdSource | None:
    """Returns the token ids that `data` names, mapped into memory; None if `data` does not name token ids. Raises
    RequestError for a damaged file, and for one of uint32 ids that is given without `,dtype=uint32`."""
    if data.startswith("hf:") or is_saved(Path(data.rpartition(",column=")[0] or data).expanduser()):
        data = data if data.startswith("hf:") else f"hf:{data}"
        from glassformer.text.hub import hub_ids

        sides = hub_ids(data)
        return None if sides is None else IdSource(data, *sides)
    place, _, dtype = data.rpartition(",dtype=")
    path = Path(place if place and dtype in RAW else data).expanduser()
    if isdir(path):
        there = [path / f"train{suffix}" for suffix in ID_SUFFIXES if isfile(path / f"train{suffix}")]
        if not there or has_text(path):
            return None
        path = there[0]
    if path.suffix.lower() not in ID_SUFFIXES or not isfile(path):
        return None
    raw = dtype if place and dtype in RAW else None
    train, held_out = read_ids(path, raw), None
    for stem in HELD_OUT if path.stem == "train" else ():
        if held_out is None and isfile(other := path.with_name(f"{stem}{path.suffix}")):
            held_out = read_ids(other, raw)
    tokenizer = path.parent if any(isfile(path.parent / name) for name in TOKENIZER_FILES) else None
    pickled = isfile(path.with_name("meta.pkl")) and tokenizer is None
    notes = ("meta.pkl is a pickle and is not read; --tokenizer FILE gives ids their text.",)
    return IdSource(data, train, held_out, tokenizer, notes if pickled else ())


def read_ids(path: Path, dtype: str | None = None) -> np.ndarray:
    """Returns the token ids in a .npy or raw file, mapped into memory. `dtype`: type of the ids in a raw file without
    llm.c's header, None for uint16. Raises RequestError."""
    try:
        if path.suffix.lower() == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        return _raw(path, dtype)
    except OSError as problem:
        raise _refused(path, f"cannot be read ({problem.strerror or problem})", "disk") from problem
    except (ValueError, EOFError) as problem:
        if isinstance(problem, RequestError):
            raise
        raise _refused(path, f"is not an array of numbers ({problem})", "damaged") from problem


def _raw(path: Path, dtype: str | None) -> np.ndarray:
    """Returns the token ids (n,), mapped into memory, of a file with llm.c's header, or without a header, of the type
    `dtype` (None for uint16). Raises RequestError for a damaged file, or one of another type."""
    size = path.stat().st_size
    if not size:
        raise _refused(path, "is empty", "missing")
    if isfile(path.with_suffix(".idx")):
        raise _refused(path, f"has an index, {path.stem}.idx, as Megatron writes; give ids without one", "unsupported")
    head = np.fromfile(path, "<i4", 3)
    if size >= HEADER_BYTES and int(head[0]) in HEADERS:
        kind, version = HEADERS[int(head[0])]
        count = (size - HEADER_BYTES) // np.dtype(kind).itemsize
        if (int(head[1]), int(head[2])) != (version, count):
            raise _refused(path, f"has a header of llm.c for {int(head[2]):,} ids, and {count:,} follow it", "damaged")
        return np.memmap(path, kind, "r", HEADER_BYTES)
    kind = RAW[dtype or "uint16"]
    if size % np.dtype(kind).itemsize:
        raise _refused(path, f"has {size:,} bytes, no whole number of {dtype or 'uint16'}", "damaged")
    ids = np.memmap(path, kind, "r")
    if dtype is None and len(ids) > 3 and not ids[1 : 2 * SAMPLE : 2].any() and ids[: 2 * SAMPLE : 2].any():
        raise _refused(path, f"holds uint32, it seems: every second uint16 is 0; give {path},dtype=uint32", "type")
    return ids


def _refused(path: Path, what: str, code: Any) -> RequestError:
    return RequestError(f"data={shown(path)!r} {what}", code=code, field="data", value=str(path))
