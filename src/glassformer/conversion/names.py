"""Our parameters and the tensors of a published checkpoint: equal elements under other names, in another layout.

A family maps each of our modules to their tensors:

    "embedding": "model.embed_tokens"                                    one for one
    ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"   ours are theirs, stacked by rows
    ".mixer.qkv": Grouped("attn.query_key_value")                        another layout

A leading dot is a module of a layer. A layout is a list of pieces, each a view of their tensor and the view of ours
with equal elements, so that one description reads and writes.
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
    """Equal elements of `ours(our tensor)` and `theirs(their tensor)`, two views of one shape."""

    name: str
    """Name of their tensor."""
    shape: tuple[int, ...]
    """Shape of their whole tensor."""
    ours: View | None = None
    theirs: View | None = None
    """View of their tensor; None for the whole tensor."""
    shift: float = 0.0
    """Constant that theirs exceeds ours by."""
    row: int | None = None
    """First row of ours, if their whole tensor is a slice of our rows; None otherwise."""

    @property
    def whole(self) -> bool:
        return self.ours is None and self.theirs is None and self.row is None and not self.shift

    def mine(self, ours: Tensor) -> Tensor:
        """Returns the view of our tensor."""
        if self.row is not None:
            return ours[self.row : self.row + self.shape[0]]
        return self.ours(ours) if self.ours else ours

    def their(self, theirs: Tensor) -> Tensor:
        """Returns the view of their tensor."""
        return self.theirs(theirs) if self.theirs else theirs


class OwnParameter(NamedTuple):
    """One of our parameters, with the facts that layouts depend on."""

    shape: tuple[int, ...]
    leaf: str
    module: nn.Module
    mixer: Any
    """Mixer of the module's layer: n_heads, n_kv_heads, head_dim."""


class TensorLayout:
    def __init__(self, *names: str):
        self.names = names

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        raise NotImplementedError

    def suffix(self, leaf: str) -> str:
        """Returns the end of their tensor's name, for a parameter such as "weight"."""
        return f".{leaf}"


class Stacked(TensorLayout):
    """Ours equals theirs; several names are stacked by rows."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if len(self.names) == 1:
            return [TensorPiece(self.names[0], at.shape)]
        rows, start, made = at.module.outs if isinstance(at.module, Linear) else (), 0, []
        for name, n in zip(self.names, rows, strict=True):
            made.append(TensorPiece(name, (n, *at.shape[1:]), row=start))
            start += n
        return made


class Flat(TensorLayout):
    """Theirs is a vector, our rows flattened (norms in groups)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [TensorPiece(self.names[0], (prod(at.shape),), lambda w: w.view(-1))]


class Transposed(TensorLayout):
    """Their matrices are stored (in, out) (GPT-2's Conv1D)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        if len(at.shape) == 1:
            return [TensorPiece(self.names[0], at.shape)]
        return [TensorPiece(self.names[0], at.shape[::-1], lambda w: w.T)]


class Grouped(TensorLayout):
    """Their fused qkv holds, for each KV head, its queries, then its key, then its value (GPT-NeoX, BLOOM, Falcon):
    rows (g, n/g + 2, h)."""

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
    """Ours is the i-th of k equal parts of theirs (Phi-3's gate_up_proj)."""

    def __init__(self, name: str, i: int, k: int):
        super().__init__(name)
        self.i, self.k = i, k

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        shape = (at.shape[0] * self.k, *at.shape[1:])
        return [TensorPiece(self.names[0], shape, None, lambda w: w.chunk(self.k)[self.i])]


class Shifted(Stacked):
    """Theirs is ours plus one: norms that store w - 1 here and w there (Gemma's in GGUF)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [piece._replace(shift=1.0) for piece in super().pieces(at)]


class EachHead(TensorLayout):
    """Ours holds a row per head, theirs a tensor per head; `#` is the index of the head (StableLM's qk norms)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        return [
            TensorPiece(self.names[0].replace("#", str(head)), at.shape[1:], lambda w, head=head: w[head])  # type: ignore[misc]
            for head in range(at.shape[0])
        ]


class EachExpert(TensorLayout):
    """Ours holds the rows of all experts, stacked, theirs a tensor for each; `#` is the index of the expert. `dense`:
    the name in layers that have one FFN instead."""

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
    """Their tensor has a name without a module: `name`, and `name_bias`."""

    def suffix(self, leaf: str) -> str:
        return "" if leaf == "weight" else f"_{leaf}"


class OfExperts(Bare):
    """One tensor (e, in, k out) of all experts; ours, (e out, in), are the i-th of k parts of its columns: contiguous,
    or every k-th (gpt-oss)."""

    def __init__(self, name: str, i: int = 0, k: int = 1, interleaved: bool = False, dense: str = ""):
        """Describes part `i` of `k`; `dense`: the name in layers that have one FFN instead."""
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
    """Ours stacks several matrices by rows, theirs interleaves their rows head by head (DeepSeek's kv_b)."""

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
    """Layout `Stacked` for q, k and v, with the rows of q and k in the order that rotates neighbours: row 2i of a head
    is our i, row 2i+1 our i + h/2 (the rotary order of Meta's Llama, which GGUF keeps for `llama`)."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        h = at.mixer.head_dim
        q, k, v = super().pieces(at)
        return [*(TensorPiece(p.name, p.shape, _halves(p.mine, h), _pairs(h)) for p in (q, k)), v]


def _halves(rows: View, h: int) -> View:
    """Returns the view (heads h, ...) -> (heads, h/2, 2, ...): features i and i + h/2 adjacent."""
    return lambda w: rows(w).unflatten(0, (-1, 2, h // 2)).transpose(1, 2)


def _pairs(h: int) -> View:
    return lambda w: w.unflatten(0, (-1, h // 2, 2))


def modules_of(module: nn.Module, path: str = "", found: dict[str, nn.Module] | None = None) -> dict[str, nn.Module]:
    """Returns `dict(module.named_modules())`, in a quarter of the time, for a module tree without shared modules."""
    found = {} if found is None else found
    found[path] = module
    for name, child in module._modules.items():
        if child is not None:
            modules_of(child, f"{path}.{name}" if path else name, found)
    return found


@dataclass(frozen=True)
class Names:
    """Our module path -> their module path or layout; `layer` is the prefix of their layers, with * for the index."""

    layer: str
    modules: Mapping[str, str | TensorLayout]
    prefix: str = ""
    """Prefix that checkpoints of the bare model, without its head, omit."""
    ignored: str = r"(?!)"
    """Regular expression of their tensors that hold no weights."""
    overflows: bool = False
    """True if published weights exceed 65,504 in float16 inside the model; such a file is loaded in float32."""
    copies: frozenset[str] = frozenset()
    """Their tensors that repeat the embedding's table; a file in which one differs is another model."""
    wholes: Mapping[str, str] = field(default_factory=dict)
    """Part of our layer -> their module that computes all of it, if its weights have no separate modules."""
    apart: frozenset[str] = frozenset()
    """Parts of our layer whose weights are in a module that computes more than they do (a norm and its gate), so that
    its inputs and outputs differ from ours."""
    buffers: Mapping[str, str] = field(default_factory=dict)
    """Our buffer -> their tensor, for values of a checkpoint that are not trained."""
    absent: frozenset[str] = frozenset()
    """Their tensors that a checkpoint may lack; their values are then 0."""
    encoder: Names | None = None
    """Names of the encoder's modules, without the prefix `encoder.`; None without an encoder."""
    blocks: int = 1
    """Number of our blocks in one of their layers; if several, names start with the block's index, as in
    `.1.mixer.output`."""

    def layout(self, module: str) -> tuple[TensorLayout, str]:
        """Returns the layout of one of our modules, and the prefix of its names."""
        names, key, stem = self._found(module)
        return names._layouts[key], stem

    def _found(self, module: str) -> tuple[Names, str, str]:
        """Returns the names that apply to a module (the encoder's or these), the key in them, and the prefix."""
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
        """Yields (our name, our parameter, its pieces) for every parameter of the model, given `modules_of` it.

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
