from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init, key_of
from glassformer.parts.core.words import Word, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import linear_cost
from glassformer.parts.mixer.base import MixerChange
from glassformer.parts.mixer.chunked import two_sided_linear_attention
from glassformer.parts.mixer.linear_attention import plain, weighted, with_ones
from glassformer.parts.mixer.matrix_state import STATE, MatrixMixer, MatrixMixerConfig
from glassformer.parts.mixer.recurrent import RecurrentState, Sizes, recurrent_cost
from glassformer.parts.precision import full_precision, wide
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import Causal, CausalConfig, Visibility, VisibilityConfig

LARGEST = "largest"


def orthogonal_features(seed: int, step: int, features: int, head_dim: int) -> Float[Tensor, "m h"]:
    """Returns random features W (m, h): rows of random orthogonal matrices, h at a time, with the lengths of rows of
    N(0, 1)^h. They depend only on the seed and the step."""
    made = torch.Generator("cpu").manual_seed(key_of("favor", seed, step))
    blocks = []
    for _ in range(-(-features // head_dim)):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=made, dtype=torch.float64))
        blocks.append((q * r.diagonal().sign()).t())  # with these signs every rotation is equally likely
    lengths = torch.randn(features, head_dim, generator=made, dtype=torch.float64).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def running_maximum(x: Float[Tensor, "b s n"], age: Tensor | None = None) -> Float[Tensor, "b s n"]:
    """Returns, for each token and head, the largest x of the token and the earlier ones of its sequence, (b, s, n).
    `age` (1 or b, s): number of earlier tokens in each token's sequence; None for one sequence per row."""
    if age is None:
        return x.cummax(dim=1).values
    shift = 1
    while shift < x.shape[1]:  # after each round, the largest of 2 shift tokens
        past = F.pad(x[:, :-shift], (0, 0, shift, 0))
        x = torch.where((age >= shift)[..., None], torch.maximum(x, past), x)
        shift *= 2
    return x


class Performer(MatrixMixer):
    """Softmax attention estimated by random positive features, FAVOR+. Choromanski et al. 2021, 2009.14794.

        z_t = phi(q_t) S_t / phi(q_t) s_t        S_t = S_{t-1} + phi(k_t) v_t^T        s_t = s_{t-1} + phi(k_t)
        phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m)        x' = x h^(-1/4)

    W (m, h) has orthogonal rows in blocks of h, so that phi(q) phi(k) has the mean exp(q k / sqrt(h)). It is a buffer
    drawn from the part's seed, and redrawn from (seed, step) every `redraw` optimizer steps. Heads share it.

    Exponents are taken minus a maximum: for a query its own, for keys the largest so far, because a maximum over the
    sequence would leak the future. S and s are decayed as the maximum grows. All of it cancels in z. Features, sums and
    quotient are at least fp32. The state has m (h + 1) elements per head and the largest exponent. Sites: q, k, v, z
    (b,s,n,h), out, and effective_attention (b,n,s,t), whose rows sum to one.

    It loses if queries and keys are long: the estimate's error falls with sqrt(m) only if |q| |k| / sqrt(h) is small,
    and sharp patterns need more features than a window of keys would cost.
    """

    features: Tensor
    seed: Tensor
    step: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        features: int = 128,
        redraw: int | None = None,
        bias: bool = False,
        visibility: Visibility | None = None,
        reparam: MakeReparam | None = None,
    ):
        super().__init__(d_model, Heads.of(d_model, n_heads, None, head_dim), None, bias, reparam)
        for name, number in (("features", features), ("redraw", redraw)):
            if number is not None and number < 1:
                raise RequestError(
                    f"mixer.{name}={number} must be a number from 1 up",
                    code="range", field=f"mixer.{name}", value=number, expected="an integer >= 1",
                )  # fmt: skip
        self.causal, self.redraw = plain(visibility or Causal()), redraw
        self.register_buffer("features", torch.empty(features, self.head_dim))
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.init_weights(Init())

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        q, k, v = self.project(x)
        q, k, v = self.q(q), self.k(k), self.v(v)
        with full_precision(x):  # exponents in 16 bits are off by per cents
            q_exponents, exponents = self.exponents(q), self.exponents(k)
        own = exponents.detach().amax(-1)
        queries = torch.exp(q_exponents - q_exponents.detach().amax(-1, keepdim=True))
        if self.causal:
            largest, log_decay = self.running(own, pass_, state)
        else:
            age = None if pass_.begins is None else pass_.age
            largest, log_decay = self.whole(own, age), None
        keys = torch.exp(exponents - largest[..., None])
        if self.causal:
            sums = self.recur(queries, keys, with_ones(v), log_decay, pass_, state, **{LARGEST: largest})
        else:
            sums = two_sided_linear_attention(queries, keys, with_ones(v), pass_.begins)
        z, weights = weighted(sums, v.dtype)
        if self.effective_attention.watched:
            by_head = weights.detach().permute(0, 2, 1, 3)  # (b, n, s, 1)
            self.show(
                queries, keys, log_decay, pass_,
                lambda first, block, heads: block / by_head[:, heads, first : first + block.shape[2]],
            )  # fmt: skip
        return self.out(self.output(self.z(z).flatten(-2)))

    def exponents(self, x: Tensor) -> Float[Tensor, "b s n m"]:
        """Returns the exponents W x' - |x'|^2 / 2 of the features of x, queries or keys (b, s, n, h), with x' = x
        h^(-1/4)."""
        scaled = wide(x) * self.head_dim**-0.25
        return F.linear(scaled, self.features.to(scaled.dtype)) - scaled.square().sum(-1, keepdim=True) / 2

    def running(self, own: Tensor, pass_: Pass, state: RecurrentState | None) -> tuple[Tensor, Tensor]:
        """Returns (largest, log_decay) at each token, each (b, s, n), for `own`, the largest exponent of each token's
        key: the largest exponent of the sequence so far, and the logarithm of the factor that rescales earlier sums to
        it, 0 at the start of a sequence."""
        apart = state is not None or pass_.documents is not None
        if state is not None:  # tokens that continue earlier ones include their maximum
            before = state.begin(pass_, own)[1][LARGEST][:, None]
            goes_on = pass_.age > torch.arange(own.shape[1], device=own.device)
            own = torch.where(goes_on[..., None], torch.maximum(own, before), own)
        age = pass_.age.clamp(max=torch.arange(own.shape[1], device=own.device)) if apart else None
        largest = running_maximum(own, age)
        past = before if state is not None else largest[:, :1]
        log_decay = torch.cat([past, largest[:, :-1]], dim=1) - largest
        return largest, log_decay.masked_fill((pass_.age == 0)[..., None], 0.0) if apart else log_decay

    @staticmethod
    def whole(own: Tensor, age: Tensor | None) -> Tensor:
        """Returns the largest exponent in the whole sequence that each token belongs to, (b, s, n), from `own` (b, s,
        n), that of each token; (b, 1, n) for an `age` of None, one sequence per row."""
        if age is None:
            return own.amax(1, keepdim=True)
        ends = F.pad((age[:, 1:] == 0), (0, 1), value=True).flip(1)  # starts of sequences, read backwards
        place = torch.arange(own.shape[1], device=own.device)
        later = place - torch.where(ends, place, 0).cummax(dim=1).values
        return torch.maximum(running_maximum(own, age), running_maximum(own.flip(1), later).flip(1))

    def after_step(self) -> None:
        """Draws W again after every `redraw` optimizer steps; must be called after each step."""
        if self.redraw is not None:
            self.step += 1
            if int(self.step) % self.redraw == 0:
                self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Draws W again from the seed and the step of this part."""
        m, h = self.features.shape
        self.features.copy_(orthogonal_features(int(self.seed), int(self.step), m, h))

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        if not self.features.is_meta:
            self.seed.fill_(int(torch.randint(1 << 62, (), generator=init.generator)))
            self.step.zero_()
            self.draw()

    @property
    def kept(self) -> Sizes:
        return {STATE: (self.n_heads, len(self.features), self.head_dim + 1), LARGEST: (self.n_heads,)}


class PerformerConfig(MatrixMixerConfig, kind="performer", words=Word("performer", whole("features"), "128")):
    """Config of softmax attention estimated by m random features, FAVOR+ (2009.14794): z_t = phi(q_t) S_t / phi(q_t)
    s_t, phi(x) = exp(W x' - |x'|^2 / 2). It loses if queries and keys are long: the error then hardly falls with m."""

    features: int = Field(128, gt=0, le=1 << 16)
    redraw: int | None = Field(None, gt=0)
    """Number of optimizer steps between draws of W; None for a constant W."""
    visibility: VisibilityConfig = CausalConfig()

    def widths(self, ctx: BuildContext) -> tuple[int, int]:
        return self.features, self.heads(ctx).head_dim + 1

    def causal(self, ctx: BuildContext) -> bool:
        return plain(self.visibility.build(ctx))

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> PerformerConfig | None:
        return self.replace(visibility=new(self.visibility)) if change == "visibility" else super().changed(change, new)

    def build(self, ctx: BuildContext) -> Performer:
        self.refuse_mup(ctx)
        n, _, h = self.heads(ctx)
        visibility = self.visibility.build(ctx)
        return Performer(ctx.d_model, n, h, self.features, self.redraw, self.bias, visibility, ctx.make_reparam)

    def resolved(self, ctx: BuildContext) -> PerformerConfig:
        n, _, h = self.heads(ctx)
        return self.replace(n_heads=n, head_dim=h, redraw=None)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer. Kept for the backward pass beyond the tensors of the recurrence: q, k and v as
        projected, scaled q and k, the decays, the weighted sums and their weights. W is not a parameter, and has no
        gradient."""
        n, _, h = self.heads(ctx)
        fp32 = torch.promote_types(shape.products, torch.float32)
        maps = linear_cost(ctx, shape, ctx.d_model, (n * h,) * 3, bias=self.bias)
        maps += linear_cost(ctx, shape.reading(shape.products), n * h, ctx.d_model, bias=self.bias)
        passes = 2 if shape.phase == "train" else 1
        features = Cost(
            flops=passes * 4 * shape.tokens * n * h * self.features,
            kept=shape.keeps(n * (3 * h + 2 + self.causal(ctx)), fp32),
            moved_bytes=passes * shape.tokens * 2 * n * (h + self.features) * fp32.itemsize,
        )
        state = recurrent_cost(shape, {LARGEST: (n,)}) if self.causal(ctx) else Cost()
        return maps + features + state + self.recurrence_cost(ctx, shape)
