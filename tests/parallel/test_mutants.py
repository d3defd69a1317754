"""Mistakes in how ranks divide a step; the comparisons with one process detect each.

That dropout of an atom does not depend on who computes it is compared by jobs of processes (`test_job.py`): threads
share a generator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.parallel import apply, experts, sharing, sums, tensor
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.seams import Group, Seams
from glassformer.parts.core.shard import Shard
from glassformer.parts.projection.base import MapShape
from glassformer.parts.projection.fused import FusedQKV
from tests.parallel import test_context, test_experts
from tests.parallel.test_shared import step
from tests.parallel.test_tensor import CLOSE, TINY, compare
from tests.parallel.threads import as_threads

Mutate = Callable[[pytest.MonkeyPatch], None]


def owners_learn_as_one_process() -> bool:
    return max(compare(f"llama@1m+{TINY}+gqa:2+qknorm+bias", "tp=2", 2)) < CLOSE


def ranks_have_the_bits_of_one_process() -> bool:
    expected, norm = step(ProcessGroups.alone())
    ranks = [one for layout in ("fsdp=4", "fsdp=2,replicate=2") for one in as_threads(layout, step)]
    return all(of_rank == norm and all(torch.equal(found[name], one) for name, one in expected.items())
               for found, of_rank in ranks)  # fmt: skip


def sequences_are_shared_as_in_one_process() -> bool:
    return test_context.compare(f"llama@1m+{TINY}+gqa:2", "cp=2") < CLOSE


def experts_give_the_gradients_of_one_process() -> bool:
    """Their loss, and the gradient of the table of words, which all of a pass goes back to."""
    expression = test_experts.MODELS["all that moves routers"]

    def work(groups: ProcessGroups) -> Tensor:
        model = test_experts.built(expression)
        if groups.world > 1:
            experts.divide(model, groups.group("ep"))
        for atom in groups.mine(2):
            model.loss(*test_experts.draw(0, atom)).backward()
        assert model.embedding.weight.grad is not None
        return model.embedding.weight.grad

    (whole,) = as_threads("dp=1", work)
    return bool((sum(as_threads("fsdp=2,ep=2", work)) - whole).abs().max() < CLOSE)


def as_one_map(patch: pytest.MonkeyPatch) -> None:
    def shapes(self: FusedQKV, d_model: int) -> dict[str, MapShape]:
        n, g, h = self.heads
        return {"qkv": MapShape(d_model, (n * h, g * h, g * h), ("score", "score", "hidden"), (Shard("column"),))}

    patch.setattr(FusedQKV, "shapes", shapes)


def rows_for_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "axis", property(lambda self: 0 if self.cut == "row" else 1))


def without(seam: str) -> Mutate:
    return lambda patch: patch.setattr(Seams, seam, lambda self, x: x)


def mean_for_sum(patch: pytest.MonkeyPatch) -> None:
    summed = Group.summed
    patch.setattr(Group, "summed", lambda self, x: summed(self, x) / self.of)


def shares_of_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor, "sum_partial", lambda model: None)


def mean_of_ranks(patch: pytest.MonkeyPatch) -> None:
    added = apply._sum_here
    patch.setattr(apply, "_sum_here", lambda received, group: added(received, group) / group.size())


def one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    def in_order(values: Any, add: Any) -> Tensor:
        first, *others = values
        for other in others:
            first = add(first, other)
        return first

    patch.setattr(apply, "tree_sum", in_order)


def torch_s_own_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sums, "row_squares", lambda gradient: gradient.norm().square()[None])
    patch.setattr(sharing, "row_squares", lambda gradient: gradient.norm().square()[None])


def copies_that_do_not_add_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(apply, "add_up", lambda tensors, group: None)


def gradients_of_own_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "scattered", Group.own)


def results_in_the_order_of_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(experts.Trip, "back", lambda self, rows: self._exchanged(rows, self.came, self.sent))


def gradients_that_stay(patch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].new_zeros(sum(ctx.how[0]), *grads[0].shape[1:]), None, None, None

    patch.setattr(experts._Exchanged, "backward", staticmethod(backward))


MUTANTS: dict[str, tuple[Mutate, Callable[[], bool]]] = {
    "q, k and v are cut as one map": (as_one_map, owners_learn_as_one_process),
    "letters of rows and columns are swapped": (rows_for_columns, owners_learn_as_one_process),
    "no seam at the start of a branch": (without("enter"), owners_learn_as_one_process),
    "no seam where a branch ends": (without("leave"), owners_learn_as_one_process),
    "a mean for a sum between owners": (mean_for_sum, owners_learn_as_one_process),
    "shares of gradients are left as they are": (shares_of_gradients, owners_learn_as_one_process),
    "a mean for a sum between ranks": (mean_of_ranks, ranks_have_the_bits_of_one_process),
    "ranks are added up one after the other": (one_after_the_other, ranks_have_the_bits_of_one_process),
    "the norm is torch's own": (torch_s_own_norm, ranks_have_the_bits_of_one_process),
    "copies do not add up": (copies_that_do_not_add_up, ranks_have_the_bits_of_one_process),
    "gradients of others' keys are left out": (gradients_of_own_keys, sequences_are_shared_as_in_one_process),
    "results come back in another order": (results_in_the_order_of_experts, experts_give_the_gradients_of_one_process),
    "gradients of rows that travelled are lost": (gradients_that_stay, experts_give_the_gradients_of_one_process),
}


@pytest.mark.parametrize(
    "holds",
    [
        owners_learn_as_one_process,
        ranks_have_the_bits_of_one_process,
        sequences_are_shared_as_in_one_process,
        experts_give_the_gradients_of_one_process,
    ],
)
def test_the_comparisons_hold(holds: Callable[[], bool]) -> None:
    assert holds()


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a difference, or by shapes that no longer meet."""
    mutate, holds = MUTANTS[name]
    owners_learn_as_one_process()  # what one process learns is kept, unmutated
    mutate(monkeypatch)
    try:
        assert not holds()
    except (RuntimeError, ValueError) as error:
        assert mutate in (as_one_map, rows_for_columns), "no other one changes shapes"
        assert re.search("shapes cannot be multiplied|argument 2 is longer|must match|is invalid for input", str(error))
