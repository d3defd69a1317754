"""Statistics of a model's activations in one pass: attention, residual stream, hidden units, experts, logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.dynamics.activations import relative_residual, residual_rms, token_cosine
from glassformer.dynamics.outputs import dead_units, log_z, max_violation, router_entropy, router_load
from glassformer.dynamics.spectra import effective_rank_of, singular_values, stable_rank_of
from glassformer.dynamics.weights import Statistics
from glassformer.introspection import eager, looking, sites
from glassformer.model import Model
from glassformer.parts.core.running import Look
from glassformer.parts.ffn import Router

RANKED = 256
"""Maximum tokens of a sequence, evenly spaced, that enter the ranks of activations."""


def probe(model: Model, tokens: Tensor, beside: Mapping[str, Any] | None = None) -> Statistics:
    """Returns {statistic: {site: number, or one for each head}} of the activations of model(tokens), tokens (b, s), in
    evaluation mode and without gradients. The last argument holds further inputs of the model by name (`source`).

    Leaves the model unchanged. Needs one device transfer for all numbers."""
    found: dict[str, dict[str, Tensor]] = {}
    looks: dict[str, Look] = {}
    seen: dict[str, MapStatistics] = {}
    for name in sites(model):
        where, _, site = name.rpartition(".")
        if site == "scores":
            seen[where] = MapStatistics()
            looks |= {name: seen[where].scores, f"{where}.pattern": seen[where].pattern}
        elif site == "router":
            sent = Sent(eager(model).get_submodule(where).router)
            looks[name] = _look(sent.routing, name, found)
            looks[f"{where}.hidden"] = _look(sent.units, f"{where}.hidden", found)
        elif site in LOOKS and name not in looks:
            looks[name] = _look(LOOKS[site], name, found)
    trains = model.training
    model.eval()
    try:
        with torch.no_grad(), looking(model, looks):
            model(tokens, **(beside or {}))
    finally:
        model.train(trains)
    for where, attention in seen.items():
        for statistic, value in attention.statistics().items():
            found.setdefault(statistic, {})[where] = value
    return numbers(found)


def stream(x: Tensor) -> dict[str, Tensor]:
    """Returns statistics of the residual stream x (b, s, d): means over the sequences, and max |x| / median |x| of all
    x."""
    x = x.float()
    singular = singular_values(x[..., :: -(-x.shape[-2] // RANKED), :])  # its time grows with the cube of the tokens
    return {
        "token_cosine": token_cosine(x).mean(),
        "relative_residual": relative_residual(x).mean(),
        "activation_effective_rank": effective_rank_of(singular).mean(),
        "activation_stable_rank": stable_rank_of(singular).mean(),
        "residual_rms": residual_rms(x).mean(),
        "massive": x.abs().amax() / x.abs().median().clamp_min(torch.finfo(x.dtype).tiny),
    }


class Sent:
    """Observer of a layer of experts: receives the router's probabilities, then the hidden units of the chosen
    experts."""

    def __init__(self, router: Router):
        self.router = router
        self.chosen = torch.empty(0)

    def routing(self, p: Tensor) -> dict[str, Tensor]:
        """Returns statistics of the router's probabilities p (b, s, e): load of each expert, (e,), entropy and maximum
        violation; with a capacity, also the share of assignments that training drops, because they exceed the
        capacity."""
        self.chosen = self.router.choose(p)[1]
        load = router_load(self.chosen, p.shape[-1])
        late = {} if self.router.capacity is None else {"router_dropped": self.router.late(self.chosen).float().mean()}
        return {
            **late,
            "router_load": load,
            "router_entropy": router_entropy(p / p.sum(-1, keepdim=True)),
            "max_violation": max_violation(load),
        }

    def units(self, hidden: Tensor) -> dict[str, Tensor]:
        """Returns the share of dead units among the experts that received a token; hidden (b, s, k, f) holds the f
        hidden units of the k experts chosen for each token."""
        size, of = hidden.abs().flatten(0, -2), self.chosen.flatten()
        largest = torch.stack([size[of == expert].amax(0) for expert in of.unique()])
        return {"dead_units": dead_units(largest.flatten()[None])}


LOOKS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "resid_post": stream,
    "hidden": lambda hidden: {"dead_units": dead_units(hidden)},
    "logits": lambda logits: {"log_z": log_z(logits).mean()},
}
"""Functions from the activations of a site to {statistic: tensor}, by the last part of the site's name."""


class MapStatistics:
    """Entropy, largest logit and mass on the first key of every head, from scores and patterns that arrive by blocks of
    c queries."""

    def __init__(self) -> None:
        self.visible: Tensor | None = None
        self.largest: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.sink: list[Tensor] = []

    def scores(self, scores: Tensor, first: int, total: int) -> None:
        """Receives a block of scores (b, n, c, t), -inf for invisible keys."""
        seen = scores != float("-inf")
        self.visible = seen.sum(-1)
        self.largest.append(scores.abs().where(seen, 0.0).amax((0, 2, 3)))

    def pattern(self, pattern: Tensor, first: int, total: int) -> None:
        """Receives the attention pattern (b, n, c, t) of the block whose scores arrived last."""
        assert self.visible is not None
        choice = self.visible > 1  # a single visible key has nothing to spread over
        entropy = torch.special.entr(pattern).sum(-1) / self.visible.clamp_min(2).log()
        self.entropy.append(entropy.where(choice, torch.nan).flatten(2).transpose(0, 1).flatten(1))
        self.sink.append(pattern[..., 0].transpose(0, 1).flatten(1))

    def statistics(self) -> dict[str, Tensor]:
        """Returns {statistic: (n,)} over all blocks: mean normalised entropy, largest |logit|, mean mass on the first
        key; empty without a block."""
        if not self.largest:
            return {}
        return {
            "attention_entropy": torch.cat(self.entropy, -1).nanmean(-1),
            "max_attention_logit": torch.stack(self.largest).amax(0),
            "sink_mass": torch.cat(self.sink, -1).mean(-1),
        }


def _look(take: Callable[[Tensor], dict[str, Tensor]], name: str, into: dict[str, dict[str, Tensor]]) -> Look:
    def look(x: Tensor, first: int, total: int) -> None:
        for statistic, value in take(x).items():
            into.setdefault(statistic, {})[name] = value

    return look


def numbers(found: dict[str, dict[str, Tensor]]) -> Statistics:
    """Returns {statistic: {place: tensor}} with each tensor as a number or a list of numbers, in one device
    transfer."""
    flat = [value.float().reshape(-1) for of_sites in found.values() for value in of_sites.values()]
    if not flat:
        return {}
    all_values = torch.cat(flat).tolist()
    made: Statistics = {}
    at = 0
    for statistic, of_sites in found.items():
        made[statistic] = {}
        for where, value in of_sites.items():
            part = all_values[at : at + value.numel()]
            at += value.numel()
            made[statistic][where] = part if value.dim() else part[0]
    return made
