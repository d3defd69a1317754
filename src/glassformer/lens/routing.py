"""Routing of a text's tokens to experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.dynamics import max_violation, router_entropy, router_load
from glassformer.errors import RequestError
from glassformer.introspection import at_rest, capture, eager, rows_of, sites, within
from glassformer.lens import style
from glassformer.lens.maps import spelled
from glassformer.lens.reading import Reading
from glassformer.lens.tables import draw_table, figure_size, table_of
from glassformer.model import Model

SHOWN = 6
"""Largest number of tokens shown for each expert."""


@dataclass(frozen=True, eq=False, repr=False)
class ExpertRouting(Reading):
    """Routing of a text's tokens to experts. `load` (l, e), the share of assignments of each expert, 1/e if balanced;
    `entropy` (l,), of the router over log e; `violation` (l,), MaxVio; over all rows, NaN for a layer without experts.
    Of row 0 at `layer`: `weights` (s, e), the weight of each expert at each token, 0 if it was not chosen, and the
    tokens' `words`."""

    title: ClassVar[str] = "Expert routing"

    load: Float[Tensor, "l e"]
    entropy: Float[Tensor, " l"]
    violation: Float[Tensor, " l"]
    weights: Float[Tensor, "s e"]
    words: list[str]
    layer: int

    def favourites(self, expert: int) -> list[str]:
        """Returns the words of the tokens for which this expert has the largest weight of all experts, by falling
        weight."""
        ranked = self.weights[:, expert].argsort(descending=True, stable=True).tolist()
        words = [self.words[at] for at in ranked if self.weights[at, expert] > 0]
        return list(dict.fromkeys(words))

    def __str__(self) -> str:
        told = [at for at, value in enumerate(self.violation.tolist()) if not math.isnan(value)]
        lines = [f"routing of {len(self.words)} tokens in {len(told)} layers with experts"]
        for at in told:
            load, first = self.load[at].nan_to_num(nan=-1.0), int(self.load[at].nan_to_num(nan=-1.0).argmax())
            lines.append(
                f"layer {at}: expert {first} has {load[first]:.0%} (MaxVio {self.violation[at]:.2f}), entropy "
                f"{self.entropy[at]:.2f} of 1"
            )
        for expert in range(self.weights.shape[1]):
            shown = ", ".join(repr(word) for word in self.favourites(expert)[:SHOWN]) or "no token"
            lines.append(f"layer {self.layer}, expert {expert}: {shown}")
        return "\n".join(lines)

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        wide, high = figure_size(self.load, 2)
        return super().figure(width or wide + 2.0, height or max(high, 4.0))

    def draw(self, figure: Any) -> None:
        left, right = style.axes(figure, 1, 2, width_ratios=(1, 1.2)).flat
        draw_table(left, self.load, label="share of assignments")
        left.set(xlabel="expert", ylabel="layer")
        left.set_title("load", loc="left", color=style.INK, fontsize=9)
        draw_table(right, self.weights, label="weight")
        style.words(right, self.words, "y")
        right.set(xlabel="expert")
        right.set_title(f"layer {self.layer}, token by token", loc="left", color=style.INK, fontsize=9)


def expert_routing(
    model: Model,
    tokens: Int[Tensor, "b s"],
    layer: int | None = None,
    tokenizer: Any = None,
    words: Sequence[str] | None = None,
) -> ExpertRouting:
    """Returns the load of every expert of every layer, the entropy of the routers, and the routing of tokens at one
    `layer` (the middle one of those with experts).

        load_i = assignments of expert i / (b s k)          MaxVio = e max_i load_i - 1
        entropy = mean over tokens of -Σ_i q_i log q_i / log e,         q = p / Σ_i p_i of the router's p
        weight_i = scale p_i / Σ_I p_j of the k chosen experts I, 0 of the others

    Load: Fedus et al. 2021, 2101.03961, eq. 5; MaxVio: Wang et al. 2024, 2408.15664; see `gf.dynamics.router_load`,
    `router_entropy` and `max_violation`. Routers that do not normalise have weight_i = scale p_i. An expert that no
    token of one text chooses may be busy with others: read a few thousand tokens before calling it dead. Raises
    RequestError for a model without experts, and a layer without any."""
    tokens, known = rows_of(model, tokens), sites(model)
    layers = eager(model).layers
    routed = [at for at in range(len(layers)) if f"layers.{at}.ffn.router" in known]
    if not routed:
        raise RequestError(
            "no layer of this model has experts; llama@1m+moe:4:2 has", code="unsupported", field="model"
        )
    shown = routed[len(routed) // 2] if layer is None else within(layer, len(layers), "layer")[0]
    if shown not in routed:
        raise RequestError(
            f"layer {shown} has no experts; those that have are {', '.join(map(str, routed))}",
            code="unsupported", field="layer", value=shown,
        )  # fmt: skip
    with at_rest(model):
        seen = capture(model, tokens, [f"layers.{at}.ffn.router" for at in routed])
    loads: list[Tensor | None] = [None] * len(layers)
    entropy = torch.full((len(layers),), math.nan, dtype=torch.float64)
    violation = entropy.clone()
    for at in routed:
        router: Any = layers[at].ffn.router
        p = seen[f"layers.{at}.ffn.router"]
        weights, chosen = router.choose(p)
        load = router_load(chosen, p.shape[-1])
        loads[at], violation[at] = load, max_violation(load).cpu()
        entropy[at] = router_entropy(p / p.sum(-1, keepdim=True), normalised=True).cpu()
        if at == shown:
            of_text = torch.zeros_like(p[0]).scatter(-1, chosen[0], weights[0]).cpu().double()
    return ExpertRouting(table_of(loads), entropy, violation, of_text, spelled(tokens[:1], tokenizer, words), shown)
