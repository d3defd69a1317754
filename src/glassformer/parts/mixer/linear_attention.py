from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner
from glassformer.parts.first_order import first_order
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import linear_cost
from glassformer.parts.mixer.base import MixerChange
from glassformer.parts.mixer.chunked import two_sided_linear_attention
from glassformer.parts.mixer.matrix_state import STATE, MatrixMixer, MatrixMixerConfig
from glassformer.parts.mixer.recurrent import RecurrentState, Sizes
from glassformer.parts.precision import wide
from glassformer.parts.region import region
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.visibility import Causal, CausalConfig, Visibility, VisibilityConfig

Feature = Literal["elu", "identity"]


@region
def _positive(x: Tensor) -> Tensor:
    return torch.exp(x.clamp(max=0)) + F.relu(x)  # elu(x) + 1 would lose the digits of a small feature


class _Positive(torch.autograd.Function):
    """Autograd function of the feature map phi of linear attention; keeps only its result for the backward pass,
    because the slope is min(phi, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        phi = _positive(x)
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return grads[0] * phi.clamp(max=1)


def positive(x: Tensor) -> Tensor:
    """Returns phi(x) = elu(x) + 1: e^x up to 0 and x + 1 above, at least in fp32."""
    return _Positive.apply(wide(x)) if torch.is_grad_enabled() else _positive(wide(x))


def weighted(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Divides sums of values by the sum of their weights. Returns (means (..., V), weights (..., 1)) of `sums` (..., V
    + 1), whose last column is the sum of the weights."""
    weights = sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    return (sums[..., :-1] / weights).to(dtype), weights


def tokens_seen(pass_: Pass, causal: bool) -> Tensor:
    """Returns the number of tokens that each token attends to in its document, (1, s) or (b, s): itself and earlier
    tokens if `causal`, else all."""
    if causal:
        return pass_.age + 1
    return torch.full_like(pass_.age, pass_.tokens) if pass_.documents is None else pass_.borders.lengths


def with_ones(v: Tensor) -> Tensor:
    """Returns the values v (..., V) as (..., V + 1), with a last column of ones, so that the recurrence sums the
    weights in it."""
    return F.pad(wide(v), (0, 1), value=1.0)


class LinearAttention(MatrixMixer):
    """Attention whose weights are products of positive features, so that it is a recurrence. Katharopoulos et al. 2020,
    2006.16236.

        z_t = phi(q_t) S_t / phi(q_t) s_t        S_t = S_{t-1} + phi(k_t) v_t^T        s_t = s_{t-1} + phi(k_t)

    phi(x) = elu(x) + 1. x (b,s,d) -> q, k, v (b,s,n,h), out = z W_O. Bidirectional, S and s are the sums over the whole
    document. Features, sums and quotient are at least fp32. The state has (h, h + 1) elements per head, with s its last
    column, for any length. Sites: q, k, v, z (b,s,n,h), out, and effective_attention (b,n,s,t), whose rows sum to one.

    With the feature `identity` queries and keys are unchanged, products may be negative, and the number of visible
    tokens t replaces their sum: z_t = q_t S_t / t, a linear function of the values that can express one step of
    gradient descent (von Oswald et al. 2022, 2212.07677). It needs no s.

    It loses if one token must be retrieved among many: a head separates about h keys, and nothing is ever forgotten.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        bias: bool = False,
        visibility: Visibility | None = None,
        reparam: MakeReparam | None = None,
        feature: Feature = "elu",
    ):
        super().__init__(d_model, Heads.of(d_model, n_heads, None, head_dim), None, bias, reparam)
        self.causal, self.feature = plain(visibility or Causal()), feature

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        q, k, v = self.project(x if self.enter is None else self.enter(x))
        q, k, v = self.q(q), self.k(k), self.v(v)
        elu = self.feature == "elu"
        features, keys, values = (positive(q), positive(k), with_ones(v)) if elu else (wide(q), wide(k), wide(v))
        if self.causal:
            sums = self.recur(features, keys, values, None, pass_, state)
        else:
            sums = two_sided_linear_attention(features, keys, values, pass_.begins)
        if elu:
            z, weights = weighted(sums, v.dtype)
        else:
            weights = tokens_seen(pass_, self.causal)[..., None, None].to(sums.dtype)
            z = (sums / weights).to(v.dtype)
            weights = weights.expand(*z.shape[:-1], 1)
        if self.effective_attention.watched:
            by_head = weights.detach().permute(0, 2, 1, 3)  # (b, n, s, 1)
            self.show(
                features, keys, None, pass_,
                lambda first, block, heads: block / by_head[:, heads, first : first + block.shape[2]],
            )  # fmt: skip
        return self.out(self.output(self.z(z).flatten(-2)))

    @property
    def kept(self) -> Sizes:
        return {STATE: (self.n_heads, self.head_dim, self.head_dim + (self.feature == "elu"))}


def plain(visibility: Visibility) -> bool:
    """Returns True if a visibility is causal, False if bidirectional. Raises RequestError for any other."""
    if not visibility.only_order or visibility.reach is not None:
        raise RequestError(
            "a linear recurrence sums up all tokens before: it has no window, no blocks; use causal or bidirectional",
            code="conflict", field="mixer.visibility", value=type(visibility).__name__,
            expected="causal or bidirectional",
        )  # fmt: skip
    return visibility.causal


class LinearAttentionConfig(MatrixMixerConfig, kind="linear_attention", words="linear_attention"):
    """Config of linear attention: z_t = sum_j phi(q_t) phi(k_j) v_j / sum_j phi(q_t) phi(k_j), phi = elu + 1
    (2006.16236). The decode state has h (h + 1) elements per head, in place of keys and values. It loses if one token
    must be retrieved among many."""

    visibility: VisibilityConfig = CausalConfig()
    feature: Feature = "elu"
    """Feature map phi of queries and keys: "elu" for elu + 1; "identity" for unchanged queries and keys, with sums
    divided by the number of visible tokens."""

    def widths(self, ctx: BuildContext) -> tuple[int, int]:
        h = self.heads(ctx).head_dim
        return h, h + (self.feature == "elu")

    def causal(self, ctx: BuildContext) -> bool:
        return plain(self.visibility.build(ctx))

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> LinearAttentionConfig | None:
        return self.replace(visibility=new(self.visibility)) if change == "visibility" else super().changed(change, new)

    def build(self, ctx: BuildContext) -> LinearAttention:
        self.refuse_mup(ctx)
        n, _, h = self.heads(ctx)
        return LinearAttention(ctx.d_model, n, h, self.bias, self.visibility.build(ctx), ctx.make_reparam, self.feature)

    def resolved(self, ctx: BuildContext) -> LinearAttentionConfig:
        n, _, h = self.heads(ctx)
        return self.replace(n_heads=n, head_dim=h)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer. Kept for the backward pass are the recurrence's tensors and, with the feature
        `elu`, the weighted sums and their weights; with `identity`, in place of both, the numbers of visible tokens."""
        n, _, h = self.heads(ctx)
        fp32 = torch.promote_types(shape.products, torch.float32)
        maps = linear_cost(ctx, shape, ctx.d_model, (n * h,) * 3, bias=self.bias)
        maps += linear_cost(ctx, shape.reading(shape.products), n * h, ctx.d_model, bias=self.bias)
        if self.feature == "elu":
            kept = shape.keeps(n * (h + 2), fp32)
        else:  # q and k are not kept as features in addition to their copies
            kept = shape.keeps_once(shape.s, fp32) - (0 if self.causal(ctx) else shape.keeps(2 * n * h, fp32))
        return maps + self.recurrence_cost(ctx, shape) + Cost(kept=kept)
