"""Products of many rows in bf16: the machine code is the same sums written plainly, and layers take it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.generation.steps import LEAST_PIECE
from glassformer.machine import native
from glassformer.parts import few_rows, many_rows
from glassformer.parts.linear import Linear

from .test_few_rows import AS_AVX2, SANITIZED, check_against_the_twin, runs_avx2

SOURCE = Path(__file__).with_name("many_rows.cpp")
has_kernel = pytest.mark.skipif(not few_rows.kernel(), reason="no kernel for this processor, or no compiler here")


@runs_avx2
def test_machine_code_has_the_bits_of_the_plain_sums(tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*native.OPTIONS, *AS_AVX2), 60, SOURCE)


@runs_avx2
@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*SANITIZED, *AS_AVX2), 300, SOURCE)


def drawn(n: int, i: int, seed: int) -> Tensor:
    return torch.randn(n, i, generator=torch.Generator().manual_seed(seed)).bfloat16()


@has_kernel
@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 120), i=st.integers(1, 70), o=st.integers(1, 40), seed=st.integers(0, 1000))
def test_products_are_their_definition(n: int, i: int, o: int, seed: int) -> None:
    """Sums of fp32 in another order: a rounding to bf16, and 2^-18 of the sizes that are added up."""
    x, w = drawn(n, i, seed), drawn(o, i, seed + 1)
    made, meant = many_rows.product(x, w).double(), many_rows.definition(x, w).double()
    assert made.shape == (n, o)
    assert ((made - meant).abs() <= 2**-7 * meant.abs() + 2**-18 * many_rows.definition(x.abs(), w.abs())).all()


@has_kernel
def test_row_has_the_same_bits_in_any_company() -> None:
    x, w = drawn(150, 90, 0), drawn(37, 90, 1)
    x[3, 40] = float("nan")
    together, before = many_rows.product(x, w), torch.get_num_threads()
    assert together[3].isnan().all() and not together[4:].isnan().any()
    for some in (slice(4, 5), slice(7, 12), slice(30, 100)):
        assert torch.equal(many_rows.product(x[some], w), together[some])
    torch.set_num_threads(2)
    try:
        assert torch.equal(many_rows.product(x[4:], w), together[4:])
    finally:
        torch.set_num_threads(before)


@has_kernel
@pytest.mark.parametrize("bias", [True, False])
def test_layer_takes_the_product_where_bf16_is_slow(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Linear(48, (20, 4), bias=bias).bfloat16(), drawn(40, 48, 3).view(2, 20, 48)
    found, like = [], layer.double()(x.double()).detach()
    layer.bfloat16()
    for slow in (True, False):
        monkeypatch.setattr(many_rows, "slow_in_bf16", lambda device, slow=slow: slow)
        with torch.no_grad():
            found.append(layer(x))
            assert many_rows.linear(x[:, :3], layer.weight) is None
        assert many_rows.linear(x, layer.weight) is None  # gradients are recorded
    with torch.no_grad():
        monkeypatch.setattr(many_rows, "slow_in_bf16", lambda device: True)
        assert many_rows.linear(x, layer.weight) is not None
        assert many_rows.linear(x.float(), layer.weight.float()) is None
    for y in found:
        assert y.dtype == torch.bfloat16 and y.shape == (2, 20, 24)
        torch.testing.assert_close(y.double(), like, rtol=2**-7, atol=2**-7)


@has_kernel
def test_tokens_of_one_text_decide_and_not_the_number_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty texts that decode a token each take the product of one; pieces of prompts in company take this one."""
    monkeypatch.setattr(many_rows, "slow_in_bf16", lambda device: True)
    weight = drawn(8, 48, 0)
    with torch.no_grad():
        assert many_rows.linear(drawn(20, 48, 1)[:, None], weight) is None
        assert many_rows.linear(drawn(20, 48, 1), weight) is None
        assert many_rows.linear(drawn(LEAST_PIECE, 48, 1)[None], weight) is not None
