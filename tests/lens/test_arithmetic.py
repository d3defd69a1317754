"""Arithmetic of a step: a formula only if it gives the numbers, and the one that gives them best."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glassformer.lens.arithmetic import Arithmetic, Sources, explained, lookup, position_of, sizes_of
from glassformer.parts.ffn.base import ACTIVATIONS
from glassformer.parts.forward_pass import Pass
from glassformer.parts.norm.layernorm import LayerNorm
from glassformer.parts.norm.rmsnorm import RMSNorm
from glassformer.parts.position.learned import Learned
from glassformer.parts.position.sinusoidal import Sinusoidal


def number_of(words: str) -> float:
    return float(words.replace("−", "-").replace("∞", "inf"))


def check_cells(found: Arithmetic | None, x: torch.Tensor) -> None:
    """Every line ends with the number of x in its place."""
    assert found is not None
    for i in range(len(x)):
        for j in range(x.shape[1]):
            line = found.cell(0, i, j)
            assert number_of(line.split()[-1]) == pytest.approx(float(x[i, j]), rel=0.02, abs=0.006), line


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_has_its_own_name(name: str, gated: bool) -> None:
    """Two activations that nearly agree, as the exact and the tanh form of GELU do, have different names."""
    up, gate = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(0)).unbind()
    hidden = ACTIVATIONS[name](gate) * up if gated else ACTIVATIONS[name](up)
    seen = [("up", "sf", up), *([("gate", "sf", gate)] if gated else [])]
    found = explained(Sources(seen, None, None, ()), "hidden", "sf", hidden)
    assert found is not None and found.formula.startswith(f"hidden = {name}(")


def test_no_formula_is_offered_for_other_numbers() -> None:
    table, tokens = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1, 3])
    check_cells(lookup(tokens, table, table[tokens]), table[tokens])
    assert lookup(tokens, table, table[tokens] * 1.1) is None and lookup(tokens, table, table[[3, 2, 3]]) is None
    learned = Learned(8, 4)
    assert position_of(learned, learned.weight[1:4].detach() + 0.1) is None
    for position in (Sinusoidal(4), torch.nn.Identity()):
        assert position_of(position, torch.ones(3, 4)) is None


@pytest.mark.parametrize(
    "position", [Learned(9, 8), Learned(9, 8, offset=2), Sinusoidal(8), Sinusoidal(8, 500.0, "halves")], ids=repr
)
def test_positions_are_rows_of_a_table_or_waves(position: Any) -> None:
    x = position(Pass(0, 6)).detach()
    check_cells(position_of(position, x), x)


def test_size_of_the_stream_is_worked_out() -> None:
    layers = [torch.randn(3, width, generator=torch.Generator().manual_seed(width)) for width in (2, 9)]
    sizes, found = sizes_of(layers)
    assert torch.allclose(sizes[:, 1], layers[1].norm(dim=-1) / 3)
    check_cells(found, sizes)


@pytest.mark.parametrize("norm", [RMSNorm(8), LayerNorm(8), torch.nn.LayerNorm(8, elementwise_affine=False)], ids=repr)
def test_norm_is_worked_out_where_its_input_is(norm: Any) -> None:
    """Values stay on their device, whatever the default one is: on the meta device nothing could be compared."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    value = norm(x).detach()
    with torch.device("meta"):
        found = explained(Sources([], None, norm, [x]), "mixer_norm", "sd", value)
    check_cells(found, value)
