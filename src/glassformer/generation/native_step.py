"""Decoding step, or pass over a few tokens of a text, as a list of instructions that one call of C++ carries out.

Eagerly a step spends four fifths of its time between its operations, and compiled it waits a minute for a compiler.
Here the list is written in milliseconds, by sending a symbol through the model's wirings, and `native_step.cpp` is
built once for a machine, in seconds. A step equals `model(tokens, state)` up to rounding: numbers between operations
are fp32. A model with a part that has no instructions (`_WRITERS`) is decoded eagerly.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, repeat
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

from glassformer.machine import native
from glassformer.model import Inputs, Model, locate
from glassformer.parts import few_rows
from glassformer.parts.core.running import thread
from glassformer.parts.core.site import Site
from glassformer.parts.embedding import Embedding
from glassformer.parts.ffn import Glu, Mlp
from glassformer.parts.forward_pass import Pass
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear
from glassformer.parts.mixer.attention import Attention
from glassformer.parts.mixer.kv import Cells
from glassformer.parts.mixer.qk_norm import QKNorm
from glassformer.parts.norm import Identity, LayerNorm, RMSNorm
from glassformer.parts.position import Alibi, Rotary
from glassformer.parts.quantized import Int4Linear, Int8Linear
from glassformer.parts.state import ModelState, State

SOURCE = few_rows.SOURCE.with_name("native_step.cpp")
MOST = 16
"""Largest number of tokens of a text that one pass of native instructions reads."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Dtype of weights or cache -> its number in `native_step.cpp`."""
INT4, NONE = 3, 4
NORM, ROUND, LINEAR, ADD, ACTIVATE, CAP, CLAMP, TURN, KEEP, ATTEND, EMBED = range(11)
PHI = {"": 0, "relu": 1, "relu2": 2, "sigmoid": 3, "silu": 4, "gelu": 5, "gelu_tanh": 6}


class _Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "stride", "column")]


class _Instruction(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "kind", "code", "phi", "centred", "heads", "groups", "width", "value_width", "cache", "table", "turned",
            "interleaved", "plus_one", "both", "bias_code", "window",
        )),
        ("inner", ctypes.c_int64), ("outer", ctypes.c_int64), ("f", ctypes.c_float), ("g", ctypes.c_float),
        *((name, _Place) for name in ("a", "b", "c", "out")),
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
    ]  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("slots", "key_stride", "value_stride", "scale_stride")),
        ("code", ctypes.c_int32), ("unused", ctypes.c_int32),
    ]  # fmt: skip


class _Table(ctypes.Structure):
    _fields_ = [("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p), ("count", ctypes.c_int64)]


class NoInstructions(Exception):
    """Error for a part of the model that has no native instructions; the model is then decoded eagerly."""


class _Buffer:
    """Memory of one value: `width` numbers a row, used by instructions `first` to `last`."""

    def __init__(self, width: int, first: int):
        self.width, self.first, self.last, self.offset = width, first, first, 0


class Symbol:
    """A vector of `width` numbers in each row, as an instruction leaves it: columns of a buffer.

    Wirings and projections compute with it as with a tensor (b, 1, width)."""

    def __init__(self, program: Program, buffer: _Buffer, width: int, column: int = 0):
        self.program, self.buffer, self.width, self.column = program, buffer, width, column

    def part(self, column: int, width: int) -> Symbol:
        """Returns columns [column, column + width) of this symbol, a view of its buffer."""
        return Symbol(self.program, self.buffer, width, self.column + column)

    def __add__(self, other: Symbol) -> Symbol:
        return self.program.write(ADD, self.width, a=self, b=other, both=1, outer=self.width, f=1.0, g=1.0)

    def __mul__(self, factor: float) -> Symbol:
        if not isinstance(factor, int | float):  # a parameter's value would be fixed
            return NotImplemented
        return self.program.write(ADD, self.width, a=self, outer=self.width, f=float(factor))

    __rmul__ = __mul__

    def clamp(self, low: float, high: float) -> Symbol:
        return self.program.write(CLAMP, self.width, a=self, outer=self.width, f=low, g=high)

    def unflatten(self, axis: int, sizes: tuple[int, ...]) -> Symbol:
        """Returns this symbol, because its columns hold the heads in order."""
        return self


class Program:
    """Instructions of a decoding step, in order, with the tensors that they read.

    held, addresses   tensors that the instructions read, and their addresses
    tables            rotary encodings, for which each step makes tables of cos and sin
    inner             largest width of rows rounded for 8- and 4-bit products
    rounded           key of the last rounding: buffer, column, width, True for 4 bits; None if there was no rounding
    """

    def __init__(self, model: nn.Module):
        self.instructions: list[dict[str, Any]] = []
        self.held: list[Tensor] = []
        self.addresses: list[int] = []
        self.tables: list[Rotary] = []
        self.inner = 0
        self.rounded: tuple[Any, ...] | None = None
        parts = [one for one in model.modules() if not isinstance(one, Site)]
        kinds = ("_modules", "_parameters", "_buffers")
        named = [(vars(one)[kind], name) for one in parts for kind in kinds for name in vars(one)[kind]]
        self._dicts, self._names = [held for held, _ in named], [name for _, name in named]
        self._values = [held[name] for held, name in named]
        self._children = [one._modules for one in parts]
        self._sizes = [len(held) for held in self._children]
        self._hooks = [held for one in model.modules() for held in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks += [every_module._global_forward_hooks, every_module._global_forward_pre_hooks]
        self._unhooked_at = -1
        self._own = [one.__dict__ for one in parts]

    def buffer(self, width: int) -> Symbol:
        return Symbol(self, _Buffer(width, len(self.instructions)), width)

    def write(self, kind: int, size: int, /, out: Symbol | None = None, **fields: Any) -> Symbol:
        """Appends an instruction; returns its result: `out`, or if None a new symbol of `size` columns."""
        out = out or self.buffer(size)
        places = {name: value for name, value in fields.items() if isinstance(value, Symbol)}
        for value in (*places.values(), out):
            value.buffer.last = len(self.instructions)
        self.instructions.append({"kind": kind, "code": NONE, "bias_code": NONE, **fields, "out": out})
        return out

    def address(self, tensor: Tensor | None, also: tuple[torch.dtype, ...] = ()) -> dict[str, Any]:
        """Returns an instruction's fields `weight` (address) and `code` (dtype) for a tensor; {} for None.

        Raises NoInstructions unless it is contiguous, in fp32, bf16 or a dtype of `also`."""
        if tensor is None:
            return {}
        if tensor.dtype not in (torch.float32, torch.bfloat16, *also) or not tensor.is_contiguous():
            raise NoInstructions(f"{tensor.dtype} of {tuple(tensor.shape)}")
        self.held.append(tensor)
        self.addresses.append(tensor.data_ptr())
        return {"weight": tensor.data_ptr(), "code": CODES.get(tensor.dtype, INT4)}

    def bias(self, tensor: Tensor | None) -> dict[str, Any]:
        found = self.address(tensor)
        return {"bias": found["weight"], "bias_code": found["code"]} if found else {}

    @property
    def intercepted(self) -> bool:
        """True if a part has a hook, or a `forward` set on the module itself.

        Torch numbers the hooks of all modules, so that hooks are looked for only after another was registered."""
        number = RemovableHandle.next_id
        if number != self._unhooked_at:
            if any(self._hooks):
                return True
            self._unhooked_at = number
        return any(map(dict.__contains__, self._own, repeat("forward")))

    @property
    def changed(self) -> bool:
        """True if a part or a tensor of the model has been replaced since the instructions were written.

        Every step asks, so C runs the loops over a thousand parts."""
        get: Any = dict.get
        same_parts = all(map(is_, map(get, self._dicts, self._names), self._values))
        same_sizes = [*map(len, self._children)] == self._sizes
        return not (same_parts and same_sizes and [*map(Tensor.data_ptr, self.held)] == self.addresses)

    def finished(self) -> tuple[Any, int]:
        """Returns the instructions as an array for C++, and the memory that a row needs, in fp32 numbers.

        Buffers that are not in use at the same time share memory."""
        free: list[_Buffer] = []
        used: list[_Buffer] = []
        total = 0
        made: set[int] = set()
        result = (_Instruction * len(self.instructions))()
        for number, fields in enumerate(self.instructions):
            for ended in [one for one in used if one.last < number]:
                used.remove(ended)
                free.append(ended)
            values = {name: value for name, value in fields.items() if isinstance(value, Symbol)}
            for value in values.values():
                buffer = value.buffer
                if id(buffer) in made:
                    continue
                made.add(id(buffer))
                used.append(buffer)
                fitting = next((one for one in free if one.width == buffer.width), None)
                if fitting is not None:
                    free.remove(fitting)
                    buffer.offset = fitting.offset
                else:
                    buffer.offset, total = total, total + -(-buffer.width // 16) * 16
            for name, value in fields.items():
                symbol = isinstance(value, Symbol)
                place = _Place(value.buffer.offset, value.buffer.width, value.column) if symbol else value
                setattr(result[number], name, place)
        return result, total


# Instructions of parts, by exact type, because a subclass may compute something else.


def _rms_norm(program: Program, norm: RMSNorm, x: Symbol, heads: int = 1) -> Symbol:
    return _norm(program, norm, x, heads, plus_one=int(norm.unit_offset), **program.address(norm.weight))


def _layer_norm(program: Program, norm: LayerNorm, x: Symbol, heads: int = 1) -> Symbol:
    return _norm(program, norm, x, heads, centred=1, **program.address(norm.weight), **program.bias(norm.bias))


def _norm(program: Program, norm: Any, x: Symbol, heads: int, **how: Any) -> Symbol:
    """Writes a norm of each of `heads` equal parts of x; weights (heads, width) are separate for each part."""
    sets = norm.weight is not None and norm.weight.dim() == 2
    return program.write(
        NORM, x.width, a=x, heads=heads, width=x.width // heads, f=norm.eps, both=int(sets), **how
    )  # fmt: skip


def _identity(program: Program, norm: Identity, x: Symbol, heads: int = 1) -> Symbol:
    return x


def _linear(program: Program, linear: Any, x: Symbol) -> Symbol:
    if linear.reparam is not None or linear.leave is not None:
        raise NoInstructions("a linear map with a reparametrisation, or of several ranks")
    return _product(program, linear.weight, linear.bias, x)


def _product(program: Program, weight: Tensor, bias: Tensor | None, x: Symbol) -> Symbol:
    o, i = weight.shape
    return program.write(LINEAR, o, a=x, inner=i, outer=o, **program.address(weight), **program.bias(bias))


def _packed(program: Program, linear: Any, x: Symbol) -> Symbol:
    """Writes a product with an 8- or 4-bit matrix. x is rounded first, once for consecutive products of it."""
    if not linear.own or not few_rows.kernel():
        raise NoInstructions("a matrix that torch has packed or multiplies")
    halves, inner = int(linear.bits == 4), x.width + linear.missing
    rounded = (x.buffer, x.column, x.width, halves)
    if program.rounded != rounded:
        program.write(ROUND, 0, out=x, a=x, inner=inner, outer=x.width, both=halves)
        program.rounded = rounded
    program.inner = max(program.inner, inner)
    made = program.write(
        LINEAR, len(linear.packed) * few_rows.ROWS, a=x, inner=inner, outer=linear.rows,
        scales=program.address(linear.scales)["weight"],
        **program.address(linear.packed, (torch.int8, torch.uint8)), **program.bias(linear.bias),
    )  # fmt: skip
    return made.part(0, linear.rows)


def _undivided(part: Any) -> None:
    """Raises NoInstructions for a part that several ranks share."""
    if part.enter is not None:
        raise NoInstructions("a part of several ranks")


def _mlp(program: Program, ffn: Mlp, x: Symbol) -> Symbol:
    _undivided(ffn)
    up = _write(program, ffn.up_proj, x)
    return _write(program, ffn.down_proj, _activated(program, ffn.activation, up))


def _glu(program: Program, ffn: Glu, x: Symbol) -> Symbol:
    _undivided(ffn)
    if ffn.clamp is not None:
        raise NoInstructions("a bounded gate")
    gate, up = _write(program, ffn.gate_proj, x), _write(program, ffn.up_proj, x)
    return _write(program, ffn.down_proj, _activated(program, ffn.activation, gate, up))


def _activated(program: Program, name: str, a: Symbol, b: Symbol | None = None) -> Symbol:
    """Returns phi(a), or phi(a) b."""
    if name not in PHI:
        raise NoInstructions(f"activation={name}")
    more: dict[str, Any] = {} if b is None else {"b": b, "both": 1}
    return program.write(ACTIVATE, a.width, a=a, outer=a.width, phi=PHI[name], **more)


@dataclass(frozen=True)
class _Map:
    """Linear map of a part: called with a symbol, it writes the product and returns the result."""

    program: Program
    linear: Any

    def __call__(self, x: Symbol) -> Symbol:
        made: Symbol = _write(self.program, self.linear, x)
        return made

    def split(self, y: Symbol) -> list[Symbol]:
        """Returns the parts of y that the maps stacked in this one give."""
        widths = self.linear.outs
        return [y.part(end - width, width) for end, width in zip(accumulate(widths), widths, strict=True)]


def _attention(program: Program, mixer: Any, x: Symbol, cache: int) -> Symbol:
    _undivided(mixer)
    n, g, h = mixer.n_heads, mixer.n_kv_heads, mixer.head_dim
    seen, projection, position = mixer.visibility, mixer.projection, mixer.position
    if not (seen.only_order and seen.causal and seen.sees_itself) or mixer.gain_control or mixer.shares is not None:
        raise NoInstructions("a visibility of another kind, a gain, or keys that layers share")
    if not projection.kept_as_read or projection.kept_shapes != ((g, h), (g, projection.value_dim)):
        raise NoInstructions("a projection that keeps less than keys and values")
    maps = {name: _Map(program, part) for name, part in mixer.named_children()}
    q, k, v = projection(SimpleNamespace(**maps), x, None)
    for adjust in mixer._adjust:
        q, k = _write(program, adjust, (q, n), k=(k, g))
    width = projection.value_dim
    how = {"heads": n, "groups": g, "width": h, "value_width": width, "cache": cache}
    program.write(KEEP, 0, out=k, b=k, c=v, **how)
    slopes = {} if position is None else _BIASES.get(type(position), _no_bias)(program, position)
    sinks = {} if mixer.sinks is None else program.address(mixer.sinks.weight)
    z = program.write(
        ATTEND, n * width, a=q, f=mixer.scale, g=mixer.softcap or 0.0, window=seen.reach or 0, **how, **sinks, **slopes
    )
    if mixer.gate_proj is not None:
        z = _activated(program, "sigmoid", _write(program, mixer.gate_proj, x), z)
    return _write(program, mixer.output, z)


def _normed(program: Program, norm: QKNorm, q: tuple[Symbol, int], k: tuple[Symbol, int]) -> tuple[Symbol, Symbol]:
    one, other = (
        _write(program, each, x, heads=1 if norm.full else heads)
        for each, (x, heads) in ((norm.q_norm, q), (norm.k_norm, k))
    )
    return one, other


def _turn(program: Program, rotary: Rotary, q: tuple[Symbol, int], k: tuple[Symbol, int]) -> tuple[Symbol, Symbol]:
    one, other = (_turned(program, rotary, x, heads, x.width // heads) for x, heads in (q, k))
    return one, other


def _unmoved(program: Program, alibi: Alibi, q: tuple[Symbol, int], k: tuple[Symbol, int]) -> tuple[Symbol, Symbol]:
    return q[0], k[0]


def _slopes(program: Program, alibi: Alibi) -> dict[str, Any]:
    """Returns the field `scales` of an attention instruction: address of the slopes (n,), score lost per token."""
    if alibi.rounded:
        raise NoInstructions("slopes rounded to bf16")
    return {"scales": program.address(torch.tensor(alibi.slopes) * alibi.scale)["weight"]}


def _no_bias(program: Program, position: Any) -> dict[str, Any]:
    return {}


_BIASES: dict[type, Callable[..., dict[str, Any]]] = {Alibi: _slopes}
"""Type of a position encoding that changes scores -> function that returns its fields of the instruction."""


def _turned(program: Program, rotary: Rotary, x: Symbol, heads: int, width: int) -> Symbol:
    same = [i for i, one in enumerate(program.tables) if one._key == rotary._key]
    if not same:
        program.tables.append(rotary)
    table = same[0] if same else len(program.tables) - 1
    interleaved = int(rotary.pairing == "interleaved")
    return program.write(
        TURN, 0, out=x, a=x, heads=heads, width=width, turned=rotary.dim, interleaved=interleaved, table=table
    )


def _embedding(program: Program, part: Embedding) -> Symbol:
    """Writes the rows of the table for a step's tokens."""
    more = (part.norm, part.position, part.segments, part.vocabulary)
    if any(one is not None for one in more) or part.tied or part.reader is not None:
        raise NoInstructions("an embedding of more than a token's row of a table")
    size, width = part.weight.shape
    scale = float(torch.tensor(part.scale, dtype=part.weight.dtype))  # rounded as the embedding rounds it
    return program.write(EMBED, width, inner=size, outer=width, f=scale, **program.address(part.weight))


def _head(program: Program, head: Head, x: Symbol, embedding: Any) -> Symbol:
    if head.pool is not None or head.transform is not None or head.vector or head.vocabulary is not None:
        raise NoInstructions("a head that transforms, pools, or is shared")
    x = x if head.scale == 1.0 else x * head.scale
    if head.packed is not None:
        logits = _write(program, head.packed, x)
    elif head.reparam is not None:
        raise NoInstructions("a head with a reparametrisation")
    else:
        logits = _product(program, head.applied(embedding), head._added, x)
    if head.softcap is None:
        return logits
    return program.write(CAP, logits.width, a=logits, outer=logits.width, f=head.softcap)


_WRITERS: dict[type, Callable[..., Any]] = {
    RMSNorm: _rms_norm, LayerNorm: _layer_norm, Identity: _identity, Linear: _linear, Int8Linear: _packed,
    Int4Linear: _packed, Mlp: _mlp, Glu: _glu, Attention: _attention, Head: _head, QKNorm: _normed,
    Rotary: _turn, Alibi: _unmoved,
}  # fmt: skip
"""Type of a part -> function that writes its instructions."""


def _write(program: Program, part: Any, x: Any, **how: Any) -> Any:
    """Writes the instructions of a part. Raises NoInstructions for a part without a writer."""
    writer = _WRITERS.get(type(part))
    if writer is None:
        raise NoInstructions(type(part).__name__)
    return writer(program, part, x, **how)


def _wired(program: Program, wiring: nn.Module, x: Symbol, mixer: Any, ffn: Any) -> Symbol:
    """Returns the symbol after a wiring's own `forward`, in which norms, mixer and FFN write instructions."""
    own = copy.copy(wiring)
    parts = {name: part if part is None else partial(_write, program, part) for name, part in wiring._modules.items()}
    own.__dict__.update(_modules={**parts, "resid_mid": None}, dropout=0.0, training=False)
    own.__dict__["resid_mid"] = lambda x: x
    wired: Symbol = type(wiring).forward(own, x, mixer, ffn)  # past its hooks, with which no step is taken
    return wired


def written(model: Model) -> tuple[Program, Symbol | None, Symbol]:
    """Returns the instructions of a model's decoding step, the symbol of its input (the embedding; None if instructions
    compute it), and the symbol of its logits.

    Raises NoInstructions for a model with a part without instructions."""
    if model.encoder is not None or model.context is not None or model.sequence is not None or not model.causal:
        raise NoInstructions("a model with an encoder, or whose layers are shared")
    if model.embedding.reader is not None:
        raise NoInstructions("a model that reads images or vectors")
    program = Program(model)
    begin: Symbol | None = None
    try:
        if type(model.embedding) is not Embedding:
            raise NoInstructions(type(model.embedding).__name__)
        x = _embedding(program, model.embedding)
    except NoInstructions:
        begin = x = program.buffer(model.embedding.weight.shape[1])
    layers: list[Any] = list(model.layers)
    for number, layer in enumerate(layers):
        mixer = partial(_write, program, layer.mixer, cache=number)
        ffn = None if layer.ffn is None else partial(_write, program, layer.ffn)
        try:
            x = _wired(program, layer.residual, x, mixer, ffn)
        except (TypeError, AttributeError) as problem:
            raise NoInstructions(f"{type(layer.residual).__name__}: {problem}") from problem
        if not isinstance(x, Symbol):
            raise NoInstructions(type(layer.residual).__name__)
    if model.final_norm is not None:
        x = _write(program, model.final_norm, x)
    return program, begin, _write(program, model.head, x, embedding=model.embedding)


@cache
def _library() -> Any:
    """Returns the C++ library, built first if needed; None without a kernel for this processor or a compiler."""
    name = native.kernel()
    if name == native.NONE:
        return None
    library = native.if_possible(SOURCE, name, "steps run one operation at a time")
    if library is None:
        return None
    library.size_of_instruction.restype = ctypes.c_int64
    assert library.size_of_instruction() == ctypes.sizeof(_Instruction)
    run = library.run_native_step
    run.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64,
    ]  # fmt: skip
    run.restype = ctypes.c_int32
    library.largest.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2]
    library.largest.restype = None
    return library


def largest(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns (tokens, bad) for logits (b, v): the first largest logit of each row, as `logits.max(-1)` finds it with
    NaN as the largest, and True if that logit is not finite, (b,) each. None for logits that C++ cannot read."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2 or logits.stride(1) != 1:
        return None
    if not logits.shape[1] or torch.compiler.is_compiling() or (library := _library()) is None:
        return None
    rows, width = logits.shape
    tokens, bad = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    library.largest(logits.data_ptr(), rows, width, logits.stride(0), tokens.data_ptr(), bad.data_ptr())
    return tokens, bad


def _readable(cells: Tensor) -> bool:
    """Returns True if cells (b, g, slots, h) of a cache have a dtype of `CODES` and each row is contiguous."""
    return cells.dtype in CODES and cells[:1].is_contiguous()


def _by_row(table: Tensor) -> Tensor:
    """Returns a table of cos or sin, (s, 1, i, j) or (b, s, 1, i, j) with one of b and s equal to 1, as (n, i j)."""
    return table.reshape(-1, table.shape[-2] * table.shape[-1]).contiguous()


class _Turns:
    """Tables of cos and sin of a model's rotary encodings, with their addresses in `listed`: for the lengths of a text
    below `most`, or for the rows of one pass if `most` is 0."""

    def __init__(self, encodings: list[Rotary], pass_: Pass, most: int) -> None:
        self.most, self._held = most, [[_by_row(one) for one in rotary.tables(pass_)] for rotary in encodings]
        self.listed = (_Table * max(len(encodings), 1))()
        for table, (cosine, sine) in zip(self.listed, self._held, strict=False):
            table.cosine, table.sine, table.count = cosine.data_ptr(), sine.data_ptr(), 0 if most else len(cosine)


class _Held(NamedTuple):
    """Caches of a decode state as C++ reads them."""

    caches: Any
    marked: list[State]
    """Layers that must know how many tokens were read."""
    rings: list[tuple[int, int]]
    """(slots, number of tokens that may be stored at once when these are full) of caches that forget tokens."""

    def at_once(self, start: int, tokens: int) -> int:
        """Returns the number of `tokens` to store at once after `start` tokens: none may replace a token that an
        earlier one attends to."""
        return min([tokens, *(spare for slots, spare in self.rings if start + tokens > slots)])


def _found(state: ModelState, windows: dict[int, int]) -> _Held | None:
    """Returns the caches of a state; None for a state with another kind of memory or layout. `windows` {cache: window}
    names those that forget tokens."""
    rings = [None if one is None else one.ring for one in state.layers]
    if None in rings:
        return None
    cells = [one for ring in rings for one in cast("tuple[Cells, Cells]", ring)]
    if not all(_readable(one.values) for one in cells):
        return None
    found = (_Cache * len(rings))()
    for mine, keys, values in zip(found, cells[::2], cells[1::2], strict=True):
        (k, *k_scales), (v, *v_scales) = keys.tensors(), values.tensors()
        mine.keys, mine.values, mine.slots = k.data_ptr(), v.data_ptr(), k.shape[2]
        mine.key_stride, mine.value_stride, mine.code = k.stride(0), v.stride(0), CODES[k.dtype]
        if k_scales:
            mine.key_scales, mine.value_scales = k_scales[0].data_ptr(), v_scales[0].data_ptr()
            mine.scale_stride = k_scales[0].stride(0)
    marks = [one for one in cast("list[State]", state.layers) if type(one).mark is not State.mark]
    return _Held(found, marks, [(found[i].slots, found[i].slots - window + 1) for i, window in windows.items()])


class NativeStep:
    """Native decoding step: called with (model, tokens (b, s), state), it returns the logits (b, v) fp32 of the next
    token, equal to `model(tokens, state)[:, -1]` up to rounding, for any b and a state that it `serves`. With `every`,
    it returns those after each of the tokens (1, s) of a single text, (s, v). The bits are those of s calls with one
    token each."""

    def __init__(self, model: Model):
        """Writes the list of native instructions of a decoding step. Raises NoInstructions if a part of `model` has
        none."""
        self.program, self.begin, self.logits = written(model)
        self.listed, self.width = self.program.finished()
        self.settled = model.settled
        attends = [one for one in self.program.instructions if one["kind"] == ATTEND]
        self._windows = {one["cache"]: one["window"] for one in attends if one["window"]}
        self._turns: _Turns | None = None
        self._kept: weakref.WeakKeyDictionary[ModelState, _Held | None] = weakref.WeakKeyDictionary()

    def serves(self, state: ModelState) -> bool:
        """Returns True if the instructions can read the caches of the state, and no part of the model has a hook."""
        if state.documents is not None or state.positions is not None or self.program.intercepted:
            return False
        return self._held(state) is not None

    def _held(self, state: ModelState) -> _Held | None:
        """Returns what `_found` does, once for a state, because a state keeps its tensors."""
        if state not in self._kept:
            self._kept[state] = _found(state, self._windows)
        return self._kept[state]

    def _turned(self, longest: int, pass_: Pass | None) -> _Turns:
        """Returns the tables of cos and sin for rows that have read at most `longest` tokens; if the frequencies change
        with the length, those of the tokens of the pass."""
        if self.settled is not None:
            assert pass_ is not None
            return _Turns(self.program.tables, pass_, 0)
        if self._turns is None or longest >= self._turns.most:
            most = 1 << max(longest, 255).bit_length()
            self._turns = _Turns(self.program.tables, Pass(0, most), most)
        return self._turns

    def __call__(self, model: Model, tokens: Tensor, state: ModelState, every: bool = False) -> Tensor:
        size = cast("_Held", self._held(state)).at_once(state.length, tokens.shape[1])
        found = [self._read(model, some, state, every) for some in tokens.split(size, 1)]
        return torch.cat(found) if len(found) > 1 and every else found[-1]

    def _read(self, model: Model, tokens: Tensor, state: ModelState, every: bool) -> Tensor:
        (texts, count), start, pass_ = tokens.shape, state.length, None
        rows, end = texts * count, start + count
        if self.begin is not None or self.settled is not None or end > state.max_len:
            pass_ = locate(model.embedding.places(tokens), Inputs(tokens, state))  # raises for a full state
        values = torch.empty(self.width * rows)
        if self.begin is not None:
            x, (first, width) = model.embedding(tokens, pass_), self._place(self.begin, rows)
            values.as_strided((rows, width), (width, 1), first).copy_(x.flatten(0, 1))
        before = [start] * texts if state.rows is None else state.rows.tolist()
        lengths = [length + i for length in before for i in range(count)]
        ids = tokens if tokens.dtype == torch.int64 and tokens.is_contiguous() else tokens.long().contiguous()
        held, turns = cast("_Held", self._held(state)), self._turned(max(lengths), pass_)
        wanted = rows if every or texts > 1 else 1
        failed = _library().run_native_step(
            self.listed, len(self.listed), rows, count, wanted, values.data_ptr(), held.caches, turns.listed,
            (ctypes.c_int64 * rows)(*lengths), ids.data_ptr(), self.program.inner, torch.get_num_threads(),
        )  # fmt: skip
        if failed == 3:
            raise IndexError("a token is outside the vocabulary")
        if failed:
            raise MemoryError(f"a step of {rows} rows")
        for layer in held.marked:
            layer.mark(end)
        state.advance(end, count)
        first, width = self._place(self.logits, rows)
        last = first + (rows - wanted) * width
        return values.as_strided((wanted, self.logits.width), (width, 1), last)

    @staticmethod
    def _place(symbol: Symbol, rows: int) -> tuple[int, int]:
        """Returns the place of a symbol's first number in the memory of `rows` rows, and the distance of its rows."""
        return symbol.buffer.offset * rows, symbol.buffer.width


_steps: weakref.WeakKeyDictionary[Model, NativeStep | None] = weakref.WeakKeyDictionary()


def native_step(model: Model, state: ModelState, tokens: int = 1) -> NativeStep | None:
    """Returns the native step of a model that reads `tokens` tokens of each row into this state; None if they must be
    read eagerly: on another device or processor, with parts without instructions, with hooks, captures, edits or
    gradients, more than `MOST`, and several of several texts."""
    if tokens > 1 and (tokens > MOST or state.batch > 1):
        return None
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or model.training or model.device.type != "cpu":
        return None
    if thread.now.taps is not None:
        return None
    step = _steps.get(model)
    if model not in _steps or (step is not None and step.program.changed):
        try:
            step = NativeStep(model) if _library() is not None else None
        except NoInstructions:
            step = None
        _steps[model] = step
    if step is None or not step.serves(state):
        return None
    crosses = step.settled is not None and state.length + tokens > step.settled
    return None if tokens > 1 and crosses else step  # a pass then turns all its tokens as its length asks
