from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard, Shards
from glassformer.parts.core.site import Site
from glassformer.parts.ffn.fused_activation import swiglu
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, Mixer, MixerChange, MixerConfig, keys_before, show_maps
from glassformer.parts.mixer.recurrent import RecurrentState, Sizes, in_pieces, recurrent_cost
from glassformer.parts.mixer.scan import CHUNK, effective_attention, scan_from_zero, selective_scan, states
from glassformer.parts.norm import RMSNorm, RMSNormConfig
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam

LEAST_STEP = 1e-4
"""Smallest initial value of dt, the step size of the recurrence."""


class ShortConv(nn.Module):
    """Short convolution y_t = bias + sum_i w_i x_{t-i}, i < k, channel by channel; x, y (b, s, c), y at least fp32.

    Tokens before the sequence count as zero; `age` (s,) or (b, s) is the number of earlier tokens in each token's
    sequence. `tail` (b, k-1, c): the inputs before x, from a decode state."""

    def __init__(self, channels: int, width: int, bias: bool = True, shard: Shard | None = None):
        super().__init__()
        self.cuts = (shard or Shard("column"),)
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.init_weights(Init())

    def forward(self, x: Float[Tensor, "b s c"], tail: Tensor | None = None, age: Tensor | None = None) -> Tensor:
        k, s = self.weight.shape[2], x.shape[1]
        padded = wide(F.pad(x, (0, 0, k - 1, 0)) if tail is None else torch.cat([tail, x], dim=1))
        weight = wide(self.weight).squeeze(1)
        y = padded[:, k - 1 :] * weight[:, -1]
        for i in range(1, k):
            past = padded[:, k - 1 - i : k - 1 - i + s]
            if age is not None:
                past = past.where((age >= i)[..., None], 0.0)
            y = torch.addcmul(y, past, weight[:, -1 - i])
        return y if self.bias is None else y + wide(self.bias)

    @property
    def shards(self) -> Shards:
        return {"weight": self.cuts, "bias": self.cuts}

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        bound = self.weight.shape[2] ** -0.5
        init.fill_uniform(self.weight, -bound, bound)
        if self.bias is not None:
            self.bias.zero_()


class StepProjection(Linear):
    """Projection to dt, the step sizes, before softplus: y = x W^T + b; x (..., r), y (..., c). At least fp32, because
    rounding b = -7 to bf16 changes dt by a per cent. W is initialised uniform in +-1/sqrt(r), b so that dt =
    softplus(b) is log-uniform between two values."""

    in_half = False  # b too stays in fp32, also on its way to other ranks

    def __init__(
        self, rank: int, channels: int, steps: tuple[float, float] = (1e-3, 0.1), reparam: MakeReparam | None = None
    ):
        self.steps = steps
        super().__init__(rank, channels, bias=True, reparam=reparam, shard=Shard("column"))

    def forward(self, x: Float[Tensor, "... r"]) -> Float[Tensor, "... c"]:
        assert self.bias is not None
        return wide(F.linear(x, self.weight if self.reparam is None else self.reparam(self.weight))) + wide(self.bias)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        assert self.bias is not None
        bound = self.in_features**-0.5
        init.fill_uniform(self.weight, -bound, bound)
        if self.reparam is not None:
            self.reparam.begin(self.weight)
        begin_steps(init, self.bias, *self.steps)


def begin_steps(init: Init, bias: Tensor, low: float, high: float) -> None:
    """Fills the bias of a step projection so that dt = softplus(bias) is log-uniform between `low` and `high`, at least
    `LEAST_STEP`."""
    steps = init.uniform_like(bias, math.log(low), math.log(high)).double().exp().clamp(min=LEAST_STEP)
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


def conv_kept(shape: Shape, channels: int, width: int) -> float:
    """Returns the number of elements per token that a `ShortConv` of `width` tokens, followed by silu, keeps for the
    backward pass: its padded input, and the outputs of both."""
    return channels * (3 + (width - 1) / shape.s)


class Mamba(Mixer):
    """Selective state space model: the recurrence of each channel depends on the token. Gu & Dao 2023, 2312.00752.

        x (b,s,d) -> in_proj -> u, gate (b,s,c)         u = silu(conv(u)), conv causal, of d_conv tokens
        u -> x_proj -> (r), B, C (b,s,p)                dt = softplus(dt_proj(r)) (b,s,c), A = -exp(A_log)
        with norm_eps, r, B and C pass an RMS norm each (Jamba, 2403.19887)
        h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t        z_t = sum_p C_t h_t + D u_t
        out = out_proj(z silu(gate))

    c = expand d channels with p = d_state states each; dt_rank r = ceil(d / 16) unless given. It needs no positions,
    because the recurrence is ordered. Recurrence and convolution restart at each document. The recurrence runs in fp32
    at least.

    Sites: u (convolved), gate, dt (b,s,c), B, C (b,s,p), z, out; and two that are computed only for observers, by
    blocks of positions, and are not editable: state (b,s,c,p), h_t; effective_attention (b,n,s,t), the weight of u_j in
    z_t - D u_t for each of the n = c channels (Ali et al. 2024, 2403.01590). It is signed and its rows do not sum to
    one, unlike a softmax pattern. With a decode state its keys are the call's tokens.
    """

    shards: ClassVar[Shards] = {"A_log": (Shard("column"),), "D": (Shard("column"),)}

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        c, r = expand * d_model, dt_rank or rank_of(d_model)
        self.d_inner, self.d_state, self.d_conv = c, d_state, d_conv
        self.in_proj = Linear(d_model, (c, c), bias, reparam=reparam, shard=Shard("column"))
        self.conv1d = ShortConv(c, d_conv, conv_bias)
        self.x_proj = Linear(c, (r, d_state, d_state), reparam=reparam, shard=Shard("row"))
        self.dt_proj = StepProjection(r, c, (dt_min, dt_max), reparam)
        self.dt_norm, self.B_norm, self.C_norm = (
            None if norm_eps is None else RMSNorm(width, norm_eps) for width in (r, d_state, d_state)
        )
        self.A_log = nn.Parameter(torch.empty(c, d_state))
        self.D = nn.Parameter(torch.empty(c))
        self.out_proj = Linear(c, d_model, bias, "output", reparam, Shard("row"))
        self.init_weights(Init())
        self.u, self.gate, self.dt, self.z = Site("bsc"), Site("bsc"), Site("bsc"), Site("bsc")
        self.B, self.C, self.out = Site("bsp"), Site("bsp"), Site("bsd")
        self.state, self.effective_attention = Site("bscp"), Site("bnst")

    def divide(self, owner: Owner) -> None:
        """Reduces this mixer to an owner's share of the channels; B, C and the rank of dt are sums over the channels of
        all owners."""
        self.d_inner = owner.share("d_inner", self.d_inner)
        self.enter, self.x_proj.leave = owner.enter, owner.mix

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        x = x if self.enter is None else self.enter(x)
        before, gate = self.in_proj.split(self.in_proj(x))
        a = -torch.exp(wide(self.A_log)).t().contiguous()  # (p, c)
        if state is None:
            tail, h = None, a.new_zeros(len(x), *a.shape)
        else:
            tail, kept = state.begin(pass_, before)
            h = kept["h"]
        apart = state is not None or pass_.documents is not None
        u = self.u(F.silu(self.conv1d(before, tail, pass_.age if apart else None)))
        r, b, c = self.x_proj.split(self.x_proj(u.to(x.dtype)))
        if self.dt_norm is not None and self.B_norm is not None and self.C_norm is not None:
            r, b, c = self.dt_norm(r), self.B_norm(b), self.C_norm(c)
        dt = self.dt(F.softplus(wide(self.dt_proj(r))))
        b, c = self.B(wide(b)), self.C(wide(c))
        fresh = pass_.begins

        def scan(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            part = None if fresh is None else fresh[:, at]
            y, last = selective_scan(u[:, at], dt[:, at], a, b[:, at], c[:, at], kept.get("h"), part)
            return y, {"h": last}

        if self._looked_at():
            self._show(u, dt, a, b, c, h, fresh, pass_)
        if state is None:
            y = scan_from_zero(u, dt, a, b, c, fresh)
        else:
            start = None if pass_.start == 0 and pass_.rows is None else h
            y = in_pieces(scan, {} if start is None else {"h": start}, pass_, state)
        z = self.z(y + wide(self.D) * u)
        return self.out(self.out_proj(swiglu(self.gate(gate), z).to(x.dtype)))

    causal, reach, heads, separates_documents = True, None, None, True

    def _looked_at(self) -> bool:
        """Returns True if an observer watches a site whose values are computed only for observers. Raises RequestError
        if such a site is edited."""
        for name in ("state", "effective_attention"):
            if getattr(self, name).edited:
                raise RequestError(
                    f"mixer.{name} is computed only for observers; edit mixer.u, dt, B, C or z instead",
                    code="unsupported", field=f"mixer.{name}",
                )  # fmt: skip
        return bool(self.state.looks or self.effective_attention.looks)

    def _show(
        self, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor, fresh: Tensor | None, pass_: Pass
    ) -> None:
        s = u.shape[1]
        if self.state.looks:
            for first, block in states(u, dt, a, b, h, fresh):
                self.state.show(block, first, s)
        age = None if pass_.documents is None else pass_.age.clamp(max=torch.arange(s, device=u.device))
        show_maps(
            self.effective_attention, self.d_inner, s,
            lambda channels: effective_attention(dt[..., channels], a[:, channels], b, c, age),
        )  # fmt: skip

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "channel", self.d_inner, self.u, self.z, self.D)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result. `rank`
        makes the input of dt_proj."""
        ins = {name: Matrix.of(self.in_proj, i) for i, name in enumerate(("u", "gate"))}
        chosen = {name: Matrix.of(self.x_proj, i) for i, name in enumerate(("rank", "B", "C"))}
        return {**ins, **chosen, "dt": Matrix.of(self.dt_proj), "out": Matrix.of(self.out_proj)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`. `dtype` is that of the convolution's tail; h
        is kept in fp32 at least, because rounding would add up from token to token."""
        kept, tail = sizes(self.d_inner, self.d_state, self.d_conv)
        return RecurrentState(batch, kept, dtype, device, rewind, tail)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Fills A_log so that A = -1, ..., -p in every channel (S4D-real, Gu et al. 2022, 2206.11893), and D with 1."""
        self.A_log.copy_(torch.arange(1, self.d_state + 1, dtype=torch.float64).log().expand_as(self.A_log))
        self.D.fill_(1.0)


def sizes(channels: int, d_state: int, d_conv: int) -> tuple[Sizes, tuple[int, int]]:
    """Returns the shapes of the decode state: {name: shape} of the recurrence's tensors, and (width, channels) of the
    inputs that the convolution still needs."""
    return {"h": (d_state, channels)}, (d_conv, channels)


def rank_of(d_model: int) -> int:
    """Returns the default rank r of dt, ceil(d_model / 16)."""
    return -(-d_model // 16)


class MambaConfig(MixerConfig, kind="mamba", words="mamba"):
    knows_order: ClassVar[bool] = True
    homonyms: ClassVar[frozenset[str]] = frozenset({"norm_eps"})
    """Names of fields that mean something else than in other mixers: `norm_eps` is of the norms of B, C and dt."""

    d_state: int = Field(16, gt=0, le=1 << 12)
    d_conv: int = Field(4, ge=2, le=1 << 8)
    expand: int = Field(2, gt=0, le=1 << 8)
    dt_rank: int | None = Field(None, gt=0, le=1 << 20)
    """Rank r of the projection to dt; None for ceil(d_model / 16)."""
    bias: bool = False
    """True if in_proj and out_proj have biases."""
    conv_bias: bool = True
    norm_eps: float | None = Field(None, gt=0)
    """Epsilon of RMS norms of B, C and the input of dt_proj, which keep large models from diverging (Jamba,
    2403.19887); None for no norms."""
    dt_min: float = Field(1e-3, gt=0)
    dt_max: float = Field(0.1, gt=0)
    """Upper bound of the initial dt, which is log-uniform from dt_min."""

    @model_validator(mode="after")
    def _ordered(self) -> MambaConfig:
        if self.dt_min > self.dt_max:
            raise RequestError(
                f"dt_min={self.dt_min} is above dt_max={self.dt_max}; give the smaller one first",
                code="conflict", field="dt_min", value=self.dt_min,
            )  # fmt: skip
        return self

    def _shape(self, ctx: BuildContext) -> tuple[int, int]:
        return self.expand * ctx.d_model, self.dt_rank or rank_of(ctx.d_model)

    def causal(self, ctx: BuildContext) -> bool:
        return True

    def reach(self, ctx: BuildContext) -> None:
        return None

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return keys_before(t, None)

    def heads(self, ctx: BuildContext) -> None:
        return None

    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Accepts every type of device, because the scan has a backward pass on all."""

    def resized(self, n_heads: int) -> MambaConfig:
        return self.replace(dt_rank=None)

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> MambaConfig | None:
        return self.replace(bias=new(self.bias)) if change == "bias" else None

    def build(self, ctx: BuildContext) -> Mamba:
        if ctx.mup is not None:
            raise RequestError(
                "mup has no rule for the mixer mamba, whose B, C and dt grow otherwise; leave mup out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip
        return Mamba(ctx.d_model, **self._fields(), reparam=ctx.make_reparam)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    def resolved(self, ctx: BuildContext) -> MambaConfig:
        defaults = {name: type(self).model_fields[name].default for name in ("dt_min", "dt_max")}  # only for training
        return self.replace(dt_rank=self._shape(ctx)[1], **defaults)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer: FLOPs of the matmuls, including C_t h_t, but not of convolution and
        recurrence, about 2 d_conv + 7 p operations per channel."""
        (c, r), d, p, k = self._shape(ctx), ctx.d_model, self.d_state, self.d_conv
        own = Cost.weights(
            c * (k + self.conv_bias) + c * (p + 2),
            flops=shape.passes * 2 * shape.tokens * c * p,
            kept=self._kept(ctx, shape),
        )
        narrow = shape.reading(shape.products)
        maps = linear_cost(ctx, shape, d, (c, c), bias=self.bias) + linear_cost(ctx, narrow, c, (r, p, p))
        maps += linear_cost(ctx, narrow, r, c) + linear_cost(ctx, narrow, c, d, bias=self.bias)
        return own + maps + self._norms(ctx, shape, (r, p, p)) + recurrent_cost(shape, *sizes(c, p, k))

    def _norms(self, ctx: BuildContext, shape: Shape, widths: tuple[int, ...]) -> Cost:
        """Returns the cost of the norms of r, B and C, which have the widths `widths`. If B and C are then converted to
        fp32, their tensors in 16 bits are not kept."""
        if self.norm_eps is None:
            return Cost()
        norm, inner = RMSNormConfig(eps=self.norm_eps), shape.reading(shape.products)
        norms = sum((norm.costs(ctx.within(width=width, sets=None), inner) for width in widths), Cost())
        apart = shape.products != torch.promote_types(shape.products, torch.float32)
        return norms + Cost(kept=-shape.keeps(2 * self.d_state) if apart else 0)

    def _kept(self, ctx: BuildContext, shape: Shape) -> int:
        """Returns the bytes kept for the backward pass, without the inputs of linear layers: u | gate as projected; r |
        B | C; in fp32 the convolved u, u, dt before and after softplus, dt u and z; a state for every chunk, and the
        first state."""
        c, p = self._shape(ctx)[0], self.d_state
        fp32 = torch.promote_types(shape.products, torch.float32)
        apart = shape.products != fp32  # widened tensors are then separate
        padded = c * (1 + (self.d_conv - 1) / shape.s)
        made = shape.keeps(padded + 5 * c + (c + 2 * p if apart else 0), fp32)
        states = shape.b * (-(-shape.s // CHUNK) + 2) * p * c
        return shape.keeps(2 * c + 2 * p) + made + shape.keeps_once(states + 2 * p * c, fp32)
