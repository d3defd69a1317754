"""Block formats against gguf-py, bit for bit."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.conversion.storage.base import Packed
from glassformer.conversion.storage.gguf import TYPES
from glassformer.conversion.storage.quants import DTYPES, FORMATS, PIECE, quantize_q8_0, unit, unpack
from tests.refused import refused

HALVES: dict[str, list[int]] = {
    **{name: [0] for name in ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"]},
    **{name: [0] for name in ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]},
    **{name: [0, 2] for name in ["Q4_1", "Q5_1", "Q4_K", "Q5_K"]},
    **{name: [] for name in ["MXFP4", "NVFP4", "IQ1_M"]},
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
}
"""Bytes at which a block has half-precision numbers; IQ1_M spreads one over the nibbles of its scales."""


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Returns random blocks (count, bytes) as uint8, with finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, FORMATS[name].nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[:, at + 1] &= np.where(blocks[:, at + 1] & 0x7C == 0x7C, 0xBF, 0xFF).astype(np.uint8)
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    return blocks


def ours(name: str, blocks: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (len(blocks), FORMATS[name].weights)
    return Packed(name, shape, torch.from_numpy(blocks.reshape(-1))).dequantize(dtype)


def bits(values: torch.Tensor) -> np.ndarray:
    return values.view({4: torch.int32, 2: torch.int16}[values.dtype.itemsize]).numpy()


def test_the_tables_agree_with_gguf_py():
    known = {t.name: (t.value, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    for code, name in TYPES.items():
        assert (code, *unit(name)) == known[name]
    assert {t.name for t in quants._type_traits} == set(FORMATS) | {"BF16"}
    assert all(PIECE % form.weights == 0 for form in FORMATS.values())


@pytest.mark.parametrize("name", FORMATS)
def test_any_block_unpacks_to_the_same_bits(name: str):
    blocks = random_blocks(name, 500)
    with np.errstate(over="ignore"):  # twelve times the largest scale of MXFP4
        theirs = quants.dequantize(blocks, GGMLQuantizationType[name])
    assert not np.isnan(theirs).any() and len(np.unique(theirs)) > 100
    values = ours(name, blocks)
    assert np.array_equal(bits(values), theirs.view(np.int32))
    assert torch.equal(ours(name, blocks, torch.bfloat16), values.bfloat16())
    assert torch.equal(ours(name, blocks, torch.float64), values.double())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_quantised_weights_unpack_to_the_same_bits_and_near_the_weights(name: str):
    weights = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    blocks = quants.quantize(weights, GGMLQuantizationType[name]).reshape(-1, FORMATS[name].nbytes)
    values = ours(name, blocks)
    theirs = quants.dequantize(blocks, GGMLQuantizationType[name])
    assert np.array_equal(bits(values), theirs.view(np.int32))
    error = np.abs(values.numpy().reshape(weights.shape) - weights).mean()
    assert error < (0.8 if name.startswith("TQ") else 0.1)  # of weights of size 1


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_pieces_join(name: str):
    """More weights than one piece, and no whole number of pieces."""
    count = PIECE // FORMATS[name].weights + 3
    blocks = random_blocks(name, count)
    theirs = quants.dequantize(blocks, GGMLQuantizationType[name])
    assert np.array_equal(bits(ours(name, blocks)), theirs.view(np.int32))


def test_a_piece_needs_little_memory():
    """`fetch` is asked for bounded pieces, in order, each once."""
    asked: list[tuple[int, int]] = []

    def fetch(begin: int, nbytes: int) -> torch.Tensor:
        asked.append((begin, nbytes))
        return torch.zeros(nbytes, dtype=torch.uint8)

    unpack("Q8_0", fetch, torch.empty(2 * PIECE + 32, dtype=torch.bfloat16))
    step = PIECE // 32 * 34
    assert asked == [(0, step), (step, step), (2 * step, 34)]


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q5_1"])
def test_rows_are_slices(name: str):
    weights, nbytes = unit(name)
    blocks = random_blocks(name, 12)
    packed = Packed(name, (4, 3 * weights), torch.from_numpy(blocks.reshape(-1)))
    assert torch.equal(packed[1:3].dequantize(), packed.dequantize()[1:3])
    assert packed[1:3].bytes.data_ptr() == packed.bytes.data_ptr() + 3 * nbytes
    assert packed[4:].dequantize().shape == (0, 3 * weights)
    flat = Packed(name, (12 * weights,), packed.bytes)
    assert torch.equal(flat[weights : 3 * weights].dequantize(), flat.dequantize()[weights : 3 * weights])
    with refused(code="range", field="rows"):
        flat[1:]
    with refused(code="range", field="rows"):
        packed[::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_q8_0_is_written_as_gguf_py_does(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(257, 96, generator=generator).to(dtype)
    weights[0] = 0
    weights[1] = 1e-7
    weights[2, :32] = torch.arange(32) / 16  # ties
    theirs = quants.quantize(weights.float().numpy(), GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantize_q8_0(weights).numpy(), theirs.reshape(-1, 34))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32))
def test_q8_0_of_any_block(weights: list[float]):
    block = np.asarray(weights, np.float32)[None]
    with np.errstate(all="ignore"):
        theirs = quants.quantize(block, GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantize_q8_0(torch.from_numpy(block)).numpy(), theirs)


def test_an_iq_format_without_the_gguf_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    blocks = random_blocks("IQ2_XS", 1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused(code="missing", field="gguf"):
        ours("IQ2_XS", blocks)
    assert ours("IQ4_XS", random_blocks("IQ4_XS", 1)).shape == (1, 256)


def test_defaults_of_torch_do_not_matter():
    blocks = random_blocks("Q4_0", 2)
    wanted = ours("Q4_0", blocks)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert torch.equal(ours("Q4_0", blocks), wanted)
            assert ours("Q4_0", blocks, torch.bfloat16).device.type == "cpu"
    finally:
        torch.set_default_dtype(before)


def test_plain_dtypes_are_those_of_the_reference():
    assert {name: DTYPES[name] for name in safetensors.torch._TYPES} == safetensors.torch._TYPES
    assert set(DTYPES) - set(safetensors.torch._TYPES) == {"F8_E8M0"}
    assert all(unit(name) == (1, dtype.itemsize) for name, dtype in DTYPES.items())
