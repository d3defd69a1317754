"""docs/weak_scaling.md: that it is what its command writes, and what must hold of any weak scaling."""

from __future__ import annotations

import pytest

from experiments.weak import FIGURE, LAYOUTS, PAGE, Row, drawing, page, planned

FEW = (8, 16, 1024)


def of(name: str) -> list[Row]:
    return [planned(ranks, LAYOUTS[name](ranks)) for ranks in FEW]


@pytest.mark.slow
def test_weak_scaling_page_equals_output_of_its_command() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m experiments.weak"
    assert FIGURE.read_text(encoding="utf-8") == drawing(), "run python -m experiments.weak"


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_becomes_more_efficient_with_more_nodes(name: str) -> None:
    rows = of(name)
    for steps in ([row.planned.seconds for row in rows], [row.seconds for row in rows]):
        assert steps == sorted(steps)


def test_the_bytes_of_a_rank_approach_a_constant() -> None:
    """FSDP moves a share of 1 - 1 / n of 2 bytes twice, or 4 once, of every weight and 4 of its gradient; the norms of
    layers are gathered twice in 4 bytes, and rows are padded to a multiple of the ranks."""
    for row in of("FSDP"):
        assert row.sent == pytest.approx(8 * row.plan.config.num_params() * (1 - 1 / row.ranks), rel=1e-3)


def test_replicas_send_less_between_nodes_than_fsdp() -> None:
    """Hybrid: 4 bytes to and 4 from of the eighth that a rank has. FSDP: 4 of an eighth of all weights, shared by the
    node, and 4 of all gradients."""
    for fsdp, hybrid in zip(of("FSDP")[1:], of("Hybrid")[1:], strict=True):
        leaving = (1 - 8 / fsdp.ranks) * fsdp.plan.config.num_params()
        assert hybrid.crossing == pytest.approx(leaving, rel=1e-3)
        assert fsdp.crossing == pytest.approx((4 / 8 + 4) * leaving, rel=1e-3)


@pytest.mark.parametrize("ranks", FEW)
def test_gathers_take_half_of_planned_sharding(ranks: int) -> None:
    """Half of what the planner counts as sharding are the gathers, and all of it crosses links by the same rule."""
    row = planned(ranks, LAYOUTS["FSDP"](ranks))
    (sharding,) = (one for one in row.planned.kinds if one.kind == "sharding")
    assert row.exchanges[0].made.operation == "all-gather"
    assert row.exchanges[0].seconds() == pytest.approx(sharding.roof / 2, rel=1e-3)


def test_computing_and_exchanging_take_alike_over_the_break_even_link() -> None:
    row = of("FSDP")[-1]
    assert row.break_even is not None
    assert row.exchanging(row.break_even) == pytest.approx(row.computing)
    assert of("FSDP")[0].break_even is None
