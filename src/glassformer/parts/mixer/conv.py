from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import Mixer, keys_before
from glassformer.parts.mixer.recurrent import RecurrenceConfig, RecurrentState, recurrent_cost
from glassformer.parts.reparam import MakeReparam


class Conv(Mixer):
    """Causal convolution over the last tokens, dense over channels, with a gate: the layer of gated convolutional
    networks. Dauphin et al. 2017, 1612.08083; Gehring et al. 2017, 1705.03122.

        z, gate = W [x_t, x_{t-1}, ..., x_{t-K+1}] + b        out = z sigmoid(gate)

    x, out (b,s,d), W (2 d, K d), K = `width`: the rows of W are 1-d kernels. A token of another document, or before the
    text, counts as zero. Computed by one matmul of copied windows, which keeps K d elements per token for the backward
    pass.

    Sites: z, gate, out (b,s,d).
    """

    causal, heads, separates_documents = True, None, True

    def __init__(self, d_model: int, width: int = 4, bias: bool = True, reparam: MakeReparam | None = None):
        super().__init__()
        self.d_model, self.width = d_model, width
        self.proj = Linear(width * d_model, (d_model, d_model), bias, ("output", "hidden"), reparam)
        self.z, self.gate, self.out = Site("bsd"), Site("bsd"), Site("bsd")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        s, last = x.shape[1], self.width - 1
        before = x.new_zeros(len(x), last, self.d_model) if state is None else state.begin(pass_, x)[0]
        padded = torch.cat([before, x], dim=1)
        tokens = [padded[:, last - i : last - i + s] for i in range(self.width)]
        if state is not None or pass_.documents is not None:
            age = pass_.age[..., None]
            tokens = [token.where(age >= i, 0.0) for i, token in enumerate(tokens)]
        z, gate = self.proj.split(self.proj(torch.cat(tokens, dim=-1)))
        return self.out(self.z(z) * torch.sigmoid(self.gate(gate)))

    @property
    def reach(self) -> int:
        return self.width

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        return {"z": Matrix.of(self.proj, 0), "gate": Matrix.of(self.proj, 1)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state of the last K - 1 tokens, whose size does not depend on `max_len`."""
        return RecurrentState(batch, {}, dtype, device, rewind, (self.width, self.d_model))


class ConvConfig(RecurrenceConfig, kind="conv", words=Word("conv", whole("width"), "4", optional=True)):
    """Config of a gated causal convolution, z sigmoid(gate), with kernels of `width` tokens (Dauphin et al. 2017,
    1612.08083).

    It loses if relevant tokens are further back than its layers reach, 1 + layers (width - 1) tokens; and no layer
    selects tokens by their content."""

    width: int = Field(4, ge=2, le=1 << 8)
    """Number K of tokens that an output depends on: its own token and the K - 1 before."""
    bias: bool = True

    def reach(self, ctx: BuildContext) -> int:  # type: ignore[override]
        return self.width

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return keys_before(t, self.width)

    def resized(self, n_heads: int) -> ConvConfig:
        return self

    def build(self, ctx: BuildContext) -> Conv:
        self.refuse_mup(ctx)
        return Conv(ctx.d_model, self.width, self.bias, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the convolution: the windows, z, gate and its sigmoid are kept for the backward pass."""
        d = ctx.d_model
        maps = linear_cost(ctx, shape, self.width * d, (d, d), bias=self.bias)
        return maps + Cost(kept=shape.keeps(3 * d)) + recurrent_cost(shape, {}, (self.width, d))
