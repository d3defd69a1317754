"""Safetensors: a header in JSON, then the tensors without gaps.

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {str: str}, NAME: {"dtype": "F32", "shape": [...], "data_offsets": [start, end]}, ...}
    data      offsets are relative to it; together the tensors cover it exactly

The rules are those of the reference implementation (safetensors, `Metadata::validate` in tensor.rs), and files written
here are those that it writes, byte for byte: tensors by falling alignment of their dtype, then by name. A large model
is a folder of such files with model.safetensors.index.json, which maps each tensor to its file.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from glassformer.conversion.storage.base import (
    ManyFiles,
    SingleFile,
    TensorEntry,
    TensorFile,
    TensorSource,
    made,
    opened,
    quoted,
    write_plain,
)
from glassformer.conversion.storage.jsons import BadJSON, members, small, string
from glassformer.conversion.storage.pickled import open_pickled
from glassformer.conversion.storage.quants import DTYPES, NAMES
from glassformer.errors import RequestError
from glassformer.files import disk_errors, staged
from glassformer.names.places import FOLDER_WEIGHTS, INDEX, SINGLE, TORCH, no_weights
from glassformer.progress import counted

HEADER_BYTES = 32 << 20  # the reference allows 100 MB; 100,000 tensors take some 12
METADATA_BYTES = 8 << 20  # text may need four times its size in memory
MAX_TENSORS = 1 << 17  # of one file
MAX_KEYS = 4096
MAX_INDEXED = 1 << 18  # of one folder
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 60  # bounds strides if a dimension is 0
LARGEST_DESCRIPTION = 4096  # bytes of one tensor's entry in the header
LARGEST_EXTRA = 1 << 16  # bytes of an index without its weight_map

SHARDS = "model-?????-of-?????.safetensors"
WEIGHT_FILES = (SINGLE, INDEX, SHARDS)
"""Patterns of the files that `write_safetensors` writes or removes."""
_COUNT = rb"(?:0|[1-9][0-9]{0,17}+)"
PLAIN = re.compile(
    rb'\{"dtype":"([A-Z0-9_]++)","shape":\[((?:%b(?:,%b){0,7}+)?)\],"data_offsets":\[(%b),(%b)\]\}' % ((_COUNT,) * 4)
)
"""Pattern of a tensor's entry in the header as the reference implementation writes it."""

ORDER = [
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
]
"""Dtypes of the reference implementation by rising alignment (`enum Dtype`); tensors are written in reverse order."""


class SafetensorsFile(SingleFile):
    """One .safetensors file; `metadata` is its `__metadata__`."""

    def _header(self, data: mmap.mmap) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        length = int.from_bytes(data[:8], "little")
        if length > min(HEADER_BYTES, len(data) - 8):
            limit = "more than the file holds" if length > len(data) - 8 else f"more than the {HEADER_BYTES} allowed"
            raise RequestError(
                f"{self.path}: the header's length is given as {length} bytes, {limit}",
                code="range", field=f"{self.path.name}:header", value=length,
            )  # fmt: skip
        metadata: dict[str, str] = {}
        entries: dict[str, TensorEntry] = {}
        try:
            for name, value in members(data[8 : 8 + length], MAX_TENSORS + 1):
                if name != "__metadata__":
                    entries[name] = _entry(name, value, 8 + length)
                elif len(value) <= METADATA_BYTES:
                    metadata = {key: string(text) for key, text in members(value, MAX_KEYS)}
                else:
                    raise BadJSON(f"its __metadata__ take {len(value)} bytes, more than the {METADATA_BYTES} allowed")
            _check_cover(list(entries.values()), 8 + length, len(data))
        except BadJSON as problem:
            raise RequestError(
                f"{self.path} is not a whole safetensors file: {problem}",
                code="damaged",
                field=f"{self.path.name}:header",
            ) from None
        return entries, metadata


def _entry(name: str, text: bytes, start: int) -> TensorEntry:
    """Parses the header's JSON `text` about the tensor `name`; `start` is the offset of the data in bytes. Raises
    BadJSON."""
    if (plain := PLAIN.fullmatch(text)) is not None:
        dtype, begin, end = plain[1].decode(), int(plain[3]), int(plain[4])
        shape = tuple(map(int, plain[2].split(b","))) if plain[2] else ()
    else:
        dtype, shape, begin, end = _described(name, text)
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise BadJSON(f"tensor {quoted(name)} has dtype {quoted(dtype)}; known are {known}")
    if len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        raise BadJSON(f"tensor {quoted(name)} has shape {quoted(str([*shape]))}, which is not a shape of a tensor")
    if begin > end:
        raise BadJSON(f"tensor {quoted(name)} has data_offsets {quoted(str([begin, end]))}; they must be [start, end]")
    if end - begin != (nbytes := math.prod(shape) * DTYPES[dtype].itemsize):
        raise BadJSON(f"tensor {quoted(name)} has {end - begin} bytes, and {dtype} {shape} needs {nbytes}")
    return TensorEntry(name, dtype, shape, start + begin, nbytes)


def _described(name: str, text: bytes) -> tuple[str, tuple[int, ...], int, int]:
    """Parses (dtype, shape, start, end) of a tensor from any JSON that describes it. Raises BadJSON."""
    if len(text) > LARGEST_DESCRIPTION or not text.startswith(b"{"):
        raise BadJSON(f"tensor {quoted(name)} is not described by a small object")
    said = small(text)
    if said.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadJSON(f"tensor {quoted(name)} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not _counts(shape):
        raise BadJSON(f"tensor {quoted(name)} has shape {quoted(str(shape))}, which is not a shape of a tensor")
    if not _counts(offsets) or len(offsets) != 2:
        raise BadJSON(f"tensor {quoted(name)} has data_offsets {quoted(str(offsets))}; they must be [start, end]")
    return dtype if isinstance(dtype, str) else str(dtype), tuple(shape), *offsets


def _counts(values: object) -> bool:
    """Returns True for a list of integers from 0 to 2^63 - 1; JSON's true and 1.0 do not count."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(entries: list[TensorEntry], start: int, size: int) -> None:
    """Raises BadJSON unless the tensors fill the file from byte `start` to `size`, without overlaps or gaps."""
    at = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != at:
            what = "overlaps the tensor before it" if entry.offset < at else "leaves a gap before it"
            raise BadJSON(f"tensor {quoted(entry.name)} {what} (offset {entry.offset - start}, not {at - start})")
        at += entry.nbytes
    if at != size:
        why = "; it is damaged, or was not fetched whole" if at > size else ""
        raise BadJSON(f"its tensors take {at - start} bytes, and the file has {size - start} after the header{why}")


def open_folder(folder: str | Path) -> TensorFile:
    """Opens the weights of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json
    names; otherwise pytorch_model.bin, or the shards of its index.

    Raises RequestError, also for a folder that holds other weights only."""
    folder = Path(folder)
    name = next((name for name in FOLDER_WEIGHTS if os.path.isfile(folder / name)), None)
    if name is None:
        raise RequestError(no_weights(folder), code="missing", field=SINGLE)
    kind: Callable[[Path], SingleFile] = open_pickled if name.startswith(TORCH) else SafetensorsFile
    return _sharded(folder, folder / name, kind) if name.endswith(".json") else kind(folder / name)


def _sharded(folder: Path, index: Path, kind: Callable[[Path], SingleFile]) -> ManyFiles:
    """Opens the shards that an index file names, as one file; `kind` opens each."""
    homes = _index(index)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(kind(folder / name)) for name in sorted(set(homes.values()))}
        for name, home in homes.items():
            if name not in files[home].entries:
                raise RequestError(
                    f"{index} places {quoted(name)} in {home}, which has no such tensor",
                    code="missing", field=f"tensor {quoted(name)}",
                )  # fmt: skip
        metadata = {key: value for file in files.values() for key, value in file.metadata.items()}
        stack.pop_all()
    return ManyFiles(folder, list(files.values()), {name: files[home] for name, home in homes.items()}, metadata)


def _index(path: Path) -> dict[str, str]:
    """Returns {tensor: file name of its shard} of an index file. Raises RequestError for a shard that is missing or
    outside of the folder."""
    with opened(path) as file:
        text = file.read(HEADER_BYTES + 1)
    homes: dict[str, str] = {}
    shards: dict[str, str] = {}  # one string per shard, not per tensor
    try:
        if len(text) > HEADER_BYTES:
            raise BadJSON(f"it is longer than {HEADER_BYTES} bytes")
        parts = dict(members(text, MAX_KEYS))
        if "weight_map" not in parts:
            raise BadJSON("it has no weight_map")
        for name, value in members(parts.pop("weight_map"), MAX_INDEXED):
            shard = string(value)
            if Path(shard).name != shard or shard in ("", "..") or not {"\\", "\0"}.isdisjoint(shard):
                raise BadJSON(
                    f"weight_map places {quoted(name)} in {quoted(shard)}, which is not a file of this folder"
                )
            homes[name] = shards.setdefault(shard, shard)
        for name, value in parts.items():
            if len(value) > LARGEST_EXTRA:
                raise BadJSON(f"{quoted(name)} in it takes {len(value)} bytes")
            small(value)
    except BadJSON as problem:
        raise RequestError(f"{path} is not an index of shards: {problem}", code="damaged", field=path.name) from None
    if missing := sorted(shard for shard in shards if not os.path.isfile(path.parent / shard)):
        raise RequestError(
            f"{path.parent} lacks {quoted(missing[0])}, a shard that {path.name} names; fetch it again",
            code="missing", field=missing[0],
        )  # fmt: skip
    return homes


def write_safetensors(
    folder: str | Path,
    tensors: Mapping[str, Tensor | TensorSource],
    max_shard_bytes: float = 5e9,
    metadata: Mapping[str, str] | None = None,
    by_name: bool = True,
    before: Callable[[], object] | None = None,
) -> None:
    """Writes model.safetensors into `folder`, or shards of at most `max_shard_bytes` (or one tensor) and their index,
    divided as Hugging Face does.

    Only one tensor at a time is in memory if sources are given. The folder's old weights are replaced at the end, when
    all is written; other weights under Hugging Face's names, which a reader could take for these, are removed. Within a
    file tensors are ordered by dtype, then `by_name` as in Hugging Face's files, or in the given order: tensors that a
    reader stacks into one matrix are mapped as one if they are contiguous. `metadata` defaults to {"format": "pt"}.
    `before` is called when all is written, before a file of the folder is replaced. Raises WorkError if the disk fails,
    RequestError for a dtype that the format lacks.
    """
    folder = Path(folder)
    metadata = dict(metadata or {"format": "pt"})
    for name, source in tensors.items():
        if NAMES.get(source.dtype) not in ORDER:
            raise RequestError(
                f"tensor {quoted(name)} has dtype {source.dtype}, which safetensors files do not have",
                code="unsupported", field=f"tensor {quoted(name)}.dtype", value=source.dtype,
            )  # fmt: skip
    shards = _shards(tensors, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    with staged(folder) as temporary:
        for file, shard in zip(names, shards, strict=True):
            _write_file(temporary / file, {name: tensors[name] for name in shard}, metadata, by_name)
        if len(shards) > 1:
            homes = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": sum(_nbytes(source) for source in tensors.values())}}
            text = json.dumps({**index, "weight_map": homes}, indent=2, sort_keys=True) + "\n"
            (temporary / INDEX).write_text(text, encoding="utf-8")
        if before is not None:
            before()
    old = {SINGLE, INDEX, *(path.name for path in folder.glob(SHARDS))}
    with disk_errors(folder):
        for name in old - {*names, *([INDEX] if len(shards) > 1 else [])}:
            (folder / name).unlink(missing_ok=True)


def _nbytes(source: Tensor | TensorSource) -> int:
    return math.prod(source.shape) * source.dtype.itemsize


def _shards(tensors: Mapping[str, Tensor | TensorSource], limit: float) -> list[list[str]]:
    """Returns the tensors' names in order, divided into shards of at most `limit` bytes; a larger tensor is a shard by
    itself."""
    shards: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, source in tensors.items():
        nbytes = _nbytes(source)
        if nbytes > limit:
            shards.append([name])
            continue
        if size + nbytes > limit:
            shards.append(current)
            current, size = [], 0
        current.append(name)
        size += nbytes
    return [*shards, current] if current or not shards else shards


def _write_file(
    path: Path, tensors: Mapping[str, Tensor | TensorSource], metadata: dict[str, str], by_name: bool
) -> None:
    order = sorted(tensors) if by_name else list(tensors)
    order.sort(key=lambda name: -ORDER.index(NAMES[tensors[name].dtype]))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        source = tensors[name]
        end = at + _nbytes(source)
        header[name] = {"dtype": NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in counted(f"writing {path.name}", order, len(order)):
            write_plain(file, made(tensors[name]), tensors[name].dtype)
