"""Initial or given weights for this rank's part of a model: no rank holds more than its part.

A model is built on the meta device, divided there, and allocated only for its part; then each piece is drawn, or copied
from whole weights. Initial values depend only on the seed and the weight's name, so that every layout starts with the
bits of one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parallel.pieces import IndexBox, pieces_of, places_of
from glassformer.parts.building import InitialWeights


@torch.no_grad()
def fill_pieces(model: nn.Module, initial: InitialWeights, given: Mapping[str, Tensor] | None = None) -> None:
    """Fills this rank's parameters and buffers in place: from `given`, whole tensors by name, or for None from
    `initial`. Buffers that are not saved always come from `initial`. Raises RequestError if `given` lacks a tensor, or
    has it in another shape."""
    places, kept = places_of(model), model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for piece in pieces_of(name, tensor, places.get(name)):
            if given is None or name not in kept:
                piece.values.copy_(_drawn(initial, name, piece.box))
                continue
            whole = given.get(name)
            if whole is None or whole.shape != piece.whole:
                found = "not there" if whole is None else str(tuple(whole.shape))
                raise RequestError(
                    f"the weights given do not fit: {name} is {found}, and {piece.whole} in the model",
                    code="conflict", field="given", value=name, expected=str(piece.whole),
                )  # fmt: skip
            piece.values.copy_(_cut(whole, piece.box))


def _drawn(initial: InitialWeights, name: str, box: IndexBox) -> Tensor:
    """Returns the initial elements of parameter `name` inside a box: only its rows, and its columns if it lacks some,
    are drawn; along other axes the drawn tensor is cut."""
    cut = [slice(first, last) for first, last in zip(box.at, box.end, strict=True)]
    whole = initial.tensors[name].shape[1:2]
    columns = cut[1:2] if whole and whole != box.shape[1:2] else []
    drawn = initial.piece(name, *cut[:1], *columns)
    return drawn[(slice(None), slice(None), *cut[2:])] if len(cut) > 2 else drawn


def _cut(whole: Tensor, box: IndexBox) -> Tensor:
    return whole[tuple(slice(first, last) for first, last in zip(box.at, box.end, strict=True))]
