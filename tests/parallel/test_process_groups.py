"""The ranks of a layout's groups, and the messages between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from glassformer.parallel.process_groups import ProcessGroups, first
from tests.parallel.threads import as_threads
from tests.refused import refused

LAYOUT = "fsdp=2,replicate=2,tp=2"


def talk(groups: ProcessGroups) -> dict[str, object]:
    members = {}
    for axis in ("fsdp", "replicate", "dp", "tp", "cp", "pp", "ep"):
        group = groups.group(axis)
        members[axis] = None if group is None else dist.get_process_group_ranks(group)
    return {
        "members": members,
        "told": groups.gather({"rank": groups.rank, "text": "é" * groups.rank}),
        "any": groups.agree(groups.rank == 3, any),
        "first": groups.agree(groups.rank, first),
        "order": groups.in_order(torch.tensor([float(i) for i in groups.mine(8)])).tolist(),
    }


def test_ranks_have_the_layouts_places_and_agree():
    found = as_threads(LAYOUT, talk)
    told = [{"rank": rank, "text": "é" * rank} for rank in range(8)]
    for rank, one in enumerate(found):
        tp, fsdp, replicate = rank % 2, rank // 2 % 2, rank // 4  # tp is the nearest neighbour, replicas the furthest
        assert one["members"] == {
            "tp": [rank - tp, rank - tp + 1],
            "fsdp": [tp + 4 * replicate, tp + 4 * replicate + 2],
            "replicate": [tp + 2 * fsdp, tp + 2 * fsdp + 4],
            "dp": [tp, tp + 2, tp + 4, tp + 6],
            "cp": None, "pp": None, "ep": None,
        }  # fmt: skip
        assert one["told"] == told and one["any"] is True and one["first"] == 0
        assert one["order"] == [float(i) for i in range(8)]


@pytest.mark.parametrize(
    ("layout", "members"),
    [
        ("fsdp=2,tp=2", {"dp": [[0, 2], [1, 3], [0, 2], [1, 3]], "tp": [[0, 1], [0, 1], [2, 3], [2, 3]]}),
        ("fsdp=4,ep=2", {"ep": [[0, 1], [0, 1], [2, 3], [2, 3]], "edp": [[0, 2], [1, 3], [0, 2], [1, 3]]}),
        ("fsdp=2,ep=2,replicate=2", {"ep": [[0, 1], [0, 1], [2, 3], [2, 3]], "edp": [None] * 4}),
    ],
)
def test_groups_of_axes_within_axes(layout: str, members: dict[str, list[list[int] | None]]):
    def work(groups: ProcessGroups) -> dict[str, list[int] | None]:
        found = {axis: groups.group(axis) for axis in members}
        return {axis: None if one is None else dist.get_process_group_ranks(one) for axis, one in found.items()}

    for rank, found in enumerate(as_threads(layout, work)):
        assert found == {axis: of_ranks[rank] for axis, of_ranks in members.items()}


def test_one_process_has_groups_of_one():
    alone = ProcessGroups.alone()
    assert alone.world == 1 and alone.leads and alone.mesh is None and list(alone.mine(4)) == [0, 1, 2, 3]
    assert alone.gather("x") == ["x"] and alone.agree(True, any) and alone.group("fsdp") is None
    assert alone.in_order(torch.arange(3.0)).tolist() == [0, 1, 2]


def test_the_odd_rank_is_named():
    def check(groups: ProcessGroups) -> str:
        groups.alike("version", "1.0")
        with refused(code="conflict", field="version"):
            groups.alike("version", "2.0" if groups.rank == 2 else "1.0")
        return "said"

    assert as_threads("fsdp=4", check) == ["said"] * 4
