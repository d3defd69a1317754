"""The gated delta rule in chunks against its definition; the mixer around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.parts.mixer.delta import delta_rule, delta_rule_map, naive_delta_rule

NAMES = ("q", "k", "v", "beta", "log_decay", "state")


def drawn(
    b: int, s: int, g: int, r: int, wide_k: int, wide_v: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Keys of length one, decays from almost 0 to almost 1, corrections past the whole."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=dtype)

    n = g * r
    return {
        "q": normal(b, s, g, wide_k), "k": torch.nn.functional.normalize(normal(b, s, g, wide_k), dim=-1),
        "v": normal(b, s, n, wide_v), "beta": 2 * normal(b, s, n).sigmoid(), "log_decay": -(2 * normal(b, s, n)).exp(),
        "state": normal(b, n, wide_k, wide_v),
    }  # fmt: skip


def starts(b: int, s: int, seed: int) -> Tensor:
    return torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.2


@given(
    st.integers(1, 2), st.integers(1, 13), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from([None, 1, 3, 4]), st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_chunks_are_the_definition(b: int, s: int, g: int, r: int, wk: int, wv: int, chunk: int | None, cut: bool):
    """Outputs, the last state and every gradient are equal for any sequence starts and any rest of the last chunk."""
    given, fresh = drawn(b, s, g, r, wk, wv, seed=s), starts(b, s, s) if cut else None
    wanted, found = ({name: x.clone().requires_grad_() for name, x in given.items()} for _ in range(2))
    y, h = naive_delta_rule(**wanted, fresh=fresh)
    z, i = delta_rule(**found, fresh=fresh, chunk=chunk)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(i, h)
    (z.sin().sum() + i.cos().sum()).backward()
    (y.sin().sum() + h.cos().sum()).backward()
    for name in NAMES:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, msg=name, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("cut", [False, True])
def test_blocks_of_chunks_are_the_definition(cut: bool, monkeypatch: pytest.MonkeyPatch):
    """Two chunks at once, of seven and a rest."""
    monkeypatch.setattr("glassformer.parts.mixer.delta.VALUES_AT_ONCE", 2 * 2 * 4 * 3 * 3)
    given, fresh = drawn(2, 23, 2, 2, 4, 3), starts(2, 23, 5) if cut else None
    wanted, found = ({name: x.clone().requires_grad_() for name, x in given.items()} for _ in range(2))
    y, h = naive_delta_rule(**wanted, fresh=fresh)
    z, i = delta_rule(**found, fresh=fresh, chunk=3)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(i, h)
    (z.sin().sum() + i.cos().sum()).backward()
    (y.sin().sum() + h.cos().sum()).backward()
    for name in NAMES:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, msg=name, rtol=1e-6, atol=1e-8)


def test_its_gradient_is_the_slope():
    given, fresh = drawn(1, 7, 1, 2, 3, 2), starts(1, 7, 1)
    for x in given.values():
        x.requires_grad_()
    inputs = tuple(given[name] for name in NAMES)
    assert torch.autograd.gradcheck(lambda *x: delta_rule(*x, fresh=fresh, chunk=3), inputs)


def test_a_key_that_comes_again_is_overwritten():
    """With beta 1 and no decay the state answers the last value that was stored under a key, however often."""
    keys = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 1, 0, 2, 1, 0])][None, :, None]
    values = torch.randn(1, 6, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, none = torch.ones(1, 6, 1, dtype=torch.float64), torch.zeros(1, 6, 1, dtype=torch.float64)
    y, h = delta_rule(keys, keys, values, whole, none, chunk=4)
    torch.testing.assert_close(y, values)
    torch.testing.assert_close(h[0, 0], values[0, [5, 4, 3], 0])


@pytest.mark.parametrize("decay", [0.0, -1e-6, -30.0, -1e4, -1e30])
def test_no_decay_is_too_strong(decay: float):
    given = drawn(1, 150, 1, 2, 4, 3, dtype=torch.float32)
    given["log_decay"] = torch.where(starts(1, 150, 3)[..., None], decay, -1e-3).expand(1, 150, 2).clone()
    for x in given.values():
        x.requires_grad_()
    y, h = delta_rule(**given)
    wanted, last = naive_delta_rule(**given)
    torch.testing.assert_close(y, wanted, rtol=1e-3, atol=1e-3)  # sums of many logarithms of -60 are that precise
    torch.testing.assert_close(h, last, rtol=1e-3, atol=1e-3)
    (y.sum() + h.sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in given.values())


@pytest.mark.parametrize("rows", [1, 40, 1 << 22])
def test_delta_rule_map_times_values_equals_output(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("glassformer.parts.mixer.delta.VALUES_PER_BLOCK", rows * 13)
    given, fresh = drawn(2, 13, 2, 1, 3, 4), starts(2, 13, 0)
    del given["state"]
    y, _ = naive_delta_rule(**given, fresh=fresh)
    blocks = delta_rule_map(given["q"], given["k"], given["beta"], given["log_decay"], fresh)
    found = torch.cat([block for _, block in blocks], dim=2)
    torch.testing.assert_close(torch.einsum("bnst,btnh->bsnh", found, given["v"]), y)
    assert not found.triu(1).any()
