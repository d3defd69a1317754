"""GGUF, the file format of llama.cpp: typed metadata, a table of tensors, then the tensors, each at an aligned offset.

    "GGUF"  version: u32  tensors: u64  pairs: u64
    pairs   key: string   type: u32     value            (string: length u64, then UTF-8; array: type u32, length u64)
    table   name: string  n: u32        n dimensions: u64, the fastest first      ggml_type: u32   offset: u64
    data    starts at the next multiple of general.alignment (32); offsets count from there

Facts relied on: docs/gguf.md of ggml for the layout; gguf.cpp for the checks of a damaged file (`general.alignment` a
UINT32 and a power of two, at most GGML_MAX_DIMS = 4 dimensions, names below GGML_MAX_NAME = 64 bytes when written);
ggml.h for the numbers of `ggml_type`. Version 2 differs from 3 only in that 3 may be big-endian, which shows in the
version's bytes; version 1 had 32-bit lengths. Types 4, 5, 31 to 33 and 36 to 38 were withdrawn. Q8_1 and Q8_K exist
while llama.cpp multiplies and never in a file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.conversion.storage.base import (
    ManyFiles,
    SingleFile,
    TensorEntry,
    TensorFile,
    TensorSource,
    made,
    pieces,
    quoted,
    write_plain,
)
from glassformer.conversion.storage.quants import DTYPES, FORMATS, NAMES, quantize_q8_0, unit
from glassformer.errors import Code, RequestError
from glassformer.files import atomic_file
from glassformer.progress import counted

HEADER_BYTES = 32 << 20  # all bytes before the tensors; a vocabulary of 256k with its merges takes some 17 MB
MAX_KEYS = 4096
MAX_STRINGS = 1 << 21  # of all arrays together: each costs Python some 80 bytes
MAX_ARRAYS = 1 << 16  # of one file; nested ones cost most for their size
MAX_DEPTH = 4  # of nested arrays
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_NAME = 63
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 1000

ALIGNMENT = "general.alignment"

NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Code of a metadata value type (`gguf_type`) of fixed size -> numpy dtype."""
UINT32, STRING, ARRAY = 4, 8, 9
CODES = {np.dtype(name): code for code, name in NUMBERS.items()}

PLAIN = {"F32": 0, "F16": 1, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "BF16": 30}
TYPES = {code: name for name, code in {**PLAIN, **{name: f.code for name, f in FORMATS.items()}}.items()}
"""`ggml_type` of a tensor -> name."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFFile(SingleFile):
    """One .gguf file.

    `metadata`: numbers, booleans and strings as Python's, arrays of numbers as numpy arrays, arrays of strings and of
    arrays as lists; bytes that are not UTF-8 become lone surrogates ("surrogateescape").
    """

    def _header(self, data: mmap.mmap) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        return _Header(self.path, data).read()


class _Header:
    """Parser of a GGUF header. Every size that the header gives is compared with the remaining bytes before
    allocation."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        self.end = min(len(data), HEADER_BYTES)
        self.strings = self.arrays = 0  # so far

    def wrong(self, what: str, sentence: str, code: Code = "damaged") -> RequestError:
        return RequestError(f"{self.path}: {sentence}", code=code, field=what.removeprefix("the "))

    def read(self) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        self.magic()
        tensors = self.count("tensors", MAX_TENSORS)
        keys = self.count("metadata keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        alignment = 32
        for _ in range(keys):
            key = self.name("a metadata key", 65535)
            if key in metadata:
                raise self.wrong(f"metadata {quoted(key)}", f"the metadata have {quoted(key)} twice", "conflict")
            field = f"metadata {quoted(key)}"
            code = self.u32(field)
            metadata[key] = self.value(code, field)
            if key == ALIGNMENT:
                alignment = metadata[key]
                if code != UINT32 or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
                    told = f"{ALIGNMENT} is {quoted(str(alignment))}, not a power of two (as uint32)"
                    raise self.wrong(field, told, "range")
        table = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, dtype, shape, offset in table:
            if name in entries:
                raise self.wrong(f"tensor {quoted(name)}", f"there are two tensors {quoted(name)}", "conflict")
            what, (weights, nbytes) = f"tensor {quoted(name)}", unit(dtype)
            size = math.prod(shape) // weights * nbytes
            if offset % alignment:
                told = f"{what} has offset {offset}, no multiple of the alignment {alignment}"
                raise self.wrong(f"{what}.offset", told, "range")
            if offset + size > len(self.data) - start:
                raise self.wrong(
                    what,
                    f"{what} ({dtype} {shape}) ends at byte {start + offset + size}, "
                    f"and the file has {len(self.data)}; it is damaged, or was not fetched whole",
                )
            entries[name] = TensorEntry(name, dtype, shape, start + offset, size)
        self.check_apart(entries)
        return entries, metadata

    def magic(self) -> None:
        if self.take(4, "the magic") != b"GGUF":
            raise self.wrong("magic", "this is not a GGUF file: it does not start with GGUF")
        version = self.u32("the version")
        if not version & 0xFFFF:
            raise self.wrong(
                "version", "this is a big-endian GGUF file; only little-endian ones are read", "unsupported"
            )
        if version not in (2, 3):
            told = f"the GGUF version is {version}; 2 and 3 are read, so convert the model again with a newer llama.cpp"
            raise self.wrong("version", told, "schema")

    def count(self, what: str, most: int) -> int:
        count = self.u64(f"the number of {what}")
        if count > most:
            told = f"the number of {what} is given as {count}, more than the {most} allowed"
            raise self.wrong(f"number of {what}", told, "range")
        return count

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.end - self.at:
            raise self.short(what)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def short(self, what: str) -> RequestError:
        if self.end < len(self.data):
            return self.wrong(what, f"{what} goes beyond the {self.end} bytes that all metadata may take", "range")
        return self.wrong(what, f"{what} goes beyond the end of the file, {len(self.data)} bytes")

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def name(self, what: str, longest: int) -> str:
        length = self.u64(what)
        if not 0 < length <= longest:
            raise self.wrong(what, f"{what} has {length} bytes, not 1 to {longest}", "range")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(what, f"{what} is not UTF-8", "syntax") from None

    def value(self, code: int, field: str, depth: int = 0) -> Any:
        if code in NUMBERS:
            return self.numbers(code, 1, field)[0].item()
        if code == STRING:
            return self.take(self.u64(field), field).decode("utf-8", "surrogateescape")
        if code == ARRAY:
            return self.array(field, depth + 1)
        raise self.wrong(f"{field}.type", f"{field} has value type {code}; known are 0 to 12", "unknown")

    def array(self, field: str, depth: int) -> Any:
        code, count = self.u32(field), self.u64(field)
        self.arrays += 1
        if depth > MAX_DEPTH or self.arrays > MAX_ARRAYS:
            told = f"{field} has more than {MAX_DEPTH} arrays in each other or {MAX_ARRAYS} in all"
            raise self.wrong(field, told, "range")
        if code in NUMBERS:
            return self.numbers(code, count, field)
        if code == STRING:
            return self.string_array(count, field)
        if code == ARRAY:
            if count > MAX_ARRAYS:
                raise self.wrong(field, f"{field} has {count} arrays, more than the {MAX_ARRAYS} allowed", "range")
            return [self.array(field, depth + 1) for _ in range(count)]
        told = f"{field} is an array of value type {code}; known are 0 to 12"
        raise self.wrong(f"{field}.type", told, "unknown")

    def numbers(self, code: int, count: int, field: str) -> np.ndarray:
        dtype = np.dtype(NUMBERS[code])
        data = self.take(count * dtype.itemsize, field)
        if dtype.kind == "b" and data.strip(b"\0\1"):
            raise self.wrong(field, f"{field} has a boolean that is neither 0 nor 1", "type")
        return np.frombuffer(data, dtype)

    def string_array(self, count: int, field: str) -> list[str]:
        self.strings += count
        if self.strings > MAX_STRINGS:
            told = f"{field} has {count} strings, and all arrays together may have {MAX_STRINGS}"
            raise self.wrong(field, told, "range")
        found: list[str] = []
        at, end, data, length_at = self.at, self.end, self.data, _U64.unpack_from
        for _ in range(count):  # half a million iterations for a large vocabulary
            begin = at + 8
            if begin > end or (at := begin + length_at(data, at)[0]) > end:
                raise self.short(field)
            found.append(data[begin:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return found

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Parses one entry of the table: (name, dtype, shape, offset in bytes from the start of the data)."""
        name = self.name("the name of a tensor", 1024)
        what = f"tensor {quoted(name)}"
        n = self.u32(what)
        if not 1 <= n <= MAX_DIMENSIONS:
            raise self.wrong(f"{what}.shape", f"{what} has {n} dimensions, not 1 to {MAX_DIMENSIONS}", "range")
        shape = struct.unpack(f"<{n}Q", self.take(8 * n, what))[::-1]
        code, offset = self.u32(what), self.u64(what)
        if code not in TYPES:
            told = f"{what} has type {code}, which is unknown here; known are {', '.join(TYPES.values())}"
            raise self.wrong(f"{what}.type", told, "unknown")
        if not all(shape):
            raise self.wrong(f"{what}.shape", f"{what} has shape {shape}; every dimension must be at least 1", "range")
        if shape[-1] % (weights := unit(TYPES[code])[0]):
            told = f"{what} has rows of {shape[-1]} values, and {TYPES[code]} packs them by {weights}"
            raise self.wrong(f"{what}.shape", told, "conflict")
        return name, TYPES[code], shape, offset

    def check_apart(self, entries: dict[str, TensorEntry]) -> None:
        at = 0
        for entry in sorted(entries.values(), key=lambda entry: entry.offset):
            if entry.offset < at:
                what = f"tensor {quoted(entry.name)}"
                raise self.wrong(f"{what}.offset", f"{what} overlaps the tensor before it", "conflict")
            at = entry.offset + entry.nbytes


def open_gguf(path: str | Path) -> TensorFile:
    """Opens a GGUF file, or all parts of a split model if `path` is any of them. Raises RequestError.

    llama.cpp's gguf-split names the parts NAME-00001-of-00003.gguf; the first has the metadata of the model."""
    file = GGUFFile(path)
    parts = file.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return file
    file.close()
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.path.name, re.DOTALL)
    if not named or int(named[2]) != parts or parts > MAX_PARTS:
        raise RequestError(
            f"{file.path} is part of a model split in {parts}, and is not named *-00001-of-{parts:05d}.gguf",
            code="conflict", field="split.count", value=parts,
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        homes: dict[str, SingleFile] = {}
        files: list[SingleFile] = []
        for i in range(1, parts + 1):
            part = stack.enter_context(GGUFFile(file.path.with_name(f"{named[1]}-{i:05d}-of-{parts:05d}.gguf")))
            if twice := homes.keys() & part.entries.keys():
                raise RequestError(
                    f"{part.path}: tensor {quoted(min(twice))} is in another part too",
                    code="conflict", field=f"tensor {quoted(min(twice))}",
                )  # fmt: skip
            homes.update(dict.fromkeys(part.entries, part))
            files.append(part)
        stack.pop_all()
    return ManyFiles(file.path, files, homes, files[0].metadata)


# Writing


@singledispatch
def _typed(value: Any) -> bytes:
    """Encodes a metadata value as GGUF does: the code of its type, then the value. Raises TypeError if GGUF has no such
    type."""
    raise TypeError


@_typed.register
def _(value: str) -> bytes:
    return _U32.pack(STRING) + _string(value)


@_typed.register
def _(value: np.ndarray) -> bytes:
    return _U32.pack(ARRAY) + _U32.pack(CODES[value.dtype]) + _U64.pack(value.size) + value.tobytes()


@_typed.register
def _(value: np.generic) -> bytes:
    return _U32.pack(CODES[value.dtype]) + value.tobytes()


@_typed.register
def _(value: bool) -> bytes:
    return _typed(np.bool_(value))


@_typed.register
def _(value: float) -> bytes:
    return _typed(np.float32(value))


@_typed.register
def _(value: int) -> bytes:
    return _typed(_narrowest(value, ["<u4", "<i4", "<u8", "<i8"]))


@_typed.register(list)
@_typed.register(tuple)
def _(value: list[Any]) -> bytes:
    if all(isinstance(item, str) for item in value):  # an empty list too: llama.cpp requires the list of merges
        return _U32.pack(ARRAY) + _U32.pack(STRING) + _U64.pack(len(value)) + b"".join(map(_string, value))
    numbers = np.asarray(value)
    if numbers.dtype.kind == "f":
        return _typed(numbers.astype("<f4"))
    return _typed(numbers if numbers.dtype.kind == "b" else _narrowest(numbers, ["<i4", "<u4", "<i8", "<u8"]))


def _narrowest(value: Any, dtypes: list[str]) -> Any:
    """Returns the integers in the first of the dtypes that holds all of them. Raises TypeError if none does."""
    numbers = np.asarray(value)
    for name in dtypes:
        limits = np.iinfo(name)
        fits = not numbers.size or (limits.min <= numbers.min() and numbers.max() <= limits.max)
        if numbers.dtype.kind in "iu" and fits:
            return numbers.astype(name)[()]
    raise TypeError


def _string(value: str) -> bytes:
    text = value.encode("utf-8", "surrogateescape")
    return _U64.pack(len(text)) + text


def _pair(key: str, value: Any) -> bytes:
    try:
        return _string(key) + _typed(value)
    except (TypeError, KeyError, ValueError):
        raise RequestError(
            f"metadata {key}={quoted(str(value))} has no type in GGUF; "
            "strings, booleans, numbers and flat lists of one of these do",
            code="type", field=f"metadata {key}", value=value,
        ) from None  # fmt: skip


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor | TensorSource],
    types: Mapping[str, str] | None = None,
) -> None:
    """Writes a GGUF file of version 3, with one tensor at a time in memory if sources are given.

    `types` maps a tensor to its stored type, a plain one or "Q8_0", if it is not the tensor's dtype. Metadata get the
    types that llama.cpp requires: integers uint32 (int32 if negative, 64 bits if need be), fractions float32, lists of
    integers int32; a numpy number or array keeps its dtype. Raises RequestError for values that GGUF cannot hold,
    WorkError if the disk fails; `path` is replaced at the end or not at all.
    """
    path = Path(path)
    stored = {name: (types or {}).get(name) or NAMES.get(source.dtype, "") for name, source in tensors.items()}
    alignment = int(metadata.get(ALIGNMENT, 32))
    table = b""
    at = 0
    for name, source in tensors.items():
        shape = tuple(source.shape)
        _check(name, shape, stored[name])
        code = PLAIN.get(stored[name], FORMATS["Q8_0"].code)
        table += _string(name) + _U32.pack(len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        table += _U32.pack(code) + _U64.pack(at)
        weights, nbytes = unit(stored[name])
        at += -(-math.prod(shape) // weights * nbytes // alignment) * alignment
    pairs = b"".join(_pair(key, value) for key, value in metadata.items())
    header = b"GGUF" + _U32.pack(3) + _U64.pack(len(tensors)) + _U64.pack(len(metadata)) + pairs + table
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        file.write(header)
        for name, source in counted(f"writing {path.name}", tensors.items(), len(tensors)):
            file.write(bytes(-file.tell() % alignment))
            if stored[name] == "Q8_0":
                for piece in pieces(made(source)):
                    file.write(quantize_q8_0(piece.to("cpu", torch.float32)).numpy().data)
            else:
                write_plain(file, made(source), DTYPES[stored[name]])
        file.write(bytes(-file.tell() % alignment))


def _check(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise RequestError(
            f"tensor {quoted(name)} needs a name of 1 to {MAX_NAME} bytes in a GGUF file",
            code="range", field=f"tensor {quoted(name)}", value=len(name.encode()),
        )  # fmt: skip
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(shape):
        raise RequestError(
            f"tensor {quoted(name)} has shape {shape}; GGUF holds 1 to 4 dimensions of at least 1",
            code="range", field=f"tensor {quoted(name)}.shape", value=shape,
        )  # fmt: skip
    if dtype not in PLAIN and dtype != "Q8_0":
        raise RequestError(
            f"tensor {quoted(name)} has type {dtype!r}; written are {', '.join(PLAIN)} and Q8_0",
            code="unsupported", field=f"tensor {quoted(name)}.type", value=dtype,
        )  # fmt: skip
    if dtype == "Q8_0" and shape[-1] % 32:
        raise RequestError(
            f"tensor {quoted(name)} has rows of {shape[-1]} values, and Q8_0 packs them by 32",
            code="conflict", field=f"tensor {quoted(name)}.shape", value=shape,
        )  # fmt: skip
