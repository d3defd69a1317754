"""Files of pieces of tensors, in safetensors format.

    {"__metadata__": {"pieces": "{KEY: {"of": NAME, "at": [row, column], "whole": [rows, columns]}}"}, KEY: ...}

A key that `pieces` does not name is a whole tensor, so that a file of whole tensors is a plain one. The content of a
file is trusted only after the pieces are found to tile each tensor exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from glassformer.errors import RequestError, shown
from glassformer.parallel.pieces import IndexBox, Piece, Place, gap_or_overlap, lies_whole, pieces_of, whole_of

PIECES = "pieces"
"""Metadata key under which a file has the locations of its pieces."""


def write_pieces(path: Path, pieces: Iterable[Piece], metadata: Mapping[str, str]) -> None:
    """Writes one rank's pieces into a file, with additional `metadata`."""
    values: dict[str, Tensor] = {}
    places: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        key = piece.name
        if piece.box.shape != piece.whole:
            key = f"{piece.name}#{len(places)}"
            places[key] = {"of": piece.name, "at": piece.box.at, "whole": piece.whole}
        values[key] = piece.values.cpu().contiguous()
    more = {PIECES: json.dumps(places)} if places else {}
    save_file(values, path, metadata={"format": "pt", **more, **metadata})


class _Found(NamedTuple):
    box: IndexBox
    key: str
    file: Any

    def values(self, box: IndexBox) -> Tensor:
        """Returns the elements inside `box`, which must be within this piece's box."""
        if box == self.box:
            return self.file.get_tensor(self.key)  # mapped, not read
        return self.file.get_slice(self.key)[box.within(self.box)]


class StoredPieces:
    """Tensors whose pieces are in several files, opened together: `with StoredPieces(paths) as stored`.

    Raises RequestError if the pieces of a tensor overlap, leave a gap or exceed it, and the errors of `safe_open` for a
    file of another format."""

    def __init__(self, paths: Sequence[Path]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape of the whole tensor."""
        self.metadata: list[dict[str, str]] = []
        """Metadata of each file, in the order of the paths."""
        self._found: dict[str, list[_Found]] = {}
        with ExitStack() as stack:
            for path in paths:
                self._list(path, stack.enter_context(safe_open(path, "pt")))
            for name, found in self._found.items():
                if wrong := gap_or_overlap((one.box for one in found), self.shapes[name]):
                    raise RequestError(
                        f"{paths[0].parent} is damaged: {shown(name)} {wrong}", code="damaged", field=shown(name)
                    )
            self._files = stack.pop_all()

    def __enter__(self) -> StoredPieces:
        return self

    def __exit__(self, *raised: object) -> None:
        self._found.clear()
        self._files.close()

    def _list(self, path: Path, file: Any) -> None:
        """Adds the pieces of an opened file to the index. Raises RequestError for a damaged one."""
        metadata = file.metadata() or {}
        self.metadata.append(metadata)
        places = _places(metadata.get(PIECES, "{}"), path)
        for key in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(key).get_shape())
            name, at, whole = places.pop(key, (key, (0,) * len(shape), shape))
            if len(at) != len(shape) or self.shapes.setdefault(name, whole) != whole:
                raise RequestError(
                    f"{path} is damaged: {shown(key)} is not a piece of a tensor {self.shapes[name]}",
                    code="damaged", field=shown(key),
                )  # fmt: skip
            self._found.setdefault(name, []).append(_Found(IndexBox(at, shape), key, file))
        if places:
            raise RequestError(
                f"{path} is damaged: it lacks the piece {shown(next(iter(places)))}", code="damaged", field=PIECES
            )

    def read(self, name: str, box: IndexBox, into: Tensor) -> None:
        """Copies the elements of tensor `name` inside `box` into the tensor `into` of that shape; no others are
        read."""
        for found in self._found[name]:
            if (common := found.box.meet(box)) is not None:
                into[common.within(box)].copy_(found.values(common))

    def like(self, name: str, tensor: Tensor, place: Place | None = None) -> Tensor:
        """Returns the stored tensor `name`: this rank's part, divided as `tensor` at `place`, if the whole shapes are
        equal; otherwise the whole tensor.

        Raises RequestError if the shapes differ, `tensor` is divided, and the stored tensor is not a scalar."""
        shape, first = self.shapes[name], self._found[name][0]
        dtype = first.values(IndexBox(first.box.at, tuple(min(1, length) for length in first.box.shape))).dtype
        if shape == (whole := whole_of(tensor, place)):
            made = torch.empty_like(tensor.detach(), dtype=dtype)
            for piece in pieces_of(name, made, place):
                self.read(name, piece.box, piece.values)
            return made
        if shape and not lies_whole(tensor, place):
            raise RequestError(
                f"{name} has shape {shape} and its parameter {whole}, which is divided among ranks; resume in one "
                f"process",
                code="unsupported", field=name,
            )  # fmt: skip
        made = torch.empty(shape, dtype=dtype, device=tensor.device)
        self.read(name, IndexBox((0,) * len(shape), shape), made)
        return made


def _places(text: str, path: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Parses the metadata of pieces: key -> (name of its tensor, first index of the piece along each axis, shape of the
    whole tensor). Raises RequestError."""
    try:
        places = {key: (one["of"], tuple(one["at"]), tuple(one["whole"])) for key, one in json.loads(text).items()}
        for name, at, whole in places.values():
            numbers = all(type(number) is int and 0 <= number < 1 << 62 for number in (*at, *whole))
            if not (isinstance(name, str) and numbers and len(at) == len(whole)):
                raise ValueError
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise RequestError(
            f"{path} is damaged: {PIECES} of its header does not locate its pieces", code="damaged", field=PIECES
        ) from None
    return places
