"""Grouped products of few rows: the machine code is their definition, and experts use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.machine import native
from glassformer.parts import grouped
from glassformer.parts.grouped import FEW, Groups, grouped_product, naive_grouped_product

from .test_few_rows import SANITIZED, check_against_the_twin
from .test_fused_loops import drawn, serves

SOURCE = Path(__file__).with_name("grouped.cpp")


def test_machine_code_is_the_sums_in_fp64(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*native.OPTIONS, *options), 60, SOURCE)


@pytest.mark.slow
def test_sanitizers_find_nothing(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*SANITIZED, *options), 60, SOURCE)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of rows of the products that the C++ computed."""
    found, product = [], grouped._OfFew.forward

    def told(ctx: Any, x: Tensor, *rest: Tensor) -> Tensor:
        found.append(len(x))
        return product(ctx, x, *rest)

    monkeypatch.setattr(grouped._OfFew, "forward", told)
    yield found


def gradients(f: Callable[..., Tensor], x: Tensor, weight: Tensor, groups: Groups) -> list[Tensor]:
    """The result and the gradients of x and weight, with a drawn gradient of the result."""
    leaves = [one.clone().requires_grad_() for one in (x, weight)]
    y = f(*leaves, groups)
    return [y.detach(), *torch.autograd.grad(y, leaves, drawn(*y.shape, seed=9).to(y.dtype))]


@serves
@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(0, 30), min_size=1, max_size=6), i=st.integers(1, 70), o=st.integers(1, 140),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_are_their_definition(rows: list[int], i: int, o: int, seed: int) -> None:
    groups = Groups.sorted(torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)), len(rows))
    x, weight = drawn(sum(rows), i, seed=seed), drawn(len(rows), o, i, seed=seed)
    made = gradients(grouped_product, x, weight, groups)
    for one, other in zip(made, gradients(naive_grouped_product, x.double(), weight.double(), groups), strict=True):
        assert one.dtype == torch.float32
        size = max([1.0, *other.abs().flatten().tolist()])
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5 * size)


@serves
def test_bits_depend_neither_on_threads_nor_on_other_rows(called: list[int]) -> None:
    x, weight, of = drawn(90, 600), drawn(3, 700, 600), torch.arange(3).repeat_interleave(30)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(gradients(grouped_product, x, weight, Groups.sorted(of, 3)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for some in (slice(0, 7), slice(29, 31), slice(50, 51)):
        leaf, groups = x[some].requires_grad_(), Groups.sorted(of[some], 3)
        y = grouped_product(leaf, weight, groups)
        assert torch.equal(y, found[0][0][some])
        y.backward(drawn(90, 700, seed=9)[some])
        assert leaf.grad is not None and torch.equal(leaf.grad, found[0][1][some])
    assert called == [90, 90, 7, 2, 1]


@serves
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_its_group(odd: float) -> None:
    x, weight, groups = drawn(20, 21), drawn(4, 19, 21), Groups.sorted(torch.tensor([0] * 8 + [2] * 12), 4)
    x[9, 5] = odd
    y, of_x, of_weight = gradients(grouped_product, x, weight, groups)
    assert not y[9].isfinite().any() and y[:9].isfinite().all() and y[10:].isfinite().all()
    assert of_x.isfinite().all() and not of_weight[2, :, 5].isfinite().any()
    assert not of_weight[[1, 3]].any() and of_weight[0].isfinite().all() and of_weight[2, :, 6:].isfinite().all()


@serves
def test_experts_use_them_where_they_are_faster(called: list[int]) -> None:
    """Not for many rows, other dtypes, a count of FLOPs and transforms of functions."""
    model, tokens = gf.preset("llama@0.1m+layers=1+vocab_size=60+moe:4:2").build(seed=0), torch.randint(60, (2, 9))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert called == [32]
    called.clear()
    with FlopCounterMode(display=False):
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    model.double().loss(tokens[:, :-1], tokens[:, 1:]).backward()
    x, weight, rows = drawn(2 * FEW + 1, 8), drawn(2, 8, 8), 2 * FEW + 1
    groups = Groups.sorted(torch.arange(rows) * 2 // rows, 2)
    grouped_product(x, weight, groups)
    torch.func.vmap(lambda one: grouped_product(x[:4], one, Groups(groups.of[:4], groups.ends)).sum())(weight[None])
    assert not called


@serves
def test_without_a_compiler_torch_computes_them(called: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, groups = drawn(9, 8), drawn(2, 8, 8), Groups.sorted(torch.arange(9) // 5, 2)
    made = gradients(grouped_product, x, weight, groups)
    monkeypatch.setattr(grouped, "_library", lambda: None)
    for one, other in zip(made, gradients(grouped_product, x, weight, groups), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert called == [9]


@serves
def test_gradients_are_computed_only_where_they_are_needed() -> None:
    x, weight, groups = drawn(9, 8), drawn(2, 8, 8), Groups.sorted(torch.arange(9) // 5, 2)
    whole = gradients(grouped_product, x, weight, groups)[1:]
    for of, one in enumerate((x, weight)):
        leaf = one.clone().requires_grad_()
        y = grouped_product(*((leaf, weight) if of == 0 else (x, leaf)), groups)
        (grad,) = torch.autograd.grad(y, leaf, drawn(9, 8, seed=9))
        assert torch.equal(grad, whole[of])
