"""Interface of mixers. Callers use only the methods and properties defined here, never the class of a mixer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.owner import Seam
from glassformer.parts.core.site import Site
from glassformer.parts.forward_pass import Pass
from glassformer.parts.fused_products import FusedPart
from glassformer.parts.linear import Linear, Matrix
from glassformer.parts.norm import Norm
from glassformer.parts.position import AttentionPosition
from glassformer.parts.state import State
from glassformer.parts.visibility import Visibility

MixerChange = Literal[
    "bias", "dropout", "gain_control", "kernel", "n_kv_heads", "position", "qk_norm", "sinks", "softcap", "visibility"
]
"""Properties that callers change by name, in mixers of any kind."""


@dataclass(frozen=True)
class DotProduct:
    """Softmax logits (scores) scale q k^T of a mixer: where to observe q and k, the matrices that make them, and the
    visibility (mask) of the pairs of tokens.

    `q` (b,s,n,h) and `k` (b,s,g,h) are sites; `queries` and `keys` are the matrices, divided into heads."""

    q: Site
    k: Site
    scale: float
    visibility: Visibility
    queries: Matrix
    keys: Matrix


@dataclass(frozen=True)
class EffectiveMaps:
    """Effective attention of a mixer without a softmax: maps (s, t) with the weight that the vector of token j at the
    site `source` has in the vector of token t at the site `result`.

    result = maps @ source + direct * source. `site` is `effective_attention` (b,n,s,t), computed only for observers
    (`show_maps`); weights may be negative, and rows need not sum to one. There is one map for each of `count` heads,
    with source (b,s,n,h), or of `count` channels, with source (b,s,n)."""

    site: Site
    of: Literal["head", "channel"]
    count: int
    source: Site
    result: Site
    direct: Tensor | None = None
    """Weight (count,) of a token's own `source` in `result`, apart from the maps; None for zero."""


def show_maps(site: Site, count: int, s: int, blocks: Callable[[list[int]], Iterator[tuple[int, Tensor]]]) -> None:
    """Shows the effective attention of a mixer to the observers of its site `site`, for s queries, and each observer
    only the heads that it wants of the `count`. `blocks(heads)` yields (first query, weights (b, heads, r, t) of the
    r queries from the first on) in turn. Raises RequestError if the site is edited."""
    if site.edited:
        raise RequestError(
            "mixer.effective_attention is computed only for observers; edit the values that it depends on instead",
            code="conflict", field="mixer.effective_attention",
        )  # fmt: skip
    for look, heads in site.lookers(count):
        for first, block in blocks(heads):
            look(block, first, s)


class Mixer(nn.Module, ABC):
    """Base of mixers of tokens: forward(x (b,s,d), pass_, state) -> (b,s,d); without a state the s tokens are the whole
    sequence.

    The abstract members have no default: a mixer that lacks one cannot be built."""

    enter: Seam | None = None
    """Function applied to x first, if tensor-parallel ranks share the mixer (`parts/core/owner.py`); None for one
    rank."""
    reads_gathered: ClassVar[bool] = False
    """True if an output depends on other tokens only through keys and values from the state, or from another layer of
    the pass: processes may then share the tokens of a sequence. A subclass must declare it again."""

    @abstractmethod
    def forward(self, x: Tensor, pass_: Pass | None = None, state: Any = None) -> Tensor:
        """Returns the output y (b, s, d) of the mixer for x (b, s, d).

        pass_        positions, documents and padding of the s tokens; if None, `Pass.of(x)`, one document
        state        from `init_state`; if None, the s tokens are the whole sequence. Otherwise they follow the state's
                     tokens, and are added to it"""

    def added_at_once(self, x: Tensor, norm: Norm, pass_: Pass) -> FusedPart | None:
        """Returns x + self(norm(x), pass_) as a fused part of a training step for tensors like x; None if this
        mixer or the machine has no such part."""
        return None

    @abstractmethod
    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> State | None:
        """Returns an empty decode state for `batch` sequences of at most `max_len` tokens; `truncate` can take back up
        to `rewind` tokens. None for a mixer that keeps no state."""

    @property
    @abstractmethod
    def causal(self) -> bool:
        """True if no output of the mixer depends on later tokens."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Number of last tokens, the output's own included, that may affect an output; None without a bound."""

    @property
    @abstractmethod
    def heads(self) -> Heads | None:
        """Numbers of query and KV heads and elements per head of the mixer; None for a mixer without heads."""

    @property
    @abstractmethod
    def separates_documents(self) -> bool:
        """True if no output depends on tokens of another document (`pass_.documents`: packed texts, padding). Otherwise
        the model refuses documents."""

    @abstractmethod
    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of this mixer; a name is that of the site with the matrix's result, such as `q`
        or `out`."""

    # Optional properties: None means that the mixer lacks what tools show or do with it.

    @property
    def attention_position(self) -> AttentionPosition | None:
        """Position encoding inside this mixer; None without one."""
        return None

    @property
    def takes_globals(self) -> bool:
        """True if the caller of the model may name global tokens (`Pass.global_tokens`)."""
        return False

    @property
    def takes_prefix(self) -> bool:
        """True if, within a prefix that the caller of the model marks (`Pass.global_tokens`), outputs may depend on
        later tokens."""
        return False

    @property
    def dot_product(self) -> DotProduct | None:
        """Place of the softmax logits (q k^T) of this mixer, which QK-clip bounds; None for a mixer without softmax
        logits."""
        return None

    @property
    def effective_maps(self) -> EffectiveMaps | None:
        """Effective attention of this mixer: maps of the weight of each token in each output, for a mixer without
        softmax that has the site `effective_attention`; None for a mixer without this site."""
        return None

    @property
    def head_output(self) -> Linear | None:
        """Linear layer W_O from the site `z` (b,s,n,h) to `out`, if `out` is a sum over heads; otherwise None."""
        return None


class MixerConfig(PartConfig, axis="mixer"):
    """Config of a mixer. The abstract methods have no default: a config that lacks one is refused when its class is
    defined."""

    knows_order: ClassVar[bool] = False
    """True if the mixer encodes the order of tokens by itself, so that the mixer's short name (`+mamba`) removes
    positions from the embedding."""
    reads_memory: ClassVar[bool] = False
    """True if the mixer attends to another sequence (cross-attention), the memory of the pass."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> Mixer:
        """Returns the mixer for a model of width `ctx.d_model`. Raises RequestError for sizes that the mixer cannot
        have."""

    def check_built(self, mixer: Mixer, ctx: BuildContext) -> None:
        """Raises RequestError if a property of the built mixer (its causality, reach or heads) differs from what this
        config says."""
        for name, said in (
            ("causal", self.causal(ctx)), ("takes_prefix", self.takes_prefix(ctx)),
            ("reach", self.reach(ctx)), ("heads", self.heads(ctx)),
        ):  # fmt: skip
            if (found := getattr(mixer, name)) != said:
                raise RequestError(
                    f"mixer kind={self.kind}: its config says {name}={said} its module {name}={found}; both must agree",
                    code="conflict", field=f"mixer.{name}", value=found, expected=str(said),
                )  # fmt: skip

    def at_once(self, ctx: BuildContext, shape: Shape) -> bool:
        """Returns True if a step of this workload computes the mixer in one operation."""
        return False

    @abstractmethod
    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns parameters, FLOPs and bytes of the mixer for the workload `shape` (`parts/core/cost.py`)."""

    def takes_prefix(self, ctx: BuildContext) -> bool:
        """Returns True if, within a prefix that the caller of the model marks (`Pass.global_tokens`), outputs may
        depend on later tokens."""
        return False

    @abstractmethod
    def causal(self, ctx: BuildContext) -> bool:
        """Returns True if no output of the mixer depends on later tokens."""

    @abstractmethod
    def reach(self, ctx: BuildContext) -> int | None:
        """Returns the number of last tokens, the output's own included, that may affect an output; None without a
        bound."""

    @abstractmethod
    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        """Returns the mean number of tokens that an output depends on in a sequence of t tokens."""

    @abstractmethod
    def heads(self, ctx: BuildContext) -> Heads | None:
        """Returns the numbers of query and KV heads and elements per head of the mixer; None for a mixer without
        heads."""

    @abstractmethod
    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Raises RequestError if the mixer has no backward pass on this type of device."""

    @abstractmethod
    def resized(self, n_heads: int) -> MixerConfig:
        """Returns this config for a model of another width, with `n_heads` heads if the mixer has heads; sizes derived
        from the width are reset to their defaults."""

    def divided(self, ctx: BuildContext, owners: int) -> MixerConfig | None:
        """Returns the config of the share of one of `owners` tensor-parallel ranks, if the mixer declares a division of
        its layers (`parts/core/shard.py`): a mixer of equal width with 1/`owners` of the heads. None without one."""
        return None

    @abstractmethod
    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> MixerConfig | None:
        """Returns this config with the property named `change` set to new(old value). None if the mixer lacks the
        property, so that a change of all layers skips it. Raises RequestError if the mixer has the property but does
        not allow the change."""

    def sharing(self, name: str) -> MixerConfig | None:
        """Returns this config as a KV source: an attention whose keys and values later layers may reuse under `name`;
        None for a mixer without keys and values."""
        return None

    def taking(self, name: str) -> MixerConfig | None:
        """Returns this config as a KV reuser: an attention with the keys and values that an earlier layer shares under
        `name`; None for a mixer without keys and values. Raises RequestError if the mixer changes keys or values in a
        way that a reuser cannot."""
        return None

    def can_clip_logits(self) -> bool:
        """Returns True if a factor on W_q and W_k multiplies the softmax logits, as QK-clip needs. False for a mixer
        without logits, and if an operation between the matrices and the logits (a norm) undoes the factor."""
        return False


def keys_before(t: int, reach: int | None) -> float:
    """Returns the mean number of tokens that a token of a t-token sequence attends to: itself and earlier tokens, in
    all at most `reach`; None for no bound."""
    w = min(reach or t, t)
    return (w * (w + 1) / 2 + (t - w) * w) / t
