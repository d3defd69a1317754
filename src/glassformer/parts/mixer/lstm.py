from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer.base import EffectiveMaps, show_maps
from glassformer.parts.mixer.chunked import linear_attention_map
from glassformer.parts.mixer.recurrent import (
    Recurrence,
    RecurrenceConfig,
    RecurrentState,
    Sizes,
    in_pieces,
    recurrent_cost,
)
from glassformer.parts.precision import full_precision, has_recurrences, wide
from glassformer.parts.reparam import MakeReparam

Affine = tuple[Tensor, Tensor | None]
"""Tuple of a matrix (o, i) and its bias (o,)."""
LEAST_DECAY = 1e-30
"""Smallest decay whose logarithm is computed; smaller decays are replaced by it."""


class GateMaps(Linear):
    """Linear layer of one input to all gates, at least fp32. Weights are initialised as in `torch.nn.LSTM`, uniform
    between -1/sqrt(c) and 1/sqrt(c) for c channels; biases are 0, but 1 for the gate with index `opened`."""

    packable = False
    in_half = False

    def __init__(
        self, inputs: int, channels: int, gates: int, bias: bool, reparam: MakeReparam | None, opened: int | None = None
    ):
        self.opened = opened
        super().__init__(inputs, (channels,) * gates, bias, reparam=reparam)

    def affine(self) -> Affine:
        """Returns (matrix, bias) of the layer, at least fp32."""
        weight = self.weight if self.reparam is None else self.reparam(self.weight)
        return wide(weight), None if self.bias is None else wide(self.bias)

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return F.linear(x, *self.affine())

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        bound = self.outs[0] ** -0.5
        init.fill_uniform(self.weight, -bound, bound)
        if self.reparam is not None:
            self.reparam.begin(self.weight)
        if self.bias is not None:
            self.bias.zero_()
            if self.opened is not None:
                self.bias.split(self.outs)[self.opened].fill_(1.0)


class GatedRNN(Recurrence):
    """Recurrence whose gates read the token and the last output through full matrices.

        gates = x_t W + b, h_{t-1} U + e        (h_t, ...) = cell(gates, state)        out = out_proj(h)

    x (b,s,d), h (b,s,c), W (d, gates c), U (c, gates c); c = width channels, d_model unless given. A whole text without
    document borders is one call of torch's operator, in fp32 at least; single tokens, and rows of several documents,
    are computed by `naive`, the definition. At the first token of a document the state is zero.

    Sites: z (h), out; and, made only while observed, and not to be edited: the gates and the cell by the names of
    `made`, and effective_attention (b,n,s,t) of each of the n = c channels: the weight of the value at site `source` of
    token j in the value at site `result` of token t, with the gates held constant.
    """

    gates: ClassVar[tuple[str, ...]]
    """Names of the gates, in the order in which torch stacks their matrices."""
    opened: ClassVar[str] = ""
    """Name of the gate whose bias is initialised to one; empty for none."""
    kept: ClassVar[tuple[str, ...]]
    """Names of the tensors of the state, which are carried from token to token."""
    made: ClassVar[tuple[str, ...]]
    """Names of the sites whose values are computed only while observed."""
    source: ClassVar[str]
    """Name of the site whose values the recurrence adds to the state, such as g of an LSTM."""
    result: ClassVar[str]
    """Name of the site that holds this sum of the values of `source`, such as c of an LSTM."""

    def __init__(self, d_model: int, width: int | None = None, bias: bool = True, reparam: MakeReparam | None = None):
        super().__init__()
        c, n = width or d_model, len(self.gates)
        self.channels = c
        self.in_proj = GateMaps(d_model, c, n, bias, reparam, self.gates.index(self.opened) if self.opened else None)
        self.hidden_proj = GateMaps(c, c, n, bias, reparam)
        self.out_proj = Linear(c, d_model, bias, "output", reparam)
        for name in self.made:
            setattr(self, name, Site("bsc"))
        self.z, self.out, self.effective_attention = Site("bsc"), Site("bsd"), Site("bnst")

    @abstractmethod
    def cell(self, given: Tensor, back: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns {name: (b, c)} of the gates and the next state of one token, from `given` = x W + b, `back` = h U +
        e, each (b, gates c), and the previous state `kept`."""

    @abstractmethod
    def fused(self, x: Tensor, kept: Mapping[str, Tensor], weights: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (h, last state by name): h (b, s, c) of all tokens of x (b, s, d), computed by torch's operator from
        the state `kept`; `weights` are W, U, b, e."""

    @staticmethod
    @abstractmethod
    def saved(b: int, s: int, d: int, c: int, bias: bool) -> int:
        """Returns the number of fp32 values, input included, that torch's operator keeps for its backward pass on a
        CPU, for x (b, s, d), c channels, and layers with biases or without."""

    @abstractmethod
    def decay(self, made: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns (a, k), each (b, s, c), of the recurrence result_t = a_t result_{t-1} + k_t source_t, from `made`,
        the gates and states by name."""

    def naive(
        self, x: Float[Tensor, "b s d"], kept: Mapping[str, Tensor], fresh: Tensor | None, w: Affine, u: Affine
    ) -> dict[str, Float[Tensor, "b s c"]]:
        """Returns all gates and states by name, (b, s, c) each, by the definition, token by token, from the state
        `kept`. `fresh` (#b, s) marks the first tokens of documents; `w` and `u` are the matrices and biases for x and
        h."""
        given, steps = F.linear(x, *w), []
        for t in range(x.shape[1]):
            if fresh is not None:
                kept = {name: value.masked_fill(fresh[:, t, None], 0.0) for name, value in kept.items()}
            steps.append(self.cell(given[:, t], F.linear(kept["h"], *u), kept))
            kept = {name: steps[-1][name] for name in self.kept}
        return {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: RecurrentState | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        inputs, fresh = wide(x), pass_.begins
        if state is None:
            kept = {name: inputs.new_zeros(len(x), self.channels) for name in self.kept}
        else:
            kept = state.begin(pass_, inputs)[1]
        with full_precision(x):
            w, u = self.in_proj.affine(), self.hidden_proj.affine()
            weights = [one for one in (w[0], u[0], w[1], u[1]) if one is not None]

            def run(at: slice, kept: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
                if fresh is None and at.stop - at.start > 1 and has_recurrences(x):
                    return self.fused(inputs[:, at], kept, weights)
                made = self.naive(inputs[:, at], kept, None if fresh is None else fresh[:, at], w, u)
                return made["h"], {name: made[name][:, -1] for name in self.kept}

            if self._observed():
                self._show(self.naive(inputs, kept, fresh, w, u), pass_)
            h = in_pieces(run, kept, pass_, state)
        return self.out(self.out_proj(self.z(h).to(x.dtype)))

    def _observed(self) -> bool:
        """Returns True if an observer watches a site whose values are computed only for observers. Raises RequestError
        if such a site is edited."""
        extra = {name: getattr(self, name) for name in (*self.made, "effective_attention")}
        for name, site in extra.items():
            if site.edited:
                raise RequestError(
                    f"mixer.{name} is only shown, not computed with; edit mixer.z instead",
                    code="unsupported", field=f"mixer.{name}",
                )  # fmt: skip
        return any(site.watched for site in extra.values())

    @torch.no_grad()
    def _show(self, made: dict[str, Tensor], pass_: Pass) -> None:
        for name in self.made:
            getattr(self, name)(made[name])
        s = pass_.tokens
        a, k = self.decay(made)
        age = None if pass_.documents is None else pass_.age.clamp(max=torch.arange(s, device=a.device))

        def blocks(channels: list[int]) -> Iterator[tuple[int, Tensor]]:
            one = torch.ones_like(a[..., channels])[..., None]
            shares = k[..., channels].transpose(1, 2)[:, :, None]
            for first, block in linear_attention_map(one, one, a[..., channels].clamp(min=LEAST_DECAY).log(), age):
                yield first, block * shares

        show_maps(self.effective_attention, self.channels, s, blocks)

    @property
    def effective_maps(self) -> EffectiveMaps:
        ends = getattr(self, self.source), getattr(self, self.result)
        return EffectiveMaps(self.effective_attention, "channel", self.channels, *ends)

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weight matrices of this mixer by name: those that read the token, by the names of the gates;
        those that read the last output, with `hidden_` before the gate's name; and `out`."""
        pairs = {"": self.in_proj, "hidden_": self.hidden_proj}
        gates = {f"{of}{name}": Matrix.of(one, i) for of, one in pairs.items() for i, name in enumerate(self.gates)}
        return {**gates, "out": Matrix.of(self.out_proj)}

    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> RecurrentState:
        """Returns a decode state whose size does not depend on `max_len`, in fp32 at least."""
        return RecurrentState(batch, sizes(self.kept, self.channels), dtype, device, rewind)


def sizes(kept: tuple[str, ...], channels: int) -> Sizes:
    """Returns {name: shape} of the tensors that are carried from token to token, each with `channels` elements."""
    return dict.fromkeys(kept, (channels,))


class LSTM(GatedRNN):
    """Long short-term memory. Hochreiter and Schmidhuber 1997, Neural Computation 9(8); the forget gate is of Gers et
    al. 2000, Neural Computation 12(10); Greff et al. 2015, 1503.04069, compare its forms. As `torch.nn.LSTM`, with a
    projection of h to the stream.

        i, f, o = sigmoid(x W + b + h U + e)        g = tanh(x W + b + h U + e)
        c_t = f_t c_{t-1} + i_t g_t                 h_t = o_t tanh(c_t)

    The bias of f is initialised to one (Jozefowicz et al. 2015, ICML). Sites: z, out; observed only: i, f, g, o, c
    (b,s,c) and effective_attention, the weight of g_j in c_t.
    """

    gates, opened, kept = ("i", "f", "g", "o"), "f", ("h", "c")
    made, source, result = ("i", "f", "g", "o", "c"), "g", "c"

    def cell(self, given: Tensor, back: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        i, f, g, o = (given + back).chunk(4, dim=-1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * kept["c"] + i * g
        return {"i": i, "f": f, "g": g, "o": o, "c": c, "h": o * torch.tanh(c)}

    def fused(self, x: Tensor, kept: Mapping[str, Tensor], weights: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        before = [kept["h"][None], kept["c"][None]]
        y, h, c = torch._VF.lstm(x, before, weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, {"h": h[0], "c": c[0]}

    @staticmethod
    def saved(b: int, s: int, d: int, c: int, bias: bool) -> int:
        """Returns the number of fp32 values that torch's LSTM keeps for its backward pass on a CPU: input, output, both
        states before and after, and oneDNN's workspace: gates and outputs of all tokens, then states and their
        gradients before, between and after the tokens, for two layers, each in whole pages. Without biases it copies
        the weights too."""
        gates, outputs = b * s * row(4 * c), b * s * row(c)
        states, cells = 2 * b * (s + 1) * row(max(c, d)), 2 * b * (s + 1) * c
        workspace = sum(map(in_pages, (gates, outputs, *[states] * 3, *[cells] * 2)))
        return b * s * (d + c) + 4 * b * c + workspace + (0 if bias else 4 * c * (d + c))

    def decay(self, made: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return made["f"], made["i"]


def row(values: int) -> int:
    """Returns the number of fp32 values that oneDNN's workspace takes for a row of `values` values: rounded up to a
    multiple of 16 that is not one of 256."""
    whole = -(-values // 16) * 16
    return whole if whole % 256 else whole + 16


def in_pages(values: int) -> int:
    """Returns the number of fp32 values, at least `values`, that fill whole pages of 4,096 bytes."""
    return -(-values // 1024) * 1024


class GRU(GatedRNN):
    """Gated recurrent unit. Cho et al. 2014, 1406.1078, with the reset after the matmul, as in `torch.nn.GRU`.

        r, u = sigmoid(x W + b + h U + e)        n = tanh(x W + b + r (h U + e))
        h_t = u_t h_{t-1} + (1 - u_t) n_t

    Sites: z, out; observed only: r, u, n (b,s,c) and effective_attention, the weight of n_j in h_t.
    """

    gates, kept = ("r", "u", "n"), ("h",)
    made, source, result = ("r", "u", "n"), "n", "z"

    def cell(self, given: Tensor, back: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (r, u, n), (of_r, of_u, of_n) = given.chunk(3, dim=-1), back.chunk(3, dim=-1)
        r, u = torch.sigmoid(r + of_r), torch.sigmoid(u + of_u)
        n = torch.tanh(n + r * of_n)
        return {"r": r, "u": u, "n": n, "h": u * kept["h"] + (1 - u) * n}

    def fused(self, x: Tensor, kept: Mapping[str, Tensor], weights: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        y, h = torch._VF.gru(
            x, kept["h"][None], weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, True
        )
        return y, {"h": h[0]}

    @staticmethod
    def saved(b: int, s: int, d: int, c: int, bias: bool) -> int:
        """Returns the number of fp32 values that torch's GRU keeps for its backward pass on a CPU: the input, and for
        each token the results of its matmul with h, both gates, n and h."""
        return b * s * (d + 7 * c)

    def decay(self, made: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return made["u"], 1 - made["u"]


class GatedRNNConfig(RecurrenceConfig):
    """Base of the configs of recurrences with gates: LSTM and GRU."""

    mixer: ClassVar[type[GatedRNN]]
    width: int | None = Field(None, gt=0, le=1 << 20)
    """Number of channels; None for d_model."""
    bias: bool = True
    """True if all linear layers have biases."""

    def resized(self, n_heads: int) -> GatedRNNConfig:
        return self.replace(width=None)

    def build(self, ctx: BuildContext) -> GatedRNN:
        self.refuse_mup(ctx)
        return self.mixer(ctx.d_model, self.width, self.bias, ctx.make_reparam)

    def resolved(self, ctx: BuildContext) -> GatedRNNConfig:
        return self.replace(width=self.width or ctx.d_model)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        d, c, n = ctx.d_model, self.width or ctx.d_model, len(self.mixer.gates)
        fp32 = torch.promote_types(shape.products, torch.float32)
        weights = n * c * (d + c + 2 * self.bias)
        own = Cost.weights(
            weights,
            flops=shape.passes * 2 * shape.tokens * n * c * (d + c),
            kept=shape.keeps_once(self.mixer.saved(shape.b, shape.s, d, c, self.bias), fp32),
            moved_bytes=shape.passes * (shape.tokens * (d + c) + weights) * fp32.itemsize,
        )
        maps = linear_cost(ctx, shape.reading(fp32), c, d, bias=self.bias)
        if ctx.reparam is not None:
            for inputs in (d, c):
                maps += ctx.reparam.costs(ctx.within(width=inputs, outs=(c,) * n), shape)
        return own + maps + recurrent_cost(shape, sizes(self.mixer.kept, c))


class LSTMConfig(GatedRNNConfig, kind="lstm", words="lstm"):
    """Config of an LSTM: c_t = f_t c_{t-1} + i_t g_t, h_t = o_t tanh(c_t), of gates that read h_{t-1} (Hochreiter and
    Schmidhuber 1997).

    It loses to attention if a word far back must be retrieved, because all of the text passes through c numbers; and in
    training time, because no token can be computed before the previous one."""

    mixer = LSTM


class GRUConfig(GatedRNNConfig, kind="gru", words="gru"):
    """Config of a GRU: h_t = u_t h_{t-1} + (1 - u_t) n_t, of gates that read h_{t-1} (Cho et al. 2014, 1406.1078).

    It has three quarters of the weights and half of the state of an LSTM of equal width, and loses where an LSTM
    does."""

    mixer = GRU


_onednn_lstm = torch.ops.aten.mkldnn_rnn_layer
if _onednn_lstm not in flop_registry:  # a single operator on CPUs, for which torch 2.13 has no formula

    @register_flop_formula([_onednn_lstm])
    def _flops(x: tuple[int, ...], w: tuple[int, ...], u: tuple[int, ...], *rest: Any, **more: Any) -> int:
        """Returns the FLOPs of the matmuls x W and h U of all tokens, from the shapes of the arguments of torch's
        operator; x (s, b, d)."""
        return 2 * x[0] * x[1] * (w[0] * w[1] + u[0] * u[1])
