from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.visibility import Visibility

Index = tuple[Tensor, Tensor]
"""Tuple (q_idx (s,) or (b, s), k_idx (t,) or (b, t)): positions of the queries and keys, counted from the sequence's
start."""

At = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tuple (b, n, q_idx, k_idx): indices of row, head, query and key, as tensors that broadcast to (b, n, s, t)."""

Once = Callable[[Hashable, Callable[[], Any]], Any]
"""Function once(key, make): returns make(), computed at the first call with this key and kept for the rest of the
pass."""


def anew(key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns make(), the function `Once` for an attention call outside a pass, for which nothing is kept."""
    return make()


class ScoreBias:
    """Bias of attention scores, a function bias(score, b, n, q_idx, k_idx) -> score, in the convention of
    `torch.nn.attention.flex_attention`.

    additive    promises bias(score, ...) = score + bias(0, ...), so that a mask can carry it
    key         equal for equal biases within one pass of the model
    parameters  tensors that the function reads and training may change; they are part of the key, by identity
    """

    def __init__(
        self, function: Callable[..., Tensor], additive: bool, key: Hashable, parameters: tuple[Tensor, ...] = ()
    ):
        self.function = function
        self.additive = additive
        self.key = (key, *parameters) if parameters else key
        self.parameters = parameters

    @property
    def learned(self) -> bool:
        """True if a parameter of the bias requires a gradient, so that training changes it."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def __call__(self, score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return self.function(score, b, n, q_idx, k_idx)

    def by_block(self, sizes: list[int]) -> list[ScoreBias]:
        """Returns an equal bias for each of the consecutive blocks of a call's queries, `sizes` their numbers of
        queries. A bias that reads a tensor with a row for each query divides it here, so that the gradient of a block
        has the size of the block."""
        return [self] * len(sizes)

    @staticmethod
    def chain(first: ScoreBias | None, then: ScoreBias | None) -> ScoreBias | None:
        """Returns the bias that applies `first`, then `then`."""
        if first is None or then is None:
            return first or then
        both = first.additive and then.additive
        parameters = first.parameters + then.parameters
        return ScoreBias(lambda score, *at: then(first(score, *at), *at), both, (first.key, then.key), parameters)


def softcap(cap: float) -> ScoreBias:
    """Returns the bias score -> cap tanh(score / cap), which bounds |score| by cap (Gemma 2, 2408.00118)."""
    return ScoreBias(lambda score, b, n, q_idx, k_idx: cap * torch.tanh(score / cap), False, ("softcap", cap))


class CallFacts(NamedTuple):
    """Facts about an attention call that decide the choice of a kernel, as plain values, without tensors or a device.
    The defaults describe a call that every kernel serves."""

    device: str = ""
    """Type of the device; empty if it is not known yet."""
    dtype: torch.dtype = torch.float32
    batch: int = 1
    s: int = 1
    t: int = 1
    head_dim: int = 64
    width: int | None = None
    """Approximate bound of the number of keys that most queries attend to; None without a bound."""
    plain: bool = True
    """True if only the order of the tokens decides visibility, and the scores have no bias."""
    masked: bool = False
    """True unless the call is full or causal attention, which some kernels compute without a mask."""
    additive: bool = True
    """True if the call has no bias, or one that is added to the scores, so that a mask can carry it."""
    learned: bool = False
    """True if the bias has trained parameters, so that its gradient is needed."""
    dropout: bool = False
    grad: bool = False
    """True if the result requires a gradient."""
    sinks: bool = False
    """True if each head has a sink, an additional score without a key."""

    @classmethod
    def of_loops(cls, b: int, s: int, head_dim: int, visibility: Visibility) -> CallFacts:
        """Returns the facts of a call of b texts of s tokens that attend to themselves, in a training step of the C++
        of `fused_loops`: in fp32 on a CPU, without a bias."""
        plain = visibility.only_order and (visibility.reach is None or visibility.reach >= s)
        return cls("cpu", torch.float32, b, s, s, head_dim, visibility.width, plain, not plain, grad=True)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Call of a kernel: z = dropout(softmax(bias(q k^T scale) where visible)) v.

    With `sinks`, the softmax of head i has an additional score, sinks[i], whose weight is dropped: the others sum to
    sigmoid(log sum exp(scores) - sinks[i]). A head can thus attend to nothing.

    q           (b, s, n, h)
    k, v        (b, t, g, h), g dividing n: query head i reads KV head i // (n/g); v may have another width hv
    visibility  keys that a query attends to
    bias        function of the scores, or None
    scale       factor on scores; None for 1 / sqrt(h)
    dropout     probability with which an entry of the pattern is dropped
    index       positions of the queries and keys; None if the queries are the last s of the t tokens
    once        keeps masks for the other layers of a pass
    sinks       (n,), or None
    """

    q: Float[Tensor, "b s n h"]
    k: Float[Tensor, "b t g h"]
    v: Float[Tensor, "b t g hv"]
    visibility: Visibility
    bias: ScoreBias | None = None
    scale: float | None = None
    dropout: float = 0.0
    index: Index | None = None
    once: Once = anew
    sinks: Float[Tensor, " n"] | None = None

    def replace(self, **changes: Any) -> AttentionCall:
        """Returns a copy of this call with some fields changed."""
        return replace(self, **changes)

    @property
    def score_scale(self) -> float:
        """Factor on the scores: `scale`, by default 1 / sqrt(h)."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def additive(self) -> bool:
        """True if the call has no bias, or one that is added to the scores, so that a mask can carry it."""
        return self.bias is None or self.bias.additive

    @property
    def learned(self) -> bool:
        """True if the bias has parameters whose gradient is recorded now."""
        return self.bias is not None and self.bias.learned and torch.is_grad_enabled()

    @property
    def sees_itself(self) -> bool:
        """True if every query attends to at least its own key, so that no row of the pattern is empty."""
        return self.visibility.sees_itself and self.index is None

    @property
    def near(self) -> bool:
        """True if visibility hides no key because of its distance: all t keys are within reach."""
        reach = self.visibility.reach
        return reach is None or reach >= self.k.shape[1]

    @property
    def plain(self) -> bool:
        """True if only the order of the tokens decides visibility, and the scores have no bias."""
        return self.bias is None and self.index is None and self.visibility.only_order and self.near

    @property
    def sees_past(self) -> bool:
        """True if query i attends to exactly keys 0 .. i, the causal case that kernels know without a mask."""
        s, t = self.q.shape[1], self.k.shape[1]
        return s > 1 and self.visibility.causal and self.plain and bool(s == t)  # lengths are symbols to a compiler

    @property
    def sees_all(self) -> bool:
        """True if every query attends to every key, so that no mask is needed."""
        return (self.q.shape[1] == 1 or not self.visibility.causal) and self.plain

    @property
    def masked(self) -> bool:
        """True if a kernel that knows only full and causal attention needs a mask."""
        return not (self.sees_all or self.sees_past)

    @property
    def grad(self) -> bool:
        """True if the result requires a gradient."""
        if not torch.is_grad_enabled():
            return False
        sinks = self.sinks is not None and self.sinks.requires_grad
        return self.q.requires_grad or self.k.requires_grad or self.v.requires_grad or self.learned or sinks

    @property
    def facts(self) -> CallFacts:
        q, bias, plain = self.q, self.bias, self.plain  # read at every layer for every token: written for speed
        b, s, _, h = q.shape
        return CallFacts(
            q.device.type, q.dtype, b, s, self.k.shape[1], h, self.visibility.width, plain, not plain or self.masked,
            bias is None or bias.additive, bias is not None and self.learned, self.dropout > 0, self.grad,
            self.sinks is not None,
        )  # fmt: skip

    @property
    def tokens(self) -> Index:
        """Positions (q_idx, k_idx) of the queries and keys: `index`, by default those of the last s and of all t
        tokens."""
        s, t, device = self.q.shape[1], self.k.shape[1], self.q.device
        return self.index or (torch.arange(t - s, t, device=device), torch.arange(t, device=device))

    @property
    def at(self) -> At:
        return indices(self.q, self.k, self.tokens)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Hashable key of the call's mask, equal for calls of one pass with equal masks. Tensors are compared by
        identity."""
        where = self.index or (self.q.shape[1], self.k.shape[1])
        return (self.visibility.key, self.bias and self.bias.key, *where, self.q.dtype)

    def additive_mask(self, dtype: torch.dtype) -> Tensor:
        """Returns the mask that is added to the scores: 0 or the bias for visible pairs, -inf for others, broadcastable
        to (b, n, s, t). The bias keeps its gradient."""
        return masked_bias(self.visibility, self.bias, self.at).to(dtype)


def indices(q: Tensor, k: Tensor, index: Index) -> At:
    """Returns the index tensors (b, n, q_idx, k_idx) of a call, which broadcast to (b, n, s, t): row (b,1,1,1), head
    (1,n,1,1), positions of the queries (1 or b,1,s,1) and of the keys (1 or b,1,1,t)."""
    b, s, n, t, device = q.shape[0], q.shape[1], q.shape[2], k.shape[1], q.device
    return (
        torch.arange(b, device=device).view(b, 1, 1, 1),
        torch.arange(n, device=device).view(1, n, 1, 1),
        index[0].reshape(-1, 1, s, 1),
        index[1].reshape(-1, 1, 1, t),
    )


def softmax_over(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax of scores (b, n, s, t) over t. The sinks (n,), None for none, are an additional score of each
    row, whose weight is dropped."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def masked_bias(visibility: Visibility, bias: ScoreBias | None, at: At) -> Tensor:
    """Returns a mask for scores: 0 or the additive bias for visible pairs, -inf for others, broadcastable to (b, n, s,
    t)."""
    zero = torch.zeros((), device=at[0].device)
    return torch.where(visibility.visible(*at), zero if bias is None else bias(zero, *at), float("-inf"))


class HeadLayout(NamedTuple):
    """Memory layout of the heads of an attention call, as a kernel receives them."""

    n: int
    """Number of query heads."""
    g: int
    """Number of KV heads."""
    biased: bool = False
    """True if the bias differs from head to head."""
    by_head: bool = False
    """True if q and k are stored head by head, as rotary positions leave them; False for token by token."""
    value_dim: int | None = None
    """Width of a value per head; None for the width of a key."""


class KeptTensors(NamedTuple):
    """Sizes of the tensors that a kernel keeps of a call for the backward pass."""

    own: int
    """Bytes of the tensors that the kernel makes itself, without its output z."""
    mask: int = 0
    """Bytes of the mask, which all calls of one pass share."""
    given: str = ""
    """Letters among q, k, v and z that name the inputs, and the output, which are kept as they are, as in "qkvz"."""


class Kernel:
    """Implementation of attention: kernel(call) -> z (b, s, n, hv). A row that attends to no key is zero.

    Every kernel equals `naive` in outputs and gradients, or refuses the call with a reason. A subclass implements
    `attend`, and `refusal` if there are calls that it cannot compute.
    """

    name: ClassVar[str]

    def __call__(self, call: AttentionCall) -> Float[Tensor, "b s n hv"]:
        """Returns z (b, s, n, hv) of the call. Raises RequestError if `serves` gives a reason why this kernel cannot
        compute it."""
        self.check(call.facts)
        return self.attend(call)

    def serves(self, call: AttentionCall) -> str | None:
        """Returns the reason why this kernel cannot compute the call; None if it can."""
        return self.refusal(call.facts)

    def refusal(self, facts: CallFacts) -> str | None:
        """Returns the reason why this kernel cannot compute calls with these facts, as a clause that continues the
        kernel's name; None if it can."""
        return None

    def in_loops(self, facts: CallFacts) -> bool:
        """Returns True if this kernel computes calls with these facts by the C++ of `fused_loops`."""
        return False

    def check(self, facts: CallFacts) -> None:
        """Raises RequestError if `refusal` gives a reason for these facts; called when a model is built, with the facts
        known then."""
        if reason := self.refusal(facts):
            others = "auto, banded or naive"  # these serve every call on every device
            raise RequestError(
                f"kernel={self.name} {reason}; use kernel={others}",
                code="conflict", field="kernel", value=self.name, expected=others,
            )  # fmt: skip

    def keeps(self, facts: CallFacts, visibility: Visibility, heads: HeadLayout) -> KeptTensors:
        """Returns the sizes of the tensors that autograd keeps of a training call with these facts; by default those of
        the definition."""
        pairs = facts.batch * heads.n * facts.s * facts.t
        widths = 2 * facts.head_dim + (heads.value_dim or facts.head_dim)
        expanded = facts.batch * heads.n * facts.t * widths
        return KeptTensors(pattern_bytes(facts, pairs) + facts.s * (facts.t + 1) + expanded * facts.dtype.itemsize)

    def has_pairs(self, facts: CallFacts) -> bool:
        """Returns True if memory holds, at one time, a value for every pair of a query and a key: a score, a weight or
        a mask. True by default, as in the definition."""
        return True

    def pairs(self, visibility: Visibility, s: int, t: int) -> int:
        """Returns the number of pairs of a query and a key, per head, whose scores this kernel computes for s queries
        and t keys."""
        return s * t

    def check_training(self, device: str) -> None:
        """Raises RequestError if the kernel has no backward pass on this type of device."""
        self.check(CallFacts(device=device, grad=True))

    def attend(self, call: AttentionCall) -> Float[Tensor, "b s n hv"]:
        """Returns z for a call that this kernel serves."""
        raise NotImplementedError


def pattern_bytes(facts: CallFacts, pairs: int) -> int:
    """Returns the bytes that autograd keeps for `pairs` scores: their softmax, at least in fp32, the pattern in the
    dtype of values, the factors of dropout, and the inputs of a bias that is not additive."""
    wide_size = torch.promote_types(facts.dtype, torch.float32).itemsize
    return pairs * (wide_size * (1 if facts.additive else 2) + facts.dtype.itemsize * (2 if facts.dropout else 1))


class KernelConfig(PartConfig, axis="kernel"):
    def build(self, ctx: BuildContext) -> Kernel:
        raise NotImplementedError

    def for_gpu(self) -> KernelConfig:
        """Returns the config of the kernel whose memory a plan for a GPU counts: this config, or, if its kernel depends
        on the device, the config of the kernel that a GPU would use."""
        return self
