"""Linear layers, and the initialisation of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts import many_rows
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.owner import Owner, Seam
from glassformer.parts.core.shard import REPLICATED, Shard, Shards
from glassformer.parts.grouped import Groups, grouped_product
from glassformer.parts.precision import as_among_others, product_dtype
from glassformer.parts.reparam import MakeReparam


class Linear(nn.Module):
    """y = x W^T + b, where W may hold several layers that share their input, stacked by rows.

    x (..., i), W (o, i), b (o,), y (..., o). With `out=(a, b, c)`, o = a + b + c, `split` returns the three results,
    one matmul computes them, and each is initialised like a single layer, by a separate role if `role` names several.
    With `reparam`, W is made from `weight` at every call (`parts/reparam.py`). `shard`: the division of each layer
    among owners (`parts/core/shard.py`).
    """

    decays = True
    packable = True
    """True if the weight of layers of this class may be quantised (`parts/quantized.py`)."""
    leave: Seam | None = None
    """Function that joins the results of several tensor-parallel ranks, before the bias is added
    (`parts/core/owner.py`); None for one rank."""
    in_half = True
    """True if autocast rounds the weight to 16 bits before the matmul, in every pass."""

    def __init__(
        self,
        in_features: int,
        out: int | tuple[int, ...],
        bias: bool = False,
        role: Role | tuple[Role, ...] = "hidden",
        reparam: MakeReparam | None = None,
        shard: Shard | tuple[Shard, ...] = REPLICATED,
    ):
        super().__init__()
        self.in_features = in_features
        self.outs = (out,) if isinstance(out, int) else tuple(out)
        self.roles = (role,) * len(self.outs) if isinstance(role, str) else role
        cuts = (shard,) * len(self.outs) if isinstance(shard, Shard) else shard
        self.cuts = tuple(replace(cut, rows=rows) for cut, rows in zip(cuts, self.outs, strict=True))
        self.weight = nn.Parameter(torch.empty(sum(self.outs), in_features))
        self.bias = nn.Parameter(torch.empty(sum(self.outs))) if bias else None
        self.reparam = reparam(in_features, self.outs) if reparam else None
        self.init_weights(Init())

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        weight = self.weight if self.reparam is None else self.reparam(self.weight)
        if self.leave is None:
            y = many_rows.linear(x, weight, self.bias)
            return as_among_others(lambda x: F.linear(x, weight, self.bias), x) if y is None else y
        y = self.leave(as_among_others(lambda x: F.linear(x, weight), x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def applied(self) -> Tensor:
        """Returns the effective matrix (o, i) of this layer: W, or what its reparametrisation makes of W."""
        return self.weight if self.reparam is None else self.reparam.applied(self.weight)

    @property
    def operand(self) -> Tensor | None:
        """Matrix W (o, i), if a matmul can use it directly; None if it is computed or unpacked at every call."""
        return self.weight if self.reparam is None else None

    @property
    def shards(self) -> Shards:
        return {"weight": self.cuts, "bias": self.cuts}

    def take_share(self, owner: Owner) -> None:
        """Updates the sizes of this layer to those of the owner's shard, after the weight was divided."""
        owner.refuse("reparam", self.reparam is not None, "makes a matrix of the whole one")
        columns = [cut.cut == "column" for cut in self.cuts]
        self.outs = tuple(out // owner.of if own else out for out, own in zip(self.outs, columns, strict=True))
        if self.cuts[0].cut == "row":
            self.in_features //= owner.of
            self.leave = self.leave or owner.leave

    def split(self, y: Float[Tensor, "... o"]) -> tuple[Tensor, ...]:
        return y.split(self.outs, dim=-1)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        for weight, role in zip(self.weight.split(self.outs), self.roles, strict=True):
            init.fill(weight, role)
        if self.reparam is not None:
            self.reparam.begin(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {' + '.join(map(str, self.outs))}, bias={self.bias is not None}"


class GroupedLinear(Linear):
    """y_r = W_j x_r + b_j, j the group of row r: every row passes through one of n linear layers, stacked by rows in W.

    x (r, i), rows in the order of their groups, W (n o, i), b (n o,), y (r, o). Reads only the layers of groups that
    have rows (`parts/grouped.py`).
    """

    packable = False

    def __init__(
        self,
        groups: int,
        in_features: int,
        out: int,
        bias: bool = False,
        role: Role = "hidden",
        reparam: MakeReparam | None = None,
    ):
        super().__init__(in_features, (out,) * groups, bias, role, reparam)
        self.cuts = (Shard("expert", groups),)

    def forward(self, x: Float[Tensor, "r i"], groups: Groups) -> Float[Tensor, "r o"]:  # type: ignore[override]
        dtype = product_dtype(x)
        y = grouped_product(x.to(dtype), self.maps().to(dtype), groups)
        if self.bias is None:
            return y
        return y + self.bias.to(dtype).view(len(self.outs), -1).index_select(0, groups.of)

    @torch.no_grad()
    def keep(self, first: int, last: int) -> None:
        """Removes all layers but `first` .. `last`-1 from this rank."""
        if self.reparam is not None:
            raise RequestError(
                "the maps of experts are divided among ranks, and their reparametrisation needs all of them; use ep=1",
                code="conflict", field="ep", value=last - first, expected="1",
            )  # fmt: skip
        rows = self.outs[0]
        for name, one in (("weight", self.weight), ("bias", self.bias)):
            if one is not None:
                setattr(self, name, nn.Parameter(one[first * rows : last * rows].clone(), one.requires_grad))
        self.outs = self.outs[first:last]

    def maps(self) -> Float[Tensor, "n o i"]:
        weight = self.weight if self.reparam is None else self.reparam(self.weight)
        return weight.view(len(self.outs), -1, self.in_features)

    def extra_repr(self) -> str:
        return f"{len(self.outs)} x ({self.in_features} -> {self.outs[0]}), bias={self.bias is not None}"


def linears(module: nn.Module) -> list[Linear]:
    """Returns all linear layers inside a module, except grouped ones (experts), where each processes only some rows."""
    return [one for one in module.modules() if isinstance(one, Linear) and not isinstance(one, GroupedLinear)]


@dataclass(frozen=True)
class Matrix:
    """One linear layer's weight matrix inside a parameter: rows first .. last-1, and the number of heads, None if these
    rows are not divided into heads."""

    parameter: nn.Parameter
    first: int
    last: int
    heads: int | None = None
    linear: Linear | None = None
    pieces: Pieces | None = None
    """Gathering of the shards of all tensor-parallel ranks, if `parameter` is this rank's shard; `first` and `last`
    then count rows of the whole parameter. None for a whole parameter."""

    @classmethod
    def of(cls, linear: Linear, part: int = 0, heads: int | None = None) -> Matrix:
        """Returns layer number `part`, from 0, of the layers stacked in `linear`, divided into `heads` heads."""
        first = sum(linear.outs[:part])
        return cls(linear.weight, first, first + linear.outs[part], heads, linear)

    def within(self, values: Tensor) -> Tensor:
        """Returns this layer's rows of `values`: the parameter, its gradient, or any tensor of that shape; as (o, i),
        or with heads (heads, o/heads, i)."""
        rows = values[self.first : self.last]
        return rows if self.heads is None else rows.unflatten(0, (self.heads, -1))

    @property
    def size(self) -> int:
        """Number of elements of this layer's matrix."""
        shape = self.parameter.shape if self.pieces is None else self.pieces.shape
        return (self.last - self.first) * math.prod(shape[1:])

    @property
    def bias(self) -> nn.Parameter | None:
        """Bias of all layers stacked in the parameter; `within` selects this layer's share. None without a bias."""
        return None if self.linear is None else self.linear.bias

    def applied(self) -> Tensor:
        """Returns the effective matrix of this layer, with the shape of `within`: rows of the parameter, or of its
        reparametrisation."""
        return self.within(self.parameter if self.linear is None else self.linear.applied())


@dataclass(frozen=True)
class Pieces:
    """Gathering of a parameter that is divided among several ranks."""

    shape: torch.Size
    """Shape of the whole parameter."""
    join: Callable[[Tensor], Tensor]
    """Function of this rank's shard of the parameter, or of a tensor of the shard's shape (a gradient); returns the
    whole tensor. All ranks must call it together."""


def matrices_of(module: nn.Module) -> dict[str, Matrix]:
    """Returns every parameter of two axes inside a module as a matrix, named by its path without the last step
    `weight`: for parts whose matrices have no other names."""
    named = ((name.removesuffix(".weight"), weight) for name, weight in module.named_parameters())
    return {name: Matrix(weight, 0, len(weight)) for name, weight in named if weight.dim() == 2}


def linear_cost(ctx: BuildContext, shape: Shape, inputs: int, *outs: int | tuple[int, ...], bias: bool = False) -> Cost:
    """Returns the cost of linear layers that share one input of `inputs` elements. Each of `outs` is the output width
    of a layer, one matmul, or a tuple of the widths of layers stacked in one matrix.

    >>> linear_cost(ctx, shape, d, f, f) + linear_cost(ctx, shape, f, d)
    """
    total = Cost()
    for i, out in enumerate(outs):
        maps = out if isinstance(out, tuple) else (out,)
        o = sum(maps)
        product = Cost.weights(
            (inputs + bias) * o,
            flops=shape.passes * 2 * shape.tokens * inputs * o,
            # under autocast, cast copies of the weights are kept, and for every matmul one of an input in another
            # dtype
            kept=shape.keeps(inputs if i == 0 or shape.inputs != shape.products else 0)
            + (shape.keeps_once(inputs * o) if shape.products != shape.dtype else 0),
            kept_selective=shape.keeps(o),
            moved_bytes=shape.passes * shape.tokens * (inputs + o) * shape.products.itemsize
            + shape.reads((inputs + bias) * o),
        )
        total += product
        if ctx.reparam is not None:
            total += ctx.reparam.costs(ctx.within(width=inputs, outs=maps), shape)
    return total
