"""Loops of a training step in fp32 on a CPU, each in one pass over memory, as `fused_loops.cpp` computes them; without
gradients, gating, RMS norm, rotation and attention in bf16 too.

Operations of torch read and write whole tensors: the gradient of a gating is ten passes, each with a call. In a small
model these passes take as long as the matmuls. Here each is one loop, built once for a machine in seconds:

    gating     y = silu(gate) up
    GELU       y = x sigmoid(2 z),  z = sqrt(2 / pi) (x + 0.044715 x^3)
    RMS norm   y = x rate w,  rate = 1 / sqrt(mean(x^2) + eps)
    rotation   y = x cos + swap(x) sin, where swap exchanges the elements of each pair
    loss       log sum exp(logits) - logit of the target
    attention  z = softmax(scale q k^T) v, over all keys or those up to the query's token

and the gradient of each. The bits of a row depend neither on the number of threads nor on other rows. Each function
returns None if torch should compute the call: for other dtypes or devices, without a compiler, while a compiler of
torch traces, and for tensors that a mode or a subclass of torch watches. `parts/region.py` compiles the same loops for
other dtypes, for each model.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glassformer.machine import native
from glassformer.parts.first_order import first_order
from glassformer.parts.precision import traced

if TYPE_CHECKING:
    from glassformer.parts.kernel.base import CallFacts

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 64
"""Number of rows whose gradients of a norm's weight are summed before those of other rows; `ROWS` in the C++."""
LONGEST = 4096
"""Largest number of keys of attention: beyond, scores of a block of queries leave the cache, and torch's kernel is
faster."""
PLAIN = (Tensor, nn.Parameter)
"""Types of tensors whose addresses hold their values."""


class _View(ctypes.Structure):
    """Address of a tensor (b, s, n, h) whose last axis has stride 1, and the strides of its other axes."""

    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "token", "head")))


class AttentionSizes(ctypes.Structure):
    """Sizes of an attention call: rows, heads of q and of k, queries, keys, and widths of k and of v."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "n", "g", "s", "t", "h", "v")),
        ("causal", ctypes.c_bool),
        ("scale", ctypes.c_float),
    )


@cache
def _library() -> Any:
    """Returns the compiled C++; None if this machine has no suitable instructions or no compiler."""
    name = native.kernel()
    if name == native.NONE or native.compiler() is None:
        return None
    found = native.if_possible(SOURCE, name, "training in fp32 uses torch's slower loops")
    if found is None:
        return None
    whole, real, at = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    for function, arguments in {
        "swiglu": [at] * 3 + [whole],
        "swiglu_of_16_bits": [at] * 3 + [whole],
        "swiglu_back": [at] * 5 + [whole],
        "gelu_tanh": [at] * 2 + [whole],
        "gelu_tanh_back": [at] * 3 + [whole],
        "rms_norm": [at] * 4 + [whole] * 2 + [real],
        "rms_norm_of_16_bits": [at] * 3 + [whole] * 2 + [real],
        "rms_norm_back": [at] * 7 + [whole] * 2,
        "turn_pairs": [at] * 4 + [whole] + [at] * 3 + [whole, ctypes.c_int32, real],
        "turn_pairs_of_16_bits": [at] * 4 + [whole] + [at] * 3 + [whole, ctypes.c_int32, real],
    }.items():
        call = getattr(found, function)
        call.argtypes, call.restype = arguments, None
    found.cross_entropy.argtypes = [at] * 3 + [whole] * 2 + [real]
    for function in ("cross_entropy", "attend", "attend_of_16_bits", "attend_back"):
        getattr(found, function).restype = ctypes.c_int32
    return found


def _serving(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the C++ if it can compute with these tensors of a dtype; None otherwise."""
    for x in tensors:
        if x.dtype != dtype or type(x) not in PLAIN or not x.is_cpu:
            return None
    if traced():  # first: a compiler cannot trace the questions below
        return None
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    modes += torch.autograd.forward_ad._current_level + 1 + torch.jit.is_tracing()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return _library()


def built() -> bool:
    """Returns True if this machine has the C++, which is compiled by the first call."""
    return _library() is not None


def serves(*tensors: Tensor) -> bool:
    """Returns True if the C++ computes with these tensors."""
    return _serving(*tensors) is not None


def swiglu(gate: Tensor, up: Tensor) -> Tensor | None:
    """Returns silu(gate) up, of the shape of both, in fp32 or bf16."""
    halves = gate.dtype == torch.bfloat16
    if (
        gate.shape != up.shape
        or (found := _serving(gate, up, dtype=torch.bfloat16 if halves else torch.float32)) is None
    ):
        return None
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    call = found.swiglu_of_16_bits if halves else found.swiglu
    call(gate.data_ptr(), up.data_ptr(), y.data_ptr(), y.numel())
    return y


def swiglu_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the gradients of gate and of up, from that of `swiglu(gate, up)`."""
    if gate.shape != up.shape or (found := _serving(grad, gate, up)) is None:
        return None
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    found.swiglu_back(
        grad.data_ptr(), gate.data_ptr(), up.data_ptr(), of_gate.data_ptr(), of_up.data_ptr(), gate.numel()
    )
    return of_gate, of_up


def gelu_tanh(x: Tensor) -> Tensor | None:
    """Returns the GELU of x, by its formula with a tanh."""
    if (found := _serving(x)) is None:
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    found.gelu_tanh(x.data_ptr(), y.data_ptr(), y.numel())
    return y


def gelu_tanh_grad(grad: Tensor, x: Tensor) -> Tensor | None:
    """Returns the gradient of x, from that of `gelu_tanh(x)`."""
    if (found := _serving(grad, x)) is None:
        return None
    grad, x = grad.contiguous(), x.contiguous()
    of_x = torch.empty_like(x)
    found.gelu_tanh_back(grad.data_ptr(), x.data_ptr(), of_x.data_ptr(), x.numel())
    return of_x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Returns the RMS norm of x (..., d), weight (d,), and the rates (..., 1)."""
    if not x.shape[-1] or weight.shape != x.shape[-1:] or (found := _serving(x, weight)) is None:
        return None
    x, weight = x.contiguous(), weight.contiguous()
    d = x.shape[-1]
    y, rate = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    found.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rate.data_ptr(), rate.numel(), d, eps)
    return y, rate


def half_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Returns the RMS norm of x (..., d) in bf16, weight (d,) in bf16 or fp32, without its rates."""
    if not x.shape[-1] or weight.shape != x.shape[-1:] or _serving(weight, dtype=weight.dtype) is None:
        return None
    if (found := _serving(x, dtype=torch.bfloat16)) is None:
        return None
    x, weight = x.contiguous(), weight.float().contiguous()
    y, d = torch.empty_like(x), x.shape[-1]
    found.rms_norm_of_16_bits(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // d, d, eps)
    return y


def rms_norm_grad(grad: Tensor, x: Tensor, weight: Tensor, rate: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the gradients of x and of the weight, from that of the RMS norm of x with these rates."""
    if weight.dim() != 1 or not x.shape[-1] or (found := _serving(grad, x, weight, rate)) is None:
        return None
    grad, x, weight, rate = grad.contiguous(), x.contiguous(), weight.contiguous(), rate.contiguous()
    rows, d = rate.numel(), x.shape[-1]
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    parts = x.new_empty(-(-rows // BLOCK), d)
    found.rms_norm_back(
        grad.data_ptr(), x.data_ptr(), weight.data_ptr(), rate.data_ptr(), of_x.data_ptr(), of_weight.data_ptr(),
        parts.data_ptr(), rows, d,
    )  # fmt: skip
    return of_x, of_weight


def turn(x: Tensor, cos: Tensor, sin: Tensor, pair_axis: int, back: bool = False) -> Tensor | None:
    """Returns x (b, s, n, h) with its pairs rotated as by `naive_turn`, by the negative angles if `back`. The result is
    laid out head by head, or token by token if `back`. x is in fp32, or in bf16 with tables in fp32."""
    if x.dim() != 4 or cos.shape[-3] != 1 or cos.shape[-4] != x.shape[1] or (found := _serving(cos, sin)) is None:
        return None
    halves = x.dtype == torch.bfloat16
    if _serving(x, dtype=torch.bfloat16 if halves else torch.float32) is None:
        return None
    b, s, n, h = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    r = cos.shape[-1] * cos.shape[-2]
    of_row = s * r if cos.dim() == 5 and len(cos) == b and b > 1 else 0
    y = x.new_empty(b, s, n, h) if back else x.new_empty(b, n, s, h).transpose(1, 2)
    call = found.turn_pairs_of_16_bits if halves else found.turn_pairs
    call(
        x.data_ptr(), _numbers(x.stride()), cos.data_ptr(), sin.data_ptr(), of_row, y.data_ptr(), _numbers(y.stride()),
        _numbers(x.shape), r, pair_axis == -1, -1.0 if back else 1.0,
    )  # fmt: skip
    return y


def cross_entropy(logits: Tensor, targets: Tensor, share: float) -> Tensor | None:
    """Returns the cross-entropy (N,) in nats of logits (N, v) and targets (N,), 0 where the target is -100; replaces
    the logits by their gradient times `share`, one over the number of targets. Raises IndexError for a target
    outside of the vocabulary."""
    usual = logits.is_contiguous() and logits.numel() and targets.dtype == torch.int64
    if not usual or (found := _serving(logits)) is None:
        return None
    targets, losses = targets.contiguous(), logits.new_empty(len(logits))
    rows, v = logits.shape
    if found.cross_entropy(logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), rows, v, share):
        raise IndexError(f"a target is neither a token of 0 .. {v - 1} nor -100")
    return losses


def _numbers(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


# Attention


class _Attend(torch.autograd.Function):
    """Autograd function of attention, keeping q, k, v, z and the logarithm of each row's sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        by_head = q.stride(1) < q.stride(2)  # z is laid out as q, as costs count it
        made, ctx.sizes = _attended(_library().attend, q, k, v, causal, scale, by_head)
        ctx.save_for_backward(*made)
        return made[3]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, z, log_z = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        made = [q.new_empty(x.shape) for x in (q, k, v)]
        given, results = [view(x) for x in (grad, q, k, v, z)], [view(x) for x in made]
        call = ctypes.byref(AttentionSizes(*ctx.sizes))
        if _library().attend_back(call, *map(ctypes.byref, given), _at(log_z), *map(ctypes.byref, results)):
            raise MemoryError("the gradient of attention")
        return (*made, None, None)


def _attended(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, by_head: bool
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Returns (q, k, v, z, log_z), which the C++ function `attend` read and wrote, and the fields of
    `AttentionSizes`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (b, s, n, h), (t, g), width = q.shape, k.shape[1:3], v.shape[-1]
    z = q.new_empty(b, n, s, width).transpose(1, 2) if by_head else q.new_empty(b, s, n, width)
    log_z = q.new_empty(b, n, s, dtype=torch.float32)
    sizes = b, n, g, s, t, h, width, causal, scale
    views = [view(x) for x in (q, k, v, z)]
    if attend(ctypes.byref(AttentionSizes(*sizes)), *map(ctypes.byref, views), _at(log_z)):
        raise MemoryError("attention")
    return (q, k, v, z, log_z), sizes


def attends(facts: CallFacts) -> bool:
    """Returns True if the C++ computes attention calls with these facts: full and causal ones."""
    here = facts.device == "cpu" and facts.dtype == torch.float32 and facts.t <= LONGEST
    known = facts.plain and not (facts.sinks or facts.dropout)
    return here and known and not traced() and built()


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor | None:
    """Returns z (b, s, n, hv) of q (b, s, n, h), k (b, t, g, h) and v (b, t, g, hv), g dividing n, with a gradient.
    `causal`: query i sees the keys 0 .. t-s+i; otherwise all. Torch computes with more than LONGEST keys."""
    if not _usual(q, k, v, causal) or _serving(q, k, v) is None:
        return None
    return _Attend.apply(q, k, v, causal, scale)


def half_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor | None:
    """Returns `attention` of tensors in bf16, computed in fp32 and rounded once, without a gradient."""
    if not _usual(q, k, v, causal) or (found := _serving(q, k, v, dtype=torch.bfloat16)) is None:
        return None
    return _attended(found.attend_of_16_bits, q, k, v, causal, scale, by_head=False)[0][3]


def _usual(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    few = k.shape[1] <= LONGEST and not (causal and q.shape[1] > k.shape[1])
    return few and all(x.numel() for x in (q, k, v))


def view(x: Tensor) -> _View:
    """Returns the address of x (b, s, n, h), whose last axis has stride 1, with the strides of its other axes."""
    row, token, head, _ = x.stride()
    return _View(x.data_ptr(), row, token, head)


def _at(x: Tensor) -> Any:
    return ctypes.c_void_p(x.data_ptr())
