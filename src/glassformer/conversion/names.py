"""Names and layouts of published checkpoints: which tensor holds which of our parameters.

A family maps each of our modules to tensors of the checkpoint ("theirs"):

    "embedding": "model.embed_tokens"                                    one for one
    ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"   ours are theirs, stacked by rows
    ".mixer.qkv": Grouped("attn.query_key_value")                        another layout

A leading dot is a module of a layer. A layout is a list of pieces, each a view of a published tensor and a view of our
parameter with equal elements, so that one description reads and writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from glassformer.parts.linear import GroupedLinear, Linear

View = Callable[[Tensor], Tensor]

LAYER = re.compile(r"layers\.(\d+)(\..+)")
OWNER = re.compile(r"(encoder\.)?layers\.\d+")


class TensorPiece(NamedTuple):
    """Elements that our parameter and a published tensor share: `ours(parameter)` and `theirs(tensor)` are equal
    views."""

    name: str
    """Name of the published tensor."""
    shape: tuple[int, ...]
    """Shape of the whole published tensor."""
    ours: View | None = None
    theirs: View | None = None
    """View of the published tensor; None for all of it."""
    shift: float = 0.0
    """Published element minus ours, a constant."""
    row: int | None = None
    """First row of our parameter, if the whole published tensor is a slice of its rows; None otherwise."""

    @property
    def whole(self) -> bool:
        return self.ours is None and self.theirs is None and self.row is None and not self.shift

    def mine(self, ours: Tensor) -> Tensor:
        """Returns the piece's view of our parameter, or of a tensor of its shape."""
        if self.row is not None:
            return ours[self.row : self.row + self.shape[0]]
        return self.ours(ours) if self.ours else ours

    def their(self, theirs: Tensor) -> Tensor:
        """Returns the piece's view of the published tensor."""
        return self.theirs(theirs) if self.theirs else theirs


class OwnParameter(NamedTuple):
    """One of our parameters, with the facts that a layout depends on."""

    shape: tuple[int, ...]
    leaf: str
    module: nn.Module
    mixer: Any
    """Mixer of the parameter's layer, with n_heads, n_kv_heads and head_dim; None outside of layers."""


class TensorLayout:
    def __init__(self, *names: str):
        self.names = names

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        raise NotImplementedError

    def suffix(self, leaf: str) -> str:
        """Returns the end of the published tensor's name for our parameter `leaf`, such as "weight"."""
        return f".{leaf}"


class Stacked(TensorLayout):
    """Layout of a parameter that equals the published tensor; several tensors are stacked by rows."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if len(self.names) == 1:
            return [TensorPiece(self.names[0], at.shape)]
        rows, start, made = at.module.outs if isinstance(at.module, Linear) else (), 0, []
        for name, n in zip(self.names, rows, strict=True):
            made.append(TensorPiece(name, (n, *at.shape[1:]), row=start))
            start += n
        return made


class Flat(TensorLayout):
    """Layout of a parameter whose rows the published checkpoint stores as one vector (norms in groups)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [TensorPiece(self.names[0], (prod(at.shape),), lambda w: w.view(-1))]


class Transposed(TensorLayout):
    """Layout of a matrix that the published checkpoint stores as (in, out) (GPT-2's Conv1D)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if len(at.shape) == 1:
            return [TensorPiece(self.names[0], at.shape)]
        return [TensorPiece(self.names[0], at.shape[::-1], lambda w: w.T)]


class Grouped(TensorLayout):
    """Layout of q, k and v whose published tensor has rows (g, n/g + 2, h): for each KV head its queries, its key, its
    value (GPT-NeoX, BLOOM, Falcon)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        n, g, h = at.mixer.n_heads, at.mixer.n_kv_heads, at.mixer.head_dim
        r, rest, made, start = n // g, at.shape[1:], [], 0
        for first, count in ((0, r), (r, 1), (r + 1, 1)):
            end = start + count * g * h

            def ours(w: Tensor, a: int = start, b: int = end, count: int = count) -> Tensor:
                return w[a:b].view(g, count, h, *rest)

            def theirs(w: Tensor, first: int = first, count: int = count) -> Tensor:
                return w.view(g, r + 2, h, *rest)[:, first : first + count]

            made.append(TensorPiece(self.names[0], at.shape, ours, theirs))
            start = end
        return made


class Part(TensorLayout):
    """Layout of a parameter that is the i-th of k equal parts of a published tensor's rows (Phi-3's gate_up_proj)."""

    def __init__(self, name: str, i: int, k: int):
        super().__init__(name)
        self.i, self.k = i, k

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        shape = (at.shape[0] * self.k, *at.shape[1:])
        return [TensorPiece(self.names[0], shape, None, lambda w: w.chunk(self.k)[self.i])]


class Shifted(Stacked):
    """Layout of a norm that stores w - 1 here and w in the published file (Gemma's in GGUF)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [piece._replace(shift=1.0) for piece in super().pieces(at)]


class EachHead(TensorLayout):
    """Layout of a parameter with a row per head, published as a tensor per head; `#` in the name is the index of the
    head (StableLM's qk norms)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [
            TensorPiece(self.names[0].replace("#", str(head)), at.shape[1:], lambda w, head=head: w[head])  # type: ignore[misc]
            for head in range(at.shape[0])
        ]


class EachExpert(TensorLayout):
    """Layout of a parameter that stacks the rows of all experts, published as a tensor per expert; `#` in the name is
    the index of the expert. `dense`: the name in layers that have one FFN instead."""

    def __init__(self, name: str, dense: str = ""):
        super().__init__(name)
        self.dense = dense

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if not isinstance(at.module, GroupedLinear):
            return [TensorPiece(self.dense, at.shape)]
        count = len(at.module.outs)
        n = at.shape[0] // count
        shape = (n, *at.shape[1:])
        return [TensorPiece(self.names[0].replace("#", str(one)), shape, row=one * n) for one in range(count)]


class Bare(Stacked):
    """Layout of a parameter published under a name without a module: `name`, and `name_bias`."""

    def suffix(self, leaf: str) -> str:
        return "" if leaf == "weight" else f"_{leaf}"


class OfExperts(Bare):
    """Layout of a parameter (e out, in) that is the i-th of k parts of the columns of one published tensor (e, in, k
    out): contiguous columns, or every k-th (gpt-oss)."""

    def __init__(self, name: str, i: int = 0, k: int = 1, interleaved: bool = False, dense: str = ""):
        """Describes part `i` of `k`; `interleaved`: True for every k-th column; `dense`: the name in layers that have
        one FFN instead."""
        super().__init__(name)
        self.i, self.k, self.interleaved, self.dense = i, k, interleaved, dense

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if not isinstance(at.module, GroupedLinear):
            return [TensorPiece(f"{self.dense}.weight", at.shape)]
        e = len(at.module.outs)
        out, inner = at.shape[0] // e, at.shape[1:]
        columns = slice(self.i, None, self.k) if self.interleaved else slice(self.i * out, (self.i + 1) * out)

        def ours(w: Tensor) -> Tensor:
            return w.view(e, out, *inner).movedim(1, -1)

        return [TensorPiece(self.names[0], (e, *inner, self.k * out), ours, lambda w: w[..., columns])]


class HeadByHead(TensorLayout):
    """Layout of several matrices, stacked by rows in our parameter and interleaved head by head in the published tensor
    (DeepSeek's kv_b)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        outs, n, rest, made = at.module.outs, at.mixer.n_heads, at.shape[1:], []
        whole, start, first = sum(outs) // n, 0, 0  # type: ignore[arg-type]
        for out in outs:  # type: ignore[union-attr]

            def ours(w: Tensor, a: int = start, rows: int = out) -> Tensor:
                return w[a : a + rows].view(n, rows // n, *rest)

            def theirs(w: Tensor, first: int = first, rows: int = out) -> Tensor:
                return w.view(n, whole, *rest)[:, first : first + rows // n]

            made.append(TensorPiece(self.names[0], at.shape, ours, theirs))
            start, first = start + out, first + out // n
        return made


class Paired(Stacked):
    """Layout `Stacked` for q, k and v, whose published q and k have the rows in the order that rotates neighbours: row
    2i of a head is our row i, row 2i+1 our row i + h/2 (the rotary order of Meta's Llama, which GGUF keeps for
    `llama`)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        h = at.mixer.head_dim
        q, k, v = super().pieces(at)
        return [*(TensorPiece(p.name, p.shape, _halves(p.mine, h), _pairs(h)) for p in (q, k)), v]


def _halves(rows: View, h: int) -> View:
    """Returns `rows` followed by the view (heads h, ...) -> (heads, h/2, 2, ...): features i and i + h/2 adjacent."""
    return lambda w: rows(w).unflatten(0, (-1, 2, h // 2)).transpose(1, 2)


def _pairs(h: int) -> View:
    return lambda w: w.unflatten(0, (-1, h // 2, 2))


def modules_of(module: nn.Module, path: str = "", found: dict[str, nn.Module] | None = None) -> dict[str, nn.Module]:
    """Returns {path: module} as `named_modules()` gives it, in a quarter of the time, for a tree without shared
    modules."""
    found = {} if found is None else found
    found[path] = module
    for name, child in module._modules.items():
        if child is not None:
            modules_of(child, f"{path}.{name}" if path else name, found)
    return found


@dataclass(frozen=True)
class Names:
    """Map of our module paths to published module names or layouts; `layer` is the prefix of a published layer, with *
    for its index."""

    layer: str
    modules: Mapping[str, str | TensorLayout]
    prefix: str = ""
    """Prefix of names that checkpoints of the bare model, without a head, omit."""
    ignored: str = r"(?!)"
    """Regular expression of published tensors that hold no weights."""
    overflows: bool = False
    """True if activations with the published weights exceed 65,504, the largest float16; such a file is loaded in
    float32."""
    copies: frozenset[str] = frozenset()
    """Published tensors that repeat the embedding's table; a file in which one differs is refused."""
    wholes: Mapping[str, str] = field(default_factory=dict)
    """Part of our layer -> published module that computes all of it, for parts whose weights have no separate modules.
    """
    apart: frozenset[str] = frozenset()
    """Parts of our layer whose published module computes more than the part (a norm and its gate), so that its inputs
    and outputs differ from ours."""
    buffers: Mapping[str, str] = field(default_factory=dict)
    """Our buffer -> published tensor, for values of a checkpoint that are not trained."""
    absent: frozenset[str] = frozenset()
    """Published tensors that a checkpoint may lack; their values are then 0."""
    encoder: Names | None = None
    """Names of the encoder's modules, without the prefix `encoder.`; None without an encoder."""
    blocks: int = 1
    """Number of our blocks in one published layer; if several, our paths start with the block's index, as in
    `.1.mixer.output`."""

    def layout(self, module: str) -> tuple[TensorLayout, str]:
        """Returns (layout of our module `module`, prefix of its published names). Raises KeyError for an unknown
        module."""
        names, key, stem = self._found(module)
        return names._layouts[key], stem

    def _found(self, module: str) -> tuple[Names, str, str]:
        """Returns (the names that apply to our module `module`, its key in them, prefix of its published names); for
        modules of the encoder the names are the encoder's."""
        if self.encoder is not None and module.startswith("encoder."):
            return self.encoder._found(module.removeprefix("encoder."))
        if (layer := LAYER.fullmatch(module)) is None:
            return self, module, ""
        number, within = divmod(int(layer[1]), self.blocks)
        key = layer[2] if self.blocks == 1 else f".{within}{layer[2]}"
        return self, key, self.layer.replace("*", str(number))

    @cached_property
    def _layouts(self) -> dict[str, TensorLayout]:
        return {
            module: named if isinstance(named, TensorLayout) else Stacked(*named.split())
            for module, named in self.modules.items()
        }

    def pieces(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, list[TensorPiece]]]:
        """Yields (our name, our parameter, its pieces) for every parameter of a model, whose modules `modules_of`
        returns.

        Raises KeyError for a module that the family does not have."""
        seen: set[int] = set()
        for module, owner in modules.items():
            for leaf, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                layout, stem = self.layout(module)
                mixer = modules[f"{OWNER.match(module)[0]}.mixer"] if stem else None  # type: ignore[index]
                place = OwnParameter(tuple(parameter.shape), leaf, owner, mixer)
                pieces = [
                    TensorPiece(
                        f"{stem}{p.name}{layout.suffix(leaf)}", p.shape, p.ours, p.theirs, p.shift, p.row
                    )  # `_replace` takes 1 us
                    for p in layout.pieces(place)
                ]
                yield f"{module}.{leaf}", parameter, pieces
            if self.buffers:
                yield from self._kept(module, owner)

    def _kept(self, module: str, owner: nn.Module) -> Iterator[tuple[str, Tensor, list[TensorPiece]]]:
        names, key, stem = self._found(module)
        for leaf, value in owner._buffers.items():
            named = names.buffers.get(f"{key}.{leaf}")
            if value is not None and named is not None:
                yield f"{module}.{leaf}", value, [TensorPiece(f"{stem}{named}", tuple(value.shape))]
