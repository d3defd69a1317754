"""Products of one row in whole numbers: their distance from exact ones, and the machine code in a compiled step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from glassformer import machine
from glassformer.parts import few_rows, quantized
from glassformer.parts.few_rows import few_rows_of_4_bits, few_rows_of_8_bits, rounded, shims
from glassformer.parts.quantized import GROUP, Int4Linear, Int8Linear, QuantizedLinear

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 9).map(lambda groups: groups * GROUP))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kind: type[QuantizedLinear], o: int, i: int, seed: int = 0) -> QuantizedLinear:
    """Packed for our own product, on a processor without a kernel too."""
    with patch.object(quantized, "own_product", lambda device: True):
        return kind(drawn(seed, o, i), None, (o,))


def product(linear: QuantizedLinear, x: Tensor) -> Tensor:
    op: Any = few_rows_of_4_bits if isinstance(linear, Int4Linear) else few_rows_of_8_bits
    return op(x, linear.packed, linear.scales)[:, : linear.rows]


@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
@settings(max_examples=25, deadline=None)
@given(size=SIZES, seed=st.integers(0, 1000))
def test_a_row_is_the_product_rounded_to_bf16(kind: type[QuantizedLinear], size: tuple[int, int], seed: int):
    """16 bits of x lose at most 2^-16 of the largest of 32 values: far less than y's own rounding does."""
    o, i = size
    linear, x = packed(kind, o, i, seed), drawn(seed + 1, 1, i).bfloat16()
    exact = F.linear(x.double(), linear.weight.double())
    lost = 2**-16 * float(x.double().abs().max()) * linear.weight.double().abs().sum(1)
    assert ((product(linear, x).double() - exact).abs() <= 2**-8 * exact.abs() + lost).all()


@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
@settings(max_examples=25, deadline=None)
@given(size=SIZES, seed=st.integers(0, 1000), power=st.integers(-6, 6))
def test_whole_numbers_lose_nothing(kind: type[QuantizedLinear], size: tuple[int, int], seed: int, power: int):
    """Groups whose largest value is 127 times a power of 2: y is the sum in fp64, rounded once."""
    o, i = size
    linear = packed(kind, o, i, seed)
    x = torch.randint(-127, 128, (1, i), generator=torch.Generator().manual_seed(seed)).float()
    x.view(-1, GROUP)[:, 0] = 127
    x = (x * 2.0**power).bfloat16()
    exact = F.linear(x.double(), linear.weight.double())
    tiny = 1e-9 * float(x.double().abs().max()) * linear.weight.double().abs().sum(1)
    assert ((product(linear, x).double() - exact).abs() <= 2**-8 * exact.abs() + tiny).all()


def test_nan_input_gives_nan_output():
    for kind in (Int4Linear, Int8Linear):
        x = torch.ones(1, 64).bfloat16()
        x[0, 3] = float("nan")
        assert product(packed(kind, 5, 64), x).isnan().all()


def test_a_row_of_zeros_gives_zeros():
    q, step = rounded(torch.zeros(1, 64).bfloat16())
    assert not q.any() and step.max() <= few_rows.LEAST
    assert not product(packed(Int8Linear, 5, 64), torch.zeros(1, 64).bfloat16()).any()


class Products(nn.Module):
    def __init__(self, linears: list[QuantizedLinear]):
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, *rows: Tensor) -> list[Tensor]:
        return [product(linear, x) for linear, x in zip(self.linears, rows, strict=True)]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(not (few_rows.kernel() and machine.can_compile("cpu")), reason="no kernel, or no compiler here")
def test_the_machine_code_is_the_definition(tmp_path: Path):
    """Sums of whole numbers are the same, those of fp32 in another order: at most a rounding to bf16 apart."""
    shapes = [(64, 32), (1, 96), (61, 160), (130, 576), (576, 1536), (7, 64)]
    kinds: list[type[QuantizedLinear]] = [Int4Linear, Int8Linear]
    model = Products([packed(kind, o, i, o) for o, i in shapes for kind in kinds])
    rows = [(drawn(1, 1, linear.in_features) * 3).bfloat16() for linear in model.linears]  # type: ignore[arg-type]
    options = {"aot_inductor.custom_ops_to_c_shims": shims()}
    with torch.no_grad():
        program = torch.export.export(model, tuple(rows))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "products.pt2"), inductor_configs=options
        )
        run: Any = torch._inductor.aoti_load_package(path)
        for filled in (rows, [x * 0 for x in rows], [x * float("nan") for x in rows]):
            for made, meant in zip(run(*filled), model(*filled), strict=True):
                torch.testing.assert_close(made, meant, rtol=2**-7, atol=1e-4, equal_nan=True)
