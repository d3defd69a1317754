"""Feed-forward networks of a training step in fp32 on a CPU, with the loop between their products, as
`fused_products.cpp` computes them.

    SwiGLU   y = (silu(x W_gate^T) * x W_up^T) W_down^T
    GELU     y = gelu_tanh(x W_up^T + b) W_down^T + b

A product over all rows writes more than a cache holds, so the loop after it waits for memory. Here blocks of rows pass
through all products and the loop between them while they are in the cache. The products are those of the BLAS inside
of torch, and what is kept for the backward pass is what the separate operations keep. Each function returns None if
torch should compute the call: wherever `fused_loops` does, with few rows, and while something watches or edits values
inside the network.
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
from glassformer.parts.core.site import unseen
from glassformer.parts.linear import Linear

SOURCE = Path(__file__).with_suffix(".cpp")
FROM = 64
"""Least number of rows for which blocks are used."""
BLOCK = 256
"""Number of rows of a block, or fewer so that each thread has a block."""


class _Call(ctypes.Structure):
    """Address of the product, numbers of rows of x and of a block, widths, number of matrices before the
    loop, and of threads."""

    _fields_ = (
        ("gemm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "d", "f", "block", "gates", "threads")),
    )


@cache
def _product() -> int | None:
    """Returns the address of the fp32 product of the BLAS inside of torch; None if torch has another than MKL, which
    may start threads of its own in each of ours."""
    folder = Path(torch.__file__).parent / "lib"
    found = next((path for path in folder.glob("libtorch_cpu.*") if path.suffix in (".so", ".dylib")), None)
    if found is None or not torch.backends.mkl.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(found)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def _library() -> Any:
    """Returns the compiled C++; None if the machine has no suitable product, instructions or compiler."""
    if _product() is None or not fused_loops.serves():
        return None
    found = native.if_possible(SOURCE, native.kernel(), "training in fp32 uses separate products and loops")
    if found is not None:
        at = ctypes.c_void_p
        for function, arguments in {"feed": 7, "feed_back": 9}.items():
            call = getattr(found, function)
            call.argtypes, call.restype = [at] * arguments, None
    return found


class _Feed(torch.autograd.Function):
    """Autograd function of a feed-forward network: x, the number of matrices before the loop, all weights, all
    biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: int, *matrices: Tensor | None) -> Tensor:
        x, weights, biases = x.contiguous(), *(matrices[i : i + gates + 1] for i in (0, gates + 1))
        d, f = x.shape[-1], weights[-1].shape[1]
        rows = x.numel() // d
        threads, rows = torch.get_num_threads(), x.numel() // d
        block = min(BLOCK, -(-rows // threads))
        ctx.sizes = _product(), rows, d, f, block, gates, threads
        opened, y = [x.new_empty(*x.shape[:-1], f) for _ in range(gates)], torch.empty_like(x)
        room = x.new_empty(threads * block, f)
        _library().feed(
            ctypes.byref(_Call(*ctx.sizes)), _at(x), _each(weights), _each(biases), _each(opened), _at(room), _at(y)
        )
        ctx.save_for_backward(x, *opened, *weights)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, f, block, gates, threads = ctx.sizes
        x, *kept = ctx.saved_tensors
        opened, weights, grad = kept[:gates], kept[gates:], grads[0].contiguous()
        rooms = [x.new_empty(threads * block, f) for _ in range(gates + 1)]
        wanted, of_x = ctx.needs_input_grad[2:], torch.empty_like(x) if ctx.needs_input_grad[0] else None
        shapes = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
        made = [x.new_empty(shape) if want else None for shape, want in zip(shapes, wanted, strict=True)]
        _library().feed_back(
            ctypes.byref(_Call(*ctx.sizes)), _at(grad), _at(x), _each(weights), _each(opened), _each(rooms),
            _at(of_x), _each(made[: gates + 1]), _each(made[gates + 1 :]),
        )  # fmt: skip
        return (of_x, None, *made)


def feed(network: nn.Module, x: Tensor, before: tuple[Linear, ...], after: Linear) -> Tensor | None:
    """Returns the output (..., d) of a feed-forward network of x (..., d), for a training step: layers `before` its
    loop, two for SwiGLU and one for GELU, and the layer `after` it."""
    if not torch.is_grad_enabled() or x.dtype != torch.float32 or x.numel() < FROM * x.shape[-1]:
        return None
    layers = (*before, after)
    if not all(type(one) is Linear and one.operand is not None and one.leave is None for one in layers):
        return None
    weights, biases = [one.weight for one in layers], [one.bias for one in layers]
    if not fused_loops.serves(x, *weights, *(one for one in biases if one is not None)) or _library() is None:
        return None
    if torch.is_autocast_enabled("cpu") or not unseen(network) or not all(one.is_contiguous() for one in weights):
        return None
    return _Feed.apply(x, len(before), *weights, *biases)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _each(tensors: Any) -> Any:
    return (ctypes.c_void_p * len(tensors))(*map(_at, tensors))
