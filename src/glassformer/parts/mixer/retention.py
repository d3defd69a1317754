from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner, of_owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word
from glassformer.parts.ffn.fused_activation import swiglu
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps
from glassformer.parts.mixer.matrix_state import MatrixMixer, MatrixMixerConfig
from glassformer.parts.mixer.recurrent import RecurrentState
from glassformer.parts.norm import RMSNorm
from glassformer.parts.norm.rmsnorm import rms_norm
from glassformer.parts.position.turn import turn
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam

BASE = 10_000.0
"""Base of the geometric rotation angles of q and k."""
MANTISSA = 53
"""Number of bits of fp64's mantissa: 1 - 2^-53 is the largest number below 1."""


def retnet_decays(n_heads: int) -> list[float]:
    """Returns the decay of each head, gamma_i = 1 - 2^(-5 - i), i = 0 .. n - 1. For more heads than fp64 can separate
    from 1 so, the exponents are spread from 5 to 9: 1 - exp(linspace(log 1/32, log 1/512, n)), the paper's other
    form."""
    step = 1.0 if n_heads + 4 <= MANTISSA else 4 / (n_heads - 1)
    return [1.0 - 2.0 ** (-5 - step * i) for i in range(n_heads)]


def lightning_decays(n_heads: int, layer: int, n_layers: int) -> list[float]:
    """Returns the decay of each head in layer l of L, exp(-2^(-8 i / n) (1 - l / (L - 1 + 1e-5) + 1e-5)), i = 1 .. n:
    later layers forget less."""
    part = 1 - layer / (n_layers - 1 + 1e-5) + 1e-5
    return [math.exp(-(2.0 ** (-8 * i / n_heads)) * part) for i in range(1, n_heads + 1)]


class Retention(MatrixMixer):
    """Linear attention with a constant decay per head. Sun et al. 2023, 2307.08621.

        y_t = q_t S_t        S_t = gamma_n S_{t-1} + k_t v_t^T        out = (norm(y) act(x W_G)) W_O

    x (b,s,d) -> q, k (b,s,n,h), v, gate (b,s,n,hv), hv = expand h. With `rotate`, pair i of q and k is rotated by the
    angle p 10000^(-i / (h/2 - 1)), p the position; k is multiplied by `key_scale` (h^-1/2 unless given). Decays are
    gamma_i = 1 - 2^(-5 - i) unless given, one for each head, between 0 and 1. The norm is RMS over each head without
    weights, or over all heads with weights (`norm="all"`); `inner="silu"` acts on q, k and v.

    Recurrence and norm are at least fp32. The state has (h, hv) elements per head, for any length. Sites: q, k
    (rotated), v, gate, y, z (normed and gated; b,s,n,hv), out, and effective_attention (b,n,s,t), the weight of v_j in
    y_t, signed.

    It loses if something far back must be retrieved: the slowest of eight heads has forgotten half after 2,840 tokens,
    the fastest after 22.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        expand: int = 2,
        bias: bool = False,
        decays: Sequence[float] | None = None,
        rotate: bool = True,
        key_scale: float | None = None,
        inner: Literal["silu"] | None = None,
        norm: Literal["head", "all"] = "head",
        gate: Literal["silu", "sigmoid"] = "silu",
        eps: float = 1e-6,
        reparam: MakeReparam | None = None,
    ):
        heads = Heads.of(d_model, n_heads, None, head_dim)
        n, _, h = heads
        super().__init__(d_model, heads, expand * h, bias, reparam)
        self.decays = list(retnet_decays(n) if decays is None else decays)
        check_decays(self.decays, n)
        if rotate and h % 2:
            raise RequestError(
                f"mixer.rotate turns pairs of values, and head_dim={h} is odd; use an even one, or rotate=false",
                code="range", field="mixer.head_dim", value=h, expected="an even number",
            )  # fmt: skip
        self.rotate, self.key_scale, self.inner, self.eps = rotate, key_scale or h**-0.5, inner, eps
        self.gate_proj = Linear(d_model, n * self.value_dim, bias, reparam=reparam, shard=Shard("column", n))
        self.norm = RMSNorm(n * self.value_dim, eps) if norm == "all" else None
        self.gating = swiglu if gate == "silu" else _sigmoid_glu
        self.gate, self.y = Site("bsnh"), Site("bsnh")

    def divide(self, owner: Owner) -> None:
        self.divide_heads(owner)
        self.decays = of_owner(self.decays, owner)
        owner.refuse("mixer.norm", self.norm is not None and "all", "norms the values of all heads at once")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        x = x if self.enter is None else self.enter(x)
        q, k, v = self.project(x)
        if self.inner is not None:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        if self.rotate:
            cos, sin = self.tables(pass_)
            q, k = turn(q, cos, sin, -1), turn(k, cos, sin, -1)
        q, k, v = self.q(q), self.k(k if self.key_scale == 1 else k * self.key_scale), self.v(v)
        log_decay = torch.tensor([math.log(decay) for decay in self.decays], device=x.device, dtype=wide(q).dtype)
        y = self.y(self.recur(q, k, v, log_decay, pass_, state))
        if self.effective_attention.watched:
            self.show(q, k, log_decay, pass_)
        if self.norm is not None:
            y = rms_norm(y.flatten(-2), self.norm.weight, self.eps).unflatten(-1, (self.n_heads, -1))
        else:
            y = rms_norm(y, y.new_ones(self.value_dim), self.eps)
        gate = self.gate(self.gate_proj(x).unflatten(-1, (self.n_heads, -1)))
        return self.out(self.output(self.z(self.gating(gate, y)).flatten(-2)))

    def tables(self, pass_: Pass) -> tuple[Tensor, Tensor]:
        """Returns (cos, +-sin) of the rotation angles of q and k in this pass, each (s, 1, h/2, 2), with a leading b if
        rows differ in positions."""

        def make() -> tuple[Tensor, Tensor]:
            theta = BASE ** -torch.linspace(0, 1, self.head_dim // 2, device=pass_.ids.device)
            angle = (pass_.ids.float()[..., None] * theta)[..., None, :]
            cos, sin = angle.cos(), angle.sin()
            return torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)

        return pass_.once(("retention", self.head_dim), make)

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "head", self.n_heads, self.v, self.y)

    def matrices(self) -> dict[str, Matrix]:
        return {**super().matrices(), "gate": Matrix.of(self.gate_proj, heads=self.n_heads)}


def _sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.sigmoid(wide(gate)) * wide(up)).to(gate.dtype)


def check_decays(decays: Sequence[float], n_heads: int) -> None:
    """Raises RequestError unless there is one decay per head, between 0 and 1."""
    for decay in decays:
        if not 0 < decay < 1:
            raise RequestError(
                f"mixer.decays has {decay:g}: a state that is multiplied by that does not fade; use numbers between 0 "
                "and 1",
                code="range", field="mixer.decays", value=decay, expected="0 < decay < 1",
            )  # fmt: skip
    if len(decays) != n_heads:
        raise RequestError(
            f"mixer.decays has {len(decays)} numbers for {n_heads} heads; give one for each",
            code="range", field="mixer.decays", value=len(decays), expected=str(n_heads),
        )  # fmt: skip


_WORDS = (
    Word("retention"),
    Word("lightning", fields={"expand": 1, "lightning": True, "rotate": False, "key_scale": 1.0, "inner": "silu",
                              "norm": "all", "gate": "sigmoid"}),
)  # fmt: skip


class RetentionConfig(MatrixMixerConfig, kind="retention", words=_WORDS):
    """Config of retention: S_t = gamma_n S_{t-1} + k_t v_t^T, y_t = q_t S_t (2307.08621); with `lightning`, the decays
    of lightning attention (2401.04658) as MiniMax-01 has them (2501.08313), by head and layer. It loses if something
    far back must be retrieved: the decay of a head does not depend on the text."""

    knows_order: ClassVar[bool] = True

    homonyms: ClassVar[frozenset[str]] = frozenset({"expand"})

    expand: int = Field(2, gt=0, le=1 << 8)
    """Ratio hv / h of the width of a value to that of a key."""
    decays: tuple[Annotated[float, Field(gt=0, lt=1)], ...] | None = None
    """Decay of each head; None for 1 - 2^(-5 - i)."""
    lightning: bool = False
    """True for decays exp(-2^(-8 i / n) (1 - l / (L - 1))) of head i of n in layer l of L (lightning attention)."""
    rotate: bool = True
    key_scale: float | None = Field(None, gt=0)
    """Factor on keys; None for 1 / sqrt(head_dim)."""
    inner: Literal["silu"] | None = None
    """Name of the activation applied to q, k and v; None for no activation."""
    norm: Literal["head", "all"] = "head"
    gate: Literal["silu", "sigmoid"] = "silu"
    eps: float = Field(1e-6, gt=0)

    @model_validator(mode="after")
    def _one_rule(self) -> RetentionConfig:
        if self.lightning and self.decays is not None:
            raise RequestError(
                "decays and lightning both say what a head forgets; leave one of them out",
                code="conflict", field="decays",
            )  # fmt: skip
        return self

    def widths(self, ctx: BuildContext) -> tuple[int, int]:
        h = self.heads(ctx).head_dim
        return h, self.expand * h

    def _decays(self, ctx: BuildContext) -> Sequence[float] | None:
        return lightning_decays(self.heads(ctx).n_heads, ctx.layer, ctx.n_layers) if self.lightning else self.decays

    def build(self, ctx: BuildContext) -> Retention:
        self.refuse_mup(ctx)
        n, _, h = self.heads(ctx)
        own: dict[str, Any] = {
            name: getattr(self, name) for name in ("rotate", "key_scale", "inner", "norm", "gate", "eps")
        }
        return Retention(ctx.d_model, n, h, self.expand, self.bias, self._decays(ctx), **own, reparam=ctx.make_reparam)

    def resolved(self, ctx: BuildContext) -> RetentionConfig:
        n, _, h = self.heads(ctx)
        decays = self.decays if self.lightning else tuple(self.decays or retnet_decays(n))
        return self.replace(n_heads=n, head_dim=h, decays=decays, key_scale=self.key_scale or h**-0.5)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer. Kept for the backward pass beyond the tensors of the recurrence: its output
        and the norm's 1 / rms, the factors of the gating, and q, k and v as projected if rotation or activation makes
        new tensors."""
        (n, _, h), (_, hv) = self.heads(ctx), self.widths(ctx)
        fp32, narrow = torch.promote_types(shape.products, torch.float32), shape.reading(shape.products)
        maps = linear_cost(ctx, shape, ctx.d_model, (n * h, n * h, n * hv), n * hv, bias=self.bias)
        maps += linear_cost(ctx, narrow, n * hv, ctx.d_model, bias=self.bias)
        rates, whole = (1, 0) if self.norm == "all" else (n, hv)
        scaled = n * h if (self.key_scale or h**-0.5) != 1 else 0
        if self.inner is not None:  # input of silu
            made = shape.keeps(n * (2 * h + hv))
        else:  # v is a part of all three
            made = 0 if shape.products != fp32 else shape.keeps(2 * n * h if self.rotate else scaled)
        own = Cost.weights(
            n * hv if self.norm == "all" else 0,
            kept=shape.keeps(2 * n * hv + rates, fp32) + shape.keeps_once(n + whole, fp32) + made
            + shape.keeps(n * hv, None if self.gate == "silu" else fp32),
        )  # fmt: skip
        if self.rotate and shape.phase == "train":
            table = Cost(kept=2 * shape.s * h * torch.float32.itemsize)
            own += Cost.once(("retention", h), table)
        return maps + self.recurrence_cost(ctx, shape) + own
