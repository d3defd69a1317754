"""Tensors that ranks saved in parts, one file for each rank, joined to whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from glassformer.conversion.storage.base import Packed, SingleFile, TensorEntry, TensorFile, quoted
from glassformer.errors import RequestError

Axis = Callable[[str, tuple[int, ...]], int | None]
"""Function of a tensor's name and the shape of a part to the axis along which ranks divided it; None if each rank has a
copy."""


class CutFile(TensorFile):
    """Files of several ranks as one: each tensor is joined, when it is read, along the axis of its division.

    Raises RequestError for files that differ in their tensors' names or shapes, or lack an axis to join."""

    def __init__(self, path: Path, files: list[SingleFile], axis: Axis):
        self.path, self._files = path, files
        self.metadata = {}
        self._axes = {name: axis(name, entry.shape) for name, entry in files[0].entries.items()}
        self.entries = {name: self._whole(name) for name in self._axes}
        for file in files[1:]:
            if more := sorted(file.entries.keys() - self._axes.keys()):
                raise RequestError(
                    f"{file.path} has a tensor {quoted(more[0])}, which {files[0].path.name} lacks",
                    code="conflict", field=f"tensor {quoted(more[0])}",
                )  # fmt: skip

    def _whole(self, name: str) -> TensorEntry:
        first, axis = self._files[0].entry(name), self._axes[name]
        for file in self._files[1:]:
            part = file.entry(name)
            if (part.dtype, part.shape) != (first.dtype, first.shape):
                raise RequestError(
                    f"{file.path}: {quoted(name)} is {part.dtype} {part.shape}, and in {self._files[0].path.name} "
                    f"{first.dtype} {first.shape}",
                    code="conflict", field=f"tensor {quoted(name)}", value=part.shape, expected=str(first.shape),
                )  # fmt: skip
        if axis is None:
            return first
        if axis >= len(first.shape):
            raise RequestError(
                f"{self._files[0].path}: {quoted(name)} is a part of a matrix, and has the shape {first.shape}",
                code="damaged", field=f"tensor {quoted(name)}", value=first.shape, expected="a matrix",
            )  # fmt: skip
        count = len(self._files)
        shape = tuple(size * count if at == axis else size for at, size in enumerate(first.shape))
        return first._replace(shape=shape, nbytes=first.nbytes * count)

    def tensor(self, name: str) -> Tensor:
        axis = self._axes[self.entry(name).name]
        return self._files[0].tensor(name) if axis is None else torch.cat([f.tensor(name) for f in self._files], axis)

    def read_into(self, name: str, out: Tensor, rows: slice | None = None) -> None:
        value = self.tensor(name)
        out.detach().copy_(value if rows is None else value[rows])

    def stacked(self, parts: object, shape: object) -> None:
        """Returns None, because the parts of a tensor are not contiguous."""

    def packed(self, name: str) -> Packed:
        value = self.tensor(name)
        return Packed(self.entry(name).dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8))

    def home(self, entry: TensorEntry) -> NoReturn:
        raise RequestError(
            f"{quoted(entry.name)} is stored in {len(self._files)} files of {self.path}",
            code="unsupported", field=f"tensor {quoted(entry.name)}",
        )  # fmt: skip

    def close(self) -> None:
        for file in self._files:
            file.close()
