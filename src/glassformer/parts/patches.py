"""Embedding of images as a sequence of vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, Value
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init, Role
from glassformer.parts.core.shard import REPLICATED, Shards
from glassformer.parts.linear import Linear, linear_cost
from glassformer.parts.reparam import MakeReparam


class First(nn.Module):
    """Trained vector before the vectors of an image's patches, weight (1, d), as BERT's [CLS]."""

    roles: tuple[Role, ...] = ("embedding",)
    shards: ClassVar[Shards] = {"weight": (REPLICATED,)}

    def __init__(self, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, d_model))
        self.init_weights(Init())

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")


class Patches(nn.Module):
    """Embedding of images: x_0 = first, x_i = patch_i W + b: images (b, c, h, w) -> x (b, 1 + n, d). Dosovitskiy et al.
    2020, 2010.11929.

    An image of size x size pixels is cut into n squares of patch x patch, row by row; the c patch^2 elements of each,
    one channel after the other, are a vector. Remaining pixels at the right and bottom are ignored.
    """

    def __init__(
        self, d_model: int, size: int, patch: int, channels: int = 3, reparam: MakeReparam | None = None
    ):  # fmt: skip
        super().__init__()
        self.size, self.patch, self.channels = size, patch, channels
        self.projection = Linear(channels * patch**2, d_model, bias=True, reparam=reparam)
        self.first = First(d_model)

    @property
    def tokens(self) -> int:
        """Number of vectors that one image becomes, the trained first vector included."""
        return 1 + (self.size // self.patch) ** 2

    def check(self, images: Tensor) -> None:
        """Raises RequestError for a tensor that does not hold images of this size."""
        wanted = (self.channels, self.size, self.size)
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted or not images.is_floating_point():
            kind = "floating" if images.is_floating_point() else "whole"
            raise RequestError(
                f"this model reads images (b, {', '.join(map(str, wanted))}) of floating numbers, and "
                f"{tuple(images.shape)} of {kind} ones were given",
                code="conflict", field="images", value=tuple(images.shape), expected=str(("b", *wanted)),
            )  # fmt: skip

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b s d"]:
        rows = F.unfold(images.to(self.first.weight.dtype), self.patch, stride=self.patch).transpose(1, 2)
        return torch.cat((self.first.weight.expand(len(images), 1, -1), self.projection(rows)), dim=1)

    def extra_repr(self) -> str:
        return f"size={self.size}, patch={self.patch}, channels={self.channels}"


class PatchesConfig(Value):
    """Config of `Patches`, the embedding of images. The vocabulary of a model that reads images has no meaning; 1 is
    usual."""

    size: int = Field(224, gt=0, le=1 << 16)
    """Number of pixels on each side of an image."""
    patch: int = Field(16, gt=0, le=1 << 16)
    """Number of pixels on each side of a patch."""
    channels: int = Field(3, gt=0, le=1 << 10)

    @model_validator(mode="after")
    def _fits(self) -> PatchesConfig:
        if self.patch > self.size:
            raise RequestError(
                f"patch={self.patch} is larger than the image, size={self.size}",
                code="range", field="patch", value=self.patch,
            )  # fmt: skip
        return self

    @property
    def tokens(self) -> int:
        """Number of vectors that one image becomes, the trained first vector included."""
        return 1 + (self.size // self.patch) ** 2

    def build(self, ctx: BuildContext) -> Patches:
        return Patches(ctx.d_model, self.size, self.patch, self.channels, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the embedding: a linear layer over the patches, and the first vector."""
        read = replace(shape, s=max(shape.s - 1, 1))
        return linear_cost(ctx, read, self.channels * self.patch**2, ctx.d_model, bias=True) + Cost.weights(ctx.d_model)
