"""Products of a training step in fp32 on a CPU, with the loops before and after them, as `fused_products.cpp` computes
them.

    gating      y = (phi(x W_gate^T + b) * (x W_up^T + b)) W_down^T + b
    network     y = phi(x W_up^T + b) W_down^T + b
    attention   y = softmax(scale q k^T) v W_out^T + b, with q, k and v as next
    projection  q, k, v = x W^T + b, with the pairs of q and k rotated

phi is one of `ACTIVATIONS`. All but the projection may also be y = x + part(norm(x)), with an RMS norm or a layer norm.
Blocks of rows pass through all products and loops while they are in the cache, in one call: in a small model the calls
of separate operations take as long as the work, and in a larger one the memory between them. The products are MKL's,
inside of torch. The backward pass makes the results of phi again, which costs less than to keep them. Each function
returns None if torch should compute the call: wherever `fused_loops` does, with few rows, while something watches or
edits values inside the part, and without gradients, where a watched model has the bits of an unwatched one. Gradients
of weights are sums over blocks, so that their last bits depend on the number of threads, and have no gradients.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.machine import native
from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.site import unseen
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
    """Addresses of weight, offset, room for results, rates and means of a norm, and its eps; nulls for what it lacks,
    or without a norm."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "offset", "room", "rates", "means")),
        ("eps", ctypes.c_float),
    )

    @staticmethod
    def made(x: Tensor, scale: Tensor | None, centred: bool) -> tuple[Tensor | None, ...]:
        """Returns empty tensors for rates and means of x."""
        if scale is None:
            return None, None
        rates = x.new_empty(x.shape[:-1])
        return rates, torch.empty_like(rates) if centred else None

    @staticmethod
    def of(eps: float, room: Tensor | None, norm: Any) -> Any:
        scale, offset, rates, means = norm
        return ctypes.byref(_Norm(*map(_at, (scale, offset, room, rates, means)), eps))

    @staticmethod
    def results(x: Tensor, step: int, scale: Tensor | None) -> Tensor | None:
        """Returns room for the results of a step of rows."""
        return None if scale is None else x.new_empty(step, x.shape[-1])

    @staticmethod
    def gradients(parts: Tensor | None, d: int, offset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of weight and offset, which are next to each other in the first row."""
        if parts is None:
            return None, None
        sums = parts[0].clone()  # without the room of the other blocks
        return (sums, None) if offset is None else (sums[:d], sums[d:])


class _Feed(torch.autograd.Function):
    """Autograd function of a feed-forward network: x, the number of matrices before the loop and that of its
    activation, the norm before the matrices as `RowNorm`, all weights, all biases. After a norm, x is added to the
    result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: int, activation: int, eps: float, centred: bool, scale: Tensor | None,
        offset: Tensor | None, *matrices: Any,
    ) -> Tensor:  # fmt: skip
        x, weights, biases = x.contiguous(), *(matrices[i : i + gates + 1] for i in (0, gates + 1))
        d, f = x.shape[-1], weights[-1].shape[1]
        ctx.call, ctx.eps = _blocks(x.numel() // d, d, f, gates, activation), eps
        step = ctx.call[6]
        opened, y = [x.new_empty(x.numel() // d, f) for _ in range(gates)], torch.empty_like(x)
        room, norm = x.new_empty(step, f), (scale, offset, *_Norm.made(x, scale, centred))
        results = _Norm.results(x, step, scale)
        _library().feed(
            ctypes.byref(_Call(*ctx.call)), _Norm.of(eps, results, norm), _at(x), _each(weights), _each(biases),
            _each(opened), _at(room), _at(y),
        )  # fmt: skip
        ctx.save_for_backward(x, *norm, *opened, *weights)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, rows, d, f, block, step, gates, *_ = ctx.call
        x, *kept = ctx.saved_tensors
        norm, kept = kept[:4], kept[4:]
        opened, weights, grad = kept[:gates], kept[gates:], grads[0].contiguous()
        rooms = [x.new_empty(step, f) for _ in range(gates + 1)]
        scale, offset, *_ = norm
        of_x = None if scale is None and not ctx.needs_input_grad[0] else torch.empty_like(x)
        of_norms = None if scale is None else x.new_empty(-(-rows // block), d if offset is None else 2 * d)
        results = _Norm.results(x, step, scale)
        wanted = ctx.needs_input_grad[7:]
        shapes = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
        made = [x.new_empty(shape) if want else None for shape, want in zip(shapes, wanted, strict=True)]
        _library().feed_back(
            ctypes.byref(_Call(*ctx.call)), _Norm.of(ctx.eps, results, norm), _at(of_norms), _at(grad), _at(x),
            _each(weights), _each(opened), _each(rooms), _at(of_x), _each(made[: gates + 1]), _each(made[gates + 1 :]),
        )  # fmt: skip
        return of_x, *[None] * 4, *_Norm.gradients(of_norms, d, offset), *made


class _Heads(ctypes.Structure):
    """Numbers of tokens, heads of q and of k, widths of k and of v, numbers turned in a head, 1 for neighbouring pairs,
    numbers between the tables of texts, and addresses of the tables."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("s", "n", "g", "h", "v", "r", "near", "of_row")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
    )


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
    @torch.autograd.function.once_differentiable
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


class _Mix(torch.autograd.Function):
    """Autograd function of attention with its projections: x, numbers of heads and widths of k and v, causality, scale
    of scores, tables of a rotation and their pairing, the norm before them as `RowNorm`, weights and biases of both
    layers. After a norm, x is added to the result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, ...], causal: bool, factor: float, cos: Tensor | None,
        sin: Tensor | None, near: bool, eps: float, centred: bool, scale: Tensor | None, offset: Tensor | None,
        weight: Tensor, bias: Tensor | None, after: Tensor, bias_after: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        (b, s, d), (n, g, h, width) = x.shape, heads
        r = 0 if cos is None else cos.shape[-1] * cos.shape[-2]
        of_row = s * r if cos is not None and cos.dim() == 5 and len(cos) == b > 1 else 0
        ctx.eps, ctx.call = eps, _blocks(b * s, d, len(weight), text=s)
        ctx.heads, ctx.sizes = (s, n, g, h, width, r, near, of_row), (b, n, g, s, s, h, width, causal, factor)
        qkv, z, y = x.new_empty(b, s, len(weight)), x.new_empty(b, s, n * width), torch.empty_like(x)
        log_z = x.new_empty(b, n, s)
        norm = scale, offset, *_Norm.made(x, scale, centred)
        given, results = (x, weight, bias, after, bias_after, qkv, z, log_z, y), _Norm.results(x, ctx.call[6], scale)
        if _library().mix(*_Mix._call(ctx, results, norm, cos, sin), *map(_at, given)):
            raise MemoryError("attention")
        ctx.save_for_backward(x, weight, after, qkv, z, log_z, cos, sin, *norm)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, after, qkv, z, log_z, cos, sin, *norm = ctx.saved_tensors
        (scale, offset, *_), d = norm, x.shape[-1]
        block, step = ctx.call[5:7]
        wanted = ctx.needs_input_grad[-4:]
        made = [
            one.new_empty(one.shape[: 2 - i % 2]) if want else None
            for i, (one, want) in enumerate(zip((weight, weight, after, after), wanted, strict=True))
        ]
        of_x = None if scale is None and not ctx.needs_input_grad[0] else torch.empty_like(x)
        blocks = -(-len(qkv.flatten(0, 1)) // step) * -(-step // block)
        of_norms = None if scale is None else x.new_empty(blocks, d if offset is None else 2 * d)
        grad, room, room_z = grads[0].contiguous(), x.new_empty(step, len(weight)), x.new_empty(step, z.shape[-1])
        given = of_norms, grad, x, weight, after, qkv, z, log_z, room, room_z, of_x, *made
        results = _Norm.results(x, step, scale)
        if _library().mix_back(*_Mix._call(ctx, results, norm, cos, sin), *map(_at, given)):
            raise MemoryError("the gradient of attention")
        return of_x, *[None] * 8, *_Norm.gradients(of_norms, d, offset), *made

    @staticmethod
    def _call(ctx: Any, results: Any, norm: Any, cos: Tensor | None, sin: Tensor | None) -> tuple[Any, ...]:
        """Returns the descriptions of a call, for the C++."""
        heads, sizes = _Heads(*ctx.heads, _at(cos), _at(sin)), fused_loops.AttentionSizes(*ctx.sizes)
        call = ctypes.byref(_Call(*ctx.call)), _Norm.of(ctx.eps, results, norm)
        return *call, ctypes.byref(heads), ctypes.byref(sizes)


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


def _serve(
    module: nn.Module, x: Tensor, layers: tuple[Linear, ...], shapes: tuple[tuple[int, int], ...], *others: Tensor
) -> bool:
    """Returns True if the C++ computes these layers, all linear ones of a module and with matrices of these shapes, for
    x and other tensors."""
    if not torch.is_grad_enabled() or x.dtype != torch.float32 or x.numel() < FROM * x.shape[-1]:
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
) -> Tensor | None:
    """Returns the output (..., d) of a feed-forward network of x (..., d): one of `ACTIVATIONS`, layers `before` its
    loop, two for a gating, and the layer `after` it. With a norm, returns x + network(norm(x))."""
    layers, d, f = (*before, after), x.shape[-1], after.in_features
    rows = _before(norm, d)
    shapes = ((f, d),) * len(before) + ((d, f),)
    if rows is None or not _serve(network, x, layers, shapes, *_tensors(rows)):
        return None
    matrices = (*(one.weight for one in layers), *(one.bias for one in layers))
    number = ACTIVATIONS.index(activation)
    return _Feed.apply(x, len(before), number, *rows, *matrices)


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
) -> Tensor | None:  # fmt: skip
    """Returns the output (b, s, d) of attention of x (b, s, d), each row one text, for a training step. With a norm,
    returns x + attention(norm(x)).

    layers    the projections to q, k and v, and of z
    heads     n, g, h, hv
    factor    scale of scores
    rotation  tables of cos and sin and the axis of pairs, for q and k; None without rotation"""
    (n, g, h, width), d = heads, x.shape[-1]
    cos, sin, axis = rotation or (None, None, -2)
    if x.dim() != 3 or (cos is not None and (cos.shape[-3] != 1 or cos.shape[-4] != x.shape[1])):
        return None
    rows = _before(norm, d)
    tables = () if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    shapes = ((n + g) * h + g * width, d), (d, n * width)
    if rows is None or not _serve(mixer, x, layers, shapes, *tables, *_tensors(rows)):
        return None
    matrices = [one for layer in layers for one in (layer.weight, layer.bias)]
    return _Mix.apply(x, heads, causal, factor, *(tables or (None, None)), axis == -1, *rows, *matrices)


def _view(x: Tensor) -> Any:
    return ctypes.byref(fused_loops.view(x))


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _each(tensors: Any) -> Any:
    return (ctypes.c_void_p * len(tensors))(*map(_at, tensors))
