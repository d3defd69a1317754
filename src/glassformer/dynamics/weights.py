"""Weights, gradients and updates of every named matrix of a model, as rows of statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glassformer.dynamics.gradients import share_moved
from glassformer.dynamics.spectra import (
    effective_rank_of,
    product_row_cosine,
    product_spectrum,
    row_cosine,
    singular_values,
    stable_rank_of,
)
from glassformer.model import Model, Tower
from glassformer.parts.linear import Matrix, Pieces

Statistics = dict[str, dict[str, float | list[float]]]
"""Statistics: {statistic: {place: number, or one for each head}}."""


def named_matrices(model: Model) -> dict[str, Matrix]:
    """Returns every matrix of the model by the name of the site it makes: `embed`, `layers.3.mixer.q`,
    `layers.3.ffn.down`, `head`, for an encoder `encoder.layers.3.mixer.q`; in the order of computation. If layers are
    divided among ranks, only this rank's layers; if matrices are sharded, whole matrices that gather their shards."""
    return _matrices(model) if model.division is None else _joined(model)


def _matrices(model: Model) -> dict[str, Matrix]:
    found = {} if model.encoder is None else {f"encoder.{n}": one for n, one in _of_tower(model.encoder).items()}
    found |= _of_tower(model)
    head: Any = model.head
    if head is not None and head.weight is not None:
        found["head"] = Matrix(head.weight, 0, len(head.weight))
    return found


def _of_tower(tower: Tower) -> dict[str, Matrix]:
    embedding: Any = tower.embedding
    found = {} if embedding is None else embedding.matrices()
    for number, layer in enumerate(tower.layers):
        parts: dict[str, Any] = {"mixer": layer.mixer, "ffn": layer.ffn}
        for branch, part in parts.items():
            if part is not None:
                found |= {f"layers.{number}.{branch}.{name}": matrix for name, matrix in part.matrices().items()}
    return found


def _joined(model: Model) -> dict[str, Matrix]:
    """Returns the matrices as before the model was sharded, each with this rank's shard of its parameter."""
    outline, division, found = model.config.outline(), model.division, _matrices(model)
    names = {id(parameter): name for name, parameter in outline.named_parameters()}
    for where, matrix in _matrices(outline).items():
        if (name := names[id(matrix.parameter)]) in division.cuts:
            pieces = Pieces(matrix.parameter.shape, partial(division.join, name))
            found[where] = replace(matrix, parameter=found[where].parameter, linear=None, pieces=pieces)
    return found


def rows_of(matrix: Matrix, values: Tensor) -> Tensor:
    """Returns the rows of a matrix, (o, i) or (heads, o/heads, i), from `values`: its parameter or a tensor of the
    parameter's shape, gathered if ranks hold shards. All ranks must call it, in one order."""
    gathered: Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return matrix.within(gathered if matrix.pieces is None else matrix.pieces.join(gathered))


def _applied(matrix: Matrix) -> Tensor:
    """Returns `rows_of` the weight that the layer applies, after any reparametrisation, in fp32."""
    return rows_of(matrix, matrix.parameter if matrix.linear is None else matrix.linear.applied()).float()


def norms(matrices: Mapping[str, Matrix], values: Callable[[Tensor], Tensor | None]) -> dict[str, list[float]]:
    """Returns {name: Frobenius norms, one for each head} of every matrix; `values(parameter)` is the tensor to measure,
    such as the gradient.

    Needs one device transfer for all. A matrix for which `values` returns None (an untrained one) is left out."""
    made: dict[str, Tensor] = {}
    for name, matrix in matrices.items():
        tensor = values(matrix.parameter)
        if tensor is not None:
            rows = rows_of(matrix, tensor.detach())
            made[name] = torch.linalg.vector_norm(rows.reshape(matrix.heads or 1, -1), dim=-1, dtype=torch.float32)
    if not made:
        return {}
    flat = torch.cat(list(made.values())).tolist()
    lengths = [len(tensor) for tensor in made.values()]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return {name: flat[end - n : end] for name, end, n in zip(made, ends, lengths, strict=True)}


def pulse(matrices: Mapping[str, Matrix]) -> Statistics:
    """Returns weight norms, gradient norms and gradient RMS of every matrix, which one pass over weights and gradients
    gives and which are cheap enough for every step."""
    weights = norms(matrices, lambda parameter: parameter)
    gradients = norms(matrices, lambda parameter: parameter.grad)
    size = {name: matrix.size // (matrix.heads or 1) for name, matrix in matrices.items()}
    return {
        "weight_norm": {name: _one(values, matrices[name]) for name, values in weights.items()},
        "gradient_norm": {name: _one(values, matrices[name]) for name, values in gradients.items()},
        "gradient_rms": {
            name: _one([value / size[name] ** 0.5 for value in values], matrices[name])
            for name, values in gradients.items()
        },
    }


def updates(matrices: Mapping[str, Matrix], before: Mapping[int, Tensor]) -> Statistics:
    """Returns the `update_ratio` ||dW|| / ||W|| of every matrix, with W before the step; `before` holds the old value
    of each parameter by id."""
    moved = norms(matrices, lambda parameter: parameter.detach() - before[id(parameter)])
    was = norms(matrices, lambda parameter: before[id(parameter)])
    ratio = {name: share_moved(torch.tensor(moved[name]), torch.tensor(was[name])).tolist() for name in moved}
    return {"update_ratio": {name: _one(values, matrices[name]) for name, values in ratio.items()}}


def spectra(matrices: Mapping[str, Matrix]) -> Statistics:
    """Returns spectral norm, effective and stable rank, and row cosine of every matrix of the layers, by head if it has
    heads; and of W_Q W_K^T by head at `layers.N.mixer.qk`, if both read one stream, which excludes latent attention.
    The vocabulary's matrices are left out, because they cost the most."""
    made: Statistics = {"spectral_norm": {}, "effective_rank": {}, "stable_rank": {}, "row_cosine": {}}

    def note(name: str, singular: Tensor) -> None:
        made["spectral_norm"][name] = _values(singular[..., 0])
        made["effective_rank"][name] = _values(effective_rank_of(singular))
        made["stable_rank"][name] = _values(stable_rank_of(singular))

    with torch.no_grad():
        for name, matrix in matrices.items():
            if "layers." in name:
                rows = _applied(matrix)
                note(name, singular_values(rows))
                made["row_cosine"][name] = _values(row_cosine(rows))
        for name, matrix in matrices.items():
            if name.endswith(".mixer.q") and (key := matrices.get(name[:-1] + "k")):
                q, k = _applied(matrix), _applied(key)
                if q.shape[-2:] != k.shape[-2:]:
                    continue
                note(name[:-1] + "qk", product_spectrum(q, k))
                made["row_cosine"][name[:-1] + "qk"] = _values(product_row_cosine(q, k))
    return made


def _one(values: Sequence[float], matrix: Matrix) -> float | list[float]:
    return list(values) if matrix.heads is not None else values[0]


def _values(tensor: Tensor) -> float | list[float]:
    return tensor.tolist()
