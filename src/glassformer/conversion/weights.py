"""Transfer of a checkpoint's tensors to a model's parameters, and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.conversion.family import complaints
from glassformer.conversion.names import Names, TensorPiece, modules_of
from glassformer.conversion.storage import DTYPES, Packed, TensorEntry, TensorFile, TensorSource, nothing_collected
from glassformer.conversion.storage.base import pieces as by_rows
from glassformer.errors import RequestError
from glassformer.figures.terminal import size
from glassformer.machine.threads import LOADING, paced
from glassformer.model import Model
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear
from glassformer.parts.quantized import UNTRAINED, QuantizedLinear
from glassformer.progress import counted

LARGE = 1 << 18
"""Least number of elements of a tensor for which the number of threads that unpack it is tuned."""
NEIGHBOURS = 1 << 20
"""Bytes below which a tensor that is not adjacent to others in use is copied: the system maps some 64 kB at once, and
would bring its unused neighbours into memory."""


@nothing_collected()
def fill(
    config: ModelConfig,
    names: Names,
    file: TensorFile,
    dtype: torch.dtype | None = None,
    device: Any = None,
    keep: bool = False,
    where: str | None = None,
) -> Model:
    """Returns a model with the file's weights in `dtype`; for None, in the most common dtype of the file, fp32 for
    quantised weights.

    A tensor stored in the file as the model holds it becomes a parameter in place, mapped and read when first used;
    others are read into allocated memory. With `keep`, quantised matrices stay quantised and are unpacked at every use.
    The model's config differs from `config` if that ties a head which the file has separately with other values.
    `where` names the file of the config, if it is another one. Raises RequestError that names the first tensor that is
    missing, superfluous, or of another shape."""
    if config.n_layers > len(file.entries):
        raise RequestError(
            f"{file.path} has {len(file.entries)} tensors, and the config asks for {config.n_layers} layers",
            code="conflict", field="n_layers", value=config.n_layers,
        )  # fmt: skip
    theirs = _Theirs(file, names, safe_dtype(names, dtype or common_dtype(file), file), torch.device(device or "cpu"))
    config = theirs.with_its_head(config)
    with complaints(where or str(file.path)):
        model = config.outline()
    modules = modules_of(model)
    for module in modules.values():
        vars(module)["training"] = False  # as `eval` does, in a tenth of the time
    packed: dict[str, list[tuple[TensorPiece, Packed]]] = {}
    spoilt: dict[str, int] = {}
    places = list(names.pieces(modules))
    for path, parameter, pieces in counted(f"loading {Path(file.path).name}", places, len(places)):
        owner, _, leaf = path.rpartition(".")
        module = modules[owner]
        if theirs.lacks(pieces):
            module._buffers[leaf] = torch.zeros(parameter.shape, dtype=theirs.dtype, device=theirs.device)
            continue
        entries = theirs.entries(path, pieces)
        quantised = keep and all(entry.dtype not in DTYPES for entry in entries)
        if quantised and isinstance(module, Linear) and module.packable and leaf == "weight":
            packed[owner] = [(piece, file.packed(entry.name)) for piece, entry in zip(pieces, entries, strict=True)]
        else:
            value = theirs.read(pieces, entries, tuple(parameter.shape))
            if not_finite(value):
                for piece, entry in zip(pieces, entries, strict=True):
                    spoilt[entry.name] = spoilt.get(entry.name, 0) + not_finite(piece.mine(value))
            if leaf in module._parameters:  # `setattr` of a module takes longer than all lines above
                module._parameters[leaf] = nn.Parameter(value)
            else:
                module._buffers[leaf] = value
    theirs.check_all_used()
    warn_spoilt(file.path, {name: count for name, count in spoilt.items() if count})
    for path, parts in packed.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, Linear)
        model.set_submodule(path, PackedLinear(linear, parts, theirs.dtype).eval())
    return model


def not_finite(value: Tensor, dtype: torch.dtype | None = None) -> int:
    """Returns the number of elements that are NaN or infinite, or become so in `dtype`. A tensor without any is read
    only once, for its minimum and maximum, which are NaN if any element is."""
    if not value.numel() or not value.is_floating_point():
        return 0
    most = torch.finfo(dtype or value.dtype).max
    low, high = torch.aminmax(value.detach())
    if low >= -most and high <= most:
        return 0
    return sum(int((~(piece.abs() <= most)).sum()) for piece in by_rows(value.detach()))


def spoilt_weights(model: nn.Module, dtype: torch.dtype | None = None, vectors: bool = True) -> dict[str, int]:
    """Returns {name: number of elements that are NaN or infinite} of the weights that have any, also after conversion
    to `dtype`; without `vectors`, only matrices are converted."""
    counts = {
        name: not_finite(weight, dtype if vectors or weight.dim() > 1 else None)
        for name, weight in model.named_parameters()
    }
    return {name: count for name, count in counts.items() if count}


def spoilt_words(spoilt: Mapping[str, int]) -> str:
    """Returns a phrase for a message with the names and counts of weights that are not finite."""
    named = [f"{name} ({count:,})" for name, count in list(spoilt.items())[:4]]
    more = [f"{len(spoilt) - 4:,} more tensors"] if len(spoilt) > 4 else []
    return f"NaN or infinite values in {', '.join([*named, *more])}"


def warn_spoilt(path: Path, spoilt: Mapping[str, int]) -> None:
    """Warns of weights in `path` that are not finite, with their names and counts; no warning for an empty `spoilt`."""
    if spoilt:
        warnings.warn(f"{path} has {spoilt_words(spoilt)}: what the model computes from them is not a number")


def as_it_lies(pieces: list[TensorPiece], shape: tuple[int, ...]) -> bool:
    """Returns True if our parameter of this `shape` equals the published tensors of its pieces, whole and unchanged,
    stacked by rows."""
    if len(pieces) == 1 and pieces[0].whole:
        return True
    at = 0
    for piece in pieces:
        if piece.row != at or piece.ours or piece.theirs or piece.shift:
            return False
        at += piece.shape[0]
    return at == shape[0]


def common_dtype(file: TensorFile) -> torch.dtype:
    """Returns the floating dtype with the most bytes in the file; quantised and 8-bit weights count as fp32."""
    sizes: dict[torch.dtype, int] = {}
    for entry in file.entries.values():
        dtype = torch.float32 if is_packed(entry) else DTYPES[entry.dtype]
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + entry.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def is_packed(entry: TensorEntry) -> bool:
    """Returns True for quantised weights and 8-bit floats, which are unpacked before computation."""
    dtype = DTYPES.get(entry.dtype)
    return dtype is None or (dtype.is_floating_point and dtype.itemsize == 1)


def packed_formats(file: TensorFile) -> str:
    """Returns a phrase with the formats of a file's quantised weights and their total size; "" without such weights."""
    entries = [entry for entry in file.entries.values() if is_packed(entry)]
    formats = sorted({entry.dtype for entry in entries})
    return f"{', '.join(formats)} ({size(sum(entry.nbytes for entry in entries))})" if formats else ""


def safe_dtype(names: Names, dtype: torch.dtype, file: TensorFile) -> torch.dtype:
    """Returns `dtype`, but float32, with a warning, instead of float16 for a family whose activations overflow float16.

    transformers keeps such a family's output matrices in float32 and clamps the residual stream."""
    if not names.overflows or dtype != torch.float16:
        return dtype
    warnings.warn(
        f"{file.path}: models of this family overflow float16; it is loaded in float32 (dtype='bfloat16' takes half)"
    )
    return torch.float32


class _Theirs:
    """The tensors of a file under a family's names, with a record of those that were used."""

    def __init__(self, file: TensorFile, names: Names, dtype: torch.dtype, device: torch.device):
        self.file, self.names, self.dtype, self.device = file, names, dtype, device
        self.used: set[str] = set()
        alone = any(DTYPES.get(entry.dtype) != dtype for entry in file.entries.values())
        self.least = NEIGHBOURS if alone else 0
        """Bytes above which a tensor is mapped."""
        bare = names.prefix and not any(name.startswith(names.prefix) for name in file.entries)
        self.cut = names.prefix if bare else ""

    def lacks(self, pieces: list[TensorPiece]) -> bool:
        """Returns True if the file has no tensor for any of the pieces, and the family allows this."""
        return all(
            piece.name in self.names.absent and piece.name.removeprefix(self.cut) not in self.file.entries
            for piece in pieces
        )

    def entries(self, path: str, pieces: list[TensorPiece]) -> list[TensorEntry]:
        """Returns the file's entries for the pieces of our parameter `path`, and marks them as used. Raises
        RequestError for a missing tensor or another shape."""
        found = []
        for piece in pieces:
            name = piece.name.removeprefix(self.cut)
            entry = self.file.entries.get(name)
            if entry is None:
                raise RequestError(
                    f"{self.file.path} has no tensor {name}, which is to become {path}",
                    code="missing", field=f"tensor {name}",
                )  # fmt: skip
            if entry.shape != piece.shape:
                raise RequestError(
                    f"{self.file.path}: {name} has shape {entry.shape}, and the config asks for {piece.shape} ({path})",
                    code="conflict", field=f"tensor {name}", value=entry.shape,
                )  # fmt: skip
            self.used.add(name)
            found.append(entry)
        return found

    def read(self, pieces: list[TensorPiece], entries: list[TensorEntry], shape: tuple[int, ...]) -> Tensor:
        first = entries[0]
        if DTYPES.get(first.dtype) == self.dtype and first.nbytes >= self.least and as_it_lies(pieces, shape):
            there = self.file.stacked(entries, shape)
            if there is not None:
                return there if there.device == self.device else there.to(self.device)
        made = torch.empty(shape, dtype=self.dtype)
        with paced(LOADING, "unpacking", made.numel()) if made.numel() >= LARGE else nullcontext():
            for piece, entry in zip(pieces, entries, strict=True):
                mine = piece.mine(made)
                if piece.theirs is None:
                    self.file.read_into(entry.name, mine)
                else:
                    mine.copy_(piece.theirs(self.file.tensor(entry.name)))
                if piece.shift:
                    mine -= piece.shift
        return made.to(self.device)

    def with_its_head(self, config: ModelConfig) -> ModelConfig:
        """Returns `config`, with an untied head if the file has a head that differs from the embedding, as
        `transformers` does; a head equal to the embedding is marked as used."""
        if not config.head.tied or "head" not in self.names.modules:
            return config
        head, embedding = (f"{self.names.modules[module]}.weight" for module in ("head", "embedding"))
        if head not in self.file.entries:
            return config
        if self._equal(head, embedding.removeprefix(self.cut)):
            self.used.add(head)
            return config
        warnings.warn(
            f"{self.file.path} has a {head} that differs from {embedding}, and the config ties them: they are loaded "
            "untied; set tie_word_embeddings to false there"
        )
        return config.replace(head=config.head.replace(tied=False))

    def _equal(self, one: str, other: str) -> bool:
        """Returns True if two tensors of the file have equal elements in the loaded dtype; compared without a copy of
        the whole."""
        dtype = self.dtype
        pairs = zip(*(by_rows(self.file.tensor(name)) for name in (one, other)), strict=True)
        same = self.file.entry(one).shape == self.file.entry(other).shape
        return same and all(torch.equal(mine.to(dtype), theirs.to(dtype)) for mine, theirs in pairs)

    def check_all_used(self) -> None:
        """Raises RequestError if the file has a tensor that belongs to no parameter of the model."""
        table = f"{self.names.modules.get('embedding')}.weight".removeprefix(self.cut)
        for copy in sorted(self.names.copies):
            name = copy.removeprefix(self.cut)
            if name in self.file.entries and not self._equal(name, table):
                raise RequestError(
                    f"{self.file.path}: {name} differs from {table}; models with one table for both are supported",
                    code="unsupported", field=f"tensor {name}", expected=f"the values of {table}",
                )  # fmt: skip
            self.used.add(name)
        for name in self.file.entries.keys() - self.used:
            if not re.fullmatch(self.names.ignored, self.cut + name):
                raise RequestError(
                    f"{self.file.path} has a tensor {name} that the config's model does not have",
                    code="unknown", field=f"tensor {name}",
                )  # fmt: skip


class _Gathered:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.parts: list[tuple[TensorPiece, Tensor]] = []

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


def tensors(model: Model, names: Names, dtype: torch.dtype | None = None) -> Mapping[str, TensorSource]:
    """Returns {published name: source of the tensor in `dtype`} of every weight of the model, for writing; a tied head
    is written once, as the embedding. Raises RequestError for quantised weights."""
    if any(isinstance(module, Linear) and not isinstance(module.weight, nn.Parameter) for module in model.modules()):
        raise RequestError(
            "packed weights are not written; load the model without quantize and save that",
            code="unsupported", field="quantize",
        )  # fmt: skip
    found: dict[str, _Gathered] = {}
    for _, parameter, pieces in names.pieces(modules_of(model)):
        for piece in pieces:
            source = found.setdefault(piece.name, _Gathered(piece.shape, dtype or parameter.dtype))
            source.parts.append((piece, parameter))
    return found


@torch.no_grad()
def fold(model: Model) -> Model:
    """Returns the model with plain linear layers: each reparametrised weight is replaced by its value.

    A model without reparametrised matrices is returned itself; otherwise a new one, which shares all other weights.
    """
    if model.config.reparam is None:
        return model
    weights = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, (Linear, Head)) and module.reparam is not None:
            weights[f"{path}.weight"] = module.applied()
            for name in module.reparam.state_dict():
                del weights[f"{path}.reparam.{name}"]
    plain = model.config.replace(reparam=None).outline()
    plain.load_state_dict(weights, assign=True)
    plain.ends = model.ends
    return plain.train(model.training)


class PackedLinear(Linear):
    """A `Linear` whose weight stays quantised and is unpacked at every call: memory for the file's bytes, plus one full
    weight at a time.

    Equals the `Linear` with the unpacked weight; it is not trainable."""

    def __init__(self, like: Linear, packed: Sequence[tuple[TensorPiece, Packed]], dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.outs, self.roles, self.bias = like.in_features, like.outs, like.roles, like.bias
        self.reparam = None
        self.packed, self.dtype = list(packed), dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        made = torch.empty(sum(self.outs), self.in_features, dtype=self.dtype)
        for piece, packed in self.packed:
            value = packed.dequantize(self.dtype)
            piece.mine(made).copy_(piece.their(value))
        return made

    def train(self, mode: bool = True) -> PackedLinear:
        if mode:
            raise RequestError(UNTRAINED, code="unsupported", field="quantize")
        return super().train(mode)

    @property
    def nbytes(self) -> int:
        return sum(packed.bytes.nbytes for _, packed in self.packed)


def precision(model: nn.Module) -> str:
    """Returns the name of the precision in which a model's matrices are held: int8, int4, the format of the first one
    that stays packed as in its file, such as Q4_1, or the dtype."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            return module.packed[0][1].dtype
        if isinstance(module, QuantizedLinear):
            return f"int{module.bits}" if module.bits < 16 else "bfloat16"
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def held_bytes(model: nn.Module) -> int:
    """Returns the number of bytes that a model's weights take in memory: of parameters and of packed matrices."""
    packed = (module.nbytes for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear))
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(packed)
