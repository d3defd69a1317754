"""Products of a training step in fp32 on a CPU, with the loops before and after them, as `fused_products.cpp` computes
them.

    gating      y = (phi(x W_gate^T + b) * (x W_up^T + b)) W_down^T + b
    network     y = phi(x W_up^T + b) W_down^T + b
    attention   y = softmax(scale q k^T) v W_out^T + b, with q, k and v as next
    projection  q, k, v = x W^T + b, with the pairs of q and k rotated

phi is one of `ACTIVATIONS`. All but the projection may also be y = x + part(norm(x)), with an RMS norm or a layer norm.
Each of these parts is described by a `FusedPart`; `through` computes several, one after another, as one function of
autograd.
Blocks of rows pass through all products and loops while they are in the cache, in one call: in a small model the calls
of separate operations take as long as the work, and in a larger one the memory between them. The products are MKL's,
inside of torch. The backward pass makes the results of phi again, which costs less than to keep them. Each function
returns None if torch should compute the call: wherever `fused_loops` does, with few rows, while something watches or
edits values inside the part, and without gradients, where a watched model has the bits of an unwatched one. Gradients
of weights are sums over blocks, so that their last bits depend on the number of threads, and have no gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.machine import native
from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.site import unseen
from glassformer.parts.first_order import first_order
from glassformer.parts.linear import Linear
from glassformer.parts.norm.base import Norm

SOURCE = Path(__file__).with_suffix(".cpp")
FROM = 64
"""Least number of rows for which blocks are used."""
ACTIVATIONS = ("silu", "gelu_tanh", "relu", "sigmoid", "relu2", "gelu")
"""Names of the activations that the C++ computes, in its order."""
WIDEST = 1 << 13
"""Largest width of a norm."""
BLOCK = 256
"""Number of rows of a block, or fewer so that each thread has a block."""
LINE = 64
"""Bytes of a cache line."""
MOST = 1 << 22
"""Largest number of elements of the weights of fused parts in one function of autograd, whose backward pass takes the
memory of all their gradients at its start."""


class _Call(ctypes.Structure):
    """Addresses of the product and of the limit of its threads, numbers of rows of x, of a block, and of all threads'
    blocks, widths, number of matrices before the loop, number of the loop's activation, and of threads."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gemm", "limit")),
        *((name, ctypes.c_int64) for name in ("rows", "d", "f", "block", "step", "gates", "activation", "threads")),
    )


@cache
def _product() -> tuple[int | None, ...]:
    """Returns the addresses of the fp32 product of MKL inside of torch and of the limit of its threads; () if torch has
    another BLAS, which may start further threads in each of ours."""
    folder = Path(torch.__file__).parent / "lib"
    found = next((path for path in folder.glob("libtorch_cpu.*") if path.suffix in (".so", ".dylib")), None)
    if found is None or not torch.backends.mkl.is_available():
        return ()
    try:
        library = ctypes.CDLL(str(found))
        functions = library.sgemm_, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return ()
    return tuple(ctypes.cast(one, ctypes.c_void_p).value for one in functions)


@cache
def _library() -> Any:
    """Returns the compiled C++; None if the machine has no suitable product, instructions or compiler."""
    if not _product() or not fused_loops.serves():
        return None
    found = native.if_possible(SOURCE, native.kernel(), "training in fp32 uses separate products and loops")
    if found is not None:
        at = ctypes.c_void_p
        for function, arguments in {"feed": 8, "feed_back": 11, "project": 8, "project_back": 11}.items():
            call = getattr(found, function)
            call.argtypes, call.restype = [at] * arguments, None
        for function, arguments in {"mix": 13, "mix_back": 19}.items():
            call = getattr(found, function)
            call.argtypes, call.restype = [at] * arguments, ctypes.c_int32
    return found


def counts(ctx: BuildContext, shape: Shape) -> bool:
    """Returns True if costs are those of the C++, which is not compiled for that: in training steps in fp32 on a CPU,
    with plain weights."""
    fp32 = shape.phase == "train" and shape.device == "cpu" and shape.products == shape.dtype == torch.float32
    return fp32 and ctx.reparam is None and shape.tokens >= FROM and bool(_product()) and fused_loops.built()


class _Norm(ctypes.Structure):
    """Addresses of weight, offset, room for results, rates, means, and gradients of weight and offset of a norm, and
    its eps; nulls for what it lacks, or without a norm."""

    _names = "weight", "offset", "room", "rates", "means", "grad_weight", "grad_offset"
    _fields_ = (*((name, ctypes.c_void_p) for name in _names), ("eps", ctypes.c_float))


class _Heads(ctypes.Structure):
    """Numbers of tokens, heads of q and of k, widths of k and of v, numbers turned in a head, 1 for neighbouring pairs,
    numbers between the tables of texts, and addresses of the tables."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("s", "n", "g", "h", "v", "r", "near", "of_row")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
    )


class _Rooms:
    """Memory for arrays of x's dtype that fused parts use one after another, each during its call."""

    def __init__(self, x: Tensor, counts: Iterable[Iterable[int]]):
        """`counts`: numbers of elements of the arrays of each part."""
        self.line = LINE // x.element_size()
        self.held = x.new_empty(max(sum(map(self._whole, some)) for some in counts) + self.line)
        self.first, self.size = -(-self.held.data_ptr() // LINE) * LINE, x.element_size()

    def __call__(self, counts: Iterable[int]) -> list[int]:
        """Returns the addresses of arrays with these numbers of elements, each from a cache line on."""
        ends = list(accumulate(map(self._whole, counts), initial=0))
        return [self.first + end * self.size for end in ends[:-1]]

    def _whole(self, count: int) -> int:
        return -(-count // self.line) * self.line


Given = tuple[str, tuple[Any, ...]]
"""Function of the C++ and its arguments, which hold the tensors' addresses but not the tensors."""


class FusedPart:
    """Part of a model that one call of C++ computes for an x of known shape, and another call its gradients. With a
    norm, the result is x + part(norm(x)).

    tensors   tensors that have gradients: weight and offset of the norm, or None, the weights of all layers, and their
              biases
    used      number of the first of `tensors` that gradients are computed from
    call      fields of `_Call`
    eps       eps of the norm
    normed    True with a norm; `centred` if it subtracts the mean
    size      number of elements of the layers' weights"""

    def __init__(self, norm: tuple[Any, ...], layers: Sequence[Linear], call: tuple[Any, ...]):
        self.eps, self.centred, scale, offset = norm
        self.tensors = (scale, offset, *(one.weight for one in layers), *(one.bias for one in layers))
        self.call, self.normed = call, scale is not None
        self.used, self.size = 2 + len(layers), sum(one.weight.numel() for one in layers)

    def __call__(self, x: Tensor) -> Tensor:
        return through(x, [self])

    def rooms(self, back: bool) -> tuple[int, ...]:
        """Returns the numbers of elements of the arrays that the call needs, or that of the gradients (`back`)."""
        raise NotImplementedError

    def forward(self, x: Tensor, rooms: list[int]) -> tuple[Tensor, list[Tensor | None], Given]:
        """Returns (result, tensors to keep for the gradients, the call that fills them)."""
        raise NotImplementedError

    def backward(
        self, x: Tensor, kept: Sequence[Tensor | None], tensors: Sequence[Tensor | None], grad: Tensor,
        of_x: Tensor | None, wanted: Sequence[bool], rooms: list[int],
    ) -> tuple[list[Tensor | None], Given]:  # fmt: skip
        """Returns (gradients of the wanted ones of `self.tensors`, the call that fills them and `of_x`, the gradient of
        x). `tensors`: the first `used` of them, as autograd has kept them."""
        raise NotImplementedError

    def statistics(self, x: Tensor) -> list[Tensor | None]:
        """Returns empty tensors for rates and means of the rows of x, as far as the norm has them."""
        return [x.new_empty(x.shape[:-1]) if one else None for one in (self.normed, self.normed and self.centred)]

    def first(
        self, results: int, statistics: Sequence[Tensor | None], tensors: Any, made: Any = (None, None)
    ) -> tuple[Any, Any]:
        """Returns the arguments `_Call` and `_Norm` of a call: of the address of the room for the norm's results, its
        `statistics`, its weight and offset, the first of `tensors`, and their gradients, the first of `made`."""
        given = *map(_at, tensors[:2]), results, *map(_at, statistics), *map(_at, made[:2])
        return ctypes.byref(_Call(*self.call)), ctypes.byref(_Norm(*given, self.eps))

    def gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Returns empty tensors for the gradients of `self.tensors`: the wanted ones, and always those of a norm."""
        both = zip(self.tensors, (True, True, *wanted[2:]), strict=True)
        return [torch.empty_like(one) if one is not None and want else None for one, want in both]

    def sums(self) -> int:
        """Returns the number of elements of all blocks' gradients of the norm."""
        _, _, rows, d, _, block, step, *_ = self.call
        return self.normed * -(-rows // step) * -(-step // block) * 2 * d


class _Feed(FusedPart):
    """Feed-forward network."""

    def rooms(self, back: bool) -> tuple[int, ...]:
        _, _, _, d, f, _, step, gates, *_ = self.call
        of_norm = self.normed * step * d
        return (of_norm, self.sums(), *[step * f] * (gates + 1)) if back else (of_norm, step * f)

    def forward(self, x: Tensor, rooms: list[int]) -> tuple[Tensor, list[Tensor | None], Given]:
        _, _, rows, _, f, _, _, gates, *_ = self.call
        opened, y, kept = x.new_empty(gates, rows, f), torch.empty_like(x), self.statistics(x)
        results, room = rooms
        weights, biases = self.tensors[2 : self.used], self.tensors[self.used :]
        first = self.first(results, kept, self.tensors)
        given = *first, _at(x), _each(weights), _each(biases), _parts(opened), room, _at(y)
        return y, [*kept, opened], ("feed", given)

    def backward(
        self, x: Tensor, kept: Sequence[Any], tensors: Sequence[Tensor | None], grad: Tensor, of_x: Tensor | None,
        wanted: Sequence[bool], rooms: list[int],
    ) -> tuple[list[Tensor | None], Given]:  # fmt: skip
        results, sums, *room = rooms
        *statistics, opened = kept
        made = self.gradients(wanted)
        first, end = self.first(results, statistics, tensors, made), self.used
        given = (
            *first, sums, _at(grad), _at(x), _each(tensors[2:]), _parts(opened), _addresses(room), _at(of_x),
            _each(made[2:end]), _each(made[end:]),
        )  # fmt: skip
        return made, ("feed_back", given)


class _Mix(FusedPart):
    """Attention with its projections.

    heads     fields of `_Heads` before the tables
    sizes     fields of `AttentionSizes`
    tables    tables of cos and sin of a rotation, or None"""

    def __init__(self, norm: Any, layers: Sequence[Linear], call: Any, heads: Any, sizes: Any, tables: Any):
        super().__init__(norm, layers, call)
        self.heads, self.sizes, self.tables = heads, sizes, tables

    def rooms(self, back: bool) -> tuple[int, ...]:
        _, _, _, d, f, _, step, *_ = self.call
        of_norm, (_, n, _, _, _, _, width, *_) = self.normed * step * d, self.sizes
        return (of_norm, self.sums(), step * f, step * n * width) if back else (of_norm,)

    def forward(self, x: Tensor, rooms: list[int]) -> tuple[Tensor, list[Tensor | None], Given]:
        (b, n, _, s, _, _, width, *_), (weight, after, bias, bias_after) = self.sizes, self.tensors[2:]
        qkv, z, log_z = x.new_empty(b, s, self.call[4]), x.new_empty(b, s, n * width), x.new_empty(b, n, s)
        y, kept = torch.empty_like(x), self.statistics(x)
        (results,) = rooms
        first = *self.first(results, kept, self.tensors), *self._described(self.tables)
        given = map(_at, (x, weight, bias, after, bias_after, qkv, z, log_z, y))
        return y, [*kept, qkv, z, log_z, *self.tables], ("mix", (*first, *given))

    def backward(
        self, x: Tensor, kept: Sequence[Any], tensors: Sequence[Tensor | None], grad: Tensor, of_x: Tensor | None,
        wanted: Sequence[bool], rooms: list[int],
    ) -> tuple[list[Tensor | None], Given]:  # fmt: skip
        rates, means, qkv, z, log_z, *tables = kept
        results, sums, *room = rooms
        made, (weight, after) = self.gradients(wanted), tensors[2:]
        first = *self.first(results, (rates, means), tensors, made), *self._described(tables)
        of_weight, of_after, of_bias, of_bias_after = made[2:]
        given, to = (grad, x, weight, after, qkv, z, log_z), (of_x, of_weight, of_bias, of_after, of_bias_after)
        return made, ("mix_back", (*first, sums, *map(_at, given), *room, *map(_at, to)))

    def _described(self, tables: Sequence[Tensor | None]) -> tuple[Any, Any]:
        heads, sizes = _Heads(*self.heads, *map(_at, tables)), fused_loops.AttentionSizes(*self.sizes)
        return ctypes.byref(heads), ctypes.byref(sizes)


class _Chain(torch.autograd.Function):
    """Autograd function of x and fused parts, each on the result of the one before, with the tensors of all parts.

    All memory is taken and all calls are described before the first call, because a call empties the caches of what
    Python and torch need: a description between two calls takes as long as the loops of a small model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[FusedPart], *tensors: Any) -> Tensor:
        x, saved, calls, ctx.parts, ctx.counts = x.contiguous(), [], [], parts, []
        if x.dtype != torch.float32 or any(x.numel() != one.call[2] * one.call[3] for one in parts):
            raise ValueError(f"{tuple(x.shape)} of {x.dtype} is not what these parts were described for")
        rooms = _Rooms(x, (one.rooms(False) for one in parts))
        for one in parts:
            y, kept, call = one.forward(x, rooms(one.rooms(False)))
            saved += [x, *kept, *one.tensors[: one.used]]
            calls.append(call)
            ctx.counts.append(len(kept))
            x = y
        _run(calls)
        ctx.save_for_backward(*saved)
        return x

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, wanted, parts = ctx.saved_tensors, ctx.needs_input_grad, ctx.parts
        grad: Any = grads[0].contiguous()
        made: list[Tensor | None] = []
        rooms = _Rooms(grad, (one.rooms(True) for one in parts))
        calls, held, end, last = [], [grad], len(saved), len(wanted)
        for one, count in zip(reversed(parts), reversed(ctx.counts), strict=True):
            many, used = len(one.tensors), one.used
            x, *kept = saved[end - used - count - 1 : end - used]
            needed = one.normed or wanted[0] or len(held) < len(parts)
            of_x = None if not needed else held[-2] if len(held) > 2 else torch.empty_like(x)
            given = x, kept, saved[end - used : end], grad, of_x, wanted[last - many : last]
            found, call = one.backward(*given, rooms(one.rooms(True)))
            end, last = end - used - count - 1, last - many
            made, grad = found + made, of_x
            calls.append(call)
            held.append(of_x)
        _run(calls)
        return grad, None, *made


def _run(calls: Sequence[Given]) -> None:
    """Runs the calls in their order. Raises MemoryError if one of them lacks memory."""
    for name, given in calls:
        if getattr(_library(), name)(*given):
            raise MemoryError(name)


def through(x: Tensor, parts: Iterable[FusedPart]) -> Tensor:
    """Returns the result of fused parts for x, each part on the result of the one before; x itself without parts. From
    the first part that has gradients on, parts are one function of autograd as long as their weights have at most
    `MOST` elements together."""
    waiting: list[FusedPart] = []
    trained = x.requires_grad
    for part in parts:
        trained = trained or any(one is not None and one.requires_grad for one in part.tensors)
        if waiting and part.size + sum(one.size for one in waiting) > MOST:
            x, waiting = _together(x, waiting), []
        if trained:
            waiting.append(part)
        else:
            x = _together(x, [part])
    return _together(x, waiting) if waiting else x


def _together(x: Tensor, parts: Sequence[FusedPart]) -> Tensor:
    y: Tensor = _Chain.apply(x, parts, *(one for part in parts for one in part.tensors))
    return y


class _Project(torch.autograd.Function):
    """Autograd function of a projection to heads with rotated q and k."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, heads: tuple[int, ...],
        near: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        (b, s, d), (n, g, h, width) = x.shape, heads
        r = cos.shape[-1] * cos.shape[-2]
        of_row = s * r if cos.dim() == 5 and len(cos) == b > 1 else 0
        ctx.call, ctx.heads = _blocks(b * s, d, len(weight)), (s, n, g, h, width, r, near, of_row)
        q, k = (x.new_empty(b, count, s, h).transpose(1, 2) for count in (n, g))
        y = x.new_empty(b, s, len(weight))
        _library().project(
            ctypes.byref(_Call(*ctx.call)), ctypes.byref(_Heads(*ctx.heads, _at(cos), _at(sin))), _at(x), _at(weight),
            _at(bias), _at(y), _view(q), _view(k),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, cos, sin)
        return q, k, y[..., (n + g) * h :].unflatten(-1, (g, width))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        given = [one if one.stride(-1) == 1 else one.contiguous() for one in grads]
        wanted = zip((x, weight, weight[:, 0]), ctx.needs_input_grad, strict=False)
        of_x, of_weight, of_bias = (torch.empty_like(one) if want else None for one, want in wanted)
        room = x.new_empty(ctx.call[6], len(weight))
        _library().project_back(
            ctypes.byref(_Call(*ctx.call)), ctypes.byref(_Heads(*ctx.heads, _at(cos), _at(sin))), *map(_view, given),
            _at(x), _at(weight), _at(room), _at(of_x), _at(of_weight), _at(of_bias),
        )  # fmt: skip
        return of_x, of_weight, of_bias, None, None, None, None


def project(
    layer: Linear, x: Tensor, heads: tuple[int, int, int, int], rotation: tuple[Tensor, Tensor, int]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns q (b, s, n, h), k (b, s, g, h), both rotated as by `naive_turn`, and v (b, s, g, hv) of x (b, s, d), for
    a training step. `heads`: n, g, h, hv; `rotation`: tables of cos and sin and the axis of pairs."""
    (cos, sin, axis), (n, g, h, width) = rotation, heads
    if x.dim() != 3 or cos.shape[-3] != 1 or cos.shape[-4] != x.shape[1]:
        return None
    if not _serve(layer, x, (layer,), (((n + g) * h + g * width, x.shape[-1]),), cos, sin):
        return None
    return _Project.apply(x, layer.weight, layer.bias, cos, sin, heads, axis == -1)


def serve(x: Tensor) -> bool:
    """Returns True if the C++ may compute parts of a training step on x."""
    return (
        torch.is_grad_enabled()
        and x.dtype == torch.float32
        and x.numel() >= FROM * x.shape[-1]
        and fused_loops.serves(x)
    )


def _serve(
    module: nn.Module, x: Tensor, layers: tuple[Linear, ...], shapes: tuple[tuple[int, int], ...], *others: Tensor
) -> bool:
    """Returns True if the C++ computes these layers, all linear ones of a module and with matrices of these shapes, for
    x and other tensors."""
    if not serve(x):
        return False
    if not all(type(one) is Linear and one.operand is not None and one.leave is None for one in layers):
        return False
    if any(one.weight.shape != shape for one, shape in zip(layers, shapes, strict=True)):
        return False  # torch says what is wrong
    used = [one for layer in layers for one in (layer.weight, layer.bias) if one is not None]
    if not fused_loops.serves(x, *used, *others) or _library() is None or torch.is_autocast_enabled("cpu"):
        return False
    return unseen(module) and all(one.is_contiguous() for one in used)


def _blocks(rows: int, d: int, f: int, gates: int = 0, activation: int = 0, text: int | None = None) -> tuple[Any, ...]:
    """Returns the fields of a call on `rows` rows by this thread's number of threads, which together take whole texts
    of `text` rows."""
    threads = torch.get_num_threads()
    step = threads * BLOCK if text is None else max(1, threads * BLOCK // text) * text
    block = min(BLOCK, -(-min(rows, step) // threads))
    return (
        *_product(),
        rows,
        d,
        f,
        block,
        threads * block if text is None else min(rows, step),
        gates,
        activation,
        threads,
    )


def feed(
    network: nn.Module, x: Tensor, activation: str, before: tuple[Linear, ...], after: Linear, norm: Norm | None = None
) -> FusedPart | None:
    """Returns the fused part of a feed-forward network for x (..., d): one of `ACTIVATIONS`, layers `before` its loop,
    two for a gating, and the layer `after` it. With a norm, its result is x + network(norm(x))."""
    layers, d, f = (*before, after), x.shape[-1], after.in_features
    rows = _before(norm, d)
    shapes = ((f, d),) * len(before) + ((d, f),)
    if rows is None or not _serve(network, x, layers, shapes, *_tensors(rows)):
        return None
    return _Feed(rows, layers, _blocks(x.numel() // d, d, f, len(before), ACTIVATIONS.index(activation)))


def _before(norm: Norm | None, d: int) -> tuple[Any, ...] | None:
    """Returns a norm of rows of d numbers as `RowNorm`, with a weight of None for no norm; None if the C++ does not
    compute the norm."""
    if norm is None:
        return 0.0, False, None, None
    found = norm.of_rows() if isinstance(norm, Norm) and d <= WIDEST and unseen(norm) else None
    if found is None or found.weight.shape != (d,):
        return None
    eps, centred, weight, offset = found
    return eps, centred, weight.contiguous(), offset


def _tensors(rows: tuple[Any, ...]) -> list[Tensor]:
    """Returns weight and offset of a norm as `RowNorm`, as far as it has them."""
    return [one for one in rows[2:] if one is not None]


def mix(
    mixer: nn.Module, x: Tensor, layers: tuple[Linear, Linear], heads: tuple[int, int, int, int], causal: bool,
    factor: float, rotation: tuple[Tensor, Tensor, int] | None, norm: Norm | None = None,
) -> FusedPart | None:  # fmt: skip
    """Returns the fused part of attention for x (b, s, d), each row one text, for a training step. With a norm, its
    result is x + attention(norm(x)).

    layers    the projections to q, k and v, and of z
    heads     n, g, h, hv
    factor    scale of scores
    rotation  tables of cos and sin and the axis of pairs, for q and k; None without rotation"""
    (n, g, h, width), d = heads, x.shape[-1]
    cos, sin, axis = rotation or (None, None, -2)
    if x.dim() != 3 or (cos is not None and (cos.shape[-3] != 1 or cos.shape[-4] != x.shape[1])):
        return None
    rows = _before(norm, d)
    tables: list[Any] = [one for one in (cos, sin) if one is not None]
    shapes = ((n + g) * h + g * width, d), (d, n * width)
    if rows is None or not _serve(mixer, x, layers, shapes, *tables, *_tensors(rows)):
        return None
    (b, s, _), o = x.shape, shapes[0][0]
    r = 0 if cos is None else cos.shape[-1] * cos.shape[-2]
    of_row = s * r if cos is not None and cos.dim() == 5 and len(cos) == b > 1 else 0
    described = (s, n, g, h, width, r, axis == -1, of_row), (b, n, g, s, s, h, width, causal, factor)
    tables = [one.contiguous() for one in tables] or [None, None]
    return _Mix(rows, layers, _blocks(b * s, d, o, text=s), *described, tables)


def _view(x: Tensor) -> Any:
    return ctypes.byref(fused_loops.view(x))


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _each(tensors: Any) -> Any:
    return _addresses([*map(_at, tensors)])


def _parts(x: Tensor) -> Any:
    """Returns the addresses of x[0], x[1], ..."""
    each = x.stride(0) * x.element_size()
    return _addresses([x.data_ptr() + i * each for i in range(len(x))])


def _addresses(found: Sequence[int | None]) -> Any:
    return (ctypes.c_void_p * len(found))(*found)
