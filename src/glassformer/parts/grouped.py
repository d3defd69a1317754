"""Grouped matmuls, in which every row is multiplied by the matrix of its group: one call for any distribution of rows.

>>> grouped_product(x, weight, Groups.sorted(of, n))      # row r of x (r, i) times weight[of[r]]^T, weight (n, o, i)
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor

from glassformer.machine import native
from glassformer.parts import fused_loops
from glassformer.parts.first_order import first_order

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 64
FEW = 64
"""Largest mean number of rows of a group for which our C++ is faster than torch's products in fp32 on a CPU."""


class Groups(NamedTuple):
    """Groups of rows that are sorted by group: `of` (r,), the group of each row, and `ends` (n,) int32, the index after
    the last row of each group."""

    of: Int[Tensor, " r"]
    ends: Int[Tensor, " n"]

    @classmethod
    def sorted(cls, of: Int[Tensor, " r"], count: int) -> Groups:
        """Returns the `count` groups of rows that are sorted by group; `of` (r,), ascending, is the group index of each
        row."""
        every = torch.arange(count, device=of.device)
        return cls(of, torch.searchsorted(of, every, right=True, out_int32=True))

    def in_blocks(self, size: int) -> tuple[Groups, Int[Tensor, " r"]]:
        """Returns the groups with each padded to whole blocks of `size` rows, and the index (r,) of each old row among
        the padded rows."""
        rows = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        filled = (rows + size - 1) // size * size
        ends = filled.cumsum(0)
        shift = (ends - filled) - (self.ends - rows)
        place = torch.arange(len(self.of), device=self.of.device) + shift[self.of]
        of = torch.arange(len(rows), device=self.of.device).repeat_interleave(filled)
        return Groups(of, ends.int()), place


def wants_blocks(x: Tensor, rows: int, groups: int) -> bool:
    """Returns True if a grouped matmul of `rows` rows should pad its groups to whole blocks: for many rows of 16 bits
    on a CPU, because oneDNN compiles a program for every number of rows and keeps a thousand of them."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    return half and rows > groups * BLOCK and not shapes_alone(x)


def shapes_alone(x: Tensor) -> bool:
    """Returns True if x has a shape but no readable values, while a compiler traces or on the meta device; sizes that
    depend on data are then unknown."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta


def filled_rows(dtype: torch.dtype, device: str, rows: int, groups: int) -> int:
    """Returns the number of rows that a grouped matmul computes for `rows` rows in `groups` groups, padding included:
    half a block per group on average."""
    half = dtype in (torch.bfloat16, torch.float16) and device == "cpu"
    return rows + groups * (BLOCK - 1) // 2 if half and rows > groups * BLOCK else rows


def at_once(dtype: torch.dtype, device: str, rows: int = 0, groups: int = 1) -> bool:
    """Returns True if one call chooses the experts of tokens and, for `rows` rows in all, computes them."""
    return dtype == torch.float32 and device == "cpu" and rows <= FEW * groups


def grouped_product(x: Float[Tensor, "r i"], weight: Float[Tensor, "n o i"], groups: Groups) -> Float[Tensor, "r o"]:
    """Returns y (r, o) with y_r = W_j x_r, where W_j (o, i) is the matrix of row r's group j = groups.of[r]; equal to
    `naive_grouped_product`."""
    if not shapes_alone(x):
        few = len(x) <= FEW * len(weight) and x.shape[1] == weight.shape[2] and groups.ends.dtype == torch.int32
        if few and fused_loops.serves(x, weight) and _library() is not None:
            return _OfFew.apply(x, weight, groups.ends)
        return _product(x, weight, groups.ends)
    if len(x) <= len(weight):  # a decoding step: the compiler reads the chosen matrices in place
        return torch.bmm(x[:, None], weight[groups.of].transpose(1, 2))[:, 0]
    return _opaque(x, weight, groups.ends)


def naive_grouped_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Returns y (r, o) with y_r = W_j x_r, j = groups.of[r], by its definition: a separate matrix-vector product for
    every row."""
    return torch.einsum("ri,roi->ro", x, weight[groups.of])


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns the products (r, o) of sorted rows x (r, i) with the matrix (o, i) of their group in `weight` (n, o, i);
    group j ends before row ends[j]. Computed by `F.grouped_mm`, which needs rows of whole 16 bytes and no fp64, or else
    a matmul per group."""
    whole = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if whole and x.dtype != torch.float64 and x.device.type != "mps":
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ own.t() for part, own in zip(parts, weight, strict=True)])


# Few rows in fp32 on a CPU


@cache
def _library() -> Any:
    """Returns the compiled C++; None if it cannot be built here."""
    found = native.if_possible(SOURCE, native.kernel(), "experts of few tokens use torch's slower products")
    if found is not None:
        at, whole = ctypes.c_void_p, ctypes.c_int64
        for call, tensors, sizes, kind in (
            (found.grouped_product, 4, 3, None), (found.grouped_product_back, 6, 3, ctypes.c_int32),
            (found.mix, 14, 5, ctypes.c_int32), (found.mix_back, 18, 5, ctypes.c_int32),
        ):  # fmt: skip
            call.argtypes, call.restype = [at] * tensors + [whole] * sizes, kind
        for call, tensors in ((found.choose, 4), (found.choose_back, 5)):
            call.argtypes = [at] * tensors + [whole] * 3 + [ctypes.c_bool, ctypes.c_float]
            call.restype = None
    return found


class _OfFew(torch.autograd.Function):
    """Autograd function of a grouped product, as `grouped.cpp` computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        n, o, i = weight.shape
        y = x.new_empty(len(x), o)
        _library().grouped_product(*(one.data_ptr() for one in (x, weight, y, ends)), n, i, o)
        ctx.save_for_backward(x, weight, ends)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad, (n, o, i) = grads[0].contiguous(), weight.shape
        of_x, of_weight = _wanted(ctx, x, weight)
        if _library().grouped_product_back(*_at(grad, x, weight, of_x, of_weight, ends), n, i, o):
            raise MemoryError("the gradient of a grouped product")
        return of_x, of_weight, None


def _at(*tensors: Tensor | None) -> list[int | None]:
    return [None if one is None else one.data_ptr() for one in tensors]


def _wanted(ctx: Any, *inputs: Tensor) -> list[Tensor | None]:
    """Returns room for the gradients of the first inputs of an autograd function; None for those not needed."""
    pairs = zip(inputs, ctx.needs_input_grad, strict=False)
    return [torch.empty_like(one) if needed else None for one, needed in pairs]


class _Choose(torch.autograd.Function):
    """Autograd function of `choice`, as `grouped.cpp` computes it."""

    @staticmethod
    def forward(
        ctx: Any, p: Tensor, bias: Tensor | None, k: int, normalised: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        p = p.contiguous()
        weights = p.new_empty(*p.shape[:-1], k)
        chosen = torch.empty_like(weights, dtype=torch.int64)
        ctx.call = len(p.view(-1, p.shape[-1])), p.shape[-1], k, normalised, scale
        _library().choose(*_at(p, bias, weights, chosen), *ctx.call)
        ctx.save_for_backward(p, weights, chosen)
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, weights, chosen = ctx.saved_tensors
        of_p = torch.empty_like(p)
        _library().choose_back(*_at(grads[0].contiguous(), p, weights, chosen, of_p), *ctx.call)
        return of_p, None, None, None, None


def choice(
    p: Float[Tensor, "*b e"], bias: Float[Tensor, " e"] | None, k: int, normalised: bool, scale: float
) -> tuple[Float[Tensor, "*b k"], Int[Tensor, "*b k"]] | None:
    """Returns (weights, indices) of the k experts of largest p + bias, as `Router.choose` defines them; None if torch
    should compute them."""
    serves = p.numel() and fused_loops.serves(p, *(() if bias is None else (bias,))) and _library() is not None
    return _Choose.apply(p, bias, k, normalised, scale) if serves else None


class _Mix(torch.autograd.Function):
    """Autograd function of `mixture`, as `grouped.cpp` computes it; keeps what separate operations keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
        x, weights, gate, up, down, chosen = (one.contiguous() for one in (x, weights, gate, up, down, chosen))
        (tokens, k), (n, f, d) = chosen.shape, gate.shape
        rows, out, y = x.new_empty(tokens * k, d), x.new_empty(tokens * k, d), torch.empty_like(x)
        opened, raised, hidden = (x.new_empty(tokens * k, f) for _ in range(3))
        ends, place = chosen.new_empty(n, dtype=torch.int32), torch.empty_like(chosen)
        maps = gate, up, down
        made = ends, place, rows, opened, raised, hidden, out
        ctx.sizes = tokens, k, n, d, f
        if _library().mix(*_at(x, weights, chosen, *maps, *made, y), *ctx.sizes):
            raise IndexError(f"a choice is outside of the experts 0 .. {n - 1}")
        ctx.save_for_backward(weights, *maps, *made)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (weights, *saved) = grads[0].contiguous(), ctx.saved_tensors
        tokens, k, _, d, f = ctx.sizes
        made = _wanted(ctx, grad, weights, *saved[:3])
        work = grad.new_empty(tokens * k * 2 * (d + f))
        if _library().mix_back(*_at(grad, weights, *saved, work, *made), *ctx.sizes):
            raise MemoryError("the gradient of experts")
        return *made, None


def mixture(
    x: Float[Tensor, "t d"], weights: Float[Tensor, "t k"], chosen: Int[Tensor, "t k"],
    gate: Float[Tensor, "n f d"], up: Float[Tensor, "n f d"], down: Float[Tensor, "n d f"],
) -> Float[Tensor, "t d"] | None:  # fmt: skip
    """Returns y (t, d) with y_t = sum over c of w_tc E_j(x_t), j = chosen[t, c], of the experts
    E_j(x) = (silu(x W_gate^T) * x W_up^T) W_down^T, in one call for a training step; equal to `Experts.naive_mix`. None
    if torch should compute it. Raises IndexError for a choice of no expert."""
    few = 0 < chosen.numel() <= FEW * len(gate) and torch.is_grad_enabled()
    fit = gate.shape == up.shape == down.mT.shape and x.shape[1] == gate.shape[2] and len(x) == len(chosen)
    fit = fit and chosen.dtype == torch.int64 and weights.shape == chosen.shape
    if not few or not fit or not fused_loops.serves(x, weights, gate, up, down) or _library() is None:
        return None
    return _Mix.apply(x, weights, gate, up, down, chosen)


# Opaque operations for the compiler, which cannot trace sizes that depend on data, and knows the shapes of
# `F.grouped_mm` only in bf16.


@library.custom_op(
    "glassformer::grouped_product", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
def _opaque(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(x, weight, ends)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@library.custom_op(
    "glassformer::grouped_outer", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor ends) -> Tensor"
)
def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Returns the gradient (n, o, i) of the matrices of a grouped matmul, from the gradient of its result, `grad` (r,
    o), and its input x (r, i); group j ends before row ends[j]."""
    made = grad.new_empty(len(ends), grad.shape[1], x.shape[1])
    for one, (first, last) in zip(made, pairwise([0, *ends.tolist()]), strict=True):
        torch.mm(grad[first:last].t(), x[first:last], out=one)
    return made


@_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return _opaque(grad, weight.transpose(1, 2), ends), _outer(grad, x, ends), None


_opaque.register_autograd(_backward, setup_context=_keep)
