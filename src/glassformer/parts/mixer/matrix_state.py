"""Base of mixers whose decode state is one matrix per head, computed by the recurrences of `chunked.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix
from glassformer.parts.mixer.base import EffectiveMaps, Mixer, MixerChange, MixerConfig, keys_before, show_maps
from glassformer.parts.mixer.chunked import CHUNK, chunked_linear_attention, linear_attention_map
from glassformer.parts.mixer.recurrent import RecurrentState, Sizes, recurrent_cost
from glassformer.parts.precision import wide
from glassformer.parts.reparam import MakeReparam

STATE = "S"


class MatrixMixer(Mixer):
    """Base of mixers of n heads with a state S (K, V) each:  S_t = exp(a_t) S_{t-1} + k_t v_t^T,  y_t = q_t S_t.

    One layer makes q, k (n heads of h) and v (n heads of hv), `output` reads z (n heads of hv). Sites: q, k, v, z, out,
    and `effective_attention` (b,n,s,t), the weight of v_j in z_t, which is computed only for observers, by blocks of
    queries, and is not editable. With a decode state its keys are the call's tokens."""

    causal, reach, separates_documents = True, None, True

    def __init__(
        self,
        d_model: int,
        heads: Heads,
        value_dim: int | None = None,
        bias: bool = False,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        self.n_heads, _, self.head_dim = heads
        self.value_dim = value_dim or self.head_dim
        n, h, hv = self.n_heads, self.head_dim, self.value_dim
        roles, cut = ("score", "score", "hidden"), Shard("column", n)
        self.qkv = Linear(d_model, (n * h, n * h, n * hv), bias, roles, reparam, cut)  # type: ignore[arg-type]
        self.output = Linear(n * hv, d_model, bias, "output", reparam, Shard("row", n))
        self.q, self.k, self.v = Site("bsnh"), Site("bsnh"), Site("bsnh")
        self.z, self.out, self.effective_attention = Site("bsnh"), Site("bsd"), Site("bnst")

    def divide_heads(self, owner: Owner) -> None:
        """Reduces this mixer to the share of the heads of one tensor-parallel rank. Raises RequestError if the ranks
        cannot divide the heads evenly."""
        self.n_heads = owner.share("n_heads", self.n_heads)
        self.enter = owner.enter

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys (b, s, n, h) and values (b, s, n, hv) of x (b, s, d)."""
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in self.qkv.split(self.qkv(x)))
        return q, k, v

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        pass_: Pass,
        state: RecurrentState | None,
        **along: Tensor,
    ) -> Tensor:
        """Returns y (b, s, n, V) of the recurrence over q, k (b, s, n, K) and v. A decode state is continued and
        updated; it also stores, from the last token, the further values `along`, each (b, s, ...)."""
        fresh = pass_.begins
        if state is None:
            return chunked_linear_attention(q, k, v, log_decay, None, fresh)[0]
        matrix, end = state.begin(pass_, wide(q))[1][STATE], 0
        ys = []
        for size in state.pieces(q.shape[1]):
            at, end = slice(end, end + size), end + size
            part = None if fresh is None else fresh[:, at]
            decay = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, at]
            y, matrix = chunked_linear_attention(q[:, at], k[:, at], v[:, at], decay, matrix, part)
            ys.append(y)
            state.keep({STATE: matrix, **{name: values[:, end - 1] for name, values in along.items()}}, pass_, end)
        return torch.cat(ys, dim=1)

    def show(
        self,
        q: Tensor,
        k: Tensor,
        log_decay: Tensor | None,
        pass_: Pass,
        of: Callable[[int, Tensor, list[int]], Tensor] = lambda first, block, heads: block,
    ) -> None:
        """Shows the effective attention of this mixer (the weights of the v_j in z_t) to the observers of its site
        `effective_attention`. `of`, called with (first query, block (b, n, r, s), heads), converts a block of
        weights in y, the recurrence's output, to weights in z."""
        s = q.shape[1]
        age = None if pass_.documents is None else pass_.age.clamp(max=torch.arange(s, device=q.device))

        def blocks(heads: list[int]) -> Iterator[tuple[int, Tensor]]:
            decay = None if log_decay is None else log_decay[..., heads]
            for first, block in linear_attention_map(q[:, :, heads], k[:, :, heads], decay, age, self.causal):
                yield first, of(first, block, heads)

        show_maps(self.effective_attention, self.n_heads, s, blocks)

    @property
    def heads(self) -> Heads:
        return Heads(self.n_heads, self.n_heads, self.head_dim)

    @property
    def head_output(self) -> Linear | None:
        return self.output

    @property
    def effective_maps(self) -> EffectiveMaps:
        return EffectiveMaps(self.effective_attention, "head", self.n_heads, self.v, self.z)

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result."""
        maps = {name: Matrix.of(self.qkv, part, self.n_heads) for part, name in enumerate("qkv")}
        return {**maps, "out": Matrix.of(self.output)}

    @property
    def kept(self) -> Sizes:
        """Mapping {name: shape in one sequence} of the tensors of the decode state: S of every head."""
        return {STATE: (self.n_heads, self.head_dim, self.value_dim)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`, at least in fp32, because rounding would add
        up from token to token. Raises RequestError for a bidirectional mixer."""
        if not self.causal:
            raise RequestError(
                "this mixer also attends to later tokens, so it cannot decode with a state; use visibility=causal",
                code="conflict", field="mixer.visibility", expected="causal",
            )  # fmt: skip
        return RecurrentState(batch, self.kept, dtype, device, rewind)


class MatrixMixerConfig(MixerConfig):
    """Base of the configs of mixers with a matrix state."""

    n_heads: int | None = Field(None, gt=0, le=1 << 16)
    """Number of heads; None for one per 64 of the width, or the nearest number that divides it."""
    head_dim: int | None = Field(None, gt=0, le=1 << 20)
    """Elements per head; None for d_model / n_heads."""
    bias: bool = False

    @abstractmethod
    def widths(self, ctx: BuildContext) -> tuple[int, int]:
        """Returns the sizes (K, V) of a head's state matrix."""

    def causal(self, ctx: BuildContext) -> bool:
        return True

    def reach(self, ctx: BuildContext) -> None:
        return None

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return keys_before(t, None) if self.causal(ctx) else float(t)

    def heads(self, ctx: BuildContext) -> Heads:
        return Heads.of(ctx.d_model, self.n_heads or Heads.fitting(ctx.d_model), None, self.head_dim)

    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Accepts every type of device, because this mixer has a backward pass on all."""

    def resized(self, n_heads: int) -> Any:
        return self.replace(n_heads=n_heads, head_dim=None)

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> Any:
        return self.replace(bias=new(self.bias)) if change == "bias" else None

    def refuse_mup(self, ctx: BuildContext) -> None:
        if ctx.mup is not None:
            raise RequestError(
                f"mup has no rule for the mixer {self.kind}, whose products are not attention scores; leave mup out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip

    def recurrence_cost(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the recurrence in chunks: its matmuls, the tensors kept for the backward pass, and the
        decode state. A bidirectional mixer has two matmuls instead, which keep copies of q and k, laid out head by
        head."""
        n, (k, v) = self.heads(ctx).n_heads, self.widths(ctx)
        fp32 = torch.promote_types(shape.products, torch.float32)
        whole, rest = divmod(shape.s, CHUNK)
        pairs = whole * CHUNK**2 + rest**2
        if not self.causal(ctx):
            flops = 4 * n * shape.s * k * v
        elif shape.s == 1:
            flops = 4 * n * k * v
        else:
            flops = 2 * n * (pairs * (k + v) + 2 * shape.s * k * v)
        states = n * k * v * (whole + bool(whole) + bool(rest) + bool(rest) if self.causal(ctx) else 1)
        copies = 0 if self.causal(ctx) else 2 * k
        own = Cost(
            flops=shape.passes * shape.b * flops,
            kept=shape.keeps(n * (2 * k + v + copies), fp32) + shape.keeps_once(shape.b * states, fp32),
            moved_bytes=shape.passes * shape.tokens * n * 2 * (k + v) * fp32.itemsize,
        )
        return own + recurrent_cost(shape, {STATE: (n, k, v)}) if self.causal(ctx) else own
