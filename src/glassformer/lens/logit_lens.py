"""The logit lens: the prediction of each layer, as if it were the last one.

    logits_l = head(final_norm(x_l)),  x_l the stream after layer l        nostalgebraist 2020, "interpreting GPT"

The final norm and the head are the model's. Early layers of many models do not yet use the head's basis: a poor
prediction there says less than a good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, capture, eager, within
from glassformer.lens import style
from glassformer.lens.maps import one_row, spell, spelled
from glassformer.lens.reading import Reading
from glassformer.model import Model
from glassformer.parts.precision import wide

VALUES_PER_CHUNK = 1 << 23
UNKNOWN = -1
"""Token id that replaces the next token after the last one of the text."""


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Reading):
    """Predictions of l layers at s positions of a text (all, or the requested ones): the k most likely tokens of each.

    `top` (l, s, k): ids of the k tokens; `top_words`: their texts; `top_probability` (l, s, k).
    `final` (s,): id that the model predicts; `final_probability` and `final_rank` (l, s) at each layer; 1 is the most
    likely.
    `next` (s,): id of the next token of the text; `next_probability` and `next_rank` (l, s). After the last token the
    id is -1, the probability nan, the rank 0.
    `entropy` (l, s) of each layer's prediction, and `divergence` (l, s), KL(p_last || p_layer), in nats.
    """

    title: ClassVar[str] = "Logit lens"

    positions: list[int]
    words: list[str]
    top: Tensor
    top_words: list[list[list[str]]]
    top_probability: Tensor
    final: Tensor
    final_probability: Tensor
    final_rank: Tensor
    next: Tensor
    next_probability: Tensor
    next_rank: Tensor
    entropy: Tensor
    divergence: Tensor

    def __str__(self) -> str:
        lines = [f"logit lens of {len(self.top)} layers, after {self.words[-1]!r} (position {self.positions[-1]})"]
        for layer, (words, chances) in enumerate(zip(self.top_words, self.top_probability, strict=True)):
            best = ", ".join(f"{word!r} {p:.2f}" for word, p in zip(words[-1][:3], chances[-1].tolist(), strict=False))
            lines.append(f"layer {layer:2}: {best}; {self.divergence[layer, -1]:.2f} nats from the last layer")
        return "\n".join(lines)

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default sized to the number of positions and
        layers."""
        layers, places, _ = self.top.shape
        return super().figure(width or min(16.0, 5.5 + 0.62 * places), height or min(14.0, 1.7 + 0.27 * max(8, layers)))

    def draw(self, figure: Any) -> None:
        layers, places, _ = self.top.shape
        ratios = [max(2.5, min(8.0, 0.62 * places)), 1.5, 1.5]
        lens, nats, rank = style.axes(figure, 1, 3, sharey=True, width_ratios=ratios).flat
        lens.set_title("logit lens", loc="left", color=style.INK, fontsize=10)
        drawn = style.heat(lens, self.top_probability[:, :, 0], label="probability of the first", low=0, high=1)
        if 0.62 * places <= 16 and 0.27 * layers <= 14:
            self._write(lens, drawn)
        if places <= style.MOST_WORDS:
            style.words(lens, self.words, "x")
            lens.tick_params(axis="x", length=0)
        lens.set(xlabel="after", ylabel="layer", ylim=(layers - 0.5, -0.5))
        style.whole_ticks(lens, "y")
        self._by_depth(nats, {"entropy": self.entropy.mean(1), "KL to the last": self.divergence.mean(1)})
        nats.set(xlabel="nats, mean", xlim=(0, None))
        known = self.next != UNKNOWN
        ranks = {"the model's own": self.final_rank.double().median(1).values}
        if known.any():
            ranks["the text's next"] = self.next_rank[:, known].double().median(1).values
        self._by_depth(rank, ranks)
        rank.set(xlabel="rank, median", xscale="log", xlim=(0.9, None))

    def _write(self, ax: Any, drawn: Any) -> None:
        for layer, places in enumerate(self.top_words):
            for place, words in enumerate(places):
                dark = float(self.top_probability[layer, place, 0]) > 0.5
                ax.text(place, layer, style.legible(words[0].strip() or words[0], 9), ha="center", va="center",
                        fontsize=6.5, color=style.PAPER if dark else style.INK)  # fmt: skip

    def _by_depth(self, ax: Any, curves: dict[str, Tensor]) -> None:
        for name, values in curves.items():
            ax.plot(values, range(len(values)), label=name, linewidth=1.6)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8, borderpad=0)


def logit_lens(
    model: Model,
    tokens: Tensor,
    top: int = 5,
    positions: int | Sequence[int] | None = None,
    tokenizer: Any = None,
    words: Sequence[str] | None = None,
) -> LogitLens:
    """Returns the predictions of every layer at these positions (None for all) of tokens (1, s).

    Keeps the streams (l, s, d), and logits of a few positions of one layer at a time. Raises RequestError for a
    position, token or `top` out of range, and more than one row."""
    tokens = one_row(model, tokens)
    labels = spelled(tokens, tokenizer, words)
    vocabulary = eager(model).vocab_size
    if not 1 <= top <= vocabulary:
        raise RequestError(
            f"top={top} is out of range: from 1 to the {vocabulary} tokens of the vocabulary",
            code="range", field="top", value=top,
        )  # fmt: skip
    length = tokens.shape[1]
    at = list(range(length)) if positions is None else within(positions, length, "position", "the text")
    names = [f"layers.{layer}.resid_post" for layer in range(len(eager(model).layers))]
    after = F.pad(tokens[0, 1:], (0, 1), value=UNKNOWN)[at]
    with at_rest(model), torch.no_grad():
        seen = capture(model, tokens, names, positions=at)
        streams = [seen[name] for name in names]
        rows = max(1, VALUES_PER_CHUNK // vocabulary)
        chunks = [_look(model, [x[:, i : i + rows] for x in streams], after[i : i + rows], top)
                  for i in range(0, len(at), rows)]  # fmt: skip
    found = {name: torch.cat([chunk[name] for chunk in chunks], -2 if name.startswith("top") else -1).cpu()
             for name in chunks[0]}  # fmt: skip
    said = cache(lambda token: spell(token, tokenizer))
    top_words = [[[said(token) for token in place] for place in layer] for layer in found["top"].tolist()]
    return LogitLens(at, [labels[i] for i in at], top_words=top_words, next=after.cpu(), **found)


def unembed(model: Model, x: Tensor) -> Tensor:
    """Returns the logits (b, s, v) that the model's final norm, if it has one, and its head give for a stream x (b, s,
    d)."""
    module = eager(model)
    return module.unembed(x if module.final_norm is None else module.final_norm(x))


def _look(model: Model, streams: list[Tensor], after: Tensor, k: int) -> dict[str, Tensor]:
    """Returns {field: tensor} of a `LogitLens` for one chunk of positions, with the layers stacked."""
    last = _log_probabilities(model, streams[-1])
    final, known = last.argmax(-1), after != UNKNOWN
    layers: list[dict[str, Tensor]] = []
    for x in streams:
        log_p = _log_probabilities(model, x)
        p = log_p.exp()
        probability, top = p.topk(k)
        final_probability, final_rank = _standing(log_p, final)
        next_probability, next_rank = _standing(log_p, after.clamp(min=0))
        layers.append({
            "top": top, "top_probability": probability,
            "final_probability": final_probability, "final_rank": final_rank,
            "next_probability": next_probability.where(known, torch.nan), "next_rank": next_rank.where(known, 0),
            "entropy": torch.special.entr(p).sum(-1),
            "divergence": F.kl_div(log_p, last, reduction="none", log_target=True).sum(-1).clamp(min=0),
        })  # fmt: skip
    return {"final": final} | {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def _log_probabilities(model: Model, x: Tensor) -> Tensor:
    """Returns the log-probabilities (s, v) that the model's final norm and head give for a stream x (1, s, d)."""
    return wide(unembed(model, x)[0]).log_softmax(-1)


def _standing(log_p: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (probability, rank), each (s,), of the token of each row among log-probabilities (s, v); rank 1 is the
    most likely."""
    own = log_p.gather(-1, token[:, None])
    return own[:, 0].exp(), 1 + (log_p > own).sum(-1)
