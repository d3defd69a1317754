"""Base of mixers with softmax attention: z is the softmax of scores, times values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Number, Shape
from glassformer.parts.core.heads import Heads, nearest_groups
from glassformer.parts.core.owner import Owner
from glassformer.parts.core.shard import Shard
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import (
    AttentionCall,
    Auto,
    AutoConfig,
    CallFacts,
    HeadLayout,
    KeptTensors,
    Kernel,
    KernelConfig,
    ScoreBias,
    attention_rows,
    naive_attention,
)
from glassformer.parts.linear import Linear
from glassformer.parts.mixer.base import Mixer, MixerChange, MixerConfig
from glassformer.parts.mixer.kv import vector_bytes
from glassformer.parts.position import AttentionPosition
from glassformer.parts.visibility import Causal, Visibility


class Sinks(nn.Module):
    """Attention sinks: a trained score for each head (n,) that has no key, initialised to 0."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.shards = {"weight": (Shard("column", n_heads),)}
        self.init_weights(None)

    @torch.no_grad()
    def init_weights(self, init: object) -> None:
        self.weight.zero_()


class SoftmaxAttention(Mixer):
    """Attention from given q, k and v: z = softmax(q k^T scale + bias) v per head, out = z W_O.

    A subclass makes `output`, the layer W_O, and `sinks` if it has them. Sites: q, k, v, scores and pattern (b,n,s,t),
    z, out."""

    separates_documents = True
    output: Linear

    def __init__(
        self,
        heads: Heads,
        position: AttentionPosition | None = None,
        visibility: Visibility | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        kernel: Kernel | None = None,
        facts: CallFacts | None = None,
    ):
        """`facts`: facts about the calls that the kernel must be able to compute, checked at construction with
        `dropout` added; None for the default facts."""
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads
        self.position, self.visibility = position, visibility or Causal()
        self.scale, self.dropout, self.kernel = scale or self.head_dim**-0.5, dropout, kernel or Auto()
        self.kernel.check((facts or CallFacts())._replace(dropout=dropout > 0))
        self.sinks: Sinks | None = None
        self.q, self.k, self.v = Site("bsnh"), Site("bsgh"), Site("bsgh")
        self.scores, self.pattern, self.z, self.out = Site("bnst"), Site("bnst"), Site("bsnh"), Site("bsd")

    def divide_heads(self, owner: Owner) -> None:
        """Reduces this mixer to the share of the heads of one tensor-parallel rank. Raises RequestError if the ranks
        cannot divide the heads evenly."""
        self.n_heads, self.n_kv_heads = (
            owner.share(name, getattr(self, name)) for name in ("n_heads", "n_kv_heads")
        )  # fmt: skip
        owner.refuse("mixer.dropout", self.dropout, "would drop other weights of the pattern than one process does")
        self.enter = owner.enter

    def call(self, q: Tensor, k: Tensor, v: Tensor, k_idx: Tensor | None, pass_: Pass) -> AttentionCall:
        """Returns the call of the kernel: queries, keys and values, the visibility, and the bias of scores.

        q            (b, s, n, h), of the new tokens, after positions and norms
        k, v         (b, t, g, h) and (b, t, g, hv), of all kept tokens; g divides n
        k_idx        (t,) or (b, t), token of each key, as returned by `KVState.append`; None for the last t
        pass_        the forward pass, with positions and documents

        Scores are scale q . k, without unit. A subclass that changes q, k or v returns `super().call(...)` with the new
        ones, and one that adds to scores overrides `score_bias`."""
        dropout = self.dropout if self.training else 0.0
        seen, bias = pass_.seen(self.visibility), self.score_bias(pass_)
        sinks = None if self.sinks is None else self.sinks.weight
        return AttentionCall(q, k, v, seen, bias, self.scale, dropout, pass_.index(k_idx), pass_.once, sinks=sinks)

    def score_bias(self, pass_: Pass) -> ScoreBias | None:
        """Returns the bias of the scores (b, n, s, t) before the softmax; None for no bias."""
        return None if self.position is None else self.position.bias(pass_)

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns z (b, s, n, hv) of the call, and shows its scores and pattern at their sites.

        If scores or pattern are edited, z is computed by the definition, because kernels do not make them as tensors.
        If they are observed, they are computed in addition; the kernel's output is unchanged."""
        if self.scores.edited or self.pattern.edited:
            return naive_attention(call, on_scores=self.scores, on_pattern=self.pattern)
        z = self.kernel(call)
        if self.scores.looks or self.pattern.looks:
            _show(call, self.scores, self.pattern)
        return z

    def put_out(self, z: Tensor) -> Tensor:
        """Returns the mixer's output (b, s, d): z (b, s, n, hv), passed through its site, times W_O."""
        return self.out(self.output(self.z(z).flatten(-2)))

    @property
    def causal(self) -> bool:
        return self.visibility.causal

    @property
    def reach(self) -> int | None:
        return self.visibility.reach

    @property
    def takes_prefix(self) -> bool:
        return self.visibility.takes_prefix

    @property
    def takes_globals(self) -> bool:
        return self.visibility.takes_globals

    @property
    def heads(self) -> Heads:
        return Heads(self.n_heads, self.n_kv_heads, self.head_dim)

    @property
    def attention_position(self) -> AttentionPosition | None:
        return self.position

    @property
    def head_output(self) -> Linear:
        return self.output


class SoftmaxAttentionConfig(MixerConfig):
    """Base of the configs of mixers with softmax attention, with the methods that follow from heads, visibility,
    position and kernel. A subclass declares its fields, and overrides methods that differ."""

    if TYPE_CHECKING:  # each subclass declares some of these as fields, in another order
        n_heads: Any
        n_kv_heads: Any = None
        head_dim: Any = None
        bias: bool = False
        out_bias: Any = None
        position: Any = None
        visibility: Any = None
        scale: Any = None
        dropout: float = 0.0
        kernel: KernelConfig = AutoConfig()

    def heads(self, ctx: BuildContext) -> Heads:
        return Heads.of(ctx.d_model, self.n_heads, self.n_kv_heads, self.head_dim)

    def seen(self, ctx: BuildContext) -> Visibility:
        """Returns the visibility (attention mask) of this mixer, built from its config."""
        built: Visibility = self.visibility.build(ctx)
        return built

    def takes_prefix(self, ctx: BuildContext) -> bool:
        return self.seen(ctx).takes_prefix

    def causal(self, ctx: BuildContext) -> bool:
        return self.seen(ctx).causal

    def reach(self, ctx: BuildContext) -> int | None:
        return self.seen(ctx).reach

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return self.seen(ctx).keys_seen(t)

    def check_training(self, ctx: BuildContext, device: str) -> None:
        self.kernel.build(ctx).check_training(device)

    def resized(self, n_heads: int) -> Any:
        groups = nearest_groups(n_heads, self.n_heads, self.n_kv_heads)
        return self.replace(n_heads=n_heads, n_kv_heads=groups, head_dim=None)

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> Any:
        """Returns this config with the property named `change` set to new(old value); a change of `bias` also sets the
        output's bias to None, so that it follows `bias`. None if the config lacks the property."""
        if change not in type(self).model_fields:
            return None
        also = {"out_bias": None} if change == "bias" and "out_bias" in type(self).model_fields else {}
        return self.replace(**{change: new(getattr(self, change))}, **also)

    def resolved(self, ctx: BuildContext) -> Any:
        n, g, h = self.heads(ctx)
        made: dict[str, Callable[[], Any]] = {
            "n_heads": lambda: n,
            "n_kv_heads": lambda: g,
            "head_dim": lambda: h,
            "out_bias": lambda: self._out_bias,
            "position": lambda: self.position and self.position.resolved(self._of_position(ctx)),
            "scale": lambda: self._scale(ctx),
            "dropout": lambda: 0.0,
            "kernel": lambda: AutoConfig(),
        }
        return self.replace(**{name: make() for name, make in made.items() if name in type(self).model_fields})

    def _within(self, ctx: BuildContext) -> BuildContext:
        """Returns the context in which the parts of this mixer are built, with the mixer's heads and bias."""
        n, g, h = self.heads(ctx)
        later = not self.seen(ctx).causal
        return ctx.within(n_heads=n, n_kv_heads=g, head_dim=h, bias=self.bias, sees_later=later)

    def _of_position(self, ctx: BuildContext) -> BuildContext:
        """Returns the context in which the position encoding of this mixer is built."""
        return self._within(ctx)

    @property
    def _out_bias(self) -> bool:
        return self.bias if self.out_bias is None else bool(self.out_bias)

    def _scale(self, ctx: BuildContext) -> float:
        h = self.heads(ctx).head_dim
        return float(self.scale or (ctx.mup.score_scale(h) if ctx.mup else h**-0.5))

    def _call_keeps(
        self, ctx: BuildContext, shape: Shape, by_head: bool = False, value_dim: int | None = None, **facts: bool
    ) -> tuple[KeptTensors, Cost]:
        """Returns (sizes, cost of the mask) of a training call with the heads of the context: the sizes of the tensors
        that the kernel keeps, and the mask, which other layers share. `facts`: further arguments of `kept_of_call`."""
        biased = self.position is not None and self.position.biases
        heads = HeadLayout(ctx.n_heads, ctx.n_kv_heads, biased, by_head, value_dim)
        kept = kept_of_call(self.kernel.build(ctx), self.seen(ctx), heads, ctx.head_dim, shape, self.dropout, **facts)
        mask = Cost.once(("mask", self.visibility, self.position), Cost(kept=kept.mask))
        return kept, mask if kept.mask else Cost()

    def _state_cost(self, ctx: BuildContext, shape: Shape, *kept: tuple[int, int]) -> Cost:
        """Returns the cost of a decode state that keeps vectors for each token within reach. `kept`: (heads, width) of
        each vector, such as of k and of v. Vectors of earlier tokens are read, those of new tokens written."""
        most = self.seen(ctx).needed.most(shape.t)
        token = sum(n * vector_bytes(width, shape.state) for n, width in kept)
        held, read, written = (token * min(tokens, most) for tokens in (shape.t, shape.t - shape.s, shape.s))
        return Cost.state(shape, held, read + written)


def change_kernels(model: nn.Module, change: Callable[[Kernel], Kernel]) -> None:
    """Replaces the kernel of every softmax attention in a model by `change(kernel)`, in place."""
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            module.kernel = change(module.kernel)


@torch.no_grad()
def _show(call: AttentionCall, scores: Site, pattern: Site) -> None:
    s = call.q.shape[1]
    for first, some_scores, some_pattern in attention_rows(call):
        scores.show(some_scores, first, s)
        pattern.show(some_pattern, first, s)


def attention_cost(ctx: BuildContext, shape: Shape, value_dim: int, keys: Number, calls: int = 1) -> Cost:
    """Returns the cost of `calls` attention calls: q k^T, and the product of the pattern with v, for queries that
    attend to `keys` keys on average. Selective recomputation keeps z and the logarithm of each row's sum of
    exponentials."""
    n, g, h = ctx.n_heads, ctx.n_kv_heads, ctx.head_dim
    calls *= shape.passes
    return Cost(
        flops=calls * 2 * n * (h + value_dim) * shape.tokens * keys,
        kept_selective=shape.keeps(n * value_dim) + shape.keeps(n, torch.float32),
        moved_bytes=calls * shape.tokens * (n + g) * (h + value_dim) * shape.products.itemsize,
    )


def keys_met(visibility: Visibility, shape: Shape) -> Number:
    """Returns the mean number of keys per query for which FLOPs are counted, for the last s queries of t tokens
    (`shape`)."""
    s, t = shape.s, shape.t
    if shape.every_key:
        return t
    if s == t or not visibility.causal:
        return visibility.keys_seen(t)
    return (t * visibility.keys_seen(t) - (t - s) * visibility.keys_seen(t - s)) / s


def kept_of_call(
    kernel: Kernel,
    visibility: Visibility,
    heads: HeadLayout,
    head_dim: int,
    shape: Shape,
    dropout: float = 0.0,
    additive: bool = True,
    sinks: bool = False,
    learned: bool = False,
) -> KeptTensors:
    """Returns the sizes of the tensors that the kernel keeps for the backward pass of a training call with this
    shape."""
    near = visibility.reach is None or visibility.reach >= shape.t
    visibility = visibility.sized(shape.t)
    plain = visibility.only_order and near and not heads.biased and additive
    facts = CallFacts(
        shape.device, shape.products, shape.b, shape.s, shape.t, head_dim, visibility.width, plain,
        masked=not plain, additive=additive, learned=learned, dropout=dropout > 0, grad=True, sinks=sinks,
    )  # fmt: skip
    return kernel.keeps(facts, visibility, heads)
