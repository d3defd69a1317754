"""Pieces tile a tensor exactly once, and any layout reads what any other wrote."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import Shard as ByRows

from glassformer.parallel.pieces import IndexBox, Piece, Place, gap_or_overlap, pieces_of
from glassformer.parallel.stored import StoredPieces, write_pieces
from glassformer.parts.core.shard import Cut, Shard, piece_of, regions
from tests.refused import refused


class Rows:
    """Substitute for a DTensor whose ranks hold rows: `torch.chunk`s of the first axis over a mesh of one axis."""

    placements = [ByRows(0)]

    def __init__(self, part: Tensor, rank: int, ranks: int):
        chunks = part.chunk(ranks)
        self.local = chunks[rank] if rank < len(chunks) else part[:0]
        self.shape = part.shape
        self.device_mesh = SimpleNamespace(get_coordinate=lambda: [rank], size=lambda axis: ranks)

    def detach(self) -> Rows:
        return self

    def dim(self) -> int:
        return len(self.shape)

    def to_local(self) -> Tensor:
        return self.local


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, tuple[Shard, ...]]:
    """A whole tensor of one to three axes, and the cut of each map stacked in it; units are divided by 1, 2 and 4."""
    kind: Cut = draw(st.sampled_from(["column", "row", "expert", "vocab", "replicated"]))
    maps = draw(st.lists(st.tuples(st.sampled_from([4, 8]), st.integers(1, 3)), min_size=1, max_size=3))
    cuts = [Shard(draw(st.sampled_from([kind, "replicated"])) if kind != "row" else kind, None, n * h) for n, h in maps]
    beyond = draw(st.sampled_from([(), (8,), (4, 3)]))
    rows = sum(cut.rows or 0 for cut in cuts)
    return torch.arange(rows * int(torch.tensor(beyond).prod())).view(rows, *beyond), tuple(cuts)


def held(whole: Tensor, cuts: tuple[Shard, ...], tp: int, fsdp: int) -> list[tuple[Tensor, list[Piece]]]:
    """Returns, for each rank, its values and pieces that are views of them."""
    found = []
    for owner in range(tp):
        part = piece_of(whole, cuts, owner, tp).clone()
        place = Place(tuple(whole.shape), regions(tuple(whole.shape), cuts, owner, tp))
        for rank in range(fsdp):
            rows: Any = Rows(part, rank, fsdp) if fsdp > 1 else part
            found.append((rows.to_local() if fsdp > 1 else part, pieces_of("w", rows, place)))
    return found


worlds = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 5]))


@settings(max_examples=60, deadline=None)
@given(tensors(), worlds, worlds)
def test_any_layout_reads_pieces_of_any_other(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    (whole, cuts), folder = drawn, tmp_path_factory.mktemp("pieces")
    written: dict[IndexBox, int] = {}
    paths = []
    for rank, (_, pieces) in enumerate(held(whole, cuts, *ours)):
        paths.append(folder / f"{rank}.safetensors")
        write_pieces(paths[-1], [piece for piece in pieces if written.setdefault(piece.box, rank) == rank], {})
    with StoredPieces(paths) as stored:  # which finds that they tile
        assert stored.shapes == {"w": tuple(whole.shape)}
        for local, pieces in held(whole, cuts, *theirs):
            right = local.clone()
            local.fill_(-1)
            for piece in pieces:
                assert piece.whole == tuple(whole.shape)
                stored.read("w", piece.box, piece.values)
            assert torch.equal(local, right)


def test_a_fused_matrix_is_cut_map_by_map() -> None:
    """Four query heads, two of keys and values, two rows each: by hand, what each of two owners has of 16 rows."""
    whole = torch.arange(16)
    cuts = (Shard("column", 4, 8), Shard("column", 2, 4), Shard("column", 2, 4))
    for (_, pieces), rows in zip(held(whole, cuts, 2, 1), ([0, 8, 12], [4, 10, 14]), strict=True):
        assert [piece.box.at[0] for piece in pieces] == rows
        assert all(piece.values[0] == row for piece, row in zip(pieces, rows, strict=True))


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(1, 3)] * 2), max_size=6))
def test_a_tiling_is_one_that_paints_each_value_once(drawn: list[tuple[int, int, int, int]]) -> None:
    """Against painting the boxes into a tensor of 4 x 4."""
    boxes = [IndexBox((a, b), (c, d)) for a, b, c, d in drawn]
    painted = torch.zeros(8, 8, dtype=torch.int64)
    for box in boxes:
        painted[box.within(IndexBox((0, 0), (8, 8)))] += 1
    once = bool((painted[:4, :4] == 1).all() and painted.sum() == 16)
    assert (gap_or_overlap(boxes, (4, 4)) is None) == once


WHOLE = torch.arange(24.0).view(6, 4)
TOP, BOTTOM = (
    Piece("w", IndexBox((0, 0), (4, 4)), WHOLE[:4], (6, 4)),
    Piece("w", IndexBox((4, 0), (2, 4)), WHOLE[4:], (6, 4)),
)


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        (TOP, None, "w"),
        (TOP, BOTTOM._replace(box=IndexBox((3, 0), (2, 4))), "w"),
        (TOP, BOTTOM._replace(box=IndexBox((5, 0), (2, 4))), "w"),
        (TOP, TOP, "w"),
        (TOP._replace(whole=(7, 4)), BOTTOM._replace(whole=(7, 4)), "w"),
        (TOP, BOTTOM._replace(whole=(8, 4)), "w#0"),
        (TOP._replace(whole=(6, 4, 1)), None, "pieces"),
        (TOP._replace(box=IndexBox((-1, 0), (4, 4))), None, "pieces"),
        (TOP._replace(box=IndexBox((1 << 70, 0), (4, 4))), None, "pieces"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_tile_are_refused(tmp_path: Path, first: Piece, second: Piece | None, field: str) -> None:
    paths = []
    for piece in (first, second):
        if piece is not None:
            paths.append(tmp_path / f"{len(paths)}.safetensors")
            write_pieces(paths[-1], [piece], {})
    with refused(code="damaged", field=field):
        StoredPieces(paths)


@pytest.mark.parametrize("said", ["[" * 100_000, "3", "[]", '{"w": 3}', '{"w": {"of": 1, "at": [0], "whole": [4]}}',
                                  '{"x": {"of": "w", "at": [0], "whole": [4]}}'])  # fmt: skip
def test_places_that_cannot_be_are_refused(tmp_path: Path, said: str) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "x", {"pieces": said})
    with refused(code="damaged", field="pieces"):
        StoredPieces([tmp_path / "x"])


def test_only_values_in_the_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glassformer.parallel import stored as module

    asked = []

    class Spy:
        def __init__(self, path: Path, framework: str):
            self.file = safe_open(path, framework)

        def __enter__(self) -> Spy:
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_slice(self, key: str) -> Any:
            inner = self.file.get_slice(key)

            class Slice:
                get_shape = inner.get_shape

                def __getitem__(self, where: Any) -> Tensor:
                    asked.append((key, where))
                    return inner[where]

            return Slice()

        def get_tensor(self, key: str) -> Tensor:
            asked.append((key, "all"))
            return self.file.get_tensor(key)

    monkeypatch.setattr(module, "safe_open", Spy)
    write_pieces(tmp_path / "a", [TOP], {})
    write_pieces(tmp_path / "b", [BOTTOM], {})
    assert json.loads(safe_open(tmp_path / "a", "pt").metadata()["pieces"]) == {
        "w#0": {"of": "w", "at": [0, 0], "whole": [6, 4]}
    }
    with StoredPieces([tmp_path / "a", tmp_path / "b"]) as stored:
        into = torch.empty(3, 1)
        stored.read("w", IndexBox((3, 2), (3, 1)), into)
    assert torch.equal(into, WHOLE[3:, 2:3])
    assert asked == [("w#0", (slice(3, 4), slice(2, 3))), ("w#0", (slice(0, 2), slice(2, 3)))]
