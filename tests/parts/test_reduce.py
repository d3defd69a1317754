"""Routers of processes that share a batch: their statistics are those of the whole batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from glassformer.parts.core import auxiliary
from glassformer.parts.core.base import after_step
from glassformer.parts.core.reduce import reducing, total
from glassformer.parts.ffn import Experts
from glassformer.parts.ffn.experts import Router

D, E, K, STEPS = 8, 4, 2, 3
_building = threading.Lock()  # torch's generator is one


class Processes:
    """Two threads that play processes: `sum` gives each of them the sum of what both brought."""

    def __init__(self, world: int = 2):
        self.brought: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(world, timeout=60)

    def sum(self, x: Tensor) -> Tensor:
        self.brought[threading.get_ident()] = x.detach().clone()
        self.barrier.wait()
        found = torch.stack(list(self.brought.values())).sum(0)
        self.barrier.wait()
        return found


def experts(balance_rate: float | None) -> Experts:
    torch.manual_seed(0)
    made = Experts(D, 8, Router(D, E, K, "sigmoid", balance_loss=0.5, z_loss=0.1, balance_rate=balance_rate))
    return made.double().train()


def steps(x: Tensor, balance_rate: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of what the router adds, its weights after some steps of descent on it, and the selection bias; x
    (steps, n, d). The mean of the gradients of all processes is taken as data parallelism takes it."""
    with _building:
        made, grad = experts(balance_rate), torch.zeros(())
    for batch in x:
        with auxiliary.gathering() as added:
            made(batch)
        (grad,) = torch.autograd.grad(sum(added, torch.zeros(())), [made.router.weight])
        grad = total(grad) / total(torch.ones(()))
        with torch.no_grad():
            made.router.weight -= 0.5 * grad
        after_step(made)
    return grad, made.router.weight.detach(), made.router.selection_bias


@pytest.mark.parametrize("balance_rate", [None, 0.01], ids=["only losses", "selection bias"])
def test_two_processes_are_the_whole_batch(balance_rate: float | None):
    x = torch.randn(STEPS, 20, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    whole = steps(x, balance_rate)
    group = Processes()
    halves = [(x[:, :10], balance_rate), (x[:, 10:], balance_rate)]

    def process(x: Tensor, balance_rate: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
        with reducing(group.sum):
            return steps(x, balance_rate)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(process, *half) for half in halves]
        for mine in (one.result() for one in found):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)
    assert total(x) is x  # one process again


def test_without_it_halves_differ():
    """The batch is one whose halves load the experts otherwise: the test above could fail."""
    x = torch.randn(STEPS, 20, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    a, b, whole = (steps(part, 0.01) for part in (x[:, :10], x[:, 10:], x))
    assert ((a[0] + b[0]) / 2 - whole[0]).abs().max() > 1e-3
