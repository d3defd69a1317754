"""The linear recurrence of matrices against its definition, closed forms and slopes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.parts.mixer import chunked
from glassformer.parts.mixer.chunked import (
    CHUNK,
    chunked_linear_attention,
    linear_attention_map,
    naive_linear_attention,
)

Inputs = dict[str, Any]
DECAYS = ("none", "head", "token")


def draw(
    b: int, s: int, g: int, r: int, kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, wide: int = 3
) -> Inputs:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=dtype)

    given: Inputs = {"q": normal(b, s, g, wide), "k": normal(b, s, g, wide), "v": normal(b, s, g * r, wide + 1),
                     "state": normal(b, g * r, wide, wide + 1)}  # fmt: skip
    if kind != "none":
        given["log_decay"] = -normal(*((g * r,) if kind == "head" else (b, s, g * r))).exp()
    return given


def starts(b: int, s: int, seed: int) -> Tensor:
    return torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.15


def fresh_of(kind: str, b: int, s: int) -> Tensor | None:
    return {"": None, "rows": starts(b, s, s), "alike": starts(1, s, s)}[kind]


@given(
    st.integers(1, 2), st.integers(1, 23), st.integers(1, 2), st.integers(1, 3), st.sampled_from(DECAYS),
    st.sampled_from(["", "rows", "alike"]), st.integers(1, 9), st.sampled_from([1, 200, 1 << 20]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_chunks_are_the_definition(b: int, s: int, g: int, r: int, kind: str, cut: str, chunk: int, pairs: int):
    """Outputs, the last state and every gradient are equal for chunks of any length, any number of them at once, and
    any sequence starts."""
    chunked.PAIRS_PER_BLOCK, before = pairs, chunked.PAIRS_PER_BLOCK
    try:
        compare(b, s, g, r, kind, cut, chunk)
    finally:
        chunked.PAIRS_PER_BLOCK = before


def compare(b: int, s: int, g: int, r: int, kind: str, cut: str, chunk: int) -> None:
    given, fresh = draw(b, s, g, r, kind, seed=s), fresh_of(cut, b, s)
    wanted, found = ({name: x.clone().requires_grad_() for name, x in given.items()} for _ in range(2))
    y, h = naive_linear_attention(**wanted, fresh=fresh)
    z, i = chunked_linear_attention(**found, fresh=fresh, chunk=chunk)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(i, h)
    (y.sin().sum() + h.cos().sum()).backward()
    (z.sin().sum() + i.cos().sum()).backward()
    for name in given:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, msg=name)
    with torch.no_grad():  # without the operator
        torch.testing.assert_close(chunked_linear_attention(**given, fresh=fresh, chunk=chunk), (y, h))


@pytest.mark.parametrize("kind", DECAYS)
def test_its_gradient_is_the_slope(kind: str):
    given, fresh = draw(1, 7, 1, 2, kind), starts(1, 7, 1)
    for x in given.values():
        x.requires_grad_()
    names = list(given)

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_linear_attention(**dict(zip(names, x, strict=True)), fresh=fresh, chunk=3)

    assert torch.autograd.gradcheck(run, tuple(given.values()))


@pytest.mark.parametrize("s", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_constant_inputs_sum_a_geometric_series(s: int):
    """S_s = k v (1 - e^(a s)) / (1 - e^a)."""
    a, q, k, v = -0.03, 3.0, 0.5, 0.7
    one = torch.ones(1, s, 1, 1, dtype=torch.float64)
    y, h = chunked_linear_attention(q * one, k * one, v * one, torch.tensor([a], dtype=torch.float64))
    sums = torch.tensor([k * v * (1 - math.exp(a * t)) / (1 - math.exp(a)) for t in range(1, s + 1)]).double()
    torch.testing.assert_close(y.flatten(), q * sums, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(h.flatten()[0], sums[-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_beyond_the_range_of_16_bits_are_fp32(dtype: torch.dtype):
    """2,000 products of 16 x 16 are 512,000: past the largest number of fp16, and past where bf16 still counts."""
    ones = torch.full((1, 2000, 1, 1), 16.0, dtype=dtype)
    y, h = chunked_linear_attention(ones, ones, ones)
    assert y.dtype == h.dtype == torch.float32 and h.item() == 512_000
    torch.testing.assert_close(y.flatten(), 16.0 * 256 * torch.arange(1.0, 2001.0))


def test_decays_from_nothing_to_everything():
    """exp(a) from 1 down to 0: nothing overflows, and gradients are numbers."""
    given = draw(1, 200, 1, 2, "token", dtype=torch.float32)
    given["log_decay"] = torch.tensor([0.0, -1e-30, -1.0, -1e4, -0.1])[None].repeat(1, 40)[..., None].repeat(1, 1, 2)
    for x in given.values():
        x.requires_grad_()
    y, h = chunked_linear_attention(**given)
    torch.testing.assert_close(y, naive_linear_attention(**given)[0], rtol=1e-5, atol=1e-5)
    (y.sum() + h.sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in given.values())


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("cut", [False, True])
def test_the_map_weighs_values(kind: str, cut: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("glassformer.parts.mixer.chunked.VALUES_PER_BLOCK", 150)
    given = draw(2, 13, 3, 1, kind)
    age = torch.stack([torch.cat([torch.arange(5), torch.arange(8)]), torch.arange(13)]) if cut else None
    del given["state"]
    blocks = list(linear_attention_map(given["q"], given["k"], given.get("log_decay"), age))
    assert len(blocks) > 3
    found = torch.cat([block for _, block in blocks], dim=2)
    assert not found.triu(1).any()
    wanted, _ = naive_linear_attention(**given, fresh=None if age is None else age == 0)
    torch.testing.assert_close(torch.einsum("bnts,bsnv->btnv", found, given["v"]), wanted)
