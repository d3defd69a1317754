"""From a checkpoint's tensors to a model's parameters, and back."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.convert.family import complaints
from glassformer.convert.names import Names, Piece, modules_of
from glassformer.convert.packed import PackedLinear
from glassformer.convert.storage import DTYPES, Packed, Source, TensorFile
from glassformer.convert.storage.base import pieces as by_rows
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.linear import Linear


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's garbage collector goes through young objects again and again while thousands are made that stay."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@_nothing_collected()
def fill(
    config: ModelConfig,
    names: Names,
    file: TensorFile,
    dtype: torch.dtype | None = None,
    device: Any = None,
    keep: bool = False,
    where: str | None = None,
) -> Model:
    """A model with the file's weights; `dtype=None` keeps the file's own, fp32 for quantised tensors.

    A tensor that lies in the file as the model holds it becomes a parameter where it is, mapped and read when first
    used; the others are read straight into their place. With `keep`, quantised matrices stay packed and are unpacked
    at every use. The model's own config is another one than `config` where that ties a head which the file has twice
    and differently. `where` names the file of the config, if it is another one. Raises RequestError that names the
    first tensor that is missing, superfluous, or of another shape."""
    if config.n_layers > len(file.entries):
        raise RequestError(
            f"{file.path} has {len(file.entries)} tensors, and the config asks for {config.n_layers} layers"
        )
    theirs, dtype, device = _Theirs(file, names), dtype or common_dtype(file), torch.device(device or "cpu")
    config = theirs.with_its_head(config, dtype)
    with complaints(where or str(file.path)):
        model = config.outline()
    modules = modules_of(model)
    for module in modules.values():
        vars(module)["training"] = False  # what `eval` does, in a tenth of the time
    packed: dict[str, list[tuple[Piece, Packed]]] = {}
    for path, parameter, pieces in list(names.pieces(modules)):
        theirs.check(path, pieces)
        owner, _, leaf = path.rpartition(".")
        module = modules[owner]
        if keep and isinstance(module, Linear) and module.packable and leaf == "weight" and theirs.quantised(pieces):
            packed[owner] = [(piece, file.packed(theirs.entry(piece.name).name)) for piece in pieces]
        else:
            value = _read(theirs, pieces, tuple(parameter.shape), dtype, device)
            if leaf in module._parameters:  # `setattr` of a module takes longer than all that is above
                module._parameters[leaf] = nn.Parameter(value)
            else:
                module._buffers[leaf] = value
    theirs.check_all_used()
    for path, parts in packed.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, Linear)
        model.set_submodule(path, PackedLinear(linear, parts, dtype).eval())
    return model


def _read(
    theirs: _Theirs, pieces: list[Piece], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    entries = [theirs.entry(piece.name) for piece in pieces]
    if DTYPES.get(entries[0].dtype) == dtype and as_it_lies(pieces, shape):
        there = theirs.file.stacked(entries, shape)
        if there is not None:
            return there if there.device == device else there.to(device)
    made = torch.empty(shape, dtype=dtype)
    for piece in pieces:
        name = theirs.entry(piece.name).name
        mine = piece.mine(made)
        if piece.theirs is None:
            theirs.file.read_into(name, mine)
        else:
            mine.copy_(piece.theirs(theirs.file.tensor(name)))
        if piece.shift:
            mine -= piece.shift
    return made.to(device)


def as_it_lies(pieces: list[Piece], shape: tuple[int, ...]) -> bool:
    """Whether our tensor is theirs, whole and unchanged, one below the other."""
    if len(pieces) == 1 and pieces[0].whole:
        return True
    at = 0
    for piece in pieces:
        if piece.row != at or piece.ours or piece.theirs or piece.shift:
            return False
        at += piece.shape[0]
    return at == shape[0]


def common_dtype(file: TensorFile) -> torch.dtype:
    """The floating dtype that most of the file's values have; quantised ones count as fp32."""
    sizes: dict[torch.dtype, int] = {}
    for entry in file.entries.values():
        dtype = DTYPES.get(entry.dtype, torch.float32)
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + entry.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


class _Theirs:
    """The tensors of a file under the names that its family uses, and which of them were used."""

    def __init__(self, file: TensorFile, names: Names):
        self.file, self.names = file, names
        self.used: set[str] = set()
        bare = names.prefix and not any(name.startswith(names.prefix) for name in file.entries)
        self.cut = names.prefix if bare else ""

    def entry(self, name: str) -> Any:
        return self.file.entries[name.removeprefix(self.cut)]

    def quantised(self, pieces: list[Piece]) -> bool:
        return all(self.entry(piece.name).dtype not in DTYPES for piece in pieces)

    def check(self, path: str, pieces: list[Piece]) -> None:
        for piece in pieces:
            name = piece.name.removeprefix(self.cut)
            if name not in self.file.entries:
                raise RequestError(f"{self.file.path} has no tensor {name}, which is to become {path}")
            if (shape := tuple(self.file.entries[name].shape)) != piece.shape:
                raise RequestError(
                    f"{self.file.path}: {name} has shape {shape}, and the config asks for {piece.shape} ({path})"
                )
            self.used.add(name)

    def with_its_head(self, config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
        """`config`, untied where the file has a head besides the embedding that differs from it, as `transformers`
        decides it; one that is equal counts as used."""
        if not config.head.tied or "head" not in self.names.modules:
            return config
        head, embedding = (f"{self.names.modules[module]}.weight" for module in ("head", "embedding"))
        if head not in self.file.entries:
            return config
        if self._equal(head, embedding.removeprefix(self.cut), dtype):
            self.used.add(head)
            return config
        warnings.warn(
            f"{self.file.path} has a {head} that differs from {embedding}, and the config ties them: they are loaded "
            "untied; set tie_word_embeddings to false there"
        )
        return config.vary(head=config.head.vary(tied=False))

    def _equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in `dtype`; looked at piece by piece, where they lie."""
        pairs = zip(*(by_rows(self.file.tensor(name)) for name in (one, other)), strict=True)
        same = self.file.entry(one).shape == self.file.entry(other).shape
        return same and all(torch.equal(mine.to(dtype), theirs.to(dtype)) for mine, theirs in pairs)

    def check_all_used(self) -> None:
        for name in self.file.entries.keys() - self.used:
            if not re.fullmatch(self.names.ignored, self.cut + name):
                raise RequestError(f"{self.file.path} has a tensor {name} that the config's model does not have")


class _Gathered:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.parts: list[tuple[Piece, Tensor]] = []

    def __call__(self) -> Tensor:
        piece, parameter = self.parts[0]
        if piece.whole and len(self.parts) == 1:
            return parameter.detach().to("cpu", self.dtype).contiguous()
        made = torch.empty(self.shape, dtype=self.dtype)
        for piece, parameter in self.parts:
            value = parameter.detach()
            theirs = piece.their(made)
            theirs.copy_(piece.mine(value))
            if piece.shift:
                theirs += piece.shift
        return made


def tensors(model: Model, names: Names, dtype: torch.dtype | None = None) -> Mapping[str, Source]:
    """Their name -> a source of their tensor, for every weight of the model; a tied head is written once, as the
    embedding. Raises RequestError for packed weights."""
    if any(isinstance(module, Linear) and not isinstance(module.weight, nn.Parameter) for module in model.modules()):
        raise RequestError("packed weights are not written; load the model without quantize and save that")
    found: dict[str, _Gathered] = {}
    for _, parameter, pieces in names.pieces(modules_of(model)):
        for piece in pieces:
            source = found.setdefault(piece.name, _Gathered(piece.shape, dtype or parameter.dtype))
            source.parts.append((piece, parameter))
    return found
