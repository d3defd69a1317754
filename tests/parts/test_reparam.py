"""Sigma-reparametrised maps against singular values and gradients taken the long way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from glassformer.introspection import sites
from glassformer.naming import preset
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.site import look_at
from glassformer.parts.linear import Linear, linear_cost
from glassformer.parts.reparam import SigmaReparam, SigmaReparamConfig, leading_right_vector

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def within(config: SigmaReparamConfig) -> BuildContext:
    return BuildContext(d_model=32, vocab_size=61, context=64, n_layers=2, reparam=config)


def made(outs: tuple[int, ...] = (6, 3, 3), inner: int = 5, gamma: float | None = None) -> Linear:
    return Linear(inner, outs, reparam=within(SigmaReparamConfig(gamma=gamma)).make_reparam)


def sigma(weight: Tensor) -> Tensor:
    return torch.linalg.svdvals(weight)[0]


def written_out(linear: Linear, gammas: Tensor) -> Tensor:
    """(gamma / sigma) W of each map by its own, sigma from a full decomposition."""
    parts = zip(gammas, linear.weight.split(linear.outs), strict=True)
    return torch.cat([gamma / sigma(part) * part for gamma, part in parts])


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_the_leading_vector_is_that_of_a_full_decomposition(rows: int, columns: int, seed: int):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    vector = leading_right_vector(weight)
    torch.testing.assert_close(vector.norm(), torch.tensor(1.0))
    torch.testing.assert_close((weight @ vector).norm(), sigma(weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outs", [(7,), (6, 3, 3)])
def test_sigma_reparam_starts_as_the_plain_map(outs: tuple[int, ...]):
    """gamma_0 = sigma(W_0) of each map, from one exact decomposition."""
    linear, x = made(outs), torch.randn(4, 5)
    assert isinstance(linear.reparam, SigmaReparam)
    torch.testing.assert_close(linear.reparam.gamma.data, torch.stack([sigma(w) for w in linear.weight.split(outs)]))
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight))


def test_gamma_from_one_makes_every_map_of_norm_one():
    linear = made(gamma=1.0)
    for part in linear.applied().split(linear.outs):
        torch.testing.assert_close(sigma(part).item(), 1.0, rtol=1e-5, atol=0)


def test_each_stacked_map_has_a_separate_scale():
    """A map ten times as large is made no larger, and the others do not notice."""
    linear = made(gamma=1.0)
    before = linear.applied()
    with torch.no_grad():
        linear.weight[6:9] *= 10
    torch.testing.assert_close(linear.applied(), before)
    with torch.no_grad():
        linear.reparam.gamma[1] = 3.0  # type: ignore[union-attr, index, operator]
    after = linear.applied()
    torch.testing.assert_close(after[6:9], 3 * before[6:9])
    torch.testing.assert_close(after[:6], before[:6])
    torch.testing.assert_close(after[9:], before[9:])


def test_a_training_forward_is_one_step_of_power_iteration_and_evaluation_none():
    linear, x = made((7,)), torch.randn(3, 5)
    reparam = linear.reparam
    assert isinstance(reparam, SigmaReparam)
    with torch.no_grad():
        linear.weight.add_(torch.randn_like(linear.weight))
    u, w = reparam.u[0].clone(), linear.weight.detach()
    linear.eval()(x)
    assert torch.equal(reparam.u[0], u)
    linear.train()(x)
    v = F.normalize(w @ u, dim=0)
    torch.testing.assert_close(reparam.u[0], F.normalize(w.T @ v, dim=0))
    found = reparam.sigmas(w).item()
    assert (w @ u).norm().item() <= found <= sigma(w).item() + 1e-6
    for _ in range(200):
        linear(x)
    torch.testing.assert_close(reparam.sigmas(w)[0], sigma(w))


def test_its_gradient_is_the_one_through_the_singular_value():
    """At the singular vectors d sigma / d W = v u^T, and torch differentiates its own decomposition to the same."""
    linear, x, gammas = made(), torch.randn(4, 5), torch.tensor([0.5, 2.0, 3.0])
    assert isinstance(linear.reparam, SigmaReparam)
    with torch.no_grad():
        linear.reparam.gamma.copy_(gammas)
    leaves = [linear.weight, linear.reparam.gamma]
    mine = torch.autograd.grad(linear(x).square().sum(), leaves)
    expected = F.linear(x, written_out(linear, linear.reparam.gamma)).square().sum()
    for a, b in zip(mine, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_analytic_off_the_singular_vectors_too():
    """The vectors of the step are constants: d/dW of gamma W / (v^T W u), by hand."""
    linear = made((7,)).eval()
    assert isinstance(linear.reparam, SigmaReparam)
    with torch.no_grad():
        linear.weight.add_(0.3 * torch.randn_like(linear.weight))
    w, g = linear.weight, torch.randn(7, 5)
    v = F.normalize(w.detach() @ linear.reparam.u[0], dim=0)
    u = F.normalize(w.detach().T @ v, dim=0)
    gamma, s = linear.reparam.gamma.item(), float(v @ w.detach() @ u)
    (found,) = torch.autograd.grad((linear.reparam(w) * g).sum(), w)
    torch.testing.assert_close(found, gamma / s * (g - (g * w.detach()).sum() / s * torch.outer(v, u)))


def test_weights_may_leap():
    """Evaluation right after a step that turned the matrix: old vectors tell nothing of it, a step from them does."""
    for seed in range(50):
        linear = Linear(64, (48,), reparam=within(SigmaReparamConfig(gamma=1.0)).make_reparam).eval()
        with torch.no_grad():
            linear.weight.normal_(generator=torch.Generator().manual_seed(seed))
        assert 1 - 1e-5 < sigma(linear.applied()) < 3


def test_sigma_reparam_is_equal_in_evaluation_and_training():
    linear, x = made(), torch.randn(4, 5)
    with torch.no_grad():
        linear.weight.add_(torch.randn_like(linear.weight))
    assert torch.equal(linear.eval()(x), linear.train()(x))


def test_forwards_may_come_before_their_gradients():
    linear, x = made(), torch.randn(4, 5)
    (linear(x).sum() + linear(2 * x).sum()).backward()
    assert linear.weight.grad is not None and linear.weight.grad.isfinite().all()


def test_half_precision_takes_sigma_in_full():
    linear, x = Linear(64, (64,), reparam=within(SigmaReparamConfig()).make_reparam), torch.randn(4, 64)
    assert isinstance(linear.reparam, SigmaReparam)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        factor = (linear.reparam.gamma / linear.reparam.sigmas(linear.weight)).item()
        plain = F.linear(x, linear.weight)
    assert y.dtype == torch.bfloat16 and abs(factor - 1) < 1e-5
    torch.testing.assert_close(y, plain, rtol=2e-2, atol=2e-2)
    narrow = copy.deepcopy(linear).bfloat16().train()
    assert narrow(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(sigma(narrow.applied().float()), sigma(linear.weight), rtol=2e-2, atol=0)


def test_a_matrix_of_zeros_stays_finite():
    linear = made((7,))
    with torch.no_grad():
        linear.weight.zero_()
    linear(torch.randn(2, 5)).sum().backward()
    assert linear.weight.grad is not None and linear.weight.grad.isfinite().all()


def test_parameters_are_counted():
    assert linear_cost(within(SigmaReparamConfig()), Shape(), 5, (6, 3, 3), bias=True).parameters == 6 * 12 + 3
    assert (
        sum(p.numel() for p in made().parameters())
        == linear_cost(within(SigmaReparamConfig()), Shape(), 5, (6, 3, 3)).parameters
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_map_of_a_model_is_bounded(family: str):
    """All of the layers and an untied head; tables and norms are not maps."""
    model = preset(f"{family}@1m+{TINY}+sigmareparam:1").build(seed=0)
    maps = {path: module for path, module in model.named_modules() if getattr(module, "reparam", None) is not None}
    linears = {path for path, module in model.named_modules() if isinstance(module, Linear)}
    assert set(maps) == linears | ({"head"} if family == "llama" else set()) and linears
    for module in maps.values():
        outs = getattr(module, "outs", (61,))
        for part in module.applied().split(outs):
            torch.testing.assert_close(sigma(part).item(), 1.0, rtol=1e-4, atol=0)


def test_model_with_sigma_reparam_starts_as_the_plain_one():
    tokens = torch.randint(0, 61, (2, 9))
    for family in ("gpt2", "llama"):
        plain, sigmas = (preset(f"{family}@1m+{TINY}{more}").build(seed=3) for more in ("", "+sigmareparam"))
        torch.testing.assert_close(sigmas(tokens), plain(tokens))
        torch.testing.assert_close(sigmas.loss(tokens, tokens), plain.loss(tokens, tokens))


def test_scores_cannot_outgrow_gamma():
    """Wherever W goes, |score| <= gamma_q gamma_k |x_i| |x_j| / sqrt(h)."""
    model = preset(f"llama@1m+{TINY}+sigmareparam:1+nope").build(seed=0)
    mixer = model.layers[0].mixer
    with torch.no_grad():
        mixer.qkv.weight.mul_(1e4).add_(1e3 * torch.randn_like(mixer.qkv.weight))
    seen: list[Tensor] = []
    with look_at([(sites(model)["layers.0.mixer.scores"], lambda x, first, total: seen.append(x.clone()))]):
        for _ in range(60):
            seen.clear()
            model(torch.randint(0, 61, (2, 9)))
    longest = 32.0  # |x|^2 of what an RMSNorm makes, times the two gammas of 1
    assert seen[0][seen[0].isfinite()].abs().max() <= 1.01 * longest / 8**0.5


def test_training_moves_gamma(steps: int = 5):
    model = preset(f"llama@1m+{TINY}+sigmareparam").build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = {n: p.clone() for n, p in model.named_parameters() if n.endswith("gamma")}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    tokens = torch.randint(0, 61, (4, 17))
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name
    for name, buffer in model.named_buffers():
        assert not torch.equal(buffer, buffers[name]), name


def test_the_modules_it_is_part_of_need_no_config():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = Linear(4, 4, reparam=lambda inner, outs: SigmaReparam(inner, outs, 1.0))

    assert Own().map(torch.randn(2, 4)).shape == (2, 4)
