"""Thousands of damaged containers, and of models with false metadata: for any bytes, the readers may only return or
raise RequestError.

`python -m tests.conversion.storage.fuzz --seconds 60` tries each format for a minute and prints what it found.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import json
import math
import random
import resource
import shutil
import struct
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch

from glassformer.conversion.gguf import write as write_model
from glassformer.conversion.storage import DTYPES, TensorFile, open_folder, open_tensors, write_gguf
from glassformer.conversion.storage.quants import FORMATS, unit
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.naming.changes import each_mixer
from glassformer.naming.loading import load
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import Llama3ScalingConfig
from glassformer.text import ByteTokenizer

SLOW = 2.0  # seconds of the processor, whatever else it has to do
LARGE = 200_000  # KiB

# Valid files, made by hand


def packed_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, code: int, value: bytes) -> bytes:
    """Returns one metadata pair of a GGUF file."""
    return packed_string(key) + struct.pack("<I", code) + value


def array(code: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", code, count) + values


def info(name: str, dims: tuple[int, ...], code: int, offset: int) -> bytes:
    """Returns one row of a GGUF file's table of tensors; `dims` as on disk."""
    return packed_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def gguf(
    pairs: list[bytes], infos: list[bytes], data: bytes = b"", version: int = 3, alignment: int = 32, **counts: int
) -> bytes:
    """Returns a GGUF file; `tensors=` and `keys=` state other counts than the true ones."""
    head = struct.pack("<4sIQQ", b"GGUF", version, counts.get("tensors", len(infos)), counts.get("keys", len(pairs)))
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def container(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Returns a safetensors file with this header; `length=` states another length than the true one."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def safetensors_file(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors of counted-up bytes."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return container(json.dumps(header).encode(), bytes(i % 2 for i in range(at)))


def gguf_corpus() -> list[bytes]:
    values = [
        pair("general.architecture", 8, packed_string("llama")),
        pair("general.alignment", 4, struct.pack("<I", 64)),
        pair("a.u8", 0, b"\x05"),
        pair("a.flag", 7, b"\x01"),
        pair("a.f64", 12, struct.pack("<d", 0.5)),
        pair("a.f32", 6, struct.pack("<f", 1e-5)),
        pair("a.i64", 11, struct.pack("<q", -9)),
        pair("tokens", 9, array(8, 3, packed_string("a") + packed_string("") + packed_string("é€😀"))),
        pair("scores", 9, array(6, 2, struct.pack("<2f", 0.0, -1.0))),
        pair("flags", 9, array(7, 3, b"\0\1\0")),
        pair("nested", 9, array(9, 2, array(4, 1, struct.pack("<I", 7)) + array(8, 1, packed_string("x")))),
    ]
    files = [gguf([], []), gguf(values, [], alignment=64)]
    rng = random.Random(1)
    codes = {0: "F32", 1: "F16", 30: "BF16", 24: "I8", 27: "I64", **{f.code: name for name, f in FORMATS.items()}}
    for group in [[0, 1, 30], [24, 27, 2], *([code] for code in sorted(codes) if code > 2)]:
        infos, data = [], b""
        for i, code in enumerate(group):
            weights, nbytes = unit(codes[code])
            dims = (2 * weights, 3) if i % 2 == 0 else (weights,)
            infos.append(info(f"t{i}.weight", dims, code, len(data)))
            data += rng.randbytes(math.prod(dims) // weights * nbytes)
            data += bytes(-len(data) % 32)
        files.append(gguf(values[2:6], infos, data))
    return files


def safetensors_corpus() -> list[bytes]:
    return [
        container(b"{}"),
        safetensors_file({"a": ("F32", [2, 3])}),
        safetensors_file({"a": ("BF16", [2, 3]), "b.weight": ("I64", [2]), "c": ("F32", [0, 4])}, {"format": "pt"}),
        safetensors_file({name: (name, [3, 1]) for name in DTYPES}, {"a": '{"in": "side"}', "b": "é\\ \n"}),
        safetensors_file({"s": ("F16", []), "é\n": ("U8", [1, 1, 1, 5])}),
    ]


SHARDS = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}


def index_corpus() -> list[bytes]:
    homes = {name: shard for shard, names in SHARDS.items() for name in names}
    return [
        json.dumps({"metadata": {"total_size": 24}, "weight_map": homes}, indent=2).encode(),
        json.dumps({"weight_map": {"c": homes["c"]}, "metadata": {"x": {"y": [1, {"z": "}"}]}}}).encode(),
        json.dumps({"weight_map": {}, "other": -1.5e3, "more": None}).encode(),
    ]


# One input


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for shard, names in SHARDS.items():
        (folder / shard).write_bytes(safetensors_file({name: ("F32", [2]) for name in names}))
    return folder


FOLDER: list[Path] = []


def _written(name: str, data: bytes) -> Path:
    if not FOLDER:
        FOLDER.append(_folder())
    (FOLDER[0] / name).write_bytes(data)
    return FOLDER[0] / name


def _use(file: TensorFile, size: int) -> None:
    """Reads every tensor in every way that a file offers, and asserts that the results agree."""
    for name, entry in file.entries.items():
        assert entry.offset >= 0 and entry.offset + entry.nbytes <= size, entry
        tensor = file.tensor(name)
        assert tuple(tensor.shape) == entry.shape == file.packed(name).shape
        assert file.packed(name).bytes.numel() == entry.nbytes
        out = torch.empty(entry.shape, dtype=tensor.dtype)
        file.read_into(name, out)
        first, second = (x.reshape(-1).view(torch.uint8).numpy() for x in (tensor, out))
        assert np.array_equal(first, second), entry
        half = torch.empty(entry.shape, dtype=torch.bfloat16)
        file.read_into(name, half)
        unpacked = file.packed(name).dequantize(torch.bfloat16)
        assert torch.equal(half.view(torch.int16), unpacked.view(torch.int16)), entry


def fuzz_gguf(data: bytes) -> None:
    with open_tensors(_written("f.gguf", data)) as file:
        _use(file, len(data))


def fuzz_safetensors(data: bytes) -> None:
    """Checks that the reference implementation accepts the same bytes, with the same meaning."""
    with open_tensors(_written("f.safetensors", data)) as file:
        _use(file, len(data))
        theirs = dict(safetensors.deserialize(data))
        assert set(theirs) == set(file.entries)
        for name, entry in file.entries.items():
            said = (theirs[name]["dtype"], tuple(theirs[name]["shape"]))
            assert said == (entry.dtype, entry.shape), entry
            assert bytes(theirs[name]["data"]) == data[entry.offset : entry.offset + entry.nbytes], entry


def fuzz_index(data: bytes) -> None:
    """Checks that an accepted index is JSON, with the weight_map that json.loads returns."""
    with open_folder(_written("model.safetensors.index.json", data).parent) as file:
        assert set(file.entries) == set(json.loads(data)["weight_map"])
        _use(file, 1 << 20)


MODELS = ["llama@1m", "llama@1m+gqa:2+layers=3", "bloom@1m", "gpt2@1m", "qwen3@1m"]
TINY = "+layers=2+d_model=16+heads=2+hidden=64+vocab_size=264+context=16"


def model_corpus() -> list[bytes]:
    """Returns whole models, of a few of llama.cpp's families."""
    found = []
    for seed, name in enumerate(MODELS):
        config = preset(f"{name}{TINY}")
        if seed == 1:
            rotary = RotaryConfig(scaling=Llama3ScalingConfig(factor=8.0, original_context=8))
            config = each_mixer(config, "position", rotary)
        path = _written("model.gguf", b"")
        write_model(config.build(seed), ByteTokenizer(), path, "F32")
        found.append(path.read_bytes())
    return found


def fuzz_model(data: bytes) -> None:
    loaded = load(_written("model.gguf", data))
    assert loaded.model.config == loaded.config
    assert all(one >= 0 for one in loaded.ends)
    if loaded.tokenizer is not None:
        loaded.tokenizer.decode(loaded.tokenizer.encode("a b"))


# Many inputs

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 4096, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53]
NUMBERS += [2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
TOKENS = [b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\", b"-1", b"1e3", b"NaN", b"null", b"true", b'"F32"', b'"I4"']
TOKENS += [
    b"18446744073709551616",
    b"0" * 5000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\0",
]
TOKENS += [
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},',
    b'"__metadata__":{"a":"b"},',
    b"..",
    b"/etc/",
    b" ",
]


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Returns `data` with one to four changes: bits, numbers, truncation, pieces moved, doubled or from `others`."""
    mutant = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        at = rng.randrange(len(mutant) + 1)
        kind = rng.randrange(8)
        if kind == 0 and mutant:
            mutant[at % len(mutant)] ^= 1 << rng.randrange(8)
        elif kind == 1 and mutant:
            mutant[at % len(mutant)] = rng.randrange(256)
        elif kind in (2, 3):  # lengths and counts are anywhere, and in the first bytes
            width = rng.choice([4, 8, 8])
            at = at if kind == 2 else rng.choice([0, 4, 8, 16, 24])
            number = rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(len(mutant) + 64)
            mutant[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4:
            del mutant[at:]
        elif kind == 5:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            mutant[at:at] = other[begin : begin + rng.choice([4, 16, 64, 1024])]
        elif kind == 6:
            del mutant[at : at + rng.choice([1, 4, 8, 40])]
        else:
            end = at + rng.choice([0, 0, 1, 4])
            mutant[at:end] = rng.choice(TOKENS)
    if mutant[8:9] == b"{" and rng.random() < 0.6:  # a safetensors header with a corrected length
        end = mutant.rfind(b"}") + 1
        mutant[:8] = struct.pack("<Q", max(end - 8, 0))
    return bytes(mutant)


KEYS = ["rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.freq_base", "vocab_size",
        "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "logit_scale"]  # fmt: skip
"""Optional metadata keys of a model, after the name of its architecture."""


def odd_value(rng: random.Random) -> Any:
    """Returns a random value that GGUF can store: a number, a flag, a text, or a list of one of these."""
    one: list[Callable[[], Any]] = [
        lambda: np.uint64(rng.choice(NUMBERS)),
        lambda: rng.choice([0, 1, 2, 4, 8, 16, 32, -1, -(2**31)]),
        lambda: rng.choice([0.0, -1.0, 0.5, 1e-5, 1e4, 1e38, math.inf, -math.inf, math.nan]),
        lambda: rng.random() < 0.5,
        lambda: rng.choice(["", "llama", "gpt2", "none", "linear", "yarn", "longrope", "x\ny", "x" * 5000, "\udcff"]),
    ]
    make = rng.choice(one)
    if rng.random() < 0.6:
        return make()
    first, many = make(), rng.choice([0, 1, 2, 3, 5000])
    return [first if rng.random() < 0.9 else make() for _ in range(many)]


def mutate_values(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Returns a whole model with one to three metadata values changed or removed, most of them about its shape."""
    with open_tensors(_written("seed.gguf", data)) as file:
        metadata, tensors = dict(file.metadata), {name: file.tensor(name).clone() for name in file.entries}
    architecture = metadata["general.architecture"]
    while True:
        changed = dict(metadata)
        for _ in range(rng.choice([1, 1, 2, 3])):
            key = rng.choice([*metadata, *(f"{architecture}.{key}" for key in KEYS)])
            changed[key] = odd_value(rng)
            if rng.random() < 0.1:
                del changed[key]
        try:
            write_gguf(path := FOLDER[0] / "mutant.gguf", changed, tensors)
        except RequestError:  # a list of several kinds
            continue
        return path.read_bytes()


class Format(NamedTuple):
    fuzz_one: Callable[[bytes], None]
    corpus: Callable[[], list[bytes]]
    mutate: Callable[[bytes, list[bytes], random.Random], bytes] = mutate
    inputs: int = 3000
    """Number of inputs of a short run."""


FORMAT: dict[str, Format] = {
    "gguf": Format(fuzz_gguf, gguf_corpus),
    "safetensors": Format(fuzz_safetensors, safetensors_corpus),
    "index": Format(fuzz_index, index_corpus),
    "model": Format(fuzz_model, model_corpus, mutate_values, 400),
}


@dataclass
class Result:
    tried: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[bytes]] = field(default_factory=dict)  # what went wrong -> inputs
    slowest: float = 0.0
    growth: int = 0  # KiB, the most that one input added to the peak of resident memory


def run(name: str, seed: int, inputs: int | None = None, seconds: float = math.inf) -> Result:
    """Tries `inputs` mutants of the corpus, or those that `seconds` allow; equal seeds give equal mutants."""
    fuzz_one, corpus, mutate, _ = FORMAT[name]
    seeds, rng, result = corpus(), random.Random(f"{name} {seed}"), Result()
    started = time.monotonic()
    while result.tried != inputs and time.monotonic() - started < seconds:
        data = mutate(rng.choice(seeds), seeds, rng)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            fuzz_one(data)
            result.accepted += 1
        except RequestError as error:
            text = str(error)
            assert "\n" not in text and len(text) < 1000, text
            result.refused[text.split(":")[-1].split("'")[0].strip()[:60]] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.format_tb(error.__traceback__)[-1].strip()
            result.findings.setdefault(f"{type(error).__name__} at {where}", []).append(data)
        took = time.process_time() - began
        grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        result.slowest, result.growth = max(result.slowest, took), max(result.growth, grew)
        if took > SLOW or grew > LARGE:
            result.findings.setdefault(f"{took:.1f} s, {grew} KiB", []).append(data)
        result.tried += 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each format")
    parser.add_argument("--format", choices=[*FORMAT], action="append")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    args = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in args.format or FORMAT:
        result = run(name, args.seed, seconds=args.seconds)
        print(
            f"{name}: {result.tried} inputs (seed {args.seed}), {result.accepted} accepted, {len(result.findings)} "
            f"findings; slowest {1000 * result.slowest:.0f} ms, largest growth {result.growth} KiB"
        )
        for text, count in result.refused.most_common(25):
            print(f"  {count:7d}  {text}")
        for what, inputs in list(result.findings.items())[:10]:
            print(f"{len(inputs)} times: {what}\n  {min(inputs, key=len).hex()[:1000]}")


if __name__ == "__main__":
    main()
