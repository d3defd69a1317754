"""Products in which every row meets the matrix of its own group: one call, however the rows are spread.

>>> grouped_product(x, weight, Groups.sorted(of, n))      # row r of x (r, i) times weight[of[r]]^T, weight (n, o, i)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor

BLOCK = 64


class Groups(NamedTuple):
    """Rows in the order of their groups: `of` (r,), the group of each, and `ends` (n,) int32, where each group ends."""

    of: Int[Tensor, " r"]
    ends: Int[Tensor, " n"]

    @classmethod
    def sorted(cls, of: Int[Tensor, " r"], count: int) -> Groups:
        """`of` ascends."""
        every = torch.arange(count, device=of.device)
        return cls(of, torch.searchsorted(of, every, right=True, out_int32=True))

    def in_blocks(self, size: int) -> tuple[Groups, Int[Tensor, " r"]]:
        """The groups filled up to whole blocks of `size` rows, and the place of each row in them."""
        rows = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        filled = (rows + size - 1) // size * size
        ends = filled.cumsum(0)
        shift = (ends - filled) - (self.ends - rows)
        place = torch.arange(len(self.of), device=self.of.device) + shift[self.of]
        of = torch.arange(len(rows), device=self.of.device).repeat_interleave(filled)
        return Groups(of, ends.int()), place


def wants_blocks(x: Tensor, rows: int, groups: int) -> bool:
    """Whether products of so many rows are to be of whole blocks: oneDNN, which computes those in 16 bits on a
    processor, writes a program for every number of rows that it meets, and keeps a thousand of them."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    return half and rows > groups * BLOCK and not shapes_alone(x)


def shapes_alone(x: Tensor) -> bool:
    """Whether sizes that the data decide are unknown: where a compiler looks on, and of tensors without data."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta


def filled_rows(dtype: torch.dtype, device: str, rows: int, groups: int) -> int:
    """Rows that are computed for so many of so many groups, blocks being filled up by half of one on average."""
    half = dtype in (torch.bfloat16, torch.float16) and device == "cpu"
    return rows + groups * (BLOCK - 1) // 2 if half and rows > groups * BLOCK else rows


def grouped_product(x: Float[Tensor, "r i"], weight: Float[Tensor, "n o i"], groups: Groups) -> Float[Tensor, "r o"]:
    """y_r = W_j x_r, j = groups.of[r]; equal to `naive_grouped_product`."""
    if not shapes_alone(x):
        return _product(x, weight, groups.ends)
    if len(x) <= len(weight):  # a decoding step: the compiler reads the chosen maps where they lie
        return torch.bmm(x[:, None], weight[groups.of].transpose(1, 2))[:, 0]
    return _opaque(x, weight, groups.ends)


def naive_grouped_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """The definition: a matrix for every row."""
    return torch.einsum("ri,roi->ro", x, weight[groups.of])


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """By `F.grouped_mm`, which wants rows of whole 16 bytes and no fp64; elsewhere a product for each group."""
    whole = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if whole and x.dtype != torch.float64 and x.device.type != "mps":
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ own.t() for part, own in zip(parts, weight, strict=True)])


# What the compiler takes as one operation: it cannot follow sizes that the data decide, and of `F.grouped_mm` it knows
# the shapes in bf16 alone.


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
    """(n, o, i): the gradient of the maps."""
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
