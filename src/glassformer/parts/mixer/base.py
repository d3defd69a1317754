"""What every mixer answers about itself. Callers ask these questions and never the class of a mixer."""

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
from glassformer.parts.linear import Linear, Matrix
from glassformer.parts.position import AttentionPosition
from glassformer.parts.state import State
from glassformer.parts.visibility import Visibility

MixerChange = Literal[
    "bias", "dropout", "gain_control", "kernel", "n_kv_heads", "position", "qk_norm", "sinks", "softcap", "visibility"
]
"""Properties that callers change by name, in mixers of any kind."""


@dataclass(frozen=True)
class DotProduct:
    """The logits scale q k^T of a mixer, of the pairs that `visibility` allows, and the maps that make q and k.

    Sites `q` (b,s,n,h) and `k` (b,s,g,h); matrices `queries` and `keys` by heads."""

    q: Site
    k: Site
    scale: float
    visibility: Visibility
    queries: Matrix
    keys: Matrix


@dataclass(frozen=True)
class EffectiveMaps:
    """The maps of a mixer that has no softmax: how much of `source` at token j is in `result` at token t.

    result = maps @ source + direct * source. `site` is `effective_attention` (b,n,s,t), made only while somebody looks
    (`show_maps`); weights may be negative, and rows need not sum to one. There are `count` maps, one for each head, of
    source (b,s,n,h), or for each channel, of source (b,s,n)."""

    site: Site
    of: Literal["head", "channel"]
    count: int
    source: Site
    result: Site
    direct: Tensor | None = None
    """(count,); None: zero."""


def show_maps(site: Site, count: int, s: int, blocks: Callable[[list[int]], Iterator[tuple[int, Tensor]]]) -> None:
    """Shows each who looks at `site` the maps of the heads it asks for, of `count` heads and s queries: `blocks(heads)`
    makes them, (first query, (b, heads, r, t)) after another. Raises RequestError where somebody edits them."""
    if site.edited:
        raise RequestError(
            "mixer.effective_attention is made only to be looked at; edit what it is made of instead",
            code="conflict", field="mixer.effective_attention",
        )  # fmt: skip
    for look, heads in site.lookers(count):
        for first, block in blocks(heads):
            look(block, first, s)


class Mixer(nn.Module, ABC):
    """forward(x (b,s,d), pass_, state) -> (b,s,d); without a state the s tokens are the whole sequence.

    The abstract members have no default: a mixer that does not answer one cannot be built."""

    enter: Seam | None = None
    """What x passes first where several owners share the mixer (`parts/core/owner.py`)."""
    reads_gathered: ClassVar[bool] = False
    """Whether it looks at other tokens only through the keys and values that its state hands it, or another layer of
    the pass: processes may then share the tokens of a sequence. A subclass says so anew."""

    @abstractmethod
    def forward(self, x: Tensor, pass_: Pass | None = None, state: Any = None) -> Tensor:
        """Returns y (b, s, d) of x (b, s, d).

        pass_        positions, documents and padding of the s tokens; if None, `Pass.of(x)`, one document
        state        from `init_state`; if None, the s tokens are the whole sequence. With it, they follow those
                     that it keeps, and it keeps them too"""

    @abstractmethod
    def init_state(
        self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0
    ) -> State | None:
        """An empty state for `batch` sequences of at most `max_len` tokens; `truncate` takes back up to `rewind`. None
        for a mixer that keeps nothing of its own."""

    @property
    @abstractmethod
    def causal(self) -> bool:
        """True if no output depends on later tokens."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """No output depends on tokens `reach` or more before it; None if there is no such bound."""

    @property
    @abstractmethod
    def heads(self) -> Heads | None:
        """Numbers of heads; None if the mixer has none."""

    @property
    @abstractmethod
    def separates_documents(self) -> bool:
        """True if tokens of different documents (`pass_.documents`: packed texts, padding) never reach one another.
        Otherwise the model refuses documents."""

    @abstractmethod
    def matrices(self) -> dict[str, Matrix]:
        """Weight matrices by the name of the site each makes, such as `q` or `out`."""

    # Optional answers: None means less can be shown or done, never that more is allowed.

    @property
    def attention_position(self) -> AttentionPosition | None:
        """The position encoding inside this mixer, if it has one."""
        return None

    @property
    def takes_globals(self) -> bool:
        """Whether the caller of the model may say which tokens are global (`Pass.global_tokens`)."""
        return False

    @property
    def takes_prefix(self) -> bool:
        """Whether an output depends on later tokens within a prefix that the caller of the model names
        (`Pass.global_tokens`), and on no others."""
        return False

    @property
    def dot_product(self) -> DotProduct | None:
        """The softmax logits that QK-clip bounds; None if there are none."""
        return None

    @property
    def effective_maps(self) -> EffectiveMaps | None:
        """The maps at its site `effective_attention`; None if it has none."""
        return None

    @property
    def head_output(self) -> Linear | None:
        """The map W_O from the site `z` (b,s,n,h) to `out`, if `out` is a sum over heads."""
        return None


class MixerConfig(PartConfig, axis="mixer"):
    """The config of a mixer. The abstract methods have no default: a config that lacks one is refused when its class is
    defined."""

    knows_order: ClassVar[bool] = False
    """True if the mixer tells the order of tokens by itself: its short name then drops positions at the embedding."""
    reads_memory: ClassVar[bool] = False
    """True if it reads another sequence beside its own, the pass's memory."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> Mixer:
        """Returns the module for a model of width `ctx.d_model`. Raises RequestError for widths that it cannot have."""

    def check_built(self, mixer: Mixer, ctx: BuildContext) -> None:
        """Raises RequestError unless the module that this config builds answers as the config does."""
        for name, said in (
            ("causal", self.causal(ctx)), ("takes_prefix", self.takes_prefix(ctx)),
            ("reach", self.reach(ctx)), ("heads", self.heads(ctx)),
        ):  # fmt: skip
            if (found := getattr(mixer, name)) != said:
                raise RequestError(
                    f"mixer kind={self.kind}: its config says {name}={said} its module {name}={found}; both must agree",
                    code="conflict", field=f"mixer.{name}", value=found, expected=str(said),
                )  # fmt: skip

    @abstractmethod
    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Parameters, FLOPs and bytes for this shape (`parts/core/cost.py`)."""

    def takes_prefix(self, ctx: BuildContext) -> bool:
        """Whether an output depends on later tokens within a prefix that the caller of the model names
        (`Pass.global_tokens`), and on no others."""
        return False

    @abstractmethod
    def causal(self, ctx: BuildContext) -> bool:
        """True if no output depends on later tokens."""

    @abstractmethod
    def reach(self, ctx: BuildContext) -> int | None:
        """No output depends on tokens `reach` or more before it; None if there is no such bound."""

    @abstractmethod
    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        """Mean number of tokens that one output of a t-token sequence depends on."""

    @abstractmethod
    def heads(self, ctx: BuildContext) -> Heads | None:
        """Numbers of heads; None if the mixer has none."""

    @abstractmethod
    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Raises RequestError if the mixer has no backward pass on the device."""

    @abstractmethod
    def resized(self, n_heads: int) -> MixerConfig:
        """The same mixer for another width, with `n_heads` heads if it has heads; sizes that follow from the width are
        left to it."""

    def divided(self, ctx: BuildContext, owners: int) -> MixerConfig | None:
        """What one of so many owners computes where its maps are cut between them as they declare
        (`parts/core/shard.py`): a mixer of the same width with its share of the heads. None: nobody said how."""
        return None

    @abstractmethod
    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> MixerConfig | None:
        """The mixer with one property changed from x to new(x); None if it has no such property, so that a change of
        all layers passes it by. Raises RequestError if the property exists and cannot be changed here."""

    def sharing(self, name: str) -> MixerConfig | None:
        """This mixer, offering its keys and values to the layers above under a name; None if it has none to offer."""
        return None

    def taking(self, name: str) -> MixerConfig | None:
        """The same mixer with the keys and values that a layer below offers under a name in place of its own; None if
        it has none. Raises RequestError where it does with them what one that takes cannot."""
        return None

    def can_clip_logits(self) -> bool:
        """True if scaling W_q and W_k scales the logits, as QK-clip needs; False if there are no logits. Raises
        RequestError if something between the two undoes the scale."""
        return False


def keys_before(t: int, reach: int | None) -> float:
    """Mean number of tokens that a token of a t-token sequence sees: itself and those before it, at most `reach`."""
    w = min(reach or t, t)
    return (w * (w + 1) / 2 + (t - w) * w) / t
