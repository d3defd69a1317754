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
from glassformer.parts.ffn import Experts, Router
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
    """Numbers of rows of the products and of tokens of the mixtures that the C++ computed."""
    found = []

    def telling(forward: Callable[..., Any]) -> Callable[..., Any]:
        def told(ctx: Any, x: Tensor, *rest: Any) -> Any:
            found.append(len(x))
            return forward(ctx, x, *rest)

        return told

    for function in (grouped._OfFew, grouped._Mix):
        monkeypatch.setattr(function, "forward", telling(function.forward))
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
    assert called == [16]
    called.clear()
    with gf.edit(model, {"layers.0.ffn.hidden": lambda hidden: hidden}):  # and product by product while one is edited
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert called == [32] * 3
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


def mixed(mix: Callable[..., Tensor], part: Experts, p: Tensor, x: Tensor) -> list[Tensor]:
    """The result of a mixture with the choice of `p`, and its gradients."""
    leaves = [x.clone().requires_grad_(), p.clone().requires_grad_()]
    maps = [one.weight for one in (part.gate_proj, part.up_proj, part.down_proj) if one is not None]
    y = mix(leaves[0], *part.router.choose(leaves[1]))
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *maps], drawn(*y.shape, seed=9).to(y.dtype))]


def drawn_experts(n: int, k: int, d: int, f: int, seed: int, **fields: Any) -> Experts:
    part = Experts(d, f, Router(d, n, k, **fields))
    for at, one in enumerate(part.parameters()):
        one.data = 0.4 * drawn(*one.shape, seed=seed + at)
    return part


@serves
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40), n=st.integers(1, 6), k=st.integers(1, 6), d=st.integers(1, 40), f=st.integers(1, 70),
    normalised=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_mixtures_are_their_definition(
    tokens: int, n: int, k: int, d: int, f: int, normalised: bool, seed: int
) -> None:
    part = drawn_experts(n, min(k, n), d, f, seed, normalised=normalised, scale=2.5)
    x, p = drawn(tokens, d, seed=seed), drawn(tokens, n, seed=seed).softmax(-1)
    made = mixed(part.mix, part, p, x)
    part.double()
    for one, other in zip(made, mixed(part.naive_mix, part, p.double(), x.double()), strict=True):
        assert one.dtype == torch.float32
        size = max([1.0, *other.abs().flatten().tolist()])
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5 * size)


@serves
def test_bits_of_a_mixture_depend_neither_on_threads_nor_on_other_tokens(called: list[int]) -> None:
    part, x, p = drawn_experts(5, 2, 150, 170, 0), drawn(60, 150), drawn(60, 5).softmax(-1)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(mixed(part.mix, part, p, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    some = slice(17, 29)
    leaves = [one[some].clone().requires_grad_() for one in (x, p)]
    y = part.mix(leaves[0], *part.router.choose(leaves[1]))
    y.backward(drawn(60, 150, seed=9)[some])
    for one, whole in zip([y, *(leaf.grad for leaf in leaves)], found[0], strict=False):
        assert one is not None and torch.equal(one, whole[some])
    assert called == [60, 60, 12]


@serves
def test_choices_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias of the choice and experts that no token may choose, and with a sum of nearly nothing."""
    router, p = Router(8, 7, 3, balance_rate=0.1), drawn(50, 7, seed=1).softmax(-1)
    router.selection_bias = drawn(7, seed=2) / 4
    p[:9, :3], p[9, :] = 0.0, 0.0
    p[10] *= 1e-40

    def run() -> list[Tensor]:
        leaf = p.clone().requires_grad_()
        weights, chosen = router.choose(leaf)
        (grad,) = torch.autograd.grad(weights, leaf, drawn(50, 3, seed=3))
        kept = weights.detach() > 0
        return [weights.detach(), chosen.where(kept, -1), grad[kept.any(1)]]

    made = run()
    monkeypatch.setattr("glassformer.parts.ffn.experts.choice", lambda *given: None)
    for one, other in zip(made, run(), strict=True):
        torch.testing.assert_close(one, other)


@serves
def test_a_choice_of_no_expert_is_refused() -> None:
    part = drawn_experts(3, 1, 8, 8, 0)
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            part.mix(drawn(2, 8), torch.ones(2, 1), torch.tensor([[0], [wrong]]))


@serves
def test_gradients_are_computed_only_where_they_are_needed() -> None:
    x, weight, groups = drawn(9, 8), drawn(2, 8, 8), Groups.sorted(torch.arange(9) // 5, 2)
    whole = gradients(grouped_product, x, weight, groups)[1:]
    for of, one in enumerate((x, weight)):
        leaf = one.clone().requires_grad_()
        y = grouped_product(*((leaf, weight) if of == 0 else (x, leaf)), groups)
        (grad,) = torch.autograd.grad(y, leaf, drawn(9, 8, seed=9))
        assert torch.equal(grad, whole[of])


def test_a_replaced_forward_of_experts_is_called() -> None:
    experts: Any = gf.preset("llama@0.1m+vocab_size=60+moe:4:2").build(seed=0).layers[0].ffn
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    plain, layer = experts(x), experts.up_proj
    own = layer.forward
    layer.forward = lambda rows, groups: 2 * own(rows, groups)
    torch.testing.assert_close(experts(x), 2 * plain)
