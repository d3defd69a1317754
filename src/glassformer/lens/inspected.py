"""Data of an inspection: heads, maps, the predictions of every depth, and derived quantities."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SINK = 0.3
"""Mass on the first token above which a head is a sink (Gu et al. 2024, 2410.10781)."""
WATCHES = 0.5
"""Mass on the previous token, or on the token itself, above which a head is listed as attending to it."""
OUTLYING = 10.0
"""Ratio of the root mean square of a token's residual stream to the median over tokens above which the token is an
outlier. Massive activations (Sun et al. 2024, 2402.17762) cause outliers: a few values of 1,000 times the median
dominate their root mean square."""


@dataclass(frozen=True)
class HeadMap:
    """Statistics of one head's attention map, as `glassformer.dynamics` defines them.

    `attention_entropy` is normalised, 0 to 1. The masses are the mean weight that queries give to the first token, to
    the previous token, to themselves, and to the one other token with most weight."""

    layer: int
    head: int
    attention_entropy: float
    sink_mass: float
    previous_mass: float
    self_mass: float
    stripe_mass: float
    max_attention_logit: float
    distance: float
    """Mean number of tokens between a query and the keys that it attends to, by weight (Vig & Belinkov 2019,
    1906.04284)."""

    @property
    def rests(self) -> bool:
        """True if the head is an attention sink: it gives most of its weight to the first token."""
        return self.sink_mass > SINK

    @property
    def watches(self) -> bool:
        """True if the head attends mostly to the previous token."""
        return self.previous_mass > WATCHES

    @property
    def elsewhere(self) -> float:
        """Strength of content-dependent attention: 1 minus the mean weights on the first, previous, same and favourite
        token, times 1 - entropy. The four weights overlap (the first token's attention to itself is in two), so for
        a short text this is a lower bound."""
        rest = 1 - self.sink_mass - self.previous_mass - self.self_mass - self.stripe_mass
        return max(0.0, rest) * (1 - self.attention_entropy) if math.isfinite(rest) else 0.0


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Attention maps of one layer: `maps` (n, S, T), and the `keys` that each query gives most weight to.

    If a tile has more than one token, an entry of a map is the mean, over the queries of a tile, of the weight given to
    all keys of a tile; rows still sum to 1. The other tensors are exact, with a row for each head and a last row for
    the mean of the heads: `keys` and `weights` (n + 1, s, k), strongest first, 0 if negligible; `received` (n + 1, t),
    the total weight that queries give a key; `seen_by` (n + 1, t), the number of queries that attend to the key."""

    maps: Tensor
    tile: int
    """Number of tokens on each side of a tile; 1 for exact maps."""
    keys: Tensor
    weights: Tensor
    received: Tensor
    seen_by: Tensor
    key_heads: int
    """Number of KV heads; the query heads share them in equal groups, in order."""

    @cached_property
    def rest(self) -> Tensor:
        """Weight (n + 1, s) that each query gives in total to the tokens that are not listed in `keys`."""
        return (1 - self.weights.sum(-1)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Crossing:
    """Cross-attention of a layer: `maps` (n, s, t), the weight that each token gives to each token of the source, for
    the first tokens of text and source. Rows sum to 1 if the whole source is included."""

    layer: int
    maps: Tensor
    key_heads: int

    @cached_property
    def mean(self) -> Tensor:
        """Mean (s, t) of the maps over the heads of the layer."""
        return self.maps.mean(0)


@dataclass(frozen=True, eq=False)
class Effective:
    """Effective attention maps of a layer whose mixer has no softmax, for some of its heads or channels: `maps` (k, S,
    T), |weight| divided by the largest of each map, `largest`; a cell has the largest of tile x tile tokens. Rows
    need not sum to one."""

    maps: Tensor
    tile: int
    which: tuple[int, ...]
    """Indices, among all heads or channels of the layer, of those whose maps are kept."""
    largest: tuple[float, ...]
    of: str
    """Kind of the indices: "head" or "channel"."""
    count: int
    """Number of heads or channels in the layer."""


@dataclass(frozen=True)
class Outlier:
    """Token whose residual stream is far larger than that of the median token: by a factor of `ratio` at `depth`, where
    the factor is largest. `first`: the first depth at which the factor exceeds `OUTLYING`."""

    position: int
    first: int
    depth: int
    rms: float
    ratio: float


@dataclass(frozen=True, eq=False, repr=False)
class Inspected:
    """Result of one pass over a text of s tokens through a model of l layers. Depth 0 is the embedding, depth i the
    stream after layer i - 1."""

    name: str
    trained: bool
    """True for trained weights, False for random ones."""
    parameters: int
    vocab_size: int
    ids: Tensor
    """Token ids of the text, (s,)."""
    words: tuple[str, ...]
    """Text of each token; empty if its character ends in a later token."""
    spelled: dict[int, str]
    """Token id -> text, for every predicted token."""
    causal: bool
    """True if predictions are of the next token; False for a bidirectional model, which predicts the token itself."""
    layers: int
    heads: tuple[HeadMap, ...]
    """Statistics of the heads of all layers that have maps, in order."""
    attention: dict[int, LayerMaps]
    """Layer -> its attention maps. Layers whose mixer has no maps are missing."""
    top_ids: Tensor
    """Ids of the most likely tokens (l + 1, s, k) at each depth and position, by the model's final norm and head (logit
    lens, nostalgebraist 2020)."""
    top_probabilities: Tensor
    """Probabilities of `top_ids`, (l + 1, s, k)."""
    depth_loss: Tensor
    """Loss in nats (l + 1, s) of each depth's prediction at a position; NaN without a target."""
    residual_rms: Tensor
    """Root mean square (l + 1, s) of the residual stream at each depth and position."""
    token_cosine: Tensor
    """Mean cosine (l + 1,) between the streams of two tokens at each depth (Noci et al. 2022, 2206.03126)."""
    mixers: tuple[str, ...] = ()
    """Kind of each layer's mixer in words: "attention", "attention, window of 256", "mamba"."""
    effective: Mapping[int, Effective] = field(default_factory=dict)
    """Layer -> maps of its mixer, for layers whose mixer has maps without a softmax."""
    command: str = ""
    """Command that repeats the inspection; empty if unknown."""
    prefix: int = 0
    """Number of tokens in the bidirectional prefix; only the last of them predicts a token that it does not attend to.
    0 without a prefix."""
    source: tuple[str, ...] = ()
    """Text of each token of the source; empty for a model without one."""
    crossings: tuple[Crossing, ...] = ()
    """Cross-attention of the layers that have it, in order."""

    @cached_property
    def loss(self) -> Tensor:
        """Loss (s,) of predicting each token, in nats; NaN for the tokens of a prefix, and for the first token of a
        causal text."""
        last = self.depth_loss[-1]
        return torch.cat([last.new_full((1,), math.nan), last[:-1]]) if self.causal else last

    @property
    def mean_loss(self) -> float:
        return self.loss.nanmean().item()

    @cached_property
    def settled(self) -> float:
        """Depth at which the final most likely token is reached and kept, the median over positions."""
        first = self.top_ids[:, :, 0]
        same = (first == first[-1]).flip(0).long().cumprod(0).sum(0)
        return statistics.median((len(first) - same).tolist())

    def notable(self, count: int = 5) -> dict[str, list[HeadMap]]:
        """Returns {kind: heads}, at most `count` heads of each kind, strongest first: heads that attend to the first
        token, to the previous token, to the query's token itself, or depending on content."""
        kinds = {
            "first token": (SINK, lambda head: head.sink_mass),
            "token before": (WATCHES, lambda head: head.previous_mass),
            "itself": (WATCHES, lambda head: head.self_mass),
            "elsewhere": (0.0, lambda head: head.elsewhere),
        }
        return {
            name: sorted((head for head in self.heads if of(head) > least), key=of, reverse=True)[:count]
            for name, (least, of) in kinds.items()
        }

    @cached_property
    def median_rms(self) -> Tensor:
        """Root mean square (l + 1,) of the median token's stream at each depth, on which a single huge token has no
        effect."""
        return self.residual_rms.quantile(0.5, dim=1)

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """Outliers of the text: tokens with a far larger stream than the median token, largest ratio first."""
        ratios = (self.residual_rms / self.median_rms[:, None]).nan_to_num(0.0, 0.0, 0.0)  # (l + 1, s)
        found = []
        for position in (ratios > OUTLYING).any(0).nonzero().flatten().tolist():
            column = ratios[:, position]
            depth, first = int(column.argmax()), int((column > OUTLYING).nonzero()[0])
            rms = self.residual_rms[depth, position].item()
            found.append(Outlier(position, first, depth, rms, column[depth].item()))
        return tuple(sorted(found, key=lambda one: one.ratio, reverse=True))

    def looked_at(self, layer: int, head: int, position: int, count: int = 3) -> list[tuple[int, float]]:
        """Returns [(key's index, weight)] of the `count` tokens to which the token at `position` attends most, with
        exact weights; head -1 is the mean of the heads. `LayerMaps.rest` is the weight of all other keys."""
        kept = self.attention[layer]
        pairs = zip(kept.keys[head, position].tolist(), kept.weights[head, position].tolist(), strict=True)
        return [pair for pair in pairs if pair[1] > 0][:count]

    def looked_at_by(self, layer: int, head: int, position: int, count: int = 3) -> list[tuple[int, float]]:
        """Returns [(query's index, weight)] of the `count` tokens that attend most to the token at `position`, with
        exact weights. Searched are the queries that have it among their strongest `k` keys, so a query with a weight
        above 1 / (k + 1) is never missing."""
        kept = self.attention[layer]
        query, rank = ((kept.keys[head] == position) & (kept.weights[head] > 0)).nonzero(as_tuple=True)
        pairs = zip(query.tolist(), kept.weights[head, query, rank].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]

    def read_at(self, crossing: Crossing, position: int, count: int = 3) -> list[tuple[int, float]]:
        """Returns [(index of a source's token, weight)] of the `count` largest cross-attention weights of the token at
        `position`, means over the layer's heads."""
        if position >= crossing.maps.shape[1]:
            return []
        best = crossing.mean[position].topk(min(count, crossing.maps.shape[2]))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def predictions(self, position: int) -> list[list[tuple[str, int, float]]]:
        """Returns, for each depth, the most likely tokens at `position` as (text, id, probability)."""
        rows = zip(self.top_ids[:, position].tolist(), self.top_probabilities[:, position].tolist(), strict=True)
        return [[(self.spelled[i], i, p) for i, p in zip(ids, shares, strict=True)] for ids, shares in rows]

    def to_dict(self) -> dict[str, Any]:
        """Returns the inspection as plain JSON: heads, losses and depths, and the predictions at the last position;
        without the maps."""
        last = len(self.ids) - 1
        return {
            "name": self.name,
            "trained": self.trained,
            "parameters": self.parameters,
            "tokens": len(self.ids),
            "ids": self.ids.tolist(),
            "words": list(self.words),
            "predicts": "next token" if self.causal else "token itself",
            "prefix": self.prefix,
            "loss": json_number(self.mean_loss),
            "loss_per_token": [json_number(value) for value in self.loss.tolist()],
            "heads": [{key: json_number(value) for key, value in vars(head).items()} for head in self.heads],
            "depths": [
                {
                    "depth": depth,
                    "loss": json_number(self.depth_loss[depth].nanmean().item()),
                    "residual_rms": json_number(self.residual_rms[depth].mean().item()),
                    "residual_rms_median": json_number(self.median_rms[depth].item()),
                    "token_cosine": json_number(self.token_cosine[depth].item()),
                }
                for depth in range(self.layers + 1)
            ],
            "outliers": [vars(one) for one in self.outliers],
            "mixers": list(self.mixers),
            "settled_depth": self.settled,
            "source": list(self.source),
            "reads": [
                {
                    "layer": one.layer,
                    "strongest": [
                        [{"word": self.source[at], "token": at, "weight": json_number(w)} for at, w in found]
                        for found in (self.read_at(one, i) for i in range(one.maps.shape[1]))
                    ],
                }
                for one in self.crossings
            ],
            "lens": {
                "position": last,
                "predictions": [
                    [{"word": word, "id": i, "probability": json_number(p)} for word, i, p in depth]
                    for depth in self.predictions(last)
                ],
            },
        }


def json_number(value: float) -> float | None:
    """Returns the number, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None
