"""Loops of a training step: the machine code is the formulas, and parts of models use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
from glassformer.parts import fused_loops, fused_products
from glassformer.parts.ffn.base import gelu_tanh
from glassformer.parts.ffn.glu import gated
from glassformer.parts.kernel import AttentionCall
from glassformer.parts.kernel.naive import Naive
from glassformer.parts.kernel.sdpa import Sdpa
from glassformer.parts.loss import naive_linear_cross_entropy
from glassformer.parts.norm.rmsnorm import naive_rms_norm, rms_norm
from glassformer.parts.position.rotary import naive_turn
from glassformer.parts.position.turn import turn
from glassformer.parts.visibility import Bidirectional, Causal

from .test_few_rows import SANITIZED, check_against_the_twin

SOURCE = Path(__file__).with_name("fused_loops.cpp")
LOOPS = ("swiglu", "swiglu_grad", "gelu_tanh", "gelu_tanh_grad", "rms_norm", "rms_norm_grad", "turn", "attention",
         "cross_entropy")  # fmt: skip
serves = pytest.mark.skipif(not fused_loops.serves(), reason="no kernel for this processor, or no compiler here")


def test_machine_code_is_the_formulas_in_fp64(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*native.OPTIONS, *options), 60, SOURCE)


@pytest.mark.slow
def test_sanitizers_find_nothing(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*SANITIZED, *options), 60, SOURCE)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def gradients(f: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """The result and the gradients of a function of these tensors, with a drawn gradient of the result."""
    leaves = [one.clone().requires_grad_() for one in given]
    y = f(*leaves)
    y.backward(drawn(*y.shape, seed=9).to(y.dtype))
    return [y.detach(), *(one.grad for one in leaves if one.grad is not None)]


def check(made: Callable[..., Tensor], meant: Callable[..., Tensor], *given: Tensor) -> None:
    """The C++ is called, and it has the result and gradients of the definition in fp64."""
    for one, other in zip(gradients(made, *given), gradients(meant, *(x.double() for x in given)), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5 * max(1.0, float(other.abs().max())))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the functions that gave a result."""
    found: set[str] = set()

    def told(name: str, function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if (result := function(*args, **named)) is not None:
                found.add(name)
            return result

        return call

    for name in LOOPS:
        monkeypatch.setattr(fused_loops, name, told(name, getattr(fused_loops, name)))
    yield found


def attended(q: Tensor, k: Tensor, v: Tensor, kernel: Any, causal: bool) -> Tensor:
    z: Tensor = kernel(AttentionCall(q, k, v, Causal() if causal else Bidirectional()))
    return z


@serves
@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 3), s=st.integers(1, 90), f=st.integers(1, 40), seed=st.integers(0, 99))
def test_gating_gelu_and_norm_are_their_definitions(b: int, s: int, f: int, seed: int) -> None:
    from glassformer.parts.ffn.fused_activation import swiglu

    x, up, weight = drawn(b, s, f, seed=seed), drawn(b, s, f, seed=seed + 1), drawn(f, seed=seed + 2)
    check(swiglu, gated(torch.nn.functional.silu), x, up)
    check(gelu_tanh, partial(torch.nn.functional.gelu, approximate="tanh"), 3 * x)
    check(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: naive_rms_norm(x, w, 1e-5), x, weight)


@serves
@pytest.mark.parametrize("axis", [-2, -1])
@settings(max_examples=15, deadline=None)
@given(b=st.integers(1, 3), s=st.integers(2, 40), m=st.integers(1, 17), rest=st.integers(0, 3), each=st.booleans())
def test_rotations_are_their_definition(axis: int, b: int, s: int, m: int, rest: int, each: bool) -> None:
    x = drawn(b, s, 7 * (2 * m + rest)).unflatten(-1, (7, -1))[:, :, 2:5]
    pair = (2, m) if axis == -2 else (m, 2)
    theta = torch.rand(*((b,) if each else ()), s, 1, 1, m).movedim(-1, -1 if axis == -2 else -2)
    theta = theta.expand(*theta.shape[:-3], 1, *pair)
    sign = torch.tensor([-1.0, 1.0]).view((2, 1) if axis == -2 else (1, 2))
    cos, sin = theta.cos().contiguous(), theta.sin() * sign
    check(lambda x: turn(x, cos, sin, axis), lambda x: naive_turn(x, cos.double(), sin.double(), axis), x)


@serves
@pytest.mark.parametrize("shape", [(1, 3, 5, 8), (2, 40, 3, 26)])
def test_loops_in_bf16_are_those_in_fp32_rounded(shape: tuple[int, ...]) -> None:
    x, up = (drawn(*shape, seed=seed).bfloat16() for seed in (0, 1))
    weight, angle = drawn(shape[-1]), drawn(shape[1], 1, 2, 4)
    cos, sin = angle.cos(), angle.sin()
    with torch.no_grad():
        for loop in (
            lambda x: fused_loops.swiglu(x, up.to(x.dtype)),
            lambda x: rms_norm(x, weight, 1e-5),
            lambda x: fused_loops.turn(x, cos, sin, -2),
        ):
            made, meant = loop(x), loop(x.float())
            assert made.dtype == torch.bfloat16 and not (made.float() - meant).abs().gt(2.0**-8 * meant.abs()).any()
        made = fused_loops.half_rms_norm(x, weight, 1e-5)
        meant = fused_loops.rms_norm(x.float(), weight, 1e-5)
        assert made is not None and meant is not None and torch.equal(made, meant[0].bfloat16())


@serves
@settings(max_examples=20, deadline=None)
@given(
    b=st.integers(1, 2), s=st.integers(2, 110), g=st.integers(1, 3), times=st.integers(1, 2), h=st.integers(1, 40),
    causal=st.booleans(),
)  # fmt: skip
def test_attention_is_its_definition(b: int, s: int, g: int, times: int, h: int, causal: bool) -> None:
    q, k, v = drawn(b, s, g * times, h), drawn(b, s, g, h, seed=1), drawn(b, s, g, h, seed=2)
    check(lambda *x: attended(*x, Sdpa(), causal), lambda *x: attended(*x, Naive(), causal), q, k, v)


@serves
@pytest.mark.parametrize("bias", [True, False])
def test_loss_is_its_definition(bias: bool) -> None:
    from glassformer.parts.loss import linear_cross_entropy

    x, weight, offset = drawn(70, 24), drawn(65, 24), drawn(65)
    targets = torch.randint(65, (70,))
    targets[::5] = -100
    given = (x, weight, offset) if bias else (x, weight)
    check(
        lambda x, w, *b: linear_cross_entropy(x, w, targets, *b),
        lambda x, w, *b: naive_linear_cross_entropy(x, w, targets, *b),
        *given,
    )
    targets[3] = 65
    with pytest.raises(IndexError):
        linear_cross_entropy(x, weight.requires_grad_(), targets)


@serves
def test_steps_take_every_loop_and_have_the_same_bits_with_any_number_of_threads(
    called: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, before = [], torch.get_num_threads()
    tokens = torch.randint(60, (4, 41))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            q, k, v, x, up = (drawn(4, 40, 2, 24, seed=i) for i in range(5))
            found.append([
                *gradients(lambda *x: attended(*x, Sdpa(), True), q, k, v),
                *gradients(lambda x, w: rms_norm(x, w, 1e-5), x, drawn(24)),
                fused_loops.swiglu(x, up),
                fused_loops.gelu_tanh(x),
            ])  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    called.clear()
    monkeypatch.setattr(fused_products, "_library", lambda: None)
    for name in ("llama", "gpt2"):
        gf.preset(f"{name}@0.1m+vocab_size=60").build(seed=0).loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert called == set(LOOPS)


@serves
@pytest.mark.parametrize(("s", "width"), [(9, 24), (300, 24), (300, 40), (700, 8)])
def test_attention_without_gradients_has_the_same_bits(s: int, width: int) -> None:
    """Its queries are divided among threads; with values of another width than keys."""
    q, k, v = drawn(2, s, 6, 24), drawn(2, s, 2, 24, seed=1), drawn(2, s, 2, width, seed=2)
    with torch.no_grad():
        z = Sdpa()(AttentionCall(q, k, v, Causal()))
        torch.testing.assert_close(z, Naive()(AttentionCall(q, k, v, Causal())), rtol=1e-4, atol=1e-5)
        assert torch.equal(Sdpa()(AttentionCall(q[1:], k[1:], v[1:], Causal()))[0], z[1])
        for first, end in ((0, s // 3), (s // 3, s)):  # a prompt that is read in pieces
            assert torch.equal(
                Sdpa()(AttentionCall(q[:, first:end], k[:, :end], v[:, :end], Causal())), z[:, first:end]
            )
    assert torch.equal(attended(q.requires_grad_(), k, v, Sdpa(), True), z)


@serves
@pytest.mark.parametrize(("s", "h", "width"), [(9, 24, 24), (300, 24, 40), (130, 16, 8)])
def test_attention_in_bf16_is_that_in_fp32_rounded(s: int, h: int, width: int) -> None:
    q, k, v = (drawn(2, s, *of).bfloat16() for of in ((6, h), (2, h), (2, width)))
    for causal in (True, False):
        made = fused_loops.half_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, causal, 0.3)
        meant = fused_loops.attention(q.float(), k.float(), v.float(), causal, 0.3)
        assert made is not None and meant is not None and torch.equal(made, meant.bfloat16())


@serves
@pytest.mark.parametrize("before", [1, 60, 65, 171])
def test_gradients_of_queries_that_continue_a_text(before: int) -> None:
    q, k, v = drawn(2, 130, 6, 24), *(drawn(2, 130 + before, 2, 24, seed=i) for i in (1, 2))
    made, meant = (gradients(lambda *x, one=one: attended(*x, one, True), q, k, v) for one in (Sdpa(), Naive()))
    for one, other in zip(made, meant, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_attention_do_not_ask_for_the_default_dtype() -> None:
    given, grad, found = [drawn(2, 20, 2, 16, seed=i).requires_grad_() for i in range(3)], drawn(2, 20, 2, 16), []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found.append(torch.autograd.grad(attended(*given, Sdpa(), True), given, grad))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_torch_computes_what_it_watches(called: set[str]) -> None:
    """Other dtypes, a count of FLOPs, transforms of functions, dropout, masks."""
    x, model = drawn(2, 8, 6, 8), gf.preset("llama@0.1m+vocab_size=60").build(seed=0)
    tokens = torch.randint(60, (2, 9))
    with FlopCounterMode(display=False) as count:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert count.get_total_flops() > 0 and not called
    model.double().loss(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.func.vmap(lambda one: torch.as_tensor(fused_loops.swiglu(one, one) is None))(x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        assert fused_loops.swiglu(x, x) is None
    q = x.clone().requires_grad_()
    Sdpa()(AttentionCall(q, q, q, Causal(), dropout=0.1))
    Sdpa()(AttentionCall(q, q, q, Causal(), index=(torch.arange(8), torch.arange(8))))
    assert not called


@serves
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(odd: float) -> None:
    x = drawn(3, 20, 2, 16).requires_grad_()
    with torch.no_grad():
        x[1, 15] = odd
    z = attended(x, x, x, Sdpa(), True)  # a block of rows that has a later token's values weighs them by 0
    assert z[1, 15:].isnan().all() and not z[[0, 2]].isnan().any() and not z[1, :12].isnan().any()
    y = rms_norm(x.flatten(2), torch.ones(32), 1e-5)
    assert y[1, 15].isnan().all() and not y[1, [14, 16]].isnan().any()


@serves
@pytest.mark.parametrize("name", ["llama@0.1m", "gpt2@0.1m", "llama@0.1m+gqa:1"])
def test_losses_of_a_training_are_torchs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(20_000)), encoding="utf-8")
    recipe = {"tokens": 6_000, "batch_size": 4, "context": 64, "dtype": "float32", "compile": False}
    curves = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(fused_loops, "_library", lambda: None)
        rows = gf.train(gf.preset(name), text, recipe, tokenizer="char").metrics
        curves.append(torch.tensor([row["loss"] for row in rows if "loss" in row]))
    assert len(curves[0]) > 10
    torch.testing.assert_close(*curves, rtol=1e-4, atol=1e-4)
