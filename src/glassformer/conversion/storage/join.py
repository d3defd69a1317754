"""Parts of files, mapped in memory as one tensor without a copy: q, k and v of a layer become one matrix.

The system maps files in pages, at any free address. The pages of each part are mapped directly after those of the
previous part; a page in which two parts meet is allocated here and filled from both. That needs parts whose offsets
within pages match: the sizes of matrices are almost always multiples of a page, and those of a layer then do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which `mmap` lacks on some systems; 0 if not on Linux. Without it Linux refuses to map a file larger
than memory."""
FIXED = 0x10
"""MAP_FIXED of Linux and macOS: replaces existing mappings at the address."""

LEAST = 16 * PAGE
"""Bytes below which copying is faster than mapping."""
MOST = 8
"""Most parts of one tensor: a process may have some 65,000 mappings."""


class Stretch(NamedTuple):
    """A range of `nbytes` bytes at `offset` of the open file `descriptor`."""

    descriptor: int
    offset: int
    nbytes: int


def joined(parts: Sequence[Stretch], dtype: torch.dtype) -> Tensor | None:
    """Returns the elements of all parts as one vector (n,), a private mapping: writing to it does not reach the files.
    None if the parts' places within pages or the system do not allow it."""
    start = parts[0].offset % PAGE
    if len(parts) > MOST or start % dtype.itemsize or any(part.nbytes < LEAST for part in parts) or _map() is None:
        return None
    ends = [start]
    for part in parts:
        if (part.offset - ends[-1]) % PAGE:
            return None
        ends.append(ends[-1] + part.nbytes)
    memory = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for part, at, end in zip(parts, ends, ends[1:], strict=False):
        first, last = -(-at // PAGE) * PAGE, end // PAGE * PAGE
        if not _lay(base + first, last - first, part.descriptor, part.offset + first - at):
            return None
        for begin, stop in ((at, first), (last, end)):
            if not _read(part.descriptor, memory, begin, stop, part.offset + begin - at):
                return None
    count = (ends[-1] - start) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


def _lay(address: int, count: int, descriptor: int, offset: int) -> bool:
    """Maps `count` bytes of a file from `offset` on to the memory at `address`, replacing it; returns True on
    success."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | FIXED | NO_RESERVE
    return _map()(address, count, protection, flags, descriptor, offset) == address


def _read(descriptor: int, memory: mmap.mmap, begin: int, stop: int, offset: int) -> bool:
    with memoryview(memory)[begin:stop] as view:
        return os.preadv(descriptor, [view], offset) == stop - begin


@cache
def _map() -> Any:
    """Returns the C library's `mmap`, which unlike Python's takes an address; None if the system has no such
    function."""
    if sys.platform not in ("linux", "darwin") or sys.maxsize < 1 << 32:
        return None
    function = ctypes.CDLL(None).mmap
    function.restype = ctypes.c_void_p
    sizes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    function.argtypes = sizes
    return function
