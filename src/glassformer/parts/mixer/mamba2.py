from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init
from glassformer.parts.core.shard import REPLICATED
from glassformer.parts.core.site import Site
from glassformer.parts.ffn.fused_activation import swiglu
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, show_maps
from glassformer.parts.mixer.chunked import CHUNK, linear_attention_map, state_space_dual
from glassformer.parts.mixer.mamba import ShortConv, begin_steps, conv_kept
from glassformer.parts.mixer.recurrent import (
    Recurrence,
    RecurrenceConfig,
    RecurrentState,
    Sizes,
    in_pieces,
    recurrent_cost,
)
from glassformer.parts.norm import RMSNorm, RMSNormConfig
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam

RATES = (1.0, 16.0)
"""Range of the initial -A, the decay rates, which are drawn uniformly."""


class Mamba2(Recurrence):
    """State space model with one decay per head, so that chunks of tokens are matmuls (SSD). Dao & Gu 2024, 2405.21060.

        x (b,s,d) -> in_proj -> gate (b,s,c), u | B | C (b,s,c + 2gp), r (b,s,n)        dt = softplus(r + dt_bias)
        u, B, C = silu(conv(u | B | C)), conv causal, of d_conv tokens; u (b,s,n,h), B, C (b,s,g,p)
        h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t^T        z_t = C_t h_t + D u_t
        out = out_proj(norm(z silu(gate))), norm in each of g groups

    c = expand d channels in n = c / head_dim heads; A = -exp(A_log) and D are scalars per head, and the heads of a
    group share B and C. dt is clamped between dt_least and dt_most. It needs no positions, because the recurrence is
    ordered. Recurrence and convolution restart at each document. The recurrence runs in fp32 at least.

    Sites: u (b,s,n,h), gate, dt (b,s,n), B, C, z (b,s,n,h), out; and, computed only for observers, by blocks of
    positions, and not editable: effective_attention (b,n,s,t), the weight of u_j in z_t - D u_t. It is signed and its
    rows do not sum to one. With a decode state its keys are the call's tokens.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        head_dim: int | None = None,
        n_groups: int = 1,
        d_conv: int = 4,
        expand: int = 2,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        dt_least: float = 0.0,
        dt_most: float | None = None,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        c, n = expand * d_model, heads_of(d_model, expand, head_dim, n_groups)
        self.d_inner, self.n_heads, self.n_groups, self.d_state, self.d_conv = c, n, n_groups, d_state, d_conv
        self.steps, self.limits = (dt_min, dt_max), (dt_least, dt_most)
        both = n_groups * d_state
        self.in_proj = Linear(d_model, (c, c, both, both, n), bias, reparam=reparam)
        self.conv1d = ShortConv(c + 2 * both, d_conv, conv_bias, REPLICATED)
        self.dt_bias = nn.Parameter(torch.empty(n))
        self.A_log = nn.Parameter(torch.empty(n))
        self.D = nn.Parameter(torch.empty(n))
        self.norm = RMSNorm(c // n_groups, norm_eps, sets=n_groups if n_groups > 1 else None, feeds_products=True)
        self.out_proj = Linear(c, d_model, bias, "output", reparam)
        self.init_weights(Init())
        self.u, self.gate, self.dt, self.z = Site("bsnh"), Site("bsc"), Site("bsn"), Site("bsnh")
        self.B, self.C, self.out = Site("bsgp"), Site("bsgp"), Site("bsd")
        self.effective_attention = Site("bnst")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        c, both = self.d_inner, self.n_groups * self.d_state
        gate, inputs, r = self.in_proj(x).split((c, c + 2 * both, self.n_heads), dim=-1)
        tail, kept = (None, {}) if state is None else state.begin(pass_, inputs)
        apart = state is not None or pass_.documents is not None
        mixed = F.silu(self.conv1d(inputs, tail, pass_.age if apart else None))
        u, b, c_ = mixed.split((c, both, both), dim=-1)
        u = self.u(u.unflatten(-1, (self.n_heads, -1)))
        b, c_ = (site(t.unflatten(-1, (self.n_groups, -1))) for site, t in ((self.B, b), (self.C, c_)))
        dt = F.softplus(wide(r) + wide(self.dt_bias))
        dt = self.dt(dt if self.limits == (0.0, None) else dt.clamp(*self.limits))
        a, fresh = -torch.exp(wide(self.A_log)), pass_.begins

        def run(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            part = None if fresh is None else fresh[:, at]
            y, h = state_space_dual(u[:, at], dt[:, at], a, b[:, at], c_[:, at], kept.get("h"), part)
            return y, {"h": h}

        if self.effective_attention.watched:
            self._show(dt, dt * a, b, c_, pass_)
        y = in_pieces(run, kept, pass_, state)
        z = self.z(y + wide(self.D)[:, None] * u).flatten(-2)
        hidden = swiglu(wide(self.gate(gate)), z)
        normed = self.norm(hidden if self.n_groups == 1 else hidden.unflatten(-1, (self.n_groups, -1)))
        return self.out(self.out_proj(normed.flatten(2).to(x.dtype)))

    def _show(self, dt: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, pass_: Pass) -> None:
        s = dt.shape[1]
        age = None if pass_.documents is None else pass_.age.clamp(max=torch.arange(s, device=dt.device))

        def blocks(heads: list[int]) -> Iterator[tuple[int, Tensor]]:
            groups = [head * self.n_groups // self.n_heads for head in heads]
            steps = dt[..., heads].transpose(1, 2)[:, :, None]
            for first, block in linear_attention_map(c[:, :, groups], b[:, :, groups], log_decay[..., heads], age):
                yield first, block * steps

        show_maps(self.effective_attention, self.n_heads, s, blocks)

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "head", self.n_heads, self.u, self.z, self.D)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        ins = {name: Matrix.of(self.in_proj, i) for i, name in enumerate(("gate", "u", "B", "C", "dt"))}
        return {**ins, "out": Matrix.of(self.out_proj)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`. `dtype` is that of the convolution's tail; h
        is kept in fp32 at least."""
        kept, tail = sizes(self.d_inner, self.n_heads, self.n_groups, self.d_state, self.d_conv)
        return RecurrentState(batch, kept, dtype, device, rewind, tail)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Fills A_log and dt_bias so that -A is uniform in 1..16 and dt log-uniform between dt_min and dt_max, and D
        with 1."""
        self.A_log.copy_(init.uniform_like(self.A_log, *RATES).log())
        begin_steps(init, self.dt_bias, *self.steps)
        self.D.fill_(1.0)


def heads_of(d_model: int, expand: int, head_dim: int | None, n_groups: int) -> int:
    """Returns the number of heads, `head_dim` of the `expand` d_model channels in each. Raises RequestError if heads do
    not divide the channels, or groups the heads."""
    c = expand * d_model
    head_dim = head_dim or c // Heads.fitting(c)
    if c % head_dim:
        raise RequestError(
            f"head_dim={head_dim} does not divide the {c} channels of expand={expand} times d_model={d_model}",
            code="range", field="mixer.head_dim", value=head_dim, expected=f"a divisor of {c}",
        )  # fmt: skip
    if (c // head_dim) % n_groups:
        raise RequestError(
            f"n_groups={n_groups} does not divide the {c // head_dim} heads",
            code="range", field="mixer.n_groups", value=n_groups, expected=f"a divisor of {c // head_dim}",
        )  # fmt: skip
    return c // head_dim


def sizes(channels: int, n_heads: int, n_groups: int, d_state: int, d_conv: int) -> tuple[Sizes, tuple[int, int]]:
    """Returns the shapes of the decode state: {name: shape} of the recurrence's tensors, and (width, channels) of the
    inputs that the convolution still needs."""
    return {"h": (n_heads, d_state, channels // n_heads)}, (d_conv, channels + 2 * n_groups * d_state)


class Mamba2Config(RecurrenceConfig, kind="mamba2", words="mamba2"):
    """Config of a state space model with one decay for a head: h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t^T, z_t = C_t
    h_t + D u_t. Dao & Gu 2024, 2405.21060.

    It loses to attention if a text must be quoted exactly from far back: the whole past is in one state of n h p
    elements."""

    homonyms: ClassVar[frozenset[str]] = frozenset({"head_dim", "norm_eps"})
    """Names of fields that mean something else than in other mixers: `head_dim` divides the channels, and `norm_eps` is
    of the norm of the output."""

    d_state: int = Field(128, gt=0, le=1 << 12)
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for 64, or the next larger number that divides the channels."""
    n_groups: int = Field(1, gt=0, le=1 << 16)
    """Number of groups of heads, which share B and C."""
    d_conv: int = Field(4, ge=2, le=1 << 8)
    expand: int = Field(2, gt=0, le=1 << 8)
    bias: bool = False
    """True if in_proj and out_proj have biases."""
    conv_bias: bool = True
    norm_eps: float = Field(1e-5, gt=0)
    dt_min: float = Field(1e-3, gt=0)
    dt_max: float = Field(0.1, gt=0)
    """Upper bound of the initial dt, which is log-uniform from dt_min."""
    dt_least: float = Field(0.0, ge=0)
    dt_most: float | None = Field(None, gt=0)
    """Upper bound to which dt is clamped; None without a bound."""

    @model_validator(mode="after")
    def _ordered(self) -> Mamba2Config:
        for low, high in (("dt_min", "dt_max"), ("dt_least", "dt_most")):
            least, most = getattr(self, low), getattr(self, high)
            if most is not None and least > most:
                raise RequestError(
                    f"{low}={least} is above {high}={most}; give the smaller one first",
                    code="conflict", field=low, value=least,
                )  # fmt: skip
        return self

    def _sizes(self, ctx: BuildContext) -> tuple[int, int, int]:
        """Returns (c, n, width): the numbers of channels and of heads, and the number of elements per token of B (and
        of C), all groups together."""
        n = heads_of(ctx.d_model, self.expand, self.head_dim, self.n_groups)
        return self.expand * ctx.d_model, n, self.n_groups * self.d_state

    def resized(self, n_heads: int) -> Mamba2Config:
        return self.replace(head_dim=None)

    def build(self, ctx: BuildContext) -> Mamba2:
        self.refuse_mup(ctx)
        return Mamba2(
            ctx.d_model, **{name: getattr(self, name) for name in type(self).model_fields}, reparam=ctx.make_reparam
        )

    def resolved(self, ctx: BuildContext) -> Mamba2Config:
        c, n, _ = self._sizes(ctx)
        return self.replace(
            head_dim=c // n, **{name: type(self).model_fields[name].default for name in ("dt_min", "dt_max")}
        )

    def _norm(self, ctx: BuildContext, shape: Shape) -> Cost:
        g, c = self.n_groups, self.expand * ctx.d_model
        inner = ctx.within(width=c // g, sets=g if g > 1 else None)
        return RMSNormConfig(eps=self.norm_eps).costs(
            inner, shape.reading(torch.promote_types(shape.products, torch.float32))
        )

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer: FLOPs of the matmuls, including those of the recurrence in chunks, but not of
        the convolution."""
        (c, n, both), d, k = self._sizes(ctx), ctx.d_model, self.d_conv
        own = Cost.weights((c + 2 * both) * (k + self.conv_bias) + 3 * n, kept=self._kept(ctx, shape))
        maps = linear_cost(ctx, shape, d, (c, c, both, both, n), bias=self.bias)
        maps += linear_cost(ctx, shape.reading(shape.products), c, d, bias=self.bias)
        scan = scan_cost(shape, self.n_groups, n, self.d_state, c // n)
        kept, tail = sizes(c, n, self.n_groups, self.d_state, k)
        return own + scan + maps + self._norm(ctx, shape) + recurrent_cost(shape, kept, tail)

    def _kept(self, ctx: BuildContext, shape: Shape) -> int:
        """Returns the bytes kept for the backward pass, without the inputs of linear layers and without B, C and the
        decays that the recurrence keeps: outputs of in_proj, or only the gate if the others are converted to fp32;
        tensors of the convolution; r, dt, the decays, dt u and z in fp32."""
        c, n, both = self._sizes(ctx)
        fp32 = torch.promote_types(shape.products, torch.float32)
        made = shape.keeps(2 * c + 2 * both + n) if shape.products == fp32 else shape.keeps(c, fp32)
        return made + shape.keeps(conv_kept(shape, c + 2 * both, self.d_conv) + 3 * n + 2 * c, fp32)


def scan_cost(shape: Shape, g: int, n: int, k: int, v: int) -> Cost:
    """Returns the cost of the recurrence in chunks, for g groups, n heads, and state matrices (k, v): its matmuls, and
    the states kept for the backward pass, one per chunk and one more for each of the two calls (whole chunks, rest)."""
    whole, rest = divmod(shape.s, CHUNK)
    pairs = 0 if shape.s == 1 else whole * CHUNK**2 + rest**2
    states = n * k * v * (whole + bool(whole) + 2 * bool(rest))
    fp32 = torch.promote_types(shape.products, torch.float32)
    return Cost(
        flops=shape.passes * shape.b * 2 * (pairs * (g * k + n * v) + 2 * shape.s * n * k * v),
        kept=shape.keeps_once(shape.b * states, fp32),
    )
