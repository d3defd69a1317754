from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from glassformer.parts.mixer.chunked import CHUNK
from glassformer.parts.mixer.delta import delta_rule, delta_rule_map
from glassformer.parts.mixer.mamba import ShortConv, begin_steps, conv_kept
from glassformer.parts.mixer.mamba2 import RATES
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

UNIT_EPS = 1e-6
"""Number added to the squared length of q and k under the square root, so that a vector of zeros has a finite
gradient."""


def unit(x: Tensor) -> Tensor:
    """Returns x scaled to length one over the last axis: x / sqrt(sum x^2 + eps)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


class GatedDeltaNet(Recurrence):
    """Linear attention that overwrites: before a value is stored under a key, the state's answer to that key is
    removed, and the state decays by a factor of the token. Yang et al. 2024, 2412.06464.

        x (b,s,d) -> in_proj -> q, k (b,s,g,h), v (b,s,n,hv), gate (b,s,n hv), b, a (b,s,n)
        q, k, v = silu(conv(q | k | v)), conv causal, of d_conv tokens; q, k of length 1, q / sqrt(h)
        beta = sigmoid(b)        decay = -exp(A_log) softplus(a + dt_bias)
        S' = exp(decay_t) S_{t-1}        S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T        z_t = S_t^T q_t
        out = out_proj(norm(z) silu(gate)), norm over each head's hv values

    n value heads share g QK heads; n_heads is g and n_v_heads is n, a multiple. It needs no positions, because the
    recurrence is ordered. Recurrence and convolution restart at each document. The recurrence runs in fp32 at least.

    Sites: q, k, v, beta, decay (b,s,n), gate (b,s,n,hv), z (b,s,n,hv), out; and, computed only for observers, by blocks
    of positions, and not editable: effective_attention (b,n,s,t), the weight of v_j in z_t. It is signed and its rows
    do not sum to one. With a decode state its keys are the call's tokens.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        n_v_heads: int | None = None,
        v_head_dim: int | None = None,
        d_conv: int = 4,
        norm_eps: float = 1e-6,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        g, n, h, hv = widths(d_model, n_heads, head_dim, n_v_heads, v_head_dim)
        self.n_heads, self.n_v_heads, self.head_dim, self.v_head_dim, self.d_conv = g, n, h, hv, d_conv
        self.steps = (dt_min, dt_max)
        self.in_proj = Linear(d_model, (g * h, g * h, n * hv, n * hv, n, n), reparam=reparam)
        self.conv1d = ShortConv(2 * g * h + n * hv, d_conv, False, REPLICATED)
        self.dt_bias = nn.Parameter(torch.empty(n))
        self.A_log = nn.Parameter(torch.empty(n))
        self.norm = RMSNorm(hv, norm_eps)
        self.out_proj = Linear(n * hv, d_model, False, "output", reparam)
        self.init_weights(Init())
        self.q, self.k, self.v = Site("bsgh"), Site("bsgh"), Site("bsnh")
        self.beta, self.decay, self.gate = Site("bsn"), Site("bsn"), Site("bsnh")
        self.z, self.out, self.effective_attention = Site("bsnh"), Site("bsd"), Site("bnst")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        g, n, h, hv = self.n_heads, self.n_v_heads, self.head_dim, self.v_head_dim
        inputs, gate, b, a = self.in_proj(x).split((2 * g * h + n * hv, n * hv, n, n), dim=-1)
        tail, kept = (None, {}) if state is None else state.begin(pass_, inputs)
        apart = state is not None or pass_.documents is not None
        q, k, v = F.silu(self.conv1d(inputs, tail, pass_.age if apart else None)).split((g * h, g * h, n * hv), -1)
        q = self.q(unit(q.unflatten(-1, (g, h))) * h**-0.5)
        k, v = self.k(unit(k.unflatten(-1, (g, h)))), self.v(v.unflatten(-1, (n, hv)))
        beta = self.beta(torch.sigmoid(wide(b)))
        decay = self.decay(-torch.exp(wide(self.A_log)) * F.softplus(wide(a) + wide(self.dt_bias)))
        fresh = pass_.begins

        def run(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            part = None if fresh is None else fresh[:, at]
            y, matrix = delta_rule(q[:, at], k[:, at], v[:, at], beta[:, at], decay[:, at], kept.get("S"), part)
            return y, {"S": matrix}

        if self.effective_attention.watched:
            self._show(q, k, beta, decay, fresh)
        z = self.z(in_pieces(run, kept, pass_, state))
        gate = self.gate(gate.unflatten(-1, (n, hv)))
        return self.out(self.out_proj(swiglu(gate, self.norm(z)).flatten(-2).to(x.dtype)))

    def _show(self, q: Tensor, k: Tensor, beta: Tensor, decay: Tensor, fresh: Tensor | None) -> None:
        def blocks(heads: list[int]) -> Iterator[tuple[int, Tensor]]:
            groups = [head * self.n_heads // self.n_v_heads for head in heads]
            return delta_rule_map(q[:, :, groups], k[:, :, groups], beta[..., heads], decay[..., heads], fresh)

        show_maps(self.effective_attention, self.n_v_heads, q.shape[1], blocks)

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "head", self.n_v_heads, self.v, self.z)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        g, n = self.n_heads, self.n_v_heads
        made = zip(("q", "k", "v", "gate", "beta", "decay"), (g, g, n, n, None, None), strict=True)
        ins = {name: Matrix.of(self.in_proj, i, heads) for i, (name, heads) in enumerate(made)}
        return {**ins, "out": Matrix.of(self.out_proj)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`. `dtype` is that of the convolution's tail; S
        is kept in fp32 at least."""
        kept, tail = sizes(self.n_heads, self.n_v_heads, self.head_dim, self.v_head_dim, self.d_conv)
        return RecurrentState(batch, kept, dtype, device, rewind, tail)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Fills A_log so that exp(A_log) is uniform in 1..16, and dt_bias so that softplus(dt_bias) is log-uniform
        between dt_min and dt_max, as in Mamba-2."""
        self.A_log.copy_(init.uniform_like(self.A_log, *RATES).log())
        begin_steps(init, self.dt_bias, *self.steps)


def widths(
    d_model: int, n_heads: int, head_dim: int | None, n_v_heads: int | None, v_head_dim: int | None
) -> tuple[int, int, int, int]:
    """Returns (g, n, h, hv): numbers of QK heads and of value heads, and the elements per head of each kind. Raises
    RequestError, with numbers that would fit, for impossible sizes."""
    g, _, h = Heads.of(d_model, n_heads, None, head_dim)
    n = n_v_heads or g
    if n % g:
        raise RequestError(
            f"n_v_heads={n} is not a multiple of n_heads={g}: heads of values share those of keys",
            code="range", field="mixer.n_v_heads", value=n, expected=f"a multiple of {g}",
        )  # fmt: skip
    return g, n, h, v_head_dim or h


def sizes(g: int, n: int, h: int, hv: int, d_conv: int) -> tuple[Sizes, tuple[int, int]]:
    """Returns the shapes of the decode state: {name: shape} of the recurrence's tensors, and (width, channels) of the
    inputs that the convolution still needs."""
    return {"S": (n, h, hv)}, (d_conv, 2 * g * h + n * hv)


class GatedDeltaNetConfig(RecurrenceConfig, kind="gated_deltanet", words="gated_deltanet"):
    """Config of the gated delta rule: S_t = exp(a_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T, z_t = S_t q_t.
    Yang et al. 2024, 2412.06464.

    It loses to attention if a head must separate more than h keys, the number of orthogonal ones; and to Mamba-2 in
    speed, because each chunk solves a triangular system."""

    n_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of QK heads; None for d_model / 64, or the nearest number that divides d_model."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per QK head; None for d_model / n_heads."""
    n_v_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of value heads; None for n_heads."""
    v_head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per value head; None for head_dim."""
    d_conv: int = Field(4, ge=2, le=1 << 8)
    norm_eps: float = Field(1e-6, gt=0)
    dt_min: float = Field(1e-3, gt=0)
    dt_max: float = Field(0.1, gt=0)
    """Upper bound of the initial softplus(dt_bias), which is log-uniform from dt_min."""

    @model_validator(mode="after")
    def _ordered(self) -> GatedDeltaNetConfig:
        if self.dt_min > self.dt_max:
            raise RequestError(
                f"dt_min={self.dt_min} is above dt_max={self.dt_max}; give the smaller one first",
                code="conflict", field="dt_min", value=self.dt_min,
            )  # fmt: skip
        return self

    def _widths(self, ctx: BuildContext) -> tuple[int, int, int, int]:
        n_heads = self.n_heads or Heads.fitting(ctx.d_model)
        return widths(ctx.d_model, n_heads, self.head_dim, self.n_v_heads, self.v_head_dim)

    def resized(self, n_heads: int) -> GatedDeltaNetConfig:
        """Returns this config with `n_heads` QK heads, and with value heads in the same ratio to them as before."""
        each = (self.n_v_heads or 1) // (self.n_heads or 1) if self.n_v_heads and self.n_heads else 1
        return self.replace(
            n_heads=n_heads, n_v_heads=each * n_heads if self.n_v_heads else None, head_dim=None, v_head_dim=None
        )

    def build(self, ctx: BuildContext) -> GatedDeltaNet:
        self.refuse_mup(ctx)
        g, n, h, hv = self._widths(ctx)
        return GatedDeltaNet(
            ctx.d_model, g, h, n, hv, self.d_conv, self.norm_eps, self.dt_min, self.dt_max, ctx.make_reparam
        )

    def resolved(self, ctx: BuildContext) -> GatedDeltaNetConfig:
        g, n, h, hv = self._widths(ctx)
        begun = {name: type(self).model_fields[name].default for name in ("dt_min", "dt_max")}  # only for training
        return self.replace(n_heads=g, head_dim=h, n_v_heads=n, v_head_dim=hv, **begun)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer: FLOPs of the matmuls, including those of the rule in chunks, but not of the
        convolution and the triangular systems."""
        (g, n, h, hv), d = self._widths(ctx), ctx.d_model
        own = Cost.weights((2 * g * h + n * hv) * self.d_conv + 2 * n, kept=self._kept(ctx, shape))
        maps = linear_cost(ctx, shape, d, (g * h, g * h, n * hv, n * hv, n, n))
        maps += linear_cost(ctx, shape.reading(shape.products), n * hv, d)
        fp32 = torch.promote_types(shape.products, torch.float32)
        norm = RMSNormConfig(eps=self.norm_eps).costs(
            ctx.within(width=hv, sets=None), replace(shape.reading(fp32), b=shape.b * n)
        )
        kept, tail = sizes(g, n, h, hv, self.d_conv)
        return own + rule_cost(shape, g, n, h, hv) + maps + norm + recurrent_cost(shape, kept, tail)

    def _kept(self, ctx: BuildContext, shape: Shape) -> int:
        """Returns the bytes kept for the backward pass, without the inputs of linear layers and of the norm: outputs of
        in_proj; tensors of the convolution; and, in fp32, q and k and their lengths, beta, the decay with two
        intermediate tensors, and the normalised z."""
        g, n, h, hv = self._widths(ctx)
        fp32 = torch.promote_types(shape.products, torch.float32)
        conv = conv_kept(shape, 2 * g * h + n * hv, self.d_conv)
        return shape.keeps(2 * g * h + 2 * n * hv + 2 * n) + shape.keeps(conv + 2 * g * (h + 1) + 4 * n + n * hv, fp32)


def rule_cost(shape: Shape, g: int, n: int, k: int, v: int) -> Cost:
    """Returns the cost of the delta rule in chunks, for g QK heads of width k and n value heads of width v: its
    matmuls, and the states kept for the backward pass, one per chunk and one more for each of the two calls (whole
    chunks, rest)."""
    whole, rest = divmod(shape.s, CHUNK)
    pairs = 0 if shape.s == 1 else whole * CHUNK**2 + rest**2
    states = n * k * v * (whole + bool(whole) + 2 * bool(rest))
    fp32 = torch.promote_types(shape.products, torch.float32)
    return Cost(
        flops=shape.passes * shape.b * 2 * (pairs * (2 * g * k + n * (k + 2 * v)) + 3 * shape.s * n * k * v),
        kept=shape.keeps_once(shape.b * states, fp32),
    )
