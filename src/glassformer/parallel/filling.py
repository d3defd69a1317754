"""Weights for the part of a model that lies on this rank: no rank holds more of the model than its part.

A model is built on the meta device, divided there, and gets memory for its part alone; then each piece is drawn, or
copied from weights that are given. What a weight begins with depends on the seed and its name, so that every layout
begins with the bits of one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from glassformer.building import InitialWeights
from glassformer.parallel.pieces import Box, pieces_of, places_of


@torch.no_grad()
def fill_pieces(model: nn.Module, initial: InitialWeights, given: Mapping[str, Tensor] | None = None) -> None:
    """Fills parameters and buffers, in place: with `given`, whole tensors by name, and what it lacks with `initial`."""
    places, given = places_of(model), given or {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for piece in pieces_of(name, tensor, places.get(name)):
            whole = given.get(name)
            piece.values.copy_(_drawn(initial, name, piece.box) if whole is None else _cut(whole, piece.box))


def _drawn(initial: InitialWeights, name: str, box: Box) -> Tensor:
    """Rows, and columns where the box has not all of them, are drawn alone; other axes are cut."""
    cut = [slice(first, last) for first, last in zip(box.at, box.end, strict=True)]
    whole = initial.tensors[name].shape[1:2]
    columns = cut[1:2] if whole and whole != box.shape[1:2] else []
    drawn = initial.piece(name, *cut[:1], *columns)
    return drawn[(slice(None), slice(None), *cut[2:])] if len(cut) > 2 else drawn


def _cut(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(first, last) for first, last in zip(box.at, box.end, strict=True))]
