"""A mixer, a norm and a feed-forward network as a user writes them: in one file, outside the package, with a short name
each. Importing the file is all it takes: llama@1m+ema+l1norm+sine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.parts.own import (
    FFN,
    BuildContext,
    Cost,
    FFNConfig,
    Init,
    Linear,
    Matrix,
    Mixer,
    MixerConfig,
    Norm,
    NormConfig,
    Pass,
    RecurrentState,
    Shape,
    Site,
    Word,
    keys_before,
    linear_cost,
    norm_cost,
    whole,
    wide,
)


class Ema(Mixer):
    """h_t = a h_{t-1} + (1 - a) x_t, a = sigmoid(decay) by channel; out = h W; x, out (b,s,d). Sites: z, out."""

    causal, reach, heads, separates_documents = True, None, None, True

    def __init__(self, d_model: int, half_life: int = 4, reparam: Any = None):
        super().__init__()
        self.half_life = half_life
        self.decay = nn.Parameter(torch.empty(d_model))
        self.output = Linear(d_model, d_model, role="output", reparam=reparam)
        self.z, self.out = Site("bsd"), Site("bsd")

    def forward(self, x: Tensor, pass_: Pass | None = None, state: RecurrentState | None = None) -> Tensor:
        pass_ = pass_ or Pass.of(x)
        a, u = torch.sigmoid(wide(self.decay)), wide(x)
        h = u.new_zeros(len(x), 1, x.shape[2]) if state is None else state.begin(pass_, x)[1]["h"]
        every = []
        for i in range(x.shape[1]):
            if pass_.documents is not None:
                h = h.masked_fill((pass_.age[:, i] == 0)[:, None, None], 0.0)
            h = a * h + (1 - a) * u[:, i : i + 1]
            every.append(h)
            if state is not None:
                state.keep({"h": h}, pass_, i + 1)
        return self.out(self.output(self.z(torch.cat(every, dim=1)).to(x.dtype)))

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        return RecurrentState(batch, {"h": (1, len(self.decay))}, dtype, device, rewind)

    def matrices(self) -> dict[str, Matrix]:
        return {"out": Matrix.of(self.output)}

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        if not self.decay.is_meta:
            a = 0.5 ** (1 / self.half_life)
            self.decay.fill_(a / (1 - a)).log_()


class EmaConfig(MixerConfig, kind="ema", words=Word("ema", whole("half_life"), "4", optional=True)):
    knows_order = True
    half_life: int = 4
    """Initial number of tokens after which half of a token is forgotten."""

    def causal(self, ctx: BuildContext) -> bool:
        return True

    def reach(self, ctx: BuildContext) -> None:
        return None

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return keys_before(t, None)

    def heads(self, ctx: BuildContext) -> None:
        return None

    def check_training(self, ctx: BuildContext, device: str) -> None:
        """It trains everywhere."""

    def resized(self, n_heads: int) -> EmaConfig:
        return self

    def changed(self, change: str, new: Callable[[Any], Any]) -> None:
        return None

    def build(self, ctx: BuildContext) -> Ema:
        return Ema(ctx.d_model, self.half_life, ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, fp32 = ctx.d_model, torch.promote_types(shape.state, torch.float32)
        held = 0 if shape.phase == "train" else shape.b * d * fp32.itemsize
        own = Cost.weights(d, state_bytes=held, moved_bytes=2 * held, kept=shape.keeps(3 * d, torch.float32))
        return own + linear_cost(ctx, shape, d, d)


class L1Norm(Norm):
    """y = x / (mean |x| + eps) * w over the last axis."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x) / (wide(x).abs().mean(-1, keepdim=True) + self.eps) * wide(self.weight)
        return y.to(self.out_dtype(x))

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        self.weight.fill_(1.0)


class L1NormConfig(NormConfig, kind="l1", words="l1norm"):
    def build(self, ctx: BuildContext) -> L1Norm:
        return L1Norm(ctx.width or ctx.d_model, self.eps)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return norm_cost(ctx, shape, weights=1, statistics=1)


class Sine(FFN):
    """y = sin(x W_up) W_down; x, y (b,s,d), hidden (b,s,f). Sites: up, hidden, out."""

    def __init__(self, d_model: int, hidden: int, reparam: Any = None):
        super().__init__()
        self.up_proj = Linear(d_model, hidden, reparam=reparam)
        self.down_proj = Linear(hidden, d_model, role="output", reparam=reparam)
        self.up, self.hidden, self.out = Site("bsf"), Site("bsf"), Site()

    def forward(self, x: Tensor, pass_: Pass | None = None) -> Tensor:
        return self.out(self.down_proj(self.hidden(torch.sin(self.up(self.up_proj(x))))))


class SineConfig(FFNConfig, kind="sine", words="sine"):
    def width(self, ctx: BuildContext) -> int:
        return self.hidden or 4 * ctx.d_model

    def build(self, ctx: BuildContext) -> Sine:
        return Sine(ctx.d_model, self.width(ctx), ctx.make_reparam)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, f = ctx.d_model, self.width(ctx)
        sine = Cost(kept=shape.keeps(f))
        return linear_cost(ctx, shape, d, f) + sine + linear_cost(ctx, shape.reading(shape.products), f, d)
