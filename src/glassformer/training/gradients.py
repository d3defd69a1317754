"""Gradients of a step from microbatches, and the order of their sum."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from glassformer.machine import Settings
from glassformer.model import Model
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.sharing import Sharing
from glassformer.parallel.sums import Tree, add_to, local, norm_of_rows, tree_sum
from glassformer.parts.region import compiled_regions
from glassformer.text import Batch
from glassformer.training.recipe import Recipe

Order = Literal["sequence", "tree"]
"""Order of the sums, as state.json names it; a resumed run keeps its order."""


class StepState(Protocol):
    """Interface of the fields of a training run that determine the gradients of a step."""

    @property
    def model(self) -> Model: ...
    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def how(self) -> Settings: ...
    @property
    def groups(self) -> ProcessGroups: ...
    @property
    def sharing(self) -> Sharing: ...
    def seed_of(self, atom: int) -> int: ...


class Sums:
    """Interface of a way to sum gradients: it adds those of a batch's microbatches to `p.grad`, and gives the batch's
    loss and the norm of the sum."""

    order: ClassVar[Order]

    def backward(self, run: StepState, batch: Batch) -> float:
        """Computes the gradients of a batch and adds them to `p.grad`; returns the mean loss."""
        raise NotImplementedError(f"{type(self).__name__} adds nothing up")

    def norm(self, run: StepState) -> float:
        """Returns the gradient norm ||g|| over all parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no norm")


class InSequence(Sums):
    """Sum in sequence: each microbatch is added to the sum of the earlier ones, and dropout continues from one to the
    next. For batches of one microbatch, and runs older than the trees."""

    order = "sequence"

    def backward(self, run: StepState, batch: Batch) -> float:
        seed_draws(run.how.device, run.seed_of(0))
        return sum(of_piece(run, piece, share) for piece, share in _atoms(run, batch))

    def norm(self, run: StepState) -> float:
        return gradient_norm(run.parameters)


class AsTree(Sums):
    """Sum as a tree: microbatches, called atoms, are added pairwise (`parallel/sums.py`), and dropout is a function of
    (seed, step, atom), so that ranks that share the atoms have bit for bit the result of one process.

    Autograd adds the gradient of every second atom to that of the atom before. At most log2(atoms) partial sums are
    kept."""

    order = "tree"

    def backward(self, run: StepState, batch: Batch) -> float:
        atoms = _atoms(run, batch)
        parameters = [one for group in run.optimizer.param_groups for one in group["params"]]
        sums, losses = Tree[list[Tensor | None]](add_to), []
        mine = run.groups.mine(len(atoms))
        for turn, i in enumerate(mine):
            seed_draws(run.how.device, run.seed_of(i))
            with run.sharing.passing():
                losses.append(of_piece(run, *atoms[i]))
            run.groups.moves += 1
            if turn % 2 or turn == len(mine) - 1:
                sums.push([parameter.grad for parameter in parameters], level=turn % 2)
                run.optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(parameters, sums.total(), strict=True):
            parameter.grad = gradient
        run.sharing.add_up(run.model)
        return tree_sum(run.groups.in_order(torch.tensor(losses, dtype=torch.float64)).tolist(), operator.add)

    def norm(self, run: StepState) -> float:
        return norm_of_rows(run.sharing.squares(run.model))


class Staged(AsTree):
    """Sum of the gradients of microbatches (atoms) as a tree, under pipeline parallelism: each rank has a part of the
    layers (a stage), and atoms flow through the stages (`parallel/stages.py`)."""

    def backward(self, run: StepState, batch: Batch) -> float:
        from glassformer.parallel.stages import Stages

        atoms = _atoms(run, batch)
        mine = [atoms[i] for i in run.groups.mine(len(atoms))]
        pieces = [piece.to(run.how.device) for piece, _ in mine]
        assert isinstance(run.model, Stages)

        @contextmanager
        def around() -> Iterator[None]:
            with compiled_regions(run.how.compile), run.how.autocast():
                yield

        run.model.around = around
        tokens, targets = (torch.cat([piece[field] for piece in pieces]) for field in (0, 1))
        losses = run.model.step(tokens, targets, len(mine), mine[0][1])
        run.sharing.add_up(run.model)
        return tree_sum(run.groups.in_order(torch.tensor(losses, dtype=torch.float64)).tolist(), operator.add)


ORDERS: dict[Order, Sums] = {sums.order: sums for sums in (InSequence(), AsTree())}


def sums_of(order: Order, groups: ProcessGroups) -> Sums:
    """Returns the object that sums gradients in the given order (`sequence` or `tree`) for these ranks."""
    return Staged() if groups.layout.pp > 1 else ORDERS[order]


def _atoms(run: StepState, batch: Batch) -> list[tuple[Batch, float]]:
    return list(batch.pieces(run.recipe.micro_batch or run.recipe.batch_size))


def seed_draws(device: str, seed: int) -> None:
    """Seeds the random generators that a step on this device uses. torch.manual_seed would also record the call for
    every other kind of device, which takes a thirtieth of a small model's step."""
    if device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def of_piece(run: StepState, piece: Batch, share: float) -> float:
    """Computes the gradient of a microbatch and adds it, times the microbatch's `share` of the batch, to `p.grad`;
    returns loss times share."""
    with compiled_regions(run.how.compile):
        with run.how.autocast():
            loss = run.recipe.objective.loss(run.model, piece.to(run.how.device))
        (loss * share).backward()
    return float(loss.detach()) * share if share else 0.0  # without any target a loss is NaN


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Returns the gradient norm ||g|| over all of these parameters."""
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip(parameters: Iterable[nn.Parameter], limit: float | None, norm: float) -> None:
    """Scales the gradients down to the norm `limit` if their norm `norm` exceeds it; None for no limit."""
    if limit is not None and norm > limit:
        here = [local(p.grad) for p in parameters if p.grad is not None]
        scale = (limit / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)  # as torch does, for whole and sharded gradients
        torch._foreach_mul_(here, scale.to(here[0].device))
