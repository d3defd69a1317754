"""What an inspection holds: heads, maps, the predictions of every depth, and what follows from them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SINK = 0.3
"""The mass on the first token above which a head is called a sink (Gu et al. 2024, 2410.10781)."""
WATCHES = 0.5
"""The mass on the previous token, or on the token itself, above which a head is named for it."""


@dataclass(frozen=True)
class Head:
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
class Attention:
    """The maps of one layer: `maps` (n, S, T), and where they are pooled the `strongest` keys of each query.

    Pooled, an entry is the weight that the queries of a tile give to all the keys of a tile, in the mean; rows still
    sum to 1. `keys` and `weights` (n, s, k) are exact, strongest first."""

    maps: Tensor
    tile: int = 1
    """Tokens of a side of a tile; 1: the maps are exact."""
    keys: Tensor | None = None
    weights: Tensor | None = None


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
    """Predictions are of the next token; otherwise the model sees both ways, and they are of the token itself."""
    layers: int
    heads: tuple[Head, ...]
    """Of all layers that have maps, in order."""
    attention: dict[int, Attention]
    """layer -> its maps. A layer whose mixer has none is missing."""
    top_ids: Tensor
    """(l + 1, s, k) the likeliest tokens at each depth and position, by the model's own final norm and head (logit
    lens, nostalgebraist 2020)."""
    top_probabilities: Tensor
    """(l + 1, s, k)"""
    depth_loss: Tensor
    """(l + 1, s) nats that each depth pays for the token that is to be predicted at a position; NaN where none is."""
    residual_rms: Tensor
    """(l + 1, s) root mean square of the residual stream."""
    token_cosine: Tensor
    """(l + 1,) mean cosine between two tokens' streams (Noci et al. 2022, 2206.03126)."""

    @cached_property
    def loss(self) -> Tensor:
        """(s,) nats that each token cost; NaN for the first of a text that is read from left to right."""
        last = self.depth_loss[-1]
        return torch.cat([last.new_full((1,), math.nan), last[:-1]]) if self.causal else last

    @property
    def mean_loss(self) -> float:
        return self.loss.nanmean().item()

    @cached_property
    def settled(self) -> float:
        """The depth from which the likeliest token stays what it is at the end: the median over positions."""
        first = self.top_ids[:, :, 0]
        same = (first == first[-1]).flip(0).long().cumprod(0).sum(0)
        return statistics.median((len(first) - same).tolist())

    def notable(self, count: int = 5) -> dict[str, list[Head]]:
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

    def looked_at(self, layer: int, head: int, position: int, count: int = 3) -> list[tuple[int, float]]:
        """(token, weight) that the query at a position gives most weight to. Where maps are pooled, those kept."""
        kept = self.attention[layer]
        if kept.keys is not None and kept.weights is not None:
            found = zip(kept.keys[head, position].tolist(), kept.weights[head, position].tolist(), strict=True)
            return list(found)[:count]
        if kept.tile > 1:
            return []
        best = kept.maps[head, position].topk(min(count, kept.maps.shape[-1]))
        return [pair for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True) if pair[1] > 0]

    def predictions(self, position: int) -> list[list[tuple[str, int, float]]]:
        """(word, id, probability) of the likeliest tokens at each depth."""
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
            "loss": json_number(self.mean_loss),
            "loss_per_token": [json_number(value) for value in self.loss.tolist()],
            "heads": [{key: json_number(value) for key, value in vars(head).items()} for head in self.heads],
            "depths": [
                {
                    "depth": depth,
                    "loss": json_number(self.depth_loss[depth].nanmean().item()),
                    "residual_rms": json_number(self.residual_rms[depth].mean().item()),
                    "token_cosine": json_number(self.token_cosine[depth].item()),
                }
                for depth in range(self.layers + 1)
            ],
            "settled_depth": self.settled,
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
