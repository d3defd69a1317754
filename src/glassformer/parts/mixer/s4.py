from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, show_maps
from glassformer.parts.mixer.chunked import whole_chunks
from glassformer.parts.mixer.recurrent import (
    Recurrence,
    RecurrenceConfig,
    RecurrentState,
    Sizes,
    in_pieces,
    recurrent_cost,
)
from glassformer.parts.precision import full_precision, wide
from glassformer.parts.reparam import MakeReparam

CHUNK = 64
"""Number of tokens in a chunk, whose outputs one matrix computes; the state is passed from chunk to chunk."""
ROWS_PER_BLOCK = 128

Discretization = Literal["zoh", "bilinear"]


class S4(Recurrence):
    """S4D: a linear state space model for each channel, diagonal and equal at every token. Gu et al. 2022, 2206.11893.

        h_t = Ab h_{t-1} + Bb u_t        z_t = sum_p C_p h_t + D u_t = (K * u)_t + D u_t        K_l = sum_p C Ab^l Bb
        out = value sigmoid(gate), value | gate = out_proj(gelu(z))

    x, u, z (b,s,d): every channel is a separate system. Complex, the p states of a channel are p/2 numbers and their
    conjugates, A = -exp(A_log) + i A_imag, initialised to -1/2 + i pi n (S4D-Lin), and z has twice the real part; real,
    A = -exp(A_log), initialised to -(n + 1) (S4D-Real). dt = exp(log_dt) per channel. zoh: Ab = exp(dt A), Bb = (Ab -
    1) / A.  bilinear: Ab = (1 + dt A/2) / (1 - dt A/2), Bb = dt / (1 - dt A/2).

    The recurrence restarts at each document. It needs no positions, because the recurrence is ordered. It runs in fp32
    at least, in chunks of tokens by matmuls (`convolution`).

    Sites: u, z, value, gate, out (b,s,d); and, computed only for observers, and not editable: effective_attention
    (b,n,s,t), the weight K_{t-j} of u_j in z_t - D u_t, for each of the n = d channels.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        real: bool = False,
        discretization: Discretization = "zoh",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        p = modes(d_state, real)
        self.d_state, self.real, self.discretization, self.steps = d_state, real, discretization, (dt_min, dt_max)
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.A_log = nn.Parameter(torch.empty(d_model, p))
        self.A_imag = None if real else nn.Parameter(torch.empty(d_model, p))
        self.C = nn.Parameter(torch.empty(d_model, d_state))  # complex: the real parts, then the imaginary ones
        self.D = nn.Parameter(torch.empty(d_model))
        self.out_proj = Linear(d_model, (d_model, d_model), True, "output", reparam)
        self.init_weights(Init())
        self.u, self.z, self.value, self.gate, self.out = (Site("bsd") for _ in range(5))
        self.effective_attention = Site("bnst")

    def system(self) -> tuple[Tensor, Tensor]:
        """Returns (Ab, C Bb), the decay and the output weights of every channel's p states, each (d, p); complex if A
        is."""
        dt = torch.exp(wide(self.log_dt))[:, None]
        a, c = -torch.exp(wide(self.A_log)), wide(self.C)
        if self.A_imag is not None:
            a = torch.complex(a, wide(self.A_imag))
            c = torch.complex(*c.chunk(2, dim=-1))
        if self.discretization == "zoh":
            return torch.exp(dt * a), c * (torch.exp(dt * a) - 1) / a
        return (1 + dt * a / 2) / (1 - dt * a / 2), c * dt / (1 - dt * a / 2)

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        u, fresh = wide(self.u(x)), pass_.begins
        kept = {} if state is None else state.begin(pass_, u)[1]

        def run(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            inputs = u[:, at], kept.get("h"), None if fresh is None else fresh[:, at]
            if torch.is_grad_enabled():  # the kernels of all channels are larger than the input, so they are recomputed
                y, h = checkpoint(self._response, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                y, h = self._response(*inputs)
            return y, {"h": h}

        with full_precision(x):
            y = in_pieces(run, kept, pass_, state)
            if self.effective_attention.watched:
                self._show(pass_, len(x))
        z = self.z(y + wide(self.D) * u)
        value, gate = self.out_proj.split(self.out_proj(F.gelu(z).to(x.dtype)))
        return self.out(self.value(value) * torch.sigmoid(self.gate(gate)))

    def _response(self, u: Tensor, h: Tensor | None, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
        return convolution(u, ChunkFactors.of(*self.system(), min(CHUNK, u.shape[1])), h, fresh)

    @torch.no_grad()
    def _show(self, pass_: Pass, batch: int) -> None:
        s = pass_.tokens
        place, kernel = torch.arange(s, device=self.D.device), kernel_of(*self.system(), s)
        age = place[None] if pass_.documents is None else pass_.age.clamp(max=place)
        begins = place - age  # (#b, s): the first token that each one attends to

        def blocks(channels: list[int]) -> Iterator[tuple[int, Tensor]]:
            for first in range(0, s, ROWS_PER_BLOCK):
                rows = place[first : first + ROWS_PER_BLOCK]
                gap = rows[:, None] - place
                seen = (gap >= 0) & (place >= begins[:, rows, None])  # (#b, r, s)
                weights = kernel[channels][:, gap.clamp(min=0)]  # (n, r, s)
                yield first, weights.expand(batch, *weights.shape).where(seen[:, None], 0.0)

        show_maps(self.effective_attention, len(self.D), s, blocks)

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "channel", len(self.D), self.u, self.z, self.D)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        return {"value": Matrix.of(self.out_proj, 0), "gate": Matrix.of(self.out_proj, 1)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`, in fp32 at least."""
        return RecurrentState(batch, sizes(len(self.D), self.d_state), dtype, device, rewind)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Fills A as S4D-Lin or S4D-Real; C with variance one (E |C|^2 = 1 if complex), dt log-uniform, D with variance
        one."""
        place = torch.arange(self.A_log.shape[1], dtype=torch.float64)
        if self.A_imag is None:
            self.A_log.copy_((place + 1).log().expand_as(self.A_log))
        else:
            self.A_log.fill_(math.log(0.5))
            self.A_imag.copy_((math.pi * place).expand_as(self.A_imag))
        init.fill_uniform(self.log_dt, *map(math.log, self.steps))
        bound = math.sqrt(3.0 if self.real else 1.5)
        init.fill_uniform(self.C, -bound, bound)
        init.fill_uniform(self.D, -math.sqrt(3.0), math.sqrt(3.0))


def modes(d_state: int, real: bool) -> int:
    """Returns the number of values of A in a channel: d_state if real, d_state / 2 if complex. Raises RequestError
    for an odd d_state if complex."""
    if not real and d_state % 2:
        raise RequestError(
            f"d_state={d_state} is odd, and complex states come in conjugate pairs; use an even number, or real=true",
            code="range", field="mixer.d_state", value=d_state, expected="an even number",
        )  # fmt: skip
    return d_state if real else d_state // 2


def sizes(channels: int, d_state: int) -> Sizes:
    """Returns {name: shape} of the decode state: per channel d_state real numbers, which for a complex state are its
    real and imaginary parts."""
    return {"h": (channels, d_state)}


def powers(ab: Tensor, length: int) -> Tensor:
    """Returns the powers Ab^0 .. Ab^(length - 1), (c, length, p), of Ab (c, p), computed as products, so that a
    negative Ab is allowed and Ab = 0 has a gradient."""
    every = ab[:, None].expand(-1, length - 1, -1)
    return (
        torch.cat([torch.ones_like(ab)[:, None], every.cumprod(1)], dim=1)
        if length > 1
        else torch.ones_like(ab)[:, None]
    )


def kernel_of(ab: Tensor, cb: Tensor, length: int) -> Float[Tensor, "c l"]:
    """Returns the convolution kernels K_0 .. K_{length - 1} of c channels, from Ab and C Bb, each (c, p)."""
    terms = (powers(ab, length) * cb[:, None]).sum(-1)
    return 2 * terms.real if terms.is_complex() else terms


class ChunkFactors:
    """Matrices that compute the outputs of a chunk of l tokens and the state after it, for c channels with q real
    numbers of state each. Factors:

    inner (c, l, l)     of input j, in output i: K_{i-j}, lower triangular
    since (c, l, q)     of the state before the chunk, in output i
    until (c, q, l)     of input j, in the state after the chunk
    over (c, p)         of the state before the chunk, in the state after it; complex if A is
    """

    def __init__(self, inner: Tensor, since: Tensor, until: Tensor, over: Tensor, ab: Tensor):
        self.inner, self.since, self.until, self.over, self.ab = inner, since, until, over, ab

    @classmethod
    def of(cls, ab: Tensor, cb: Tensor, length: int) -> ChunkFactors:
        each = powers(ab, length + 1)
        terms = (each[:, :-1] * cb[:, None]).sum(-1)
        kernel = 2 * terms.real if terms.is_complex() else terms
        inner = F.pad(kernel.flip(-1), (0, length - 1)).unfold(-1, length, 1).flip(1)
        since, until = each[:, 1:] * cb[:, None], each[:, :-1].flip(1).mT
        if ab.is_complex():
            since = torch.cat([2 * since.real, -2 * since.imag], dim=-1)
            until = torch.cat([until.real, until.imag], dim=1)
        return cls(inner, since, until, each[:, -1], ab)

    def first(self, length: int) -> ChunkFactors:
        """Returns the factors of a chunk that has only the first `length` tokens."""
        over = powers(self.ab, length + 1)[:, -1]
        return ChunkFactors(
            self.inner[:, :length, :length], self.since[:, :length], self.until[..., -length:], over, self.ab
        )


def naive_convolution(u: Tensor, ab: Tensor, cb: Tensor, h: Tensor | None = None, fresh: Tensor | None = None) -> Any:
    """Returns (y (b, s, c), last state (b, c, q)) of every channel's system by its definition, token by token."""
    state = u.new_zeros(len(u), *ab.shape).to(ab.dtype) if h is None else as_modes(h, ab.is_complex())
    ys = []
    for t in range(u.shape[1]):
        if fresh is not None:
            state = torch.where(fresh[:, t, None, None], 0.0, state)
        state = ab * state + u[:, t, :, None]
        y = (cb * state).sum(-1)
        ys.append(2 * y.real if y.is_complex() else y)
    return torch.stack(ys, dim=1), as_reals(state)


def as_reals(h: Tensor) -> Tensor:
    """Returns a complex state h (..., p/2) as real numbers (..., p): the real parts, then the imaginary ones; a real
    state unchanged."""
    return torch.cat([h.real, h.imag], dim=-1) if h.is_complex() else h


def as_modes(h: Tensor, is_complex: bool) -> Tensor:
    return torch.complex(*h.chunk(2, dim=-1)) if is_complex else h


def convolution(
    u: Float[Tensor, "b s c"], factors: ChunkFactors, h: Tensor | None = None, fresh: Tensor | None = None
) -> tuple[Float[Tensor, "b s c"], Tensor]:
    """Returns (y, last state (b, c, q)) of every channel's system, from the state h; restarts at `fresh` (#b, s).

    Tokens of a chunk are connected by one matrix for each channel, equal in all chunks; states are passed from chunk to
    chunk. The states are those of h_t = Ab h_{t-1} + u_t, because `cb` = C Bb includes Bb. If documents start inside
    chunks, each chunk is computed once for each document in it."""
    (b, s, c), length = u.shape, factors.inner.shape[1]
    state = u.new_zeros(b, c, factors.since.shape[2]) if h is None else h
    ys = []
    for at in whole_chunks(s, length):
        part = factors if at.stop - at.start >= length else factors.first(at.stop - at.start)
        y, state = _chunks(u[:, at], part, state, None if fresh is None else fresh[:, at])
        ys.append(y)
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=1), state


def _chunks(u: Tensor, f: ChunkFactors, state: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the results of `convolution` for whole chunks. Inside, tensors are (c, l, m b): columns are the b rows of
    each of m chunks."""
    b, length = len(u), f.inner.shape[1]
    columns = u.unflatten(1, (-1, length)).permute(3, 2, 1, 0).flatten(2)
    m, parts, last, over = columns.shape[2] // b, None, columns, None
    if fresh is not None:
        begun = fresh.expand(b, -1).unflatten(1, (-1, length)).cumsum(2).permute(2, 1, 0).flatten(1)  # (l, m b)
        parts = [begun == i for i in range(int(begun.max()) + 1)]
        last = columns.where(begun == begun[-1], 0.0)
        over = (begun[-1] == 0).view(m, b)
    given = (f.until @ last).unflatten(-1, (m, b)).permute(2, 3, 0, 1)  # (m, b, c, q)
    states, modes_ = [state], as_modes(given, f.over.is_complex())
    h = as_modes(state, f.over.is_complex())
    for i in range(m):
        kept = f.over * h if over is None else torch.where(over[i, :, None, None], f.over * h, 0.0)
        h = kept + modes_[i]
        states.append(as_reals(h))
    before = torch.stack(states[:-1]).permute(2, 3, 0, 1).flatten(2)  # (c, q, m b)
    far = f.since @ before
    if parts is None:
        y = torch.baddbmm(far, f.inner, columns)
    else:
        y = far.where(parts[0], 0.0)
        for part in parts:
            y = y + (f.inner @ columns.where(part, 0.0)).where(part, 0.0)
    return y.unflatten(-1, (m, b)).permute(3, 2, 1, 0).flatten(1, 2), states[-1]


class S4Config(RecurrenceConfig, kind="s4", words="s4"):
    """Config of S4D: z = K * u + D u with K_l = sum_p C Ab^l Bb, equal at every token (Gu et al. 2022, 2206.11893).

    It loses if the memory must depend on the token, as in copying or recall, because it forgets everything at one pace;
    it wins on long smooth signals."""

    d_state: int = Field(64, gt=0, le=1 << 12)
    """Number of real numbers in a channel's state; complex states are d_state / 2 conjugate pairs."""
    real: bool = False
    discretization: Discretization = "zoh"
    dt_min: float = Field(1e-3, gt=0)
    dt_max: float = Field(0.1, gt=0)
    """Upper bound of the initial dt, which is log-uniform from dt_min."""

    @model_validator(mode="after")
    def _ordered(self) -> S4Config:
        if self.dt_min > self.dt_max:
            raise RequestError(
                f"dt_min={self.dt_min} is above dt_max={self.dt_max}; give the smaller one first",
                code="conflict", field="dt_min", value=self.dt_min,
            )  # fmt: skip
        if not self.real and self.d_state % 2:
            raise RequestError(
                f"d_state={self.d_state} is odd, and complex states come in pairs; use an even one, or real=true",
                code="range", field="d_state", value=self.d_state,
            )  # fmt: skip
        return self

    def resized(self, n_heads: int) -> S4Config:
        return self

    def build(self, ctx: BuildContext) -> S4:
        self.refuse_mup(ctx)
        return S4(
            ctx.d_model, **{name: getattr(self, name) for name in type(self).model_fields}, reparam=ctx.make_reparam
        )

    def resolved(self, ctx: BuildContext) -> S4Config:
        return self.replace(**{name: type(self).model_fields[name].default for name in ("dt_min", "dt_max")})

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer: FLOPs of the matmuls, within chunks and from one chunk to the next."""
        d, q, p = ctx.d_model, self.d_state, modes(self.d_state, self.real)
        own = Cost.weights(
            d * (2 + q + p * (1 if self.real else 2)), flops=shape.passes * self._products(d, shape),
            kept=self._kept(d, shape),
        )  # fmt: skip
        maps = linear_cost(ctx, shape.reading(shape.products), d, (d, d), bias=True)
        return own + maps + recurrent_cost(shape, sizes(d, q))

    def _products(self, d: int, shape: Shape) -> int:
        length = min(CHUNK, shape.s)
        whole, rest = divmod(shape.s, length)
        return 2 * shape.b * d * (whole * length**2 + rest**2 + 2 * shape.s * self.d_state)

    def _kept(self, d: int, shape: Shape) -> int:
        """Returns the bytes kept for the backward pass, without the input of out_proj, for d channels: u and z in fp32,
        the outputs of out_proj, and sigmoid(gate). The convolution is recomputed."""
        return shape.keeps(2 * d, torch.promote_types(shape.products, torch.float32)) + shape.keeps(3 * d)
