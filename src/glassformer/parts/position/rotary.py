from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts import fused_loops
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position.base import AttentionPosition, AttentionPositionConfig
from glassformer.parts.position.picture import Plot, some
from glassformer.parts.position.scaling import RotaryScaling, RotaryScalingConfig
from glassformer.parts.position.turn import turn
from glassformer.parts.precision import at_hand, wide

Pairing = Literal["half", "interleaved"]


class Rotary(AttentionPosition):
    """Rotates pair i of each head by the angle p theta_i, theta_i = base^(-2i/r): (q_m, k_n) depends only on m - n.

    Su et al. 2021, 2104.09864. r = `dim` leading elements of the head are rotated, the rest pass (GPT-NeoX rotates a
    quarter). `half` pairs (x_i, x_{i+r/2}) as GPT-NeoX and Hugging Face do, `interleaved` pairs (x_2i, x_2i+1) as the
    paper does; they are equal up to a permutation of the head's elements.
    """

    _last: tuple[tuple[int, int, float], tuple[Tensor, Tensor]] | None = None
    """Tables of the previous training step, after the tokens and the base for which they are."""

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        dim: int | None = None,
        pairing: Pairing = "half",
        scaling: RotaryScaling | None = None,
    ):
        super().__init__()
        self.dim = head_dim if dim is None else dim
        if not 0 < self.dim <= head_dim or self.dim % 2:
            raise RequestError(
                f"position=rotary turns {self.dim} of head_dim={head_dim} values; it must be an even number "
                f"between 2 and {head_dim}",
                code="range", field="position.dim", value=self.dim,
            )  # fmt: skip
        self.base, self.scaling = base, scaling or RotaryScaling()
        self.scaling.check(self.dim)
        self.pairing = pairing
        self._pair_axis = -2 if pairing == "half" else -1
        self._key = ("rotary", self.dim, base, pairing, self.scaling.key)

    def frequencies(self, t: int, device: Any = None, scaling: RotaryScaling | None = None) -> Float[Tensor, " i"]:
        """Returns the frequencies theta_i in radians per token, for a text of t tokens; with another `scaling` than
        this encoding's if given."""
        exponent = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return (scaling or self.scaling).frequencies(exponent, self.base, self.dim, t)

    @property
    def moves_with_length(self) -> bool:
        return not torch.equal(self.frequencies(1), self.frequencies(1 << 30))

    @cached_property
    def settled(self) -> int | None:
        return self.scaling.settled if self.scaling.settled is not None and self.moves_with_length else None

    def tables(self, pass_: Pass) -> tuple[Tensor, Tensor]:
        """Returns (cos, +-sin) of the angle of each element in this pass, fp32, (s, 1, 2, r/2) for half pairs, (s, 1,
        r/2, 2) for interleaved ones; with a leading b if rows differ."""

        def make() -> tuple[Tensor, Tensor]:
            theta = self.frequencies(pass_.end, pass_.ids.device)
            angle = (pass_.ids.float()[..., None] * theta)[..., None, :]
            cos, sin = angle.cos() * self.scaling.magnitude, angle.sin() * self.scaling.magnitude
            return torch.stack((cos, cos), self._pair_axis), torch.stack((-sin, sin), self._pair_axis)

        return pass_.once(self._key, lambda: self._kept(pass_, make) if torch.is_grad_enabled() else make())

    def _kept(self, pass_: Pass, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns the tables of the previous training step if they are those of this pass, since making them takes a
        hundredth of a small model's step."""
        if not pass_.in_order or not at_hand(pass_.ids):
            return make()
        key, last = (pass_.start, pass_.end, self.base), self._last
        if last is None or last[0] != key:
            last = key, make()
            if all(fused_loops.serves(one) and not (one.requires_grad or one.is_inference()) for one in last[1]):
                self._last = last
        return last[1]

    def pair_rotation(self, pass_: Pass) -> tuple[Tensor, Tensor, int] | None:
        return (*self.tables(pass_), self._pair_axis) if type(self).forward is Rotary.forward else None

    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(pass_)
        return turn(q, cos, sin, self._pair_axis), turn(k, cos, sin, self._pair_axis)

    def picture(self, length: int) -> dict[str, Plot]:
        """Returns named plots of the wavelengths 2 pi / theta_i; of cos(theta_i k) by pair and distance k; and of its
        mean over pairs, the score of two equal vectors k apart, times magnitude^2. Scaled frequencies are plotted
        before and after scaling."""
        forms = {"plain": RotaryScaling(), "scaled": self.scaling}
        used = ("plain", "scaled") if self.scaling.key else ("plain",)
        theta = torch.stack([self.frequencies(length, scaling=forms[name]) for name in used])  # (plain, scaled; r/2)
        at, pairs = some(length), torch.arange(self.dim // 2)
        turned = (theta[..., None] * at).cos()  # (plain, scaled; r/2, c)
        magnitude = torch.tensor([forms[name].magnitude for name in used])
        waves = torch.cat([2 * torch.pi / theta, torch.full((1, len(pairs)), float(length))])
        return {
            "wavelength by pair": Plot("pair", "tokens", pairs, waves, (*used, "this text"), log=True),
            "cosine of the rotation": Plot("distance", "pair", at, turned[-1]),
            "mean cosine by distance": Plot("distance", "mean", at, magnitude[:, None] ** 2 * turned.mean(1), used),
        }

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}{self.scaling}"


def naive_turn(x: Float[Tensor, "b s n h"], cos: Tensor, sin: Tensor, pair_axis: int) -> Float[Tensor, "b s n h"]:
    """Returns x with each pair (a, b) rotated by its angle, by the definition: (a cos - b sin, b cos + a sin). Elements
    beyond the tables are unchanged."""
    r = cos.shape[-1] * cos.shape[-2]
    pairs = wide(x[..., :r]).unflatten(-1, cos.shape[-2:])
    a, b = pairs.unbind(pair_axis)
    c, s = cos.select(pair_axis, 0), sin.select(pair_axis, 1)
    turned = torch.stack((a * c - b * s, b * c + a * s), pair_axis).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., r:]], dim=-1)


class RotaryConfig(AttentionPositionConfig, kind="rotary", words="rope"):
    pairs: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    base: float = Field(10000.0, gt=1)
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of each head's elements that is rotated."""
    pairing: Pairing = "half"
    scaling: RotaryScalingConfig | None = None

    def stretched(self, choice: type[PartConfig], context: int, **fields: Any) -> RotaryConfig:
        """Returns this config with another frequency scaling of the class `choice`, with these fields; the number of
        trained tokens stays that of the old scaling."""
        old = self.scaling
        own = None if old is None else old.original_context
        return self.replace(scaling=choice.replacing(old, original_context=own or context, **fields))

    @property
    def longest(self) -> int | None:
        return self.scaling.longest if self.scaling else None

    def resolved(self, ctx: BuildContext) -> RotaryConfig:
        return self.replace(scaling=self.scaling.resolved(ctx) if self.scaling else None)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the tables of cos and sin, which are made once for all layers."""
        r = int(ctx.head_dim * self.fraction)
        tables = shape.s * 2 * r
        return Cost.once(("rotary", self, r), Cost(kept=shape.keeps_once(tables, torch.float32)))

    def build(self, ctx: BuildContext) -> Rotary:
        scaling = self.scaling.build(ctx) if self.scaling else None
        return Rotary(ctx.head_dim, self.base, int(ctx.head_dim * self.fraction), self.pairing, scaling)
