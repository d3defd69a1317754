"""Base of the two containers: tensors by name in a file that is checked, mapped, and read in bounded pieces."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from glassformer.conversion.storage.join import NO_RESERVE, Stretch, joined
from glassformer.conversion.storage.quants import DTYPES, PIECE, unit, unpack
from glassformer.errors import RequestError, WorkError


class TensorEntry(NamedTuple):
    """Location of one tensor in a file: `shape` has rows first, `offset` is in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Disables Python's garbage collector inside the block, because it would scan thousands of new, permanent objects
    repeatedly."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def quoted(text: str) -> str:
    """Returns the text for a message: in quotes, printable, and short."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _rows(dtype: str, shape: tuple[int, ...], rows: slice | None) -> tuple[tuple[int, ...], int, int]:
    """Returns (shape, offset of the first byte, number of bytes) of `rows` of a tensor; None for all rows."""
    weights, nbytes = unit(dtype)
    if rows is None:
        return shape, 0, math.prod(shape) // weights * nbytes
    if not shape:
        raise RequestError("a tensor without dimensions has no rows", code="range", field="rows")
    start, stop, step = rows.indices(shape[0])
    row = math.prod(shape[1:])
    if step != 1 or start * row % weights or stop * row % weights:
        raise RequestError(
            f"rows {start}:{stop}:{step} of {dtype} {shape} do not start and end with whole blocks",
            code="range", field="rows", value=f"{start}:{stop}:{step}",
        )  # fmt: skip
    count = max(stop - start, 0)
    return (count, *shape[1:]), start * row // weights * nbytes, count * row // weights * nbytes


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor as stored in its file: `bytes` (nbytes,) uint8 encode elements of `dtype` with this `shape`."""

    dtype: str
    shape: tuple[int, ...]
    bytes: Tensor

    def __getitem__(self, rows: slice) -> Packed:
        """Returns consecutive rows, without a copy. Raises RequestError for a step and for a boundary within a
        block."""
        shape, begin, nbytes = _rows(self.dtype, self.shape, rows)
        return Packed(self.dtype, shape, self.bytes[begin : begin + nbytes])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the elements as a new tensor of `shape` on the CPU."""
        out = torch.empty(self.shape, dtype=dtype, device="cpu")
        unpack(self.dtype, lambda begin, nbytes: self.bytes[begin : begin + nbytes], out)
        return out


class TensorFile(ABC):
    """An opened file, or several as one, of tensors by name.

    path: the opened path; entries: name -> TensorEntry; metadata: other content of the header. The header has been
    checked against the size of the file, so every entry can be read. Use as a context manager or close it: that
    releases the file, while returned tensors stay valid.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, Any]

    @abstractmethod
    def packed(self, name: str) -> Packed:
        """Returns a tensor as it is stored, a view of a private mapping of the file."""

    @abstractmethod
    def read_into(self, name: str, out: Tensor, rows: slice | None = None) -> None:
        """Fills `out` with a tensor, or with some of its rows, converting as needed.

        `out` has the shape of the rows read and any dtype, device and strides: rows of a larger tensor, or a transposed
        one. The file is read in pieces of a few MiB (of whole rows, if `out` is not contiguous) and is not mapped.
        """

    @abstractmethod
    def close(self) -> None: ...

    def tensor(self, name: str) -> Tensor:
        """Returns a plain tensor as a view of a private mapping of the file: nothing is read before it is used, and
        writing to it does not reach the file. It is copied only if its address is not aligned for its dtype. A
        quantised tensor is unpacked to float32."""
        entry = self.entry(name)
        if (dtype := DTYPES.get(entry.dtype)) is not None:
            return self.home(entry).plain(dtype, entry.offset, entry.nbytes).view(entry.shape)
        out = torch.empty(entry.shape, dtype=torch.float32, device="cpu")
        self.read_into(name, out)
        return out

    def stacked(self, parts: Sequence[TensorEntry], shape: tuple[int, ...]) -> Tensor | None:
        """Returns the plain tensors `parts` as one tensor of `shape`, a view like that of `tensor`; None if they cannot
        be mapped as one. Contiguous parts can; `join.py` tells which others."""
        first = parts[0]
        home, dtype, end, together = self.home(first), DTYPES.get(first.dtype), first.offset, True
        for part in parts:
            if part.dtype != first.dtype:
                return None
            together = together and part.offset == end and self.home(part) is home
            end = part.offset + part.nbytes
        if dtype is None:
            return None
        if together:
            return home.plain(dtype, first.offset, end - first.offset).view(shape)
        found = joined([self.home(part).stretch(part) for part in parts], dtype)
        return None if found is None else found.view(shape)

    @abstractmethod
    def home(self, entry: TensorEntry) -> SingleFile:
        """Returns the single file that holds the entry's tensor."""

    def entry(self, name: str) -> TensorEntry:
        """Returns the entry of the tensor `name`. Raises RequestError if the file has no such tensor."""
        if name in self.entries:
            return self.entries[name]
        raise RequestError(f"{self.path} has no tensor {quoted(name)}", code="missing", field=f"tensor {quoted(name)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SingleFile(TensorFile):
    """Base of files with one header, which subclasses parse."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = opened(self.path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            if self._size < 8:
                raise RequestError(
                    f"{self.path}: the file has {self._size} bytes, too few for a header",
                    code="damaged", field=self.path.name, value=self._size,
                )  # fmt: skip
            with nothing_collected(), self._map(mmap.MAP_SHARED, mmap.PROT_READ) as data:
                self.entries, self.metadata = self._header(data)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _header(self, data: mmap.mmap) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        """Returns (entries, metadata) of the header in `data`, the mapped file. Raises RequestError for any
        contradiction within the header or with the size of the file."""

    @functools.cached_property
    def _mapping(self) -> mmap.mmap:
        return self._map(mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)

    def _map(self, flags: int, prot: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._file.fileno(), self._size, flags=flags, prot=prot)
        except (OSError, ValueError) as problem:  # ValueError: the file has become shorter
            raise WorkError(f"{self.path} cannot be mapped into memory ({problem})", code="disk") from problem

    def packed(self, name: str) -> Packed:
        entry = self.entry(name)
        return Packed(entry.dtype, entry.shape, self.bytes(entry.dtype, entry.offset, entry.nbytes))

    def bytes(self, dtype: str, offset: int, count: int) -> Tensor:
        """Returns `count` bytes at `offset`, (count,) uint8; copied only if their address is not aligned for elements
        of `dtype`."""
        if not count:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)
        plain = DTYPES.get(dtype)
        aligned = data.data_ptr() % (plain.itemsize if plain else 2) == 0  # blocks hold half-precision scales
        return data if aligned else data.clone()

    def plain(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """Returns `count` bytes at `offset` as a vector of `dtype`; copied only if their address is not aligned for
        it."""
        if offset % dtype.itemsize or not count:
            return self.bytes("U8", offset, count).clone().view(dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count // dtype.itemsize, offset=offset)

    def home(self, entry: TensorEntry) -> SingleFile:
        return self

    def stretch(self, entry: TensorEntry) -> Stretch:
        return Stretch(self._file.fileno(), entry.offset, entry.nbytes)

    def read_into(self, name: str, out: Tensor, rows: slice | None = None) -> None:
        entry = self.entry(name)
        shape, begin, _ = _rows(entry.dtype, entry.shape, rows)
        if tuple(out.shape) != shape:
            raise RequestError(
                f"{self.path}: tensor {quoted(name)} has shape {shape}, and `out` {tuple(out.shape)}",
                code="conflict", field="out", value=tuple(out.shape),
            )  # fmt: skip
        self._fill(entry.dtype, entry.offset + begin, out.detach())

    def _fill(self, dtype: str, offset: int, out: Tensor) -> None:
        """Fills `out` with consecutive elements that are stored as `dtype` from byte `offset` on."""
        if not out.numel():
            return
        if not out.is_contiguous() or out.device.type != "cpu":
            self._fill_rows(dtype, offset, out if out.dim() else out.view(1))
        elif DTYPES.get(dtype) is out.dtype:
            self._read(offset, out.view(-1).view(torch.uint8))
        else:
            weights, nbytes = unit(dtype)
            scratch = torch.empty(min(PIECE, out.numel()) // weights * nbytes, dtype=torch.uint8, device="cpu")

            def fetch(begin: int, count: int) -> Tensor:
                self._read(offset + begin, scratch[:count])
                return scratch[:count]

            unpack(dtype, fetch, out)

    def _fill_rows(self, dtype: str, offset: int, out: Tensor) -> None:
        """Fills `out`, not contiguous or not on the CPU, some rows at a time by way of a contiguous copy."""
        weights, nbytes = unit(dtype)
        row = out.numel() // len(out)
        count = min(max(1, PIECE // row), len(out))
        values = torch.empty((count, *out.shape[1:]), dtype=out.dtype, device="cpu")
        for first in range(0, len(out), count):
            part = out[first : first + count]
            self._fill(dtype, offset + first * row // weights * nbytes, values[: len(part)])
            part.copy_(values[: len(part)])

    def _read(self, offset: int, out: Tensor) -> None:
        """Fills `out` (contiguous, uint8) with the file's bytes from `offset` on. Raises WorkError."""
        view = out.numpy().data
        while view:
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as problem:
                raise WorkError(f"{self.path} cannot be read ({problem.strerror})", code="disk") from problem
            if not count:
                raise WorkError(
                    f"{self.path} became shorter while it was read; read it again when it is whole", code="changed"
                )
            view, offset = view[count:], offset + count

    def close(self) -> None:
        self.__dict__.pop("_mapping", None)
        self._file.close()


class ManyFiles(TensorFile):
    """Several files of whole tensors as one; `homes` maps a tensor's name to its file."""

    def __init__(self, path: Path, files: list[SingleFile], homes: dict[str, SingleFile], metadata: dict[str, Any]):
        self.path, self.metadata = path, metadata
        self._files, self._homes = files, homes
        self.entries = {name: home.entries[name] for name, home in homes.items()}

    def packed(self, name: str) -> Packed:
        return self._homes[self.entry(name).name].packed(name)

    def home(self, entry: TensorEntry) -> SingleFile:
        return self._homes[entry.name]

    def read_into(self, name: str, out: Tensor, rows: slice | None = None) -> None:
        self._homes[self.entry(name).name].read_into(name, out, rows)

    def close(self) -> None:
        for file in self._files:
            file.close()


def opened(path: Path) -> IO[bytes]:
    """Opens a regular file for reading, unbuffered. Raises RequestError."""
    if not os.path.isfile(path):  # a pipe would block; `isfile` is also False for impossible names
        what = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise RequestError(
            f"{str(path)!r} {what}; give a file of tensors, or a folder", code="missing", field=path.name
        )
    try:
        return open(path, "rb", buffering=0)
    except OSError as problem:
        raise RequestError(f"{path} cannot be read ({problem.strerror})", code="disk", field=path.name) from problem


# Writing


class TensorSource(Protocol):
    """A tensor to be written that a call makes on demand, to save memory; shape and dtype are known before."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __call__(self) -> Tensor: ...


def made(source: Tensor | TensorSource) -> Tensor:
    """Returns the tensor itself, or the one that a source makes. Raises ValueError if it has another shape than
    declared."""
    tensor = source if isinstance(source, Tensor) else source()
    if tuple(tensor.shape) != tuple(source.shape):
        raise ValueError(f"a source of shape {tuple(source.shape)} made a tensor of shape {tuple(tensor.shape)}")
    return tensor.detach()


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields consecutive rows of a tensor in groups of at most PIECE elements, at least one row each."""
    if not tensor.numel():
        return
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    row = tensor.numel() // len(tensor)
    yield from tensor.split(max(1, PIECE // row))


def write_plain(file: IO[bytes], tensor: Tensor, dtype: torch.dtype) -> None:
    """Writes the elements of a tensor to `file` as `dtype`, some rows at a time."""
    for piece in pieces(tensor):
        values = piece.to("cpu", dtype).contiguous()
        file.write(values.view(-1).view(torch.uint8).numpy().data)
