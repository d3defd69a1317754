from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position.base import EmbeddingPosition, EmbeddingPositionConfig
from glassformer.parts.position.picture import Plot, some

Layout = Literal["interleaved", "halves"]


def sinusoid(
    ids: Int[Tensor, "*s"], d_model: int, base: float, layout: Layout = "interleaved"
) -> Float[Tensor, "*s d"]:
    """Returns the encoding of positions p: PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos(p / base^(2i/d)), in
    fp32.

    With layout "halves", all sines come first."""
    rate = base ** (-torch.arange(0, d_model, 2, device=ids.device, dtype=torch.float32) / d_model)
    angle = ids.float()[..., None] * rate  # (*s, d/2)
    if layout == "halves":
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Sinusoidal(EmbeddingPosition):
    """Fixed sines and cosines of geometric wavelengths, without weights or a limit. Vaswani et al. 2017, 1706.03762,
    3.5.

    Sines and cosines take turns, as in the paper, or all sines come first, as in the authors' code and in Marian. Each
    has size 1, but token embeddings are initialised with .02: the paper multiplies them by sqrt(d_model) (3.4), and so
    does the change `+sinusoidal`, unless `embedding.scale` is set.
    """

    def __init__(self, d_model: int, base: float = 10000.0, layout: Layout = "interleaved"):
        super().__init__()
        if d_model % 2:
            raise RequestError(
                f"position=sinusoidal needs an even d_model, and d_model={d_model}",
                code="range", field="d_model", value=d_model,
            )  # fmt: skip
        self.d_model, self.base, self.layout = d_model, base, layout

    def forward(self, pass_: Pass) -> Tensor:
        return sinusoid(pass_.ids, self.d_model, self.base, self.layout)

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of PE(p)_i, its first eight dimensions, and of PE(p) . PE(p + k) = sum_i cos(k /
        base^(2i/d)), which is equal for all p."""
        at, near = some(length), torch.arange(min(length, 32))
        encoding = sinusoid(at, self.d_model, self.base, self.layout).T
        first = sinusoid(near, self.d_model, self.base, self.layout).T[:8]
        origin = sinusoid(torch.tensor([0]), self.d_model, self.base, self.layout)
        return {
            "encoding by dimension": Plot("position", "dimension", at, encoding),
            "first dimensions": Plot("position", "value", near, first, tuple(f"{i}" for i in range(len(first)))),
            "dot product by distance": Plot("distance", "dot product", at, origin @ encoding, ("PE(p) · PE(p + k)",)),
        }

    def extra_repr(self) -> str:
        return f"base={self.base:g}, layout={self.layout}"


class SinusoidalConfig(EmbeddingPositionConfig, kind="sinusoidal", words="sinusoidal"):
    scales_tokens: ClassVar[bool] = True
    base: float = Field(10000.0, gt=1)
    layout: Layout = "interleaved"

    def limit(self, ctx: BuildContext) -> None:
        return None

    def build(self, ctx: BuildContext) -> Sinusoidal:
        return Sinusoidal(ctx.d_model, self.base, self.layout)
