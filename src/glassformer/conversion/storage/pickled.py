"""Tensors of the files that `torch.save` writes, read without unpickling.

    a zip archive, nothing compressed
    NAME/data.pkl       a pickle: the value that was saved, with a reference to a storage for each tensor
    NAME/data/KEY       the bytes of a storage
    NAME/byteorder      little

A pickle is a program for a stack machine that may call any function by its name. The machine here has only the
instructions that build plain values, and accepts only the names that torch needs to rebuild a tensor; it imports
nothing and calls nothing. Any other instruction or name is refused. Tensors are views of the file, like those of
safetensors.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from glassformer.conversion.storage.base import SingleFile, TensorEntry, quoted
from glassformer.conversion.storage.quants import DTYPES
from glassformer.errors import RequestError
from glassformer.names.places import is_zip, pickled

MOST_BYTES = 16 << 20
"""Most bytes of a pickle."""
MOST_DIRECTORY = 4 << 20
"""Most bytes of the directory of an archive; a tensor takes some 90."""
MOST_STEPS = 1 << 20
"""Most instructions of a pickle; each makes at most one value. A tensor takes some 40."""
MOST_ELEMENTS = 1 << 60
MOST_DIMENSIONS = 8
LARGEST_KEY = 1 << 31
"""Bound of integer keys: larger ones could be chosen so that a mapping takes quadratic time."""
LOCAL = 30
"""Bytes of the header before a member of an archive, without its name and its extra field."""
STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""Storage class of torch -> dtype of its elements."""


class BadPickle(ValueError):
    """Error for a refused pickle; `at` is the instruction or name at fault."""

    def __init__(self, message: str, at: str = "pickle"):
        super().__init__(message)
        self.at = at


class Called(NamedTuple):
    """Name of a function or class that a pickle refers to; it is not imported."""

    name: str


class PickledStorage(NamedTuple):
    """A storage that a pickle refers to: `length` elements of `dtype` in the archive's member data/`key`."""

    key: str
    dtype: str
    length: int


class PickledTensor(NamedTuple):
    """A tensor that a pickle describes: elements of `storage`, from index `start` on; strides in elements."""

    storage: PickledStorage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """True if the elements are in the order of the shape without gaps."""
        expected = 1
        if 0 in self.shape:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


def _storage(reference: Any) -> PickledStorage:
    match reference:
        case ("storage", Called(name), str(key), str(), int(count)) if name.removeprefix("torch.") in STORAGES:
            if 0 <= count < MOST_ELEMENTS:
                return PickledStorage(key, STORAGES[name.removeprefix("torch.")], count)
    raise BadPickle(f"it refers to {_shown(reference)}, not to a storage of plain numbers", "storage")


def _tensor(arguments: tuple[Any, ...]) -> PickledTensor:
    match arguments:
        case (PickledStorage() as storage, start, tuple(shape), tuple(strides), bool(), *_):
            if _counts((start, *shape, *strides)) and len(shape) == len(strides) <= MOST_DIMENSIONS:
                return PickledTensor(storage, start, shape, strides)
    raise BadPickle("it rebuilds a tensor of something else than a storage, a shape and strides", "tensor")


def _parameter(arguments: tuple[Any, ...]) -> PickledTensor:
    match arguments:
        case (PickledTensor() as tensor, bool(), _):
            return tensor
    raise BadPickle("it makes a parameter of something other than a tensor", "tensor")


def _empty(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise BadPickle("it makes an OrderedDict of arguments", "collections.OrderedDict")
    return {}


KNOWN: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _empty,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}
"""Name of a function in a pickle -> function of this module that replaces it, given the arguments."""
NAMED = {*KNOWN, *(f"torch.{name}" for name in STORAGES)}


class _Machine:
    """Stack machine that executes the instructions of a pickle and makes plain values only."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise BadPickle("an instruction of it finds no value")
        return self.stack.pop()

    def top(self, kind: type[Any]) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise BadPickle(f"an instruction of it finds no {kind.__name__}")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Pops the last mark and the values pushed since; returns the values."""
        if not self.marks:
            raise BadPickle("an instruction of it finds no mark")
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def fill(self, pairs: list[Any]) -> None:
        """Puts pairs, a flat list of keys and values in turn, into the mapping on top of the stack. Raises
        BadPickle."""
        found, keys = self.top(dict), pairs[::2]
        if len(pairs) % 2 or not all(isinstance(key, str) or _is_small(key) for key in keys):
            raise BadPickle("a mapping of it has a key that is neither a text nor a small whole number")
        found.update(zip(keys, pairs[1::2], strict=True))

    def name(self, name: str) -> Called:
        if name not in NAMED:
            raise BadPickle(f"it calls for {quoted(name)}, which no file of tensors needs", name[:80])
        return Called(name)

    def call(self) -> Any:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Called) or function.name not in KNOWN or not isinstance(arguments, tuple):
            raise BadPickle("it calls a value other than a function of torch")
        return KNOWN[function.name](arguments)

    def step(self, name: str, argument: Any) -> None:
        """Executes one instruction, any but STOP, by its name in `pickletools`. Raises BadPickle for one that tensors
        do not need."""
        push = self.stack.append
        match name:
            case "PROTO" | "FRAME":
                return
            case "MARK":
                self.marks.append(len(self.stack))
            case "EMPTY_DICT":
                push({})
            case "EMPTY_LIST":
                push([])
            case "EMPTY_TUPLE":
                push(())
            case "TUPLE":
                push(tuple(self.marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple([self.pop() for _ in range(int(name[-1]))][::-1]))
            case "APPEND":
                value = self.pop()
                self.top(list).append(value)
            case "APPENDS":
                values = self.marked()
                self.top(list).extend(values)
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self.fill([key, value])
            case "SETITEMS":
                self.fill(self.marked())
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                push(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top(object)
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top(object)
            case "BINGET" | "LONG_BINGET":
                if argument not in self.memo:
                    raise BadPickle("an instruction of it recalls a value that was not kept")
                push(self.memo[argument])
            case "GLOBAL":
                push(self.name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                last, first = self.pop(), self.pop()
                push(self.name(f"{first}.{last}" if isinstance(first, str) and isinstance(last, str) else ""))
            case "REDUCE":
                push(self.call())
            case "BINPERSID":
                push(_storage(self.pop()))
            case "BUILD":  # attributes of a mapping, such as the `_metadata` of a state dict
                self.pop()
                self.top(dict)
            case _:
                raise BadPickle(f"it has the instruction {name}, which no file of tensors needs", name)


def value_of(pickle: bytes) -> Any:
    """Returns the value that a pickle describes: plain values, and `PickledTensor` for tensors. Raises BadPickle."""
    if len(pickle) > MOST_BYTES:
        raise BadPickle(f"it takes {len(pickle):,} bytes, more than the {MOST_BYTES:,} allowed")
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if count >= MOST_STEPS:
                raise BadPickle(f"it has more than {MOST_STEPS:,} instructions")
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except BadPickle:
        raise
    except (ValueError, OverflowError) as problem:  # errors of pickletools: an unknown or truncated instruction
        raise BadPickle(f"it is damaged ({str(problem)[:80]})") from None
    raise BadPickle("it has no end")


def open_pickled(path: Path) -> PickledFile:
    """Opens a file that `torch.save` wrote. Raises RequestError, with a way to convert it, for a format older than
    torch 1.6's zip archives."""
    if not (path.is_file() and is_zip(path)):
        raise RequestError(pickled(path), code="unsupported", field=path.name)
    return PickledFile(path)


def scalars(value: Any) -> dict[str, Any]:
    """Returns the entries of a mapping whose values are strings, numbers, booleans or None; {} if `value` is not a
    mapping."""
    found = value.items() if isinstance(value, dict) else ()
    return {str(key): one for key, one in found if one is None or isinstance(one, str | int | float)}


class PickledFile(SingleFile):
    """A file that `torch.save` wrote. `entries` holds the tensors of a mapping by name; names from a nested mapping
    have its name and a dot as prefix. `metadata` holds plain values in the same way, one mapping deep."""

    def _header(self, data: mmap.mmap) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        try:
            self._members = _members(data)
            tree = value_of(self._bytes(data, "data.pkl"))
        except BadPickle as problem:
            raise RequestError(
                f"{self.path} is a pickle that is not read: {problem}",
                code="unsupported", field=f"{self.path.name}:{problem.at}",
            ) from None  # fmt: skip
        except RequestError:
            raise
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as problem:
            raise self._damaged(str(problem)[:80]) from None
        if "byteorder" in self._members and self._bytes(data, "byteorder") != b"little":
            raise RequestError(
                f"{self.path} was saved by a big-endian machine; save it again on another one",
                code="unsupported", field=f"{self.path.name}:byteorder",
            )  # fmt: skip
        if not isinstance(tree, dict):
            raise self._damaged(f"it holds a {type(tree).__name__} and no mapping of tensors")
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, Any] = {}
        for prefix, values in [("", tree), *((f"{key}.", one) for key, one in tree.items() if isinstance(one, dict))]:
            found = {f"{prefix}{key}": one for key, one in values.items() if isinstance(one, PickledTensor)}
            entries |= {name: self._entry(data, name, one) for name, one in found.items()}
            metadata |= {f"{prefix}{key}": one for key, one in scalars(values).items()}
        return entries, metadata

    def _damaged(self, why: str) -> RequestError:
        return RequestError(
            f"{self.path} is not a whole file of torch.save: {why}", code="damaged", field=f"{self.path.name}:header"
        )

    def _bytes(self, data: mmap.mmap, member: str) -> bytes:
        start, size = self._place(data, member)
        if size > MOST_BYTES:
            raise self._damaged(f"its {member} takes {size:,} bytes")
        return data[start : start + size]

    def _place(self, data: mmap.mmap, member: str) -> tuple[int, int]:
        """Returns (offset, size) in bytes of a member of the archive. Raises RequestError."""
        if (info := self._members.get(member)) is None:
            raise self._damaged(f"it has no {quoted(member)}")
        header = data[info.header_offset : info.header_offset + LOCAL]
        if len(header) < LOCAL or not header.startswith(b"PK\x03\x04") or info.flag_bits & 1:
            raise self._damaged(f"{quoted(member)} is not where its directory says")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise self._damaged(f"{quoted(member)} is compressed, which torch.save does not do")
        start = info.header_offset + LOCAL + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        if start + info.file_size > len(data):
            raise self._damaged(f"{quoted(member)} ends behind the file")
        return start, info.file_size

    def _entry(self, data: mmap.mmap, name: str, tensor: PickledTensor) -> TensorEntry:
        storage, width = tensor.storage, DTYPES[tensor.storage.dtype].itemsize
        start, size = self._place(data, f"data/{storage.key}")
        numbers = math.prod(tensor.shape)
        if not tensor.contiguous:
            raise RequestError(
                f"{self.path}: the numbers of {quoted(name)} are not in the order of its shape; save its "
                ".contiguous()",
                code="unsupported", field=f"tensor {quoted(name)}", value=tensor.strides,
            )  # fmt: skip
        if storage.length * width != size or tensor.start + numbers > storage.length:
            raise self._damaged(f"{quoted(name)} has {numbers:,} numbers, and its storage {size:,} bytes")
        return TensorEntry(name, storage.dtype, tensor.shape, start + tensor.start * width, numbers * width)


class _Directory:
    """The file as `zipfile` reads it; only its directory, at the end and of bounded size, is ever read."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.seek, self.tell = data.seek, data.tell

    def read(self, count: int = -1) -> bytes:
        left = len(self.data) - self.tell()
        count = left if count < 0 else min(count, left)
        if count > MOST_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory takes {count:,} bytes, more than the {MOST_DIRECTORY:,} allowed")
        return self.data.read(count)


def _members(data: mmap.mmap) -> dict[str, zipfile.ZipInfo]:
    """Returns the members of a zip archive, by their names without the top folder."""
    with zipfile.ZipFile(_Directory(data)) as archive:  # type: ignore[call-overload]
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if len(found) != len(archive.infolist()):
        raise zipfile.BadZipFile("two members of it have one name")
    return found


def _counts(values: tuple[Any, ...]) -> bool:
    """Returns True if all values are integers that a tensor's sizes, strides or offset can have."""
    return all(type(value) is int and 0 <= value < MOST_ELEMENTS for value in values)


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < LARGEST_KEY


def _shown(value: Any) -> str:
    """Returns a string in quotes, shortened; for another value the name of its type, because it may unfold without
    end."""
    return quoted(value) if isinstance(value, str) else type(value).__name__
