"""What an inspection holds: heads, maps, the predictions of every depth, and what follows from them."""

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
"""The mass on the first token above which a head is called a sink (Gu et al. 2024, 2410.10781)."""
WATCHES = 0.5
"""The mass on the previous token, or on the token itself, above which a head is named for it."""
OUTLYING = 10.0
"""A token stands out where its stream is so many times as large as the median token's. Massive activations (Sun et al.
2024, 2402.17762) make such tokens: a few values of 1,000 times the median dominate their root mean square."""


@dataclass(frozen=True)
class HeadMap:
    """What one head's map comes to, by the definitions of `glassformer.dynamics`.

    `attention_entropy` is normalised, 0 to 1. The masses are the weight that queries give, in the mean, to the first
    token, to the token before them, to themselves, and to the one other token that gets most of all."""

    layer: int
    head: int
    attention_entropy: float
    sink_mass: float
    previous_mass: float
    self_mass: float
    stripe_mass: float
    max_attention_logit: float
    distance: float
    """Mean number of tokens between a query and the keys that it reads, by weight (Vig & Belinkov 2019, 1906.04284)."""

    @property
    def rests(self) -> bool:
        """A sink: it rests on the first token."""
        return self.sink_mass > SINK

    @property
    def watches(self) -> bool:
        """It watches the token before."""
        return self.previous_mass > WATCHES

    @property
    def elsewhere(self) -> float:
        """How far each query looks at something of its own: what the four masses leave of 1, times 1 - entropy. They
        overlap (the first token's look at itself is in two), so of a short text this is the least it can be."""
        rest = 1 - self.sink_mass - self.previous_mass - self.self_mass - self.stripe_mass
        return max(0.0, rest) * (1 - self.attention_entropy) if math.isfinite(rest) else 0.0


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The maps of one layer: `maps` (n, S, T), and by name the `keys` that each query gives most weight to.

    With tiles of more than one token an entry of a map is the weight that the queries of a tile give to all the keys of
    a tile, in the mean; rows still sum to 1. All else is exact, of each head, and in the last row of the mean of the
    heads: `keys` and `weights` (n + 1, s, k), strongest first, 0 for what is negligible; `received` (n + 1, t), the
    weight that all queries together give a key, of the queries that see it, `seen_by` (n + 1, t)."""

    maps: Tensor
    tile: int
    """Tokens of a side of a tile; 1: the maps are exact."""
    keys: Tensor
    weights: Tensor
    received: Tensor
    seen_by: Tensor
    key_heads: int
    """KV heads; the query heads share them in equal groups, in order."""

    @cached_property
    def rest(self) -> Tensor:
        """(n + 1, s) the weight that a query gives to all the tokens that are not named."""
        return (1 - self.weights.sum(-1)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Crossing:
    """What a layer reads of a source: `maps` (n, s, t), the weight that each token gives to each one of the source, of
    the first tokens of both. Rows sum to 1 where the whole source is there."""

    layer: int
    maps: Tensor
    key_heads: int

    @cached_property
    def mean(self) -> Tensor:
        """(s, t) of the heads."""
        return self.maps.mean(0)


@dataclass(frozen=True, eq=False)
class Effective:
    """Some maps of a layer whose mixer has no softmax: `maps` (k, S, T), |weight| over the largest of each map,
    `largest`; a cell has the largest of tile x tile tokens. Rows need not sum to one."""

    maps: Tensor
    tile: int
    which: tuple[int, ...]
    """The heads, or channels, that they are of."""
    largest: tuple[float, ...]
    of: str
    """"head" or "channel"."""
    count: int
    """How many there are in the layer."""


@dataclass(frozen=True)
class Outlier:
    """A token whose stream is far larger than the others': `ratio` times the median token's at `depth`, where that is
    most. `first`: the first depth at which it is more than `OUTLYING` times the median."""

    position: int
    first: int
    depth: int
    rms: float
    ratio: float


@dataclass(frozen=True, eq=False, repr=False)
class Inspected:
    """What one pass over a text of s tokens shows of a model of l layers. Depth 0 is the embedding, depth i the stream
    after layer i - 1."""

    name: str
    trained: bool
    """False: the weights are random."""
    parameters: int
    vocab_size: int
    ids: Tensor
    """(s,)"""
    words: tuple[str, ...]
    """What each token stands for; empty where the character it begins ends in a later token."""
    spelled: dict[int, str]
    """id -> word, of every token that is predicted."""
    causal: bool
    """Predictions are of the next token; otherwise the model is bidirectional, and they are of the token itself."""
    layers: int
    heads: tuple[HeadMap, ...]
    """Of all layers that have maps, in order."""
    attention: dict[int, LayerMaps]
    """layer -> its maps. A layer whose mixer has none is missing."""
    top_ids: Tensor
    """(l + 1, s, k) the most likely tokens at each depth and position, by the model's own final norm and head (logit
    lens, nostalgebraist 2020)."""
    top_probabilities: Tensor
    """(l + 1, s, k)"""
    depth_loss: Tensor
    """(l + 1, s) nats that each depth pays for the token that is to be predicted at a position; NaN where none is."""
    residual_rms: Tensor
    """(l + 1, s) root mean square of the residual stream."""
    token_cosine: Tensor
    """(l + 1,) mean cosine between two tokens' streams (Noci et al. 2022, 2206.03126)."""
    mixers: tuple[str, ...] = ()
    """Of each layer, the kind of its mixer in words: "attention", "attention, window of 256", "mamba"."""
    effective: Mapping[int, Effective] = field(default_factory=dict)
    """layer -> maps of a mixer without softmax, where it has any."""
    command: str = ""
    """What made it, to be typed again; empty: nobody said."""
    prefix: int = 0
    """The first tokens, which see each other; none of them but the last predicts what it does not see."""
    source: tuple[str, ...] = ()
    """What each token of the source stands for, of a model that reads one."""
    crossings: tuple[Crossing, ...] = ()
    """Of the layers that read it, in order."""

    @cached_property
    def loss(self) -> Tensor:
        """(s,) nats that each token cost; NaN for a prefix, and for the first of a text that is read on."""
        last = self.depth_loss[-1]
        return torch.cat([last.new_full((1,), math.nan), last[:-1]]) if self.causal else last

    @property
    def mean_loss(self) -> float:
        return self.loss.nanmean().item()

    @cached_property
    def settled(self) -> float:
        """The depth from which the most likely token stays what it is at the end: the median over positions."""
        first = self.top_ids[:, :, 0]
        same = (first == first[-1]).flip(0).long().cumprod(0).sum(0)
        return statistics.median((len(first) - same).tolist())

    def notable(self, count: int = 5) -> dict[str, list[HeadMap]]:
        """Heads that stand out, by what for: those that rest on the first token, watch the token before, watch
        themselves, and look at something in particular; the strongest first."""
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
        """(l + 1,) of the median token: a single token that is huge moves a mean, and not this."""
        return self.residual_rms.quantile(0.5, dim=1)

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """The tokens whose stream stands out, the farthest first."""
        ratios = (self.residual_rms / self.median_rms[:, None]).nan_to_num(0.0, 0.0, 0.0)  # (l + 1, s)
        found = []
        for position in (ratios > OUTLYING).any(0).nonzero().flatten().tolist():
            column = ratios[:, position]
            depth, first = int(column.argmax()), int((column > OUTLYING).nonzero()[0])
            rms = self.residual_rms[depth, position].item()
            found.append(Outlier(position, first, depth, rms, column[depth].item()))
        return tuple(sorted(found, key=lambda one: one.ratio, reverse=True))

    def looked_at(self, layer: int, head: int, position: int, count: int = 3) -> list[tuple[int, float]]:
        """(token, weight) that the query at a position gives most weight to, exactly; head -1: the mean of the heads.
        `LayerMaps.rest` is what all else gets."""
        kept = self.attention[layer]
        pairs = zip(kept.keys[head, position].tolist(), kept.weights[head, position].tolist(), strict=True)
        return [pair for pair in pairs if pair[1] > 0][:count]

    def looked_at_by(self, layer: int, head: int, position: int, count: int = 3) -> list[tuple[int, float]]:
        """(query, weight) of the queries that give a token most weight, exactly, of those that have it among their own
        strongest: none that gives it more than 1 / (k + 1) is missing."""
        kept = self.attention[layer]
        query, rank = ((kept.keys[head] == position) & (kept.weights[head] > 0)).nonzero(as_tuple=True)
        pairs = zip(query.tolist(), kept.weights[head, query, rank].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]

    def read_at(self, crossing: Crossing, position: int, count: int = 3) -> list[tuple[int, float]]:
        """(token of the source, weight) that the heads of a layer give most weight to in the mean, at a position."""
        if position >= crossing.maps.shape[1]:
            return []
        best = crossing.mean[position].topk(min(count, crossing.maps.shape[2]))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def predictions(self, position: int) -> list[list[tuple[str, int, float]]]:
        """(word, id, probability) of the most likely tokens at each depth."""
        rows = zip(self.top_ids[:, position].tolist(), self.top_probabilities[:, position].tolist(), strict=True)
        return [[(self.spelled[i], i, p) for i, p in zip(ids, shares, strict=True)] for ids, shares in rows]

    def to_dict(self) -> dict[str, Any]:
        """The reading as plain JSON: heads, losses and depths, and the predictions at the last position. No maps."""
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
    """What JSON can hold."""
    return value if math.isfinite(value) else None
