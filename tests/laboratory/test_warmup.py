"""Optimizer and sharpness of the claims about warm-up, against torch's Adam and matrices in closed form."""

from __future__ import annotations

import pytest
import torch

from glassformer.laboratory.evidence.condensing import EvenDescent
from glassformer.laboratory.evidence.warmup import BETAS, EPS, Adam, move_within, sharpness


def test_steps_equal_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,))]
    theirs = [weight.clone().requires_grad_() for weight in ours]
    adam, reference = Adam(ours), torch.optim.Adam(theirs, lr=0.1, betas=BETAS, eps=EPS)
    for _ in range(10):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in ours]
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        reference.step()
        for weight, update in zip(ours, adam.directions(gradients), strict=True):
            weight -= 0.1 * update
    torch.testing.assert_close(ours, [weight.detach() for weight in theirs], rtol=1e-5, atol=1e-6)


def test_estimated_moments_are_the_mean_of_squares() -> None:
    adam, draws = Adam([torch.zeros(6)]), torch.randn(2, 6)
    for draw in draws:
        adam.estimate([draw])
    torch.testing.assert_close(adam.scales()[0], draws.square().mean(0).sqrt(), rtol=1e-2, atol=1e-2)


def test_sharpness_is_the_largest_eigenvalue_of_the_preconditioned_hessian() -> None:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    hessian, scale = half @ half.T, torch.rand(6, generator=generator) + 0.5
    weight = torch.randn(6, generator=generator, dtype=torch.float64)
    found = sharpness(lambda: [hessian @ weight], [weight], [scale], power=200)
    roots = scale.double().rsqrt()
    assert found == pytest.approx(torch.linalg.eigvalsh(roots[:, None] * hessian * roots).max().item(), rel=1e-6)


def test_matrix_moves_within_its_limit_and_vector_freely() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    largest = move_within([matrix, vector], [torch.ones(2, 2), torch.ones(2)], rate=0.5, limit=0.1)
    assert largest == pytest.approx(0.1)
    torch.testing.assert_close(matrix, torch.full((2, 2), 0.9))
    torch.testing.assert_close(vector, torch.full((2,), 0.5))


def test_steps_of_even_descent_have_one_length() -> None:
    weights = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    optimizer = EvenDescent(weights, lr=0.5)
    for weight, size in zip(weights, (3.0, 200.0), strict=True):
        weight.grad = torch.full_like(weight, size)
    optimizer.step()
    assert torch.cat([weight.detach().flatten() for weight in weights]).norm() == pytest.approx(0.5)
