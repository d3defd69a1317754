"""Number formats of GGUF files, and the decoding of blocks of quantised weights.

All formats that this module unpacks itself have one form. A block holds integer codes, one per weight, in groups that
share a scale and perhaps a minimum:

    weight = scale[group] * code + minimum[group]

They differ in the layout of the bits. The layouts are those of `block_*` in ggml-common.h and of `dequantize_row_*` in
ggml-quants.c (llama.cpp); the products are rounded in the order of gguf-py's quants.py, so that the results are equal
to it bit for bit. The formats built on large tables of vectors (IQ1, IQ2, IQ3) are left to the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.errors import RequestError

PIECE = 1 << 19
"""Number of weights unpacked at once: bytes, codes and fp32 values together stay in the cache. A multiple of every
block."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Plain dtypes by their names in safetensors files; GGUF uses the same names."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

Decode = Callable[[Tensor, Tensor], None]
"""Function `decode(blocks, out)`: blocks (n, bytes) uint8 into out (n, weights) float32."""


@dataclass(frozen=True)
class Format:
    """A format of blocks: its `ggml_type` number, the weights and bytes of one block, and its decoder."""

    code: int
    weights: int
    nbytes: int
    decode: Decode


def unit(dtype: str) -> tuple[int, int]:
    """Returns (elements, bytes) of the smallest unit of a tensor of `dtype`: one element, or one block."""
    plain = DTYPES.get(dtype)
    return (1, plain.itemsize) if plain else (FORMATS[dtype].weights, FORMATS[dtype].nbytes)


def unpack(dtype: str, fetch: Callable[[int, int], Tensor], out: Tensor) -> None:
    """Fills `out` (contiguous, on the CPU, any float dtype) piece by piece from the bytes of a tensor of `dtype`.

    `fetch(start, nbytes)` returns the bytes of a piece as uint8; they are used before the next call.
    """
    flat = out.view(-1)
    weights, nbytes = unit(dtype)
    for begin in range(0, flat.numel(), PIECE):
        part = flat[begin : begin + PIECE]
        raw = fetch(begin // weights * nbytes, part.numel() // weights * nbytes)
        if dtype in DTYPES:
            part.copy_(raw.view(DTYPES[dtype]))
            continue
        values = part if part.dtype is torch.float32 else torch.empty(part.shape, dtype=torch.float32, device="cpu")
        FORMATS[dtype].decode(raw.view(-1, nbytes), values.view(-1, weights))
        if values is not part:
            part.copy_(values)


# Bits to codes.  `b` is (n, bytes) uint8 throughout.


def _planes(b: Tensor, bits: int) -> Tensor:
    """Unpacks bytes (n, k) into codes (n, 8 / bits, k): the lowest bits of all bytes first, as llama.cpp stores
    weights."""
    b = b.contiguous()
    return torch.stack([(b >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], 1)


def _fields(b: Tensor, bits: int) -> Tensor:
    """Unpacks bytes (n, k) into codes of `bits` bits, (n, k * 8 / bits): all codes of the first byte first, the lowest
    bits leading."""
    return _planes(b, bits).transpose(1, 2).flatten(1)


def _half(b: Tensor, at: int) -> Tensor:
    """Returns the half-precision number at byte `at` of each block, as (n, 1) float32."""
    return b[:, at : at + 2].view(torch.float16).float()


def _scaled(out: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> None:
    """Sets out (n, weights) to scale (n, groups) * codes (n * weights of them, any shape) + minimum (n, groups) or
    0."""
    groups = out.view(*scale.shape, -1)
    groups.copy_(codes.view(groups.shape))
    groups.mul_(scale[..., None])
    if minimum is not None:
        groups.add_(minimum[..., None])


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Returns uint8 codes, all below 128, minus `zero` as int8."""
    return codes.view(torch.int8) - zero


# Blocks of 32


def _q4_0(b: Tensor, out: Tensor) -> None:
    _scaled(out, _signed(_planes(b[:, 2:], 4), 8), _half(b, 0))


def _q4_1(b: Tensor, out: Tensor) -> None:
    _scaled(out, _planes(b[:, 4:], 4), _half(b, 0), _half(b, 2))


_SPREAD = torch.tensor([sum((byte >> bit & 1) << 8 * bit + 4 for bit in range(8)) for byte in range(256)], device="cpu")
"""Table of 256 int64: byte i of entry b is bit i of b times 16, i from the lowest on."""


def _five_bits(b: Tensor) -> Tensor:
    """Returns 5-bit codes (n, 32) of bytes (n, 20): four bytes of fifth bits, then sixteen of low nibbles."""
    fifth = _SPREAD.index_select(0, b[:, :4].reshape(-1).int()).view(torch.uint8).view(-1, 32)
    return _planes(b[:, 4:], 4).flatten(1) | fifth


def _q5_0(b: Tensor, out: Tensor) -> None:
    _scaled(out, _signed(_five_bits(b[:, 2:]), 16), _half(b, 0))


def _q5_1(b: Tensor, out: Tensor) -> None:
    _scaled(out, _five_bits(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor, out: Tensor) -> None:
    _scaled(out, b[:, 2:].contiguous().view(torch.int8), _half(b, 0))


# Superblocks of 256: 16 groups of 16, or 8 of 32


def _q2_k(b: Tensor, out: Tensor) -> None:
    pairs = b[:, :16]  # scale in the low nibble, minimum in the high one
    codes = _planes(b[:, 16:80].reshape(-1, 32), 2)
    _scaled(out, codes, _half(b, 80) * (pairs & 15), -(_half(b, 82) * (pairs >> 4)))


def _q3_k(b: Tensor, out: Tensor) -> None:
    low = _planes(b[:, 32:96].reshape(-1, 32), 2).view(-1, 256)
    high = _planes(b[:, :32], 1).flatten(1)  # a set bit means that 4 is *not* subtracted
    scale = _planes(b[:, 96:104], 4).flatten(1) | _planes(b[:, 104:108], 2).flatten(1) << 4
    _scaled(out, _signed(low | high << 2, 4), _half(b, 108) * _signed(scale, 32))


def _six_bit_pairs(b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 scales and 8 minima of six bits, each (n, 8), of bytes (n, 12): the last four bytes hold the low
    nibbles of groups 4 to 7, whose high two bits are on top of groups 0 to 3."""
    scale, minimum, nibbles = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    return (
        torch.cat([scale & 63, nibbles & 15 | scale >> 2 & 48], 1),
        torch.cat([minimum & 63, nibbles >> 4 | minimum >> 2 & 48], 1),
    )


def _q4_k(b: Tensor, out: Tensor) -> None:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    codes = _planes(b[:, 16:].reshape(-1, 32), 4)
    _scaled(out, codes, _half(b, 0) * scale, -(_half(b, 2) * minimum))


def _q5_k(b: Tensor, out: Tensor) -> None:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    low = _planes(b[:, 48:].reshape(-1, 32), 4).view(-1, 256)
    codes = low | _planes(b[:, 16:48], 1).flatten(1) << 4
    _scaled(out, codes, _half(b, 0) * scale, -(_half(b, 2) * minimum))


def _q6_k(b: Tensor, out: Tensor) -> None:
    low = _planes(b[:, :128].reshape(-1, 64), 4).view(-1, 256)
    high = _planes(b[:, 128:192].reshape(-1, 32), 2).view(-1, 256)
    _scaled(out, _signed(low | high << 4, 32), _half(b, 208) * b[:, 192:208].view(torch.int8))


# Ternary weights


def _trits(b: Tensor, count: int) -> Tensor:
    """Returns `count` codes 0, 1 or 2 of each byte (n, k), as (n, count * k): a byte is a fraction in base 3, rounded
    up, so that the integer part of three times it is the next digit."""
    powers = [b * 3**power for power in range(count)]  # wraps: the digits already read overflow
    return torch.stack([(part.to(torch.int16) * 3 >> 8).to(torch.uint8) for part in powers], 1).flatten(1)


def _tq1_0(b: Tensor, out: Tensor) -> None:
    codes = torch.cat([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], 1)
    _scaled(out, _signed(codes, 1), _half(b, 52))


def _tq2_0(b: Tensor, out: Tensor) -> None:
    _scaled(out, _signed(_planes(b[:, :64].reshape(-1, 32), 2), 1), _half(b, 64))


# Four-bit indices into a table

NORMAL_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8, device="cpu"
)
"""Values of 4-bit codes of IQ4 weights, spaced like normally distributed weights (kvalues_iq4nl in ggml-common.h)."""

E2M1_VALUES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8, device="cpu")
"""Values of 4-bit floats, doubled to be integers (kvalues_mxfp4 in ggml-common.h); the scales are halved in return."""

E8M0_SCALES = torch.tensor([2.0 ** (byte - 128) for byte in range(256)], dtype=torch.float32, device="cpu")
"""Scale of each byte of MXFP4, half of 2^(byte - 127), exactly; the first two are subnormal."""


def _e4m3(byte: int) -> float:
    """Returns half of the float that a byte encodes with 4 exponent and 3 mantissa bits, the sign ignored; 0 for the
    NaN 0x7F."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
    return 0.0 if byte == 0x7F else value / 2


E4M3_SCALES = torch.tensor([_e4m3(byte) for byte in range(256)], dtype=torch.float32, device="cpu")


def _chosen(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _iq4_nl(b: Tensor, out: Tensor) -> None:
    _scaled(out, _chosen(NORMAL_VALUES, _planes(b[:, 2:], 4)), _half(b, 0))


def _iq4_xs(b: Tensor, out: Tensor) -> None:
    scale = _fields(b[:, 4:8], 4) | _fields(b[:, 2:4], 2) << 4
    codes = _planes(b[:, 8:].reshape(-1, 16), 4)
    _scaled(out, _chosen(NORMAL_VALUES, codes), _half(b, 0) * _signed(scale, 32))


def _mxfp4(b: Tensor, out: Tensor) -> None:
    _scaled(out, _chosen(E2M1_VALUES, _planes(b[:, 1:], 4)), _chosen(E8M0_SCALES, b[:, :1]))


def _nvfp4(b: Tensor, out: Tensor) -> None:
    codes = _planes(b[:, 4:].reshape(-1, 8), 4)
    _scaled(out, _chosen(E2M1_VALUES, codes), _chosen(E4M3_SCALES, b[:, :4]))


def _by_gguf(name: str) -> Decode:
    """Returns a decoder that calls the `gguf` package, and raises RequestError if the package is missing."""

    def decode(b: Tensor, out: Tensor) -> None:
        try:
            from gguf import GGMLQuantizationType, quants
        except ImportError:
            raise RequestError(
                f"the tables of {name} weights come with the gguf package; install it: pip install glassformer[gguf]",
                code="missing", field="gguf",
            ) from None  # fmt: skip
        out.copy_(torch.from_numpy(quants.dequantize(b.numpy(), GGMLQuantizationType[name])))

    return decode


FORMATS: dict[str, Format] = {
    "Q4_0": Format(2, 32, 18, _q4_0),
    "Q4_1": Format(3, 32, 20, _q4_1),
    "Q5_0": Format(6, 32, 22, _q5_0),
    "Q5_1": Format(7, 32, 24, _q5_1),
    "Q8_0": Format(8, 32, 34, _q8_0),
    "Q2_K": Format(10, 256, 84, _q2_k),
    "Q3_K": Format(11, 256, 110, _q3_k),
    "Q4_K": Format(12, 256, 144, _q4_k),
    "Q5_K": Format(13, 256, 176, _q5_k),
    "Q6_K": Format(14, 256, 210, _q6_k),
    "IQ2_XXS": Format(16, 256, 66, _by_gguf("IQ2_XXS")),
    "IQ2_XS": Format(17, 256, 74, _by_gguf("IQ2_XS")),
    "IQ3_XXS": Format(18, 256, 98, _by_gguf("IQ3_XXS")),
    "IQ1_S": Format(19, 256, 50, _by_gguf("IQ1_S")),
    "IQ4_NL": Format(20, 32, 18, _iq4_nl),
    "IQ3_S": Format(21, 256, 110, _by_gguf("IQ3_S")),
    "IQ2_S": Format(22, 256, 82, _by_gguf("IQ2_S")),
    "IQ4_XS": Format(23, 256, 136, _iq4_xs),
    "IQ1_M": Format(29, 256, 56, _by_gguf("IQ1_M")),
    "TQ1_0": Format(34, 256, 54, _tq1_0),
    "TQ2_0": Format(35, 256, 66, _tq2_0),
    "MXFP4": Format(39, 32, 17, _mxfp4),
    "NVFP4": Format(40, 64, 36, _nvfp4),
}


def quantize_q8_0(weights: Tensor) -> Tensor:
    """Returns Q8_0 blocks, uint8 (n, 34), of float weights (..., 32 k), 32 weights a block.

    scale = max|w| / 127 and code = round(w / scale), halves away from zero, in float32 and stored as float16 and int8:
    `quantize_row_q8_0_ref` in ggml-quants.c, bit for bit.
    """
    blocks = weights.to(torch.float32).reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = blocks * torch.where(scale == 0, 0.0, 1.0 / scale)
    size = codes.abs()
    whole = size.floor()
    codes = codes.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat([scale.to(torch.float16).view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], 1)
