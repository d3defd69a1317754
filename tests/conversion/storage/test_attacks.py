"""Files made to hurt: each is refused in one sentence, at once, and without much memory."""

from __future__ import annotations

import gc
import json
import os
import re
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.conversion.storage import SafetensorsFile, open_folder, open_tensors
from glassformer.conversion.storage.jsons import BadJSON, members, small
from glassformer.errors import RequestError
from tests.conversion.storage.fuzz import (
    SHARDS,
    array,
    container,
    gguf,
    gguf_corpus,
    info,
    packed_string,
    pair,
    safetensors_corpus,
    safetensors_file,
)
from tests.refused import refused

SECONDS, BYTES = 8.0, 200 << 20  # a header that is read in steps of its square takes minutes


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


@contextmanager
def bounded(nbytes: int = BYTES) -> Iterator[None]:
    """Fails if the block takes SECONDS of CPU or `nbytes` of resident memory, pages of mapped files included."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    before, started = _status("VmHWM"), time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert _status("VmHWM") - before < nbytes


def sentence_of(path: Path, opening: Callable[[Path], object] = open_tensors, nbytes: int = BYTES) -> str:
    """Returns the one-sentence error of opening `path`."""
    with bounded(nbytes), pytest.raises(RequestError) as caught:
        opening(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1200 and path.name in text
    return text


# Safetensors


def described(**changes: object) -> bytes:
    """Returns a file of one F32 tensor of three values, with `changes` to its description."""
    said = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}
    return container(json.dumps({"a": said}).encode(), bytes(12))


def two(a: tuple[int, int], b: tuple[int, int], size: int) -> bytes:
    """Returns two U8 tensors at these offsets."""
    said = {n: {"dtype": "U8", "shape": [e - s], "data_offsets": [s, e]} for n, (s, e) in {"a": a, "b": b}.items()}
    return container(json.dumps(said).encode(), bytes(size))


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
SAFETENSORS = {
    "length beyond the file": (container(b"{}", length=3), "given as 3 bytes, more than the file holds"),
    "length of 2^63": (container(b"{}", length=1 << 63), "given as 9223372036854775808 bytes"),
    "length of all ones": (container(b"{}", length=(1 << 64) - 1), "given as 18446744073709551615 bytes"),
    "length too short": (container(b"{" + ONE + b"}", bytes(4), length=20), "JSON is damaged at byte 1"),
    "length of 0": (container(b"{}", length=0), "not a JSON object"),
    "data cut": (described()[:-1], "its tensors take 12 bytes, and the file has 11"),
    "data left over": (described() + b"\0", "its tensors take 12 bytes, and the file has 13"),
    "overlap": (two((0, 8), (4, 12), 12), "'b' overlaps the tensor before it"),
    "the same place twice": (two((0, 8), (0, 8), 8), "overlaps the tensor before it"),
    "a gap": (two((0, 8), (9, 12), 12), "'b' leaves a gap before it"),
    "a gap at the start": (two((1, 8), (8, 12), 12), "'a' leaves a gap before it"),
    "offsets backwards": (described(data_offsets=[12, 0]), "data_offsets"),
    "offsets negative": (described(data_offsets=[-12, 0]), "data_offsets"),
    "one offset": (described(data_offsets=[12]), "data_offsets"),
    "offsets as an object": (described(data_offsets={"0": 0}), "data_offsets"),
    "offsets of 2^64": (described(data_offsets=[1 << 64, (1 << 64) + 12]), "data_offsets"),
    "offset beyond the file": (described(data_offsets=[1 << 62, (1 << 62) + 12]), "leaves a gap"),
    "shape of 2^60": (described(shape=[1 << 30, 1 << 30]), "has 12 bytes, and F32"),
    "shape of 2^120": (described(shape=[1 << 60, 1 << 60]), "not a shape of a tensor"),
    "nothing, of 2^120": (described(shape=[0, 1 << 60, 1 << 60], data_offsets=[0, 0]), "not a shape of a tensor"),
    "shape negative": (described(shape=[-1, -3]), "not a shape of a tensor"),
    "shape of booleans": (described(shape=[True, 3]), "not a shape of a tensor"),
    "shape of fractions": (described(shape=[3.0]), "not a shape of a tensor"),
    "shape of NaN": (described(shape=[float("nan")]), "not a shape of a tensor"),
    "shape of 9 dimensions": (described(shape=[3] + 8 * [1]), "not a shape of a tensor"),
    "shape too large for its data": (described(shape=[4]), "has 12 bytes, and F32 (4,) needs 16"),
    "shape as text": (described(shape="3"), "not a shape of a tensor"),
    "unknown dtype": (described(dtype="Q4_0"), "has dtype 'Q4_0'; known are F64"),
    "dtype as a list": (described(dtype=["F32"]), "has dtype"),
    "a field too many": (described(extra=1), "must have dtype, shape and data_offsets"),
    "a tensor that is a number": (container(b'{"a":1}'), "'a' is not described by a small object"),
    "a description without end": (described(shape=[1] * 4000), "not described by a small object"),
    "a tensor twice": (container(b"{" + ONE + b"," + ONE + b"}", bytes(4)), "names 'a' twice"),
    "a field twice": (container(b"{" + ONE.replace(b"}", b',"dtype":"F32"}') + b"}", bytes(4)), "damaged"),
    "metadata of numbers": (container(b'{"__metadata__":{"a":1}}'), "where a string belongs"),
    "metadata that is text": (container(b'{"__metadata__":"a"}'), "not a JSON object"),
    "a name without end": (container(b'{"' + b"n" * 5000 + ONE[2:] + b"}", bytes(4)), "a name of 5002 bytes"),
    "a name that is not UTF-8": (container(b'{"\xff' + ONE[2:] + b"}", bytes(4)), "damaged"),
    "half a surrogate": (container(b'{"\\ud800' + ONE[2:] + b"}", bytes(4)), "where a string belongs"),
    "text after the object": (container(b"{} {}"), "damaged"),
    "a list": (container(b"[]"), "starts with"),
    "nothing in it": (b"", "starts with b''"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "starts with"),
    "objects in each other": (container(b'{"a":' * 200_000 + b"}" * 200_000), "damaged"),
    "lists in each other": (container(b'{"a":{"dtype":' + b"[" * 3000 + b"}}"), "damaged"),
    "lists in each other, closed": (container(b'{"a":{"dtype":' + b"[" * 1900 + b"]" * 1900 + b"}}"), "damaged"),
    "101 lists in each other": (container(b'{"a":{"dtype":' + b"[" * 101 + b"]" * 101 + b"}}"), "damaged"),
}


@pytest.mark.parametrize("attack", SAFETENSORS)
def test_safetensors(tmp_path: Path, attack: str):
    data, sentence = SAFETENSORS[attack]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert sentence in sentence_of(path)
    if len(data) >= 8:
        assert path.name in sentence_of(path, SafetensorsFile)


def repeated(pattern: str, size: int) -> bytes:
    """Returns `pattern` repeated with a running number for %d, up to `size` bytes."""
    count = size // len(pattern % 1_000_000)
    return "".join([pattern % i for i in range(1_000_000, 1_000_000 + count)]).encode()


LARGE = 31 << 20
FLAT = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
LARGE_HEADERS = {
    "empty lists": lambda: b'{"a":{"dtype":' + b"[]," * (LARGE // 3) + b"}}",
    "empty objects": lambda: b'{"a":' + b"{}," * (LARGE // 3) + b"}",
    "objects two deep": lambda: b'{"a":{' + repeated('"%d":{},', LARGE) + b"}}",
    "spaces": lambda: b"{" + b" " * LARGE + b"}" + b" " * 100 + b"x",
    "one string": lambda: b'{"' + b"x" * LARGE,
    "one string of escapes": lambda: b'{"' + b"\\x" * (LARGE // 2),
    "quotes": lambda: b'{"a":{' + b'"' * LARGE + b"}",
    "opening braces": lambda: b'{"a":' + b"{" * LARGE,
    "braces and strings": lambda: b'{"a":' + b'{"":' * (LARGE // 4),
    "metadata keys": lambda: b'{"__metadata__":{' + repeated('"%d":"",', 7 << 20) + b"}}",
    "metadata of four-byte letters": lambda: b'{"__metadata__":{"a":"' + "😀".encode() * (LARGE // 4) + b'"}}',
    "tensors": lambda: b"{" + repeated(FLAT, LARGE)[:-1] + b"}",
    "a name of four-byte letters": lambda: b'{"' + "😀".encode() * (LARGE // 4) + b'":1}',
}


@pytest.mark.parametrize("attack", LARGE_HEADERS)
def test_large_safetensors_headers(tmp_path: Path, attack: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container(LARGE_HEADERS[attack]()))
    sentence_of(path)
    path.rename(tmp_path / "model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").write_bytes(LARGE_HEADERS[attack]())
    sentence_of(tmp_path, open_folder)


def test_a_header_of_100_mb_is_not_read(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(container(b"{", length=100_000_000))
        file.truncate(200_000_000)
    assert "more than the 33554432 allowed" in sentence_of(path, nbytes=4 << 20)


@pytest.mark.slow
def test_the_most_tensors_a_header_may_have(tmp_path: Path):
    names = [f"model.layers.{i}.mlp.experts.{i}.down_proj.weight" for i in range(1 << 17)]
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file({name: ("BF16", [1]) for name in names}))
    with bounded(), open_tensors(path) as file:
        assert [*file.entries] == names


# GGUF

F32_INFO = info("a", (3,), 0, 0)
HUGE = [1 << 31, (1 << 32) - 1, 1 << 60, 1 << 63, (1 << 64) - 1]


def keyed(code: int, value: bytes) -> bytes:
    return gguf([pair("k", code, value)], [])


def infos(*rows: bytes, data: int = 12) -> bytes:
    return gguf([], list(rows), bytes(data))


def nested(depth: int) -> bytes:
    return array(9, 1, nested(depth - 1)) if depth > 1 else array(4, 0, b"")


def alignment(code: int, value: bytes) -> bytes:
    return gguf([pair("general.alignment", code, value)], [])


GGUF = {
    **{f"{n} tensors": (gguf([], [], tensors=n), "number of tensors is given as") for n in HUGE},
    **{f"{n} keys": (gguf([], [], keys=n), "number of metadata keys is given as") for n in HUGE},
    **{f"a string of {n}": (keyed(8, struct.pack("<Q", n)), "metadata 'k' goes beyond the end") for n in HUGE},
    **{f"a key of {n}": (gguf([struct.pack("<Q", n)], []), "a metadata key has") for n in HUGE},
    **{f"a name of {n}": (infos(struct.pack("<Q", n)), "the name of a tensor has") for n in HUGE},
    **{f"{n} strings": (keyed(9, array(8, n, b"")), f"has {n} strings, and all arrays") for n in HUGE},
    **{f"{n} numbers": (keyed(9, array(10, n, b"")), "metadata 'k' goes beyond the end") for n in HUGE},
    **{f"{n} bytes": (keyed(9, array(0, n, bytes(64))), "metadata 'k' goes beyond the end") for n in HUGE},
    **{f"{n} arrays": (keyed(9, array(9, n, b"")), "arrays, more than the 65536 allowed") for n in HUGE},
    **{
        f"{n} dimensions": (infos(packed_string("a") + struct.pack("<I", n)), "dimensions, not 1 to 4")
        for n in [0, 5, 255, (1 << 32) - 1]
    },
    **{f"a dimension of {n}": (infos(info("a", (n,), 0, 0)), "ends at byte") for n in HUGE},
    **{f"an offset of {n}": (infos(info("a", (3,), 0, n // 32 * 32)), "ends at byte") for n in HUGE},
    **{
        f"type {n}": (infos(info("a", (256,), n, 0)), f"has type {n}, which is unknown")
        for n in [4, 5, 9, 15, 31, 36, 41, 1 << 31]
    },
    **{f"version {n}": (gguf([], [], version=n), f"version is {n}") for n in [1, 4, 2**31 - 1]},
    "big endian": (gguf([], [], version=3 << 24), "big-endian"),
    "shape of 2^60": (infos(info("a", (1 << 30, 1 << 30), 0, 0)), "ends at byte"),
    "shape of 2^256": (infos(info("a", (1 << 63,) * 4, 0, 0)), "ends at byte"),
    "shape that wraps to 0": (infos(info("a", (1 << 32, 1 << 32), 0, 0)), "ends at byte"),
    "a dimension of 0": (infos(info("a", (3, 0), 0, 0)), "has shape (0, 3); every dimension must be at least 1"),
    "half a block": (infos(info("a", (48,), 2, 0), data=64), "rows of 48 values, and Q4_0 packs them by 32"),
    "half a block in each row": (infos(info("a", (16, 4), 8, 0), data=99), "rows of 16 values, and Q8_0"),
    "unaligned": (infos(info("a", (3,), 0, 4), data=64), "offset 4, no multiple of the alignment 32"),
    "cut": (infos(F32_INFO, data=11), "damaged, or was not fetched whole"),
    "no data": (infos(F32_INFO, data=0), "damaged, or was not fetched whole"),
    "overlap": (infos(info("a", (9,), 0, 0), info("b", (9,), 0, 32), data=99), "'b' overlaps"),
    "the same place twice": (infos(F32_INFO, info("b", (3,), 0, 0)), "overlaps the tensor before it"),
    "a tensor twice": (infos(F32_INFO, info("a", (3,), 0, 32), data=99), "two tensors 'a'"),
    "a key twice": (gguf([pair("k", 0, b"\0")] * 2, []), "have 'k' twice"),
    "a key without a name": (gguf([pair("", 0, b"\0")], []), "a metadata key has 0 bytes"),
    "a key that is not UTF-8": (gguf([pair(b"\xff", 0, b"\0")], []), "a metadata key is not UTF-8"),
    "a tensor that has no name": (infos(info("", (3,), 0, 0)), "the name of a tensor has 0 bytes"),
    "value type 13": (keyed(13, bytes(8)), "value type 13"),
    "an array of type 99": (keyed(9, array(99, 1, bytes(8))), "value type 99"),
    "a boolean of 2": (keyed(7, b"\2"), "neither 0 nor 1"),
    "a boolean of 2 in an array": (keyed(9, array(7, 3, b"\1\2\1")), "neither 0 nor 1"),
    "strings that are missing": (keyed(9, array(8, 9, packed_string("ab"))), "metadata 'k' goes beyond the end"),
    "many arrays of arrays": (keyed(9, array(9, 300, array(9, 300, array(4, 0, b"") * 300) * 300)), "65536 in all"),
    "many arrays of strings": (
        gguf([pair(f"{i}", 9, array(8, 1 << 18, bytes(8 << 18))) for i in range(9)], []),
        "strings, and all arrays together may have 2097152",
    ),
    "arrays in each other": (keyed(9, nested(5)), "more than 4 arrays in each other"),
    "arrays in each other, far": (keyed(9, nested(900)), "more than 4 arrays in each other"),
    "alignment 0": (alignment(4, struct.pack("<I", 0)), "not a power of two"),
    "alignment 48": (alignment(4, struct.pack("<I", 48)), "not a power of two"),
    "alignment 2^31": (alignment(4, struct.pack("<I", 1 << 31)), "not a power of two"),
    "alignment as text": (alignment(8, packed_string("32")), "not a power of two"),
    "alignment of 64 bits": (alignment(10, struct.pack("<Q", 32)), "not a power of two"),
    "alignments": (alignment(9, array(4, 2, bytes(8))), "not a power of two"),
    "alignment as a fraction": (alignment(6, struct.pack("<f", 32.0)), "not a power of two"),
    "only the magic": (b"GGUF", "too few"),
    "only the version": (b"GGUF\3\0\0\0", "the number of tensors goes beyond the end"),
    "split in parts of another name": (gguf([pair("split.count", 2, struct.pack("<H", 9))], []), "split in 9"),
}


@pytest.mark.parametrize("attack", GGUF)
def test_gguf(tmp_path: Path, attack: str):
    data, sentence = GGUF[attack]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert sentence in sentence_of(path)


def strings(text: str, size: int) -> bytes:
    item = packed_string(text)
    return array(8, size // len(item), item * (size // len(item)))


MIB = 1 << 20
UNFOLDING = {  # what unfolds most, in files of 10 MB: accepted or not, they may not cost more than 100 MB
    "empty strings": lambda: keyed(9, strings("", 10 * MIB)),
    "short strings": lambda: keyed(9, strings("ab", 10 * MIB)),
    "two-byte letters": lambda: keyed(9, strings("ā", 10 * MIB)),
    "four-byte letters": lambda: keyed(9, strings("😀", 10 * MIB)),
    "one string": lambda: keyed(8, packed_string("😀" + "a" * 10 * MIB)),
    "bytes": lambda: keyed(9, array(0, 10 * MIB, bytes(10 * MIB))),
    "empty arrays": lambda: keyed(9, array(9, 10 * MIB // 12, array(4, 0, b"") * (10 * MIB // 12))),
    "short arrays": lambda: keyed(9, array(9, 60_000, (array(8, 1, packed_string("ab")) * 60_000))),
    "keys": lambda: gguf([pair(f"{i}", 9, array(8, 100, packed_string("āb") * 100)) for i in range(4000)], []),
    "tensors": lambda: infos(*[info(f"{i}", (1,), 24, 32 * i) for i in range(1 << 16)], data=32 << 16),
}


@pytest.mark.parametrize("attack", UNFOLDING)
def test_a_gguf_file_of_10_mb_unfolds_to_100(tmp_path: Path, attack: str):
    path = tmp_path / "x.gguf"
    path.write_bytes(UNFOLDING[attack]())
    with bounded(100_000_000):
        try:
            open_tensors(path).close()
        except RequestError as error:
            assert "allowed" in str(error) or "in all" in str(error)


@pytest.mark.parametrize("text", ["ā", "a", "😀" + "a" * 4000])
def test_metadata_of_a_large_gguf_file_end_somewhere(tmp_path: Path, text: str):
    path = tmp_path / "x.gguf"
    path.write_bytes(keyed(9, strings(text, 60 * MIB)))
    sentence_of(path)


# What both have in common


@pytest.mark.parametrize("data", [*gguf_corpus(), *safetensors_corpus()[1:]], ids=lambda data: f"{len(data)}")
def test_every_truncated_file_is_refused(tmp_path: Path, data: bytes):
    path = tmp_path / "x"
    path.write_bytes(data)
    with open_tensors(path) as file:
        end = max((entry.offset + entry.nbytes for entry in file.entries.values()), default=len(data.rstrip(b"\0")))
    for size in reversed(range(end)):
        os.truncate(path, size)
        with pytest.raises(RequestError):
            open_tensors(path)


def test_pickles_and_foreign_files_get_their_sentence(tmp_path: Path):
    torch.save({"a": torch.ones(2)}, tmp_path / "new.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.bin"):
        assert re.search(rf"pickle.*never is.*torch\.load\('{name}', weights_only=True\)", sentence_of(tmp_path / name))
    for data, sentence in {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n": "pointer of Git LFS",
        b"tjgg" + bytes(60): "GGJT",
        b"<!DOCTYPE html><html></html>": "neither a safetensors nor a GGUF file",
    }.items():
        (tmp_path / "x").write_bytes(data)
        assert sentence in sentence_of(tmp_path / "x")


@pytest.mark.parametrize("length", [0x0280, 0x0480])
def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path: Path, length: int):
    (tmp_path / "x").write_bytes(container((b"{" + ONE + b"}").ljust(length), bytes(4)))
    with open_tensors(tmp_path / "x") as file:
        assert file.tensor("a").tolist() == [0.0]


def test_paths_without_a_regular_file_are_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in sentence_of(tmp_path / "pipe")
    assert "does not exist" in sentence_of(tmp_path / "nothing")
    for name in ("a" * 5000, "a\0b", "\ud800"):
        with pytest.raises(RequestError):
            open_tensors(name)
    (tmp_path / "mine").write_bytes(b"GGUF")
    (tmp_path / "mine").chmod(0)
    if os.geteuid():
        assert "Permission denied" in sentence_of(tmp_path / "mine")


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, names in SHARDS.items():
        (tmp_path / shard).write_bytes(safetensors_file({name: ("F32", [2]) for name in names}))
    (tmp_path.parent / "outside.safetensors").write_bytes(safetensors_file({"a": ("F32", [2])}))
    (tmp_path / "deeper").mkdir(exist_ok=True)
    return tmp_path


FIRST = next(iter(SHARDS))
INDEXES: dict[str, tuple[object, str]] = {
    "a path that leaves": ({"weight_map": {"a": "../outside.safetensors"}}, "not a file of this folder"),
    "a path that leaves by turns": ({"weight_map": {"a": f"deeper/../{FIRST}"}}, "not a file of this folder"),
    "an absolute path": ({"weight_map": {"a": "/etc/passwd"}}, "not a file of this folder"),
    "a path of Windows": ({"weight_map": {"a": "..\\outside.safetensors"}}, "not a file of this folder"),
    "the folder above": ({"weight_map": {"a": ".."}}, "not a file of this folder"),
    "the folder": ({"weight_map": {"a": "."}}, "not a file of this folder"),
    "no name": ({"weight_map": {"a": ""}}, "not a file of this folder"),
    "a NUL": ({"weight_map": {"a": "a\0b"}}, "not a file of this folder"),
    "a folder as a shard": ({"weight_map": {"a": "deeper"}}, "lacks 'deeper'"),
    "a missing shard": ({"weight_map": {"a": "model-00003-of-00003.safetensors"}}, "lacks 'model-00003"),
    "a name too long for the disk": ({"weight_map": {"a": "s" * 4000}}, "lacks 'sss"),
    "a tensor that is elsewhere": ({"weight_map": {"c": FIRST}}, f"places 'c' in {FIRST}, which has no such"),
    "a tensor that is nowhere": ({"weight_map": {"a": FIRST, "z": FIRST}}, "places 'z'"),
    "no weight_map": ({"metadata": {}}, "has no weight_map"),
    "a list for a map": ({"weight_map": [1, 2]}, "damaged"),
    "a number for a map": ({"weight_map": 1}, "not a JSON object"),
    "a number for a shard": ({"weight_map": {"a": 1}}, "where a string belongs"),
    "an object for a shard": ({"weight_map": {"a": {}}}, "where a string belongs"),
    "a list": ([], "not a JSON object"),
    "metadata without end": ({"weight_map": {"a": FIRST}, "metadata": {"a": "x" * 70000}}, "takes 70009 bytes"),
    "metadata in each other": ({"weight_map": {"a": FIRST}, "metadata": {"a": {"b": {"c": {"d": {}}}}}}, "damaged"),
}


@pytest.mark.parametrize("attack", INDEXES)
def test_index(folder: Path, attack: str):
    said, sentence = INDEXES[attack]
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))
    assert sentence in sentence_of(folder, open_folder)


def test_an_index_whose_shard_is_damaged_names_the_shard(folder: Path):
    said = {"weight_map": {"a": FIRST, "c": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))
    with open_folder(folder) as file:
        assert set(file.entries) == {"a", "c"}
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with refused(code="damaged", field="model-00002-of-00002.safetensors:header"):
        open_folder(folder)
    second.write_bytes(gguf([], []))
    with refused(code="range", field="model-00002-of-00002.safetensors:header"):
        open_folder(folder)


def test_a_shard_may_be_a_link_into_a_cache(folder: Path):
    """huggingface_hub's cache links shards to blobs."""
    (folder / FIRST).rename(folder / "deeper" / "blob")
    (folder / FIRST).symlink_to(folder / "deeper" / "blob")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": FIRST}}))
    with open_folder(folder) as file:
        assert file.tensor("a").shape == (2,)


def test_a_refusal_leaves_no_file_open(folder: Path):
    said = {"weight_map": {"a": FIRST, "z": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))
    (folder / "x.gguf").write_bytes(gguf([], [], tensors=1))
    gc.collect()  # files that other tests left to the collector
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for path in (folder, folder / "x.gguf", folder / "nothing"):
            with pytest.raises(RequestError):
                open_tensors(path)
        gc.collect()
    assert not seen, seen[0].message  # ResourceWarning: closed by the garbage collector
    assert len(os.listdir("/proc/self/fd")) == before


# The bounded reading of JSON

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(), st.text() | st.integers() | st.dictionaries(st.text(), VALUES, max_size=3))


def deep(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict) + max(map(deep, inner), default=0)


@settings(max_examples=200, deadline=None)
@given(value=OBJECTS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_members_are_those_of_json(value: dict[str, object], indent: int | None, ascii_only: bool):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    if deep(value) <= 4:
        assert {name: small(part) for name, part in members(text, 100)} == value
    else:
        with pytest.raises(BadJSON):
            list(members(text, 100))
