from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init
from glassformer.parts.core.shard import REPLICATED
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, show_maps
from glassformer.parts.mixer.chunked import linear_attention_map
from glassformer.parts.mixer.mamba import ShortConv
from glassformer.parts.mixer.recurrent import (
    Recurrence,
    RecurrenceConfig,
    RecurrentState,
    Sizes,
    in_pieces,
    recurrent_cost,
)
from glassformer.parts.mixer.scan import CHUNK, gated_scan
from glassformer.parts.precision import full_precision, wide
from glassformer.parts.reparam import MakeReparam

SHARPNESS = 8.0
LEAST_SHARE = 1e-12
"""Lower bound of 1 - a^2, below which the slope of its square root is not usable."""
DECAYS = (0.9, 0.999)
"""Range of the initial decay a of a channel whose gate is fully open."""


class BlockGates(nn.Module):
    """Block-diagonal gates y_i = x_i W_i + b_i for each of n blocks of w channels, at least fp32; x (b, s, n, w), W (n,
    w, w), b and y (b, s, n w)."""

    decays = True

    def __init__(self, blocks: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width, width))
        self.bias = nn.Parameter(torch.empty(blocks * width))
        self.init_weights(Init())

    def forward(self, x: Float[Tensor, "b s n w"]) -> Float[Tensor, "b s c"]:
        return torch.einsum("bsnw,nwv->bsnv", x, wide(self.weight)).flatten(2) + wide(self.bias)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight.view(-1, self.weight.shape[2]), "hidden")
        self.bias.zero_()


class RGLRU(Recurrence):
    """Real-gated linear recurrent unit: channels that decay by their gate and take in a complementary share of the
    input. De et al. 2024 (Griffin), 2402.19427.

        x (b,s,d) -> in_proj -> u, gate (b,s,c)         u = conv(u), causal, of d_conv tokens
        r = sigmoid(u W_r + b_r), i = sigmoid(u W_i + b_i), W in n blocks        log a = -8 r softplus(Lambda)
        z_t = a_t z_{t-1} + sqrt(1 - a_t^2) i_t u_t     with a root of 1 for a document's first token
        out = out_proj(gelu(gate) z)

    c = width channels, d_model unless given. It needs no positions, because the recurrence is ordered. Recurrence and
    convolution restart at each document. The recurrence runs in fp32 at least.

    Sites: u, r, i, decay (log a), z, gate (b,s,c), out; and, computed only for observers, by blocks of positions, and
    not editable: effective_attention (b,n,s,t), the weight of u_j in z_t, for each of the n = c channels.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        width: int | None = None,
        d_conv: int = 4,
        bias: bool = True,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        c, n = width or d_model, blocks_of(width or d_model, n_heads)
        self.channels, self.n_heads, self.d_conv = c, n, d_conv
        self.in_proj = Linear(d_model, (c, c), bias, reparam=reparam)
        self.conv1d = ShortConv(c, d_conv, True, REPLICATED)
        self.r_gate, self.i_gate = BlockGates(n, c // n), BlockGates(n, c // n)
        self.Lambda = nn.Parameter(torch.empty(c))
        self.out_proj = Linear(c, d_model, bias, "output", reparam)
        self.init_weights(Init())
        self.u, self.r, self.i, self.decay = Site("bsc"), Site("bsc"), Site("bsc"), Site("bsc")
        self.z, self.gate, self.out = Site("bsc"), Site("bsc"), Site("bsd")
        self.effective_attention = Site("bnst")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        inputs, gate = self.in_proj.split(self.in_proj(x))
        tail, kept = (None, {}) if state is None else state.begin(pass_, inputs)
        apart = state is not None or pass_.documents is not None
        u = self.u(self.conv1d(inputs, tail, pass_.age if apart else None))
        with full_precision(x):
            blocks = u.unflatten(-1, (self.n_heads, -1))
            r = self.r(torch.sigmoid(self.r_gate(blocks)))
            i = self.i(torch.sigmoid(self.i_gate(blocks)))
        decay = self.decay(-SHARPNESS * F.softplus(wide(self.Lambda)) * r)
        root = (-torch.expm1(2 * decay)).clamp(min=LEAST_SHARE).sqrt()
        share = i * torch.where((pass_.age == 0)[..., None], 1.0, root)
        given, fresh = share * u, pass_.begins

        def run(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            part = None if fresh is None else fresh[:, at]
            y, h = gated_scan(decay[:, at], given[:, at], kept.get("h"), part)
            return y, {"h": h}

        if self.effective_attention.watched:
            self._show(decay, share, pass_)
        z = self.z(in_pieces(run, kept, pass_, state))
        hidden = F.gelu(wide(self.gate(gate)), approximate="tanh") * z
        return self.out(self.out_proj(hidden.to(x.dtype)))

    def _show(self, decay: Tensor, share: Tensor, pass_: Pass) -> None:
        s = decay.shape[1]
        age = None if pass_.documents is None else pass_.age.clamp(max=torch.arange(s, device=decay.device))

        def blocks(channels: list[int]) -> Iterator[tuple[int, Tensor]]:
            one = torch.ones_like(decay[..., channels])[..., None]
            shares = share[..., channels].transpose(1, 2)[:, :, None]
            for first, block in linear_attention_map(one, one, decay[..., channels], age):
                yield first, block * shares

        show_maps(self.effective_attention, self.channels, s, blocks)

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "channel", self.channels, self.u, self.z)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        ins = {name: Matrix.of(self.in_proj, part) for part, name in enumerate(("u", "gate"))}
        return {**ins, "out": Matrix.of(self.out_proj)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`. `dtype` is that of the convolution's tail; h
        is kept in fp32 at least."""
        kept, tail = sizes(self.channels, self.d_conv)
        return RecurrentState(batch, kept, dtype, device, rewind, tail)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Fills Lambda so that the square of the decay at r = 1 is uniform between the squares of `DECAYS`."""
        low, high = DECAYS
        squared = init.uniform_like(self.Lambda, low**2, high**2).double()
        self.Lambda.copy_(squared.log().mul(-0.5).expm1().log())  # the inverse of softplus, of -log a


def blocks_of(channels: int, n_heads: int) -> int:
    if channels % n_heads:
        raise RequestError(
            f"n_heads={n_heads} does not divide the {channels} channels, whose gates are made in this number of blocks",
            code="range", field="mixer.n_heads", value=n_heads, expected=f"a divisor of {channels}",
        )  # fmt: skip
    return n_heads


def sizes(channels: int, d_conv: int) -> tuple[Sizes, tuple[int, int]]:
    """Returns the shapes of the decode state: {name: shape} of the recurrence's tensors, and (width, channels) of the
    inputs that the convolution still needs."""
    return {"h": (channels,)}, (d_conv, channels)


class RGLRUConfig(RecurrenceConfig, kind="rglru", words="rglru"):
    """Config of Griffin's recurrence: z_t = a_t z_{t-1} + sqrt(1 - a_t^2) i_t u_t, log a = -8 r_t softplus(Lambda)
    (2402.19427).

    It loses to attention, and to recurrences with a matrix state, if many items must be separated: each channel keeps
    one number. Griffin therefore has a layer of window attention after every two of its layers."""

    n_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of blocks in the gates' matrices; None for channels / 64, or the nearest number that divides the
    channels."""
    width: int | None = Field(None, gt=0, le=1 << 20)
    """Number of channels; None for d_model."""
    d_conv: int = Field(4, ge=2, le=1 << 8)
    bias: bool = True
    """True if in_proj and out_proj have biases."""

    def _shape(self, ctx: BuildContext) -> tuple[int, int]:
        c = self.width or ctx.d_model
        return c, blocks_of(c, self.n_heads or Heads.fitting(c))

    def resized(self, n_heads: int) -> RGLRUConfig:
        return self.replace(n_heads=n_heads, width=None)

    def build(self, ctx: BuildContext) -> RGLRU:
        self.refuse_mup(ctx)
        c, n = self._shape(ctx)
        return RGLRU(ctx.d_model, n, c, self.d_conv, self.bias, ctx.make_reparam)

    def resolved(self, ctx: BuildContext) -> RGLRUConfig:
        c, n = self._shape(ctx)
        return self.replace(n_heads=n, width=c)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer: FLOPs of the matmuls, including those of the gates and the scan."""
        (c, n), d = self._shape(ctx), ctx.d_model
        products = shape.passes * 2 * shape.tokens * (2 * c * (c // n) + (c if shape.s > 1 else 0))
        own = Cost.weights(
            c * (self.d_conv + 1) + 2 * (c * (c // n) + c) + c, flops=products, kept=self._kept(c, shape)
        )
        maps = linear_cost(ctx, shape, d, (c, c), bias=self.bias)
        maps += linear_cost(ctx, shape.reading(shape.products), c, d, bias=self.bias)
        return own + maps + recurrent_cost(shape, *sizes(c, self.d_conv))

    def _kept(self, c: int, shape: Shape) -> int:
        """Returns the bytes kept for the backward pass, without the inputs of linear layers, for c channels: outputs of
        in_proj, or only the gate if u is converted to fp32; the padded inputs of the convolution and u; r and i; six
        intermediate tensors from r to the input of the scan; z and gelu(gate); a state for every chunk, and the first
        state."""
        fp32 = torch.promote_types(shape.products, torch.float32)
        made = shape.keeps(2 * c) if shape.products == fp32 else shape.keeps(c, fp32)
        padded = 1 + (self.d_conv - 1) / shape.s
        states = shape.b * (-(-shape.s // CHUNK) + 1) * c
        return made + shape.keeps(c * (padded + 12) + 2, fp32) + shape.keeps_once(states, fp32)
