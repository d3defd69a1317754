from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, Mixer, MixerChange, MixerConfig, show_maps
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam
from glassformer.parts.state import State

Share = Literal["each", "heads", "kv"]
WHY = "each of its m keys is a sum over all positions, so every token attends to later ones and no mask can hide them"


class Linformer(Mixer):
    """Attention to m sums of keys and values in place of s tokens, for encoders. Wang et al. 2020, 2006.04768.

        K' = E^T K        V' = F^T V        z = softmax(q K'^T / sqrt(h)) V'

    x (b,s,d) -> q, k, v (b,s,n,h); E, F (length, m); a text of s tokens uses the first s rows. They are shared by the
    heads, separate for each head (`share="each"`), or one matrix (`share="kv"`). Each document starts with row 0 and
    has m separate keys. It has no causal form, because every key sums later tokens: a decode state is refused, and so
    are texts longer than `length`.

    Sites: q, k, v, z (b,s,n,h), out, pattern over the m keys as `compressed` (b,n,s,m), and effective_attention
    (b,n,s,t), the weight of v_j in z_t, signed.

    It loses if texts differ in length, because E and F are learned by position, and if one exact token counts.
    """

    causal, reach, separates_documents = False, None, True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        length: int = 512,
        keys: int = 64,
        share: Share = "heads",
        bias: bool = False,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        self.n_heads, _, self.head_dim = Heads.of(d_model, n_heads, None, head_dim)
        n, h = self.n_heads, self.head_dim
        roles = ("score", "score", "hidden")
        self.qkv = Linear(d_model, (n * h,) * 3, bias, roles, reparam, Shard("column", n))  # type: ignore[arg-type]
        shape = (n, length, keys) if share == "each" else (1, length, keys)
        self.E = nn.Parameter(torch.empty(shape))
        self.F = nn.Parameter(torch.empty(shape)) if share != "kv" else None
        self.output = Linear(n * h, d_model, bias, "output", reparam, Shard("row", n))
        self.init_weights(Init())
        self.q, self.k, self.v, self.z = Site("bsnh"), Site("bsnh"), Site("bsnh"), Site("bsnh")
        self.compressed, self.out, self.effective_attention = Site("bnsm"), Site("bsd"), Site("bnst")

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: Any = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in self.qkv.split(self.qkv(x)))
        q, k, v = self.q(q), self.k(k), self.v(v)
        e, seen = self.places(self.E, pass_)
        f = e if self.F is None else self.places(self.F, pass_)[0]
        keys, values = summed(e, k), summed(f, v)
        scores = wide(q.transpose(1, 2) @ keys.mT) * self.head_dim**-0.5  # (b, n, s, m)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        pattern = self.compressed(scores.softmax(-1)).to(v.dtype)
        if self.effective_attention.watched:
            self._show(pattern.detach(), f.detach())
        z = self.z((pattern @ values).transpose(1, 2))
        return self.out(self.output(z.flatten(-2)))

    def places(self, rows: Tensor, pass_: Pass) -> tuple[Tensor, Tensor | None]:
        """Returns (weights, mask) that sum the tokens of a pass to m keys or values, from E or F, `rows` (1 or n,
        length, m): without documents each token's row, (s, m), or by head (n, s, m), and None. With c documents
        there are m separate columns for each document: weights (b, n or 1, s, c m), and mask (b, 1, s, c m), True
        where a token attends to a column."""
        s, (_, length, m) = pass_.tokens, rows.shape
        if pass_.begins is None:
            self.check(s, length)
            return rows[0, :s] if len(rows) == 1 else rows[:, :s], None
        age, begins = pass_.age, pass_.begins
        self.check(int(age.max()) + 1, length)
        document = begins.int().cumsum(1) - begins[:, :1].int()  # (b, s)
        own = torch.nn.functional.one_hot(document.long(), int(document.max()) + 1).to(rows.dtype)  # (b, s, c)
        met = rows[:, age].transpose(0, 1)  # (b, n or 1, s, m)
        apart = (met[..., None, :] * own[:, None, :, :, None]).flatten(-2)
        return apart, own[:, None, :, :].repeat_interleave(m, -1) > 0

    def check(self, s: int, length: int) -> None:
        """Raises RequestError for a text of s tokens if s exceeds `length`, the number of rows of E and F."""
        if s > length:
            raise RequestError(
                f"linformer has maps of {length} positions and was given {s} tokens; build it with mixer.length={s}",
                code="range", field="mixer.length", value=s, expected=f"<= {length}",
            )  # fmt: skip

    def _show(self, pattern: Tensor, f: Tensor) -> None:
        def blocks(heads: list[int]) -> list[tuple[int, Tensor]]:
            maps = f if f.dim() == 2 or f.shape[-3] == 1 else f[..., heads, :, :]
            return [(0, pattern[:, heads] @ maps.mT)]

        show_maps(self.effective_attention, self.n_heads, pattern.shape[2], lambda heads: iter(blocks(heads)))

    @property
    def heads(self) -> Heads:
        return Heads(self.n_heads, self.n_heads, self.head_dim)

    @property
    def head_output(self) -> Linear:
        return self.output

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "head", self.n_heads, self.v, self.z)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        maps = {name: Matrix.of(self.qkv, part, self.n_heads) for part, name in enumerate("qkv")}
        return {**maps, "out": Matrix.of(self.output)}

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> State:
        raise RequestError(
            f"linformer cannot continue from a state: {WHY}", code="conflict", field="mixer.kind", value="linformer"
        )

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        bound = self.E.shape[-1] ** -0.5
        for weight in (self.E, self.F):
            if weight is not None:
                init.fill_uniform(weight, -bound, bound)


def summed(rows: Tensor, x: Float[Tensor, "b s n h"]) -> Float[Tensor, "b n m h"]:
    """Returns the m weighted sums of x over its tokens, with weights `rows`: (s, m), or by sequence and head (b or 1, n
    or 1, s, m)."""
    if rows.dim() == 2:
        return torch.einsum("sm,bsnh->bnmh", rows, x)
    return rows.mT @ x.transpose(1, 2)


class LinformerConfig(MixerConfig, kind="linformer", words=Word("linformer", whole("keys"), "64")):
    """Config of Linformer's attention, bidirectional only: z = softmax(q (E^T K)^T / sqrt(h)) F^T V (2006.04768). It
    loses if texts differ in length, because E and F are learned by position, and if one exact token counts."""

    n_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of heads; None for one per 64 of the width, or the nearest number that divides it."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    length: int | None = Field(None, gt=0, le=1 << 24)
    """Number of rows of E and F, which is the largest number of tokens of a text; None for the model's context."""
    keys: int = Field(64, gt=0, le=1 << 20)
    """Number m of keys and values that all tokens are summed to; more than the length costs more than attention."""
    share: Share = "heads"
    bias: bool = False

    def _length(self, ctx: BuildContext) -> int:
        return self.length or ctx.context

    def causal(self, ctx: BuildContext) -> bool:
        return False

    def reach(self, ctx: BuildContext) -> None:
        return None

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return float(t)

    def heads(self, ctx: BuildContext) -> Heads:
        return Heads.of(ctx.d_model, self.n_heads or Heads.fitting(ctx.d_model), None, self.head_dim)

    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Accepts every type of device, because this mixer has a backward pass on all."""

    def resized(self, n_heads: int) -> LinformerConfig:
        return self.replace(n_heads=n_heads, head_dim=None)

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> LinformerConfig | None:
        if change == "visibility":
            kind = getattr(new(None), "kind", "")
            if kind != "bidirectional":
                raise RequestError(
                    f"visibility={kind}: linformer must be bidirectional, as {WHY}",
                    code="conflict", field="mixer.visibility", value=kind, expected="bidirectional",
                )  # fmt: skip
            return self
        return self.replace(bias=new(self.bias)) if change == "bias" else None

    def build(self, ctx: BuildContext) -> Linformer:
        if ctx.mup is not None:
            raise RequestError(
                "mup has no rule for the mixer linformer, whose maps have positions for inputs; leave mup out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip
        n, _, h = self.heads(ctx)
        length = self._length(ctx)
        return Linformer(ctx.d_model, n, h, length, self.keys, self.share, self.bias, ctx.make_reparam)

    def resolved(self, ctx: BuildContext) -> LinformerConfig:
        n, _, h = self.heads(ctx)
        return self.replace(n_heads=n, head_dim=h, length=self._length(ctx))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the mixer. Kept for the backward pass: q, k and v as projected; the m keys and values;
        the softmax of the scores, at least in fp32, and again in the dtype of values; z; and E and F if they are
        copied, into the dtype of matmuls or for each row and head."""
        (n, _, h), m = self.heads(ctx), self.keys
        maps = linear_cost(ctx, shape, ctx.d_model, (n * h,) * 3, bias=self.bias)
        maps += linear_cost(ctx, shape.reading(shape.products), n * h, ctx.d_model, bias=self.bias)
        tables = (1 if self.share == "kv" else 2) * (n if self.share == "each" else 1)
        fp32 = torch.promote_types(shape.products, torch.float32)
        wide_pattern = shape.keeps(n * m, fp32) if fp32 != shape.products else 0
        copied = shape.b * n if self.share == "each" else int(shape.products != shape.dtype)
        own = Cost.weights(
            tables * self._length(ctx) * m,
            flops=shape.passes * 8 * shape.tokens * n * h * m,
            kept=shape.keeps(n * (3 * h + m))
            + shape.keeps_once(2 * m * (shape.b * n * h + shape.s * copied))
            + wide_pattern,
            moved_bytes=shape.passes * shape.tokens * n * (4 * h + 2 * m) * shape.products.itemsize,
        )
        return maps + own
