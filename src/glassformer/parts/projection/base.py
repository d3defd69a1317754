from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Role
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.reparam import MakeReparam

# `Self` written out, because the tests' shape checker takes `Self` only in decorated classes
P = TypeVar("P", bound="Projection")


class MapShape(NamedTuple):
    """Shape of one `Linear` of a projection, which stacks several matrices: its number of inputs, and for each matrix
    its number of outputs, its role (q, k, v), and the axis along which tensor parallelism divides it."""

    in_features: int
    outs: tuple[int, ...]
    roles: tuple[Role, ...]
    shards: tuple[Shard, ...]


class Projection(ABC):
    """Projection of x to queries, keys and values: projection(maps, x, pass_) -> q (b,s,n,h), k (b,s,g,h), v (b,s,g,h).

    A projection is a plain object. The mixer owns the linear layers ("maps") as modules (`layers.3.mixer.qkv`), so that
    quantisation, sharding and checkpoints find ordinary linear layers; `maps` in the calls below is that mixer, or any
    object with the modules as attributes. With `clip`, every element of q, k, v is clamped to [-clip, clip].

    A projection may keep less per token than the kernel reads, a latent for example: its k and v then have the heads
    and widths of `kept_shapes`, the decode state stores those, and `expand` computes the kernel's input.
    """

    def __init__(self, heads: Heads, clip: float | None = None, value_dim: int | None = None):
        self.heads, self.clip = heads, clip
        self._value_dim = value_dim or heads.head_dim

    @abstractmethod
    def shapes(self, d_model: int) -> dict[str, MapShape]:
        """Returns {name: shapes} of the linear layers of this projection, for inputs of width d_model."""

    @abstractmethod
    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]: ...

    def stacked(self, maps: Any) -> Linear | None:
        """Returns the layer whose results are q, k and v one after the other, unchanged; None without such a layer."""
        return None

    @abstractmethod
    def matrices(self, maps: Any) -> dict[str, Matrix]:
        """Returns {"q", "k", "v": weight matrix} of the linear layers in `maps`, divided into heads."""

    def maps(self, d_model: int, bias: bool = False, reparam: MakeReparam | None = None) -> dict[str, nn.Module]:
        """Builds the linear layers of this projection; returns {name: layer}, for the mixer to own."""
        return {
            name: Linear(in_features, outs, bias, roles, reparam, shards)
            for name, (in_features, outs, roles, shards) in self.shapes(d_model).items()
        }

    def of_owner(self: P, owner: Owner) -> P:
        """Returns this projection for a tensor-parallel rank's share of the heads. Raises RequestError if a layer is
        not divided by heads."""
        cuts = [cut for shape in self.shapes(1).values() for cut in shape.shards]
        whole = any(cut.cut != "column" for cut in cuts)
        owner.refuse("mixer.projection", whole and type(self).__name__, "does not cut its maps by heads")
        n, g, h = self.heads
        other = copy.copy(self)
        other.heads = Heads(owner.share("n_heads", n), owner.share("n_kv_heads", g), h)
        return other

    @property
    def value_dim(self) -> int:
        """Number of elements per head of the values v, and so of the attention output z (b, s, n, value_dim)."""
        return self._value_dim

    @property
    def kept_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes (heads, width) of the k and of the v that the decode state keeps of each token."""
        _, g, h = self.heads
        return (g, h), (g, self.value_dim)

    @property
    def kept_as_read(self) -> bool:
        """True if the decode state keeps k and v in the form in which the kernel reads them."""
        return type(self).expand is Projection.expand

    def expand(self, maps: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the k (b, t, g, h) and v (b, t, g, value_dim) that the kernel reads, from the k and v that the decode
        state keeps."""
        return k, v

    def by_head(self, x: Tensor, width: int | None = None) -> Tensor:
        """Returns x (b, s, n h) as (b, s, n, h), with h = `width`, None for head_dim; elements are clamped to [-clip,
        clip] if `clip` is set."""
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.unflatten(-1, (-1, width or self.heads.head_dim))


MakeProjection = Callable[..., Projection]
"""Function of (heads, clip=None) that returns a projection, such as a class of projections."""


class ProjectionConfig(PartConfig, axis="projection"):
    """Config of a projection to queries, keys and values."""

    tensors: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    """Groups of q, k and v that are one tensor, which stays in memory while a part of it is needed."""

    def build(self, ctx: BuildContext) -> MakeProjection:
        raise NotImplementedError

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the projection's layers; layers with equal numbers of inputs read one tensor."""
        outs: dict[int, list[tuple[int, ...]]] = {}
        for map_ in self._shapes(ctx):
            outs.setdefault(map_.in_features, []).append(map_.outs)
        total = Cost()
        for inputs, maps in outs.items():
            total += linear_cost(ctx, shape, inputs, *maps, bias=ctx.bias)
        return total

    def _shapes(self, ctx: BuildContext) -> list[MapShape]:
        heads = Heads(ctx.n_heads, ctx.n_kv_heads, ctx.head_dim)
        return list(self.build(ctx)(heads).shapes(ctx.d_model).values())


class SelfProjectionConfig(ProjectionConfig):
    """Base of the configs of projections for self-attention."""


class MemoryProjectionConfig(ProjectionConfig):
    """Base of the configs of projections for attention to another sequence."""

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the projection; the memory is one tensor for all layers."""
        return super().costs(ctx, shape) + Cost.once("memory", Cost(kept=shape.keeps(ctx.d_model, shape.inputs)))

    def build(self, ctx: BuildContext) -> Any:
        """Returns a function of (heads, clip=None) that makes a projection with the methods `queries` and `keys_values`
        of `CrossQKV`."""
        raise NotImplementedError
