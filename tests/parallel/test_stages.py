"""Layers on several ranks: the bits of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel.layout import Layout, stage_layers
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.stages import Stages
from glassformer.parallel.sums import Tree, add_to
from glassformer.training import Recipe
from glassformer.training.shared import check_shared
from tests.parallel.processes import as_processes
from tests.refused import refused

VOCAB, CONTEXT, ROWS = 61, 16, 2
TINY = "layers=5+d_model=32+heads=4+untied"


def model(expression: str) -> Model:
    return preset(expression).replace(vocab_size=VOCAB, context=CONTEXT).build(seed=0).train()


def draw(atoms: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (atoms * ROWS, CONTEXT)
    return torch.randint(0, VOCAB, shape, generator=generator), torch.randint(0, VOCAB, shape, generator=generator)


def around(half: bool) -> Any:
    return partial(torch.autocast, "cpu", torch.bfloat16) if half else nullcontext


def of_one_process(expression: str, atoms: int, half: bool) -> tuple[dict[str, Tensor | None], list[float], Tensor]:
    whole, (x, y) = model(expression), draw(atoms)
    sums, losses = Tree[list[Tensor | None]](add_to), []
    for tokens, targets in zip(x.split(ROWS), y.split(ROWS), strict=True):
        with around(half)():
            loss = whole.loss(tokens, targets)
        (loss * (1 / atoms)).backward()
        losses.append(float(loss.detach()) * (1 / atoms))
        sums.push([one.grad for one in whole.parameters()])
        whole.zero_grad(set_to_none=True)
    with torch.no_grad(), around(half)():
        each = whole.loss(x, y, reduction="none")
    names = [name for name, _ in whole.named_parameters()]
    return dict(zip(names, sums.total(), strict=True)), losses, each


EXPRESSIONS = (f"llama@1m+{TINY}", f"gpt2@1m+{TINY}+moe:4:2+ffn.balance_loss=0.1", f"llama@1m+{TINY}+mamba")


def of_a_rank(groups: ProcessGroups, chunks: int, atoms: int) -> dict[tuple[str, bool], Any]:
    """Expression and whether in bf16 -> (names, whether gradients, losses of tokens, and of atoms are those of one
    process)."""
    found: dict[tuple[str, bool], Any] = {}
    for expression in EXPRESSIONS:
        for half in (False, True):
            stages = Stages(model(expression), groups.at["pp"], groups.layout.pp, chunks, groups.group("pp")).train()
            stages.around = around(half)
            x, y = draw(atoms)
            losses = stages.step(x, y, atoms, 1 / atoms)
            wanted, of_atoms, each = of_one_process(expression, atoms, half)
            names = [name for name, _ in stages.named_parameters()]
            same = [equal(one.grad, wanted[name]) for name, one in stages.named_parameters()]
            with torch.no_grad(), around(half)():
                read = stages.loss(x, y, reduction="none")
            found[expression, half] = names, all(same), torch.equal(read, each), losses == of_atoms
    return found


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.mark.slow  # two and three processes
@pytest.mark.parametrize(("ranks", "chunks", "atoms"), [(2, 1, 4), (2, 2, 4), (3, 1, 8)])
def test_stages_have_the_bits_of_one_process(ranks: int, chunks: int, atoms: int) -> None:
    """Gradients are summed as trees; losses are those of training and of tokens only; layers are plain, Mamba, or
    experts whose balance loss joins."""
    ranks_found = as_processes(f"pp={ranks}", of_a_rank, chunks, atoms)
    for (expression, _), of_first in ranks_found[0].items():
        names = [name for found in ranks_found for name in found[expression, False][0]]
        assert sorted(names) == sorted(name for name, _ in model(expression).named_parameters()) and of_first
    assert all(same for found in ranks_found for one in found.values() for same in one[1:])


def test_every_layer_is_of_one_stage() -> None:
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            parts = stage_layers(layers, stages)
            assert [layer for part in parts for layer in part] == list(range(layers))
            assert len(parts) == stages and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("expression", "stages", "field"),
    [
        (f"llama@1m+{TINY}", 6, "pp"),
        (f"llama@1m+{TINY}+tied", 2, "head.tied"),
        (f"llama@1m+{TINY}+mixer.dropout=0.1", 2, "dropout"),
        ("t5@1m", 2, "encoder"),
    ],
)
def test_models_that_cannot_be_cut_between_layers_are_refused(expression: str, stages: int, field: str) -> None:
    with refused(code="conflict", field=field):
        Stages(model(expression), 0, stages)


@pytest.mark.parametrize(
    ("layout", "recipe", "field"),
    [
        ("pp=2,fsdp=2", {}, "pp"),
        ("pp=2", {"watch": 5}, "watch"),
        ("pp=2", {"micro_batch": None}, "micro_batch"),
        ("pp=2,interleave=2", {"micro_batch": 3, "batch_size": 9}, "micro_batch"),
        ("pp=2", {"objective": "masked"}, "objective"),
    ],
)
def test_runs_that_cannot_flow_are_refused(layout: str, recipe: dict[str, Any], field: str, tmp_path: Path) -> None:
    fields = {"tokens": 4096, "batch_size": 8, "micro_batch": 2, "context": CONTEXT, **recipe}
    with refused(code="conflict", field=field):
        check_shared(preset(f"llama@1m+{TINY}"), Recipe.of(**fields), Layout.of(layout), tmp_path)
