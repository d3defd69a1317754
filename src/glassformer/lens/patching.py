"""Activation patching: values of one run put into another, to locate where an answer arises.

>>> task = gf.lens.indirect_object(loaded.tokenizer, n=8)
>>> task.prompts[0]
'When Anna and Paul came back from the garden, Paul handed the basket to'
>>> gf.lens.activation_patching(loaded.model, task.clean, task.corrupt, task.metric, labels=task.labels).save("ioi.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.introspection import at_rest, capture, choose, eager, head_axis, rows_of, within
from glassformer.lens import style
from glassformer.lens.edits import patch
from glassformer.lens.passes import SAME, Metric, OnPass, by_metric, outcomes
from glassformer.lens.reading import Reading
from glassformer.lens.tables import draw_table, shared_bar, strongest, table_of
from glassformer.model import Model
from glassformer.parts.core.running import Edit
from glassformer.text import Tokenizer

STREAM = ("resid_pre", "mixer.out", "ffn.out")
LEAST = 1e-6
"""Smallest relative difference between the metrics of both runs at which patching is possible."""


@dataclass(frozen=True, eq=False, repr=False)
class ActivationPatching(Reading):
    """Result of activation patching: the share of the clean answer that each patch restores, from 0, as in the corrupt
    run, to 1, as in the clean run.

    `grids`: site -> (layers, positions), or (layers, heads) for the sites `by_head`. NaN if a layer has no such site or
    head."""

    title: ClassVar[str] = "Activation patching"

    grids: dict[str, Float[Tensor, "l p"]]
    clean: float
    """Value of the metric in the clean run."""
    corrupt: float
    positions: list[int]
    labels: list[str]
    """Words at the patched positions."""
    by_head: list[str]

    def __str__(self) -> str:
        lines = [f"metric {self.clean:.3f} on the clean text, {self.corrupt:.3f} on the corrupt; brought back by"]
        for site, grid in self.grids.items():
            best = [self._told(site, *one) for one in strongest(grid, 3, signed=True)]
            lines.append(f"{site}: {', '.join(best)}")
        return "\n".join(lines)

    def _told(self, site: str, layer: int, column: int, value: float) -> str:
        where = f"head {column}" if site in self.by_head else f"{self.labels[column]!r} ({self.positions[column]})"
        return f"layer {layer} {where} {value:+.2f}"

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the grids need."""
        layers = next(iter(self.grids.values())).shape[0]
        columns = sum(max(grid.shape[1], 10) for grid in self.grids.values())
        wide, high = min(16.0, max(5.0, 0.2 * columns + 1.6)), min(10.0, max(3.5, 0.17 * layers + 1.8))
        return super().figure(width or wide, height or high)

    def draw(self, figure: Any) -> None:
        said = f"metric {self.clean:.2f} on the clean text, {self.corrupt:.2f} on the corrupt"
        axes = list(np.atleast_1d(style.axes(figure, 1, len(self.grids), y="layer", sharey=True)).flat)
        figure.suptitle(said, x=0.01, ha="left", color=style.INK, fontsize=10)
        most = max(1.0, *(float(grid.nan_to_num(0.0).abs().max()) for grid in self.grids.values()))
        for ax, (site, grid) in zip(axes, self.grids.items(), strict=True):
            drawn = draw_table(ax, grid, signed=True, high=most, bar=False)
            ax.set_title(site, loc="left", color=style.INK, fontsize=9)
            if site in self.by_head:
                ax.set_xlabel("head", color=style.INK, fontsize=9)
            else:
                style.words(ax, self.labels, "x")
            ax.label_outer(remove_inner_ticks=True)
        shared_bar(figure, drawn, axes, "brought back by the clean value")


def activation_patching(
    model: Model,
    clean: Int[Tensor, "b s"],
    corrupt: Int[Tensor, "b s"],
    metric: Metric,
    sites: str | Sequence[str] = STREAM,
    positions: int | Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
    progress: OnPass | None = None,
) -> ActivationPatching:
    """Returns how much of the clean answer each patch restores: every site of every layer of the run on `corrupt` is
    given, at one position at a time, the value of the run on `clean`.

        (metric(patched) - metric(corrupt)) / (metric(clean) - metric(corrupt))

    `metric(logits (b, s, v))` is a number, or one for each row. `sites` are named as in a layer: resid_pre, mixer.out,
    ...; q, k, v, z and pattern are patched head by head instead, at all `positions` (by default all) together. `labels`
    name all s positions. Meng et al. 2022, 2202.05262 (causal tracing); Wang et al. 2022, 2211.00593.

    Copies of the text share a pass; `progress(done, of)` is called after every one. Raises RequestError if clean and
    corrupt differ in shape or have equal metrics, and for a site that no layer has."""
    clean, corrupt = rows_of(model, clean), rows_of(model, corrupt)
    if clean.shape != corrupt.shape:
        raise RequestError(
            f"clean is {tuple(clean.shape)} and corrupt {tuple(corrupt.shape)}: a value can only be patched where both "
            "runs have the position; give texts of one length",
            code="conflict", field="corrupt", value=tuple(corrupt.shape),
        )  # fmt: skip
    length, layers = clean.shape[1], len(eager(model).layers)
    columns = list(range(length)) if positions is None else within(positions, length, "position", "the text")
    words = [str(at) for at in range(length)] if labels is None else list(labels)
    if len(words) != length:
        raise RequestError(
            f"labels has {len(words)} words, and the text has {length} tokens",
            code="conflict", field="labels", value=len(words),
        )  # fmt: skip
    kinds = [sites] if isinstance(sites, str) else list(sites)
    if not kinds:
        raise RequestError(
            f"sites=[] is empty; use {', '.join(STREAM)} or others of a layer", code="missing", field="sites"
        )
    known = choose(model, [f"layers.*.{kind}" for kind in kinds])
    kinds = list(dict.fromkeys(name.split(".", 2)[2] for name in known))  # a pattern may match several
    with at_rest(model):
        run, other = (capture(model, tokens, list(known), memory=1 << 62) for tokens in (clean, corrupt))

    def patches(name: str) -> list[Edit]:
        axis = head_axis(known[name].axes)
        if axis is None:
            return [patch(run, name, at)[name] for at in columns]
        return [patch(run, name, positions, head)[name] for head in range(run[name].shape[axis])]

    changes = {name: patches(name) for name in run}
    by_head = [kind for kind in kinds if any(name.endswith(f".{kind}") and head_axis(known[name].axes) for name in run)]
    measure = by_metric(model, metric)
    high, low = (float(outcomes(model, tokens, [SAME], measure)) for tokens in (clean, corrupt))
    if not abs(high - low) > LEAST * max(abs(high), abs(low)):  # NaN too
        raise RequestError(
            f"the metric is {high:.6g} on clean and {low:.6g} on corrupt; it must tell them apart",
            code="conflict", field="metric", value=(high, low),
        )  # fmt: skip
    # Skips positions where both runs have equal values, as before the texts differ: a patch changes nothing.
    whole = [(name, change) for name, some in changes.items() for change in some]
    alike = torch.tensor([torch.equal(change(other[name]), other[name]) for name, change in whole])
    found = torch.zeros(len(whole), dtype=torch.float64)
    if not alike.all():
        needed = [one for one, same in zip(whole, alike.tolist(), strict=True) if not same]
        found[~alike] = (outcomes(model, corrupt, needed, measure, progress) - low) / (high - low)
    rows = dict(zip(changes, found.split([len(some) for some in changes.values()]), strict=True))
    grids = {kind: table_of([rows.get(f"layers.{at}.{kind}") for at in range(layers)]) for kind in kinds}
    return ActivationPatching(grids, high, low, columns, [words[at] for at in columns], by_head)


# A task to patch on


@dataclass(frozen=True, eq=False)
class IndirectObject:
    """Data of the indirect-object task: n pairs of sentences in which two people meet and one of them gives the other
    something (Wang et al. 2022, 2211.00593). The clean one ends "... Paul handed the basket to", with the answer Anna;
    the corrupt one differs in a single token, "... Anna handed the basket to", with the answer Paul."""

    clean: Int[Tensor, "n s"]
    corrupt: Int[Tensor, "n s"]
    answers: Int[Tensor, " n"]
    """Ids (n,) of the correct token after each clean sentence."""
    wrong: Int[Tensor, " n"]
    """Ids (n,) of the correct token after each corrupt sentence, a wrong answer after the clean one."""
    prompts: list[str]
    """Texts of the clean sentences."""
    labels: list[str]
    """Label of each position: the token's text, or a role such as the giver if the word differs between sentences."""

    def metric(self, logits: Float[Tensor, "n s v"]) -> Float[Tensor, " n"]:
        """Returns logit(answer) - logit(wrong) after each sentence, (n,), of logits (n, s, v): positive for a correct
        prediction."""
        last, row = logits[:, -1], torch.arange(len(logits), device=logits.device)
        return last[row, self.answers.to(last.device)] - last[row, self.wrong.to(last.device)]


SENTENCES = (
    "When {a} and {b} came back from the {place}, {giver} handed the {thing} to",
    "As soon as {a} and {b} had left the {place}, {giver} lent a {thing} to",
    "Because {a} and {b} were tired after the long day at the {place}, {giver} brought a {thing} to",
    "The evening that {a} and {b} met in the {place}, {giver} showed the {thing} to",
)
NAMES = (
    "Anna", "Paul", "Mary", "John", "Tom", "Kate", "Mark", "Laura", "Peter", "Alice", "Simon", "Jane", "David",
    "Emma", "Sarah", "James", "Robert", "Linda", "Henry", "Lucy", "George", "Ruth", "Frank", "Helen", "Adam", "Rose",
    "Jack", "Susan", "Martin", "Julia", "Daniel", "Maria", "Michael", "Sam", "Ben", "Lisa", "Charles", "Amy",
    "Richard", "Grace", "Eric", "Rachel", "Andrew", "Emily", "Kevin", "Sophie", "Brian", "Claire", "William",
    "Elizabeth",
)  # fmt: skip
PLACES = (
    "garden", "school", "station", "market", "library", "beach", "office", "church", "hotel", "museum", "kitchen",
    "park", "hospital", "farm",
)  # fmt: skip
THINGS = (
    "basket", "book", "letter", "ring", "key", "ball", "picture", "bottle", "map", "watch", "cup", "bag", "phone",
    "hat",
)  # fmt: skip
LABELS = {"a": "[first]", "b": "[second]", "giver": "[giver]", "place": "[place]", "thing": "[thing]"}


def indirect_object(tokenizer: Tokenizer, n: int = 16, seed: int = 0, sentence: int = 0) -> IndirectObject:
    """Returns the data of the indirect-object task: n sentences of one of four forms (`sentence`), with names, places
    and things that `tokenizer` encodes as one token each, so that all are equally long. Every second one names the
    giver first.

    Raises RequestError if the tokenizer splits words (bytes, characters, a small vocabulary)."""
    check_whole("n", n)
    if not 0 <= sentence < len(SENTENCES):
        raise RequestError(
            f"sentence={sentence}: there are sentences 0 to {len(SENTENCES) - 1}",
            code="range", field="sentence", value=sentence,
        )  # fmt: skip
    ids = _single_tokens(tokenizer, (*NAMES, *PLACES, *THINGS))
    names, places, things = ([word for word in words if word in ids] for words in (NAMES, PLACES, THINGS))
    if len(names) < 2 or not places or not things:
        raise RequestError(
            f"this tokenizer reads {len(names)} of {len(NAMES)} names, {len(places)} of {len(PLACES)} places and "
            f"{len(things)} of {len(THINGS)} things as one token each; the task needs 2, 1 and 1",
            code="unsupported", field="tokenizer",
        )  # fmt: skip
    draw, form = Random(seed), SENTENCES[sentence]
    filled: list[dict[str, str]] = []
    for row in range(n):
        giver, taker = draw.sample(names, 2)
        a, b = (giver, taker) if row % 2 else (taker, giver)
        words = {"place": draw.choice(places), "thing": draw.choice(things)}
        filled.append({"a": a, "b": b, "giver": giver, "taker": taker, **words})
    prompts = [form.format(**words) for words in filled]
    swapped = [form.format(**words | {"giver": words["taker"]}) for words in filled]
    rows = [tokenizer.encode(text).tolist() for text in prompts + swapped]
    differ = {sum(a != b for a, b in zip(one, other, strict=False)) for one, other in zip(rows, rows[n:], strict=False)}
    if len({len(row) for row in rows}) > 1 or differ != {1}:
        raise RequestError(
            "this tokenizer cuts the sentences otherwise than their words; the task cannot be made with it",
            code="unsupported", field="tokenizer",
        )  # fmt: skip
    clean, corrupt = torch.tensor(rows).chunk(2)
    answers, wrong = (torch.tensor([ids[words[who]] for words in filled]) for who in ("taker", "giver"))
    labels, at = [tokenizer.decode([token]) for token in rows[0]], -1
    for _, slot, _, _ in Formatter().parse(form):
        if slot:
            at = rows[0].index(ids[filled[0][slot]], at + 1)
            labels[at] = LABELS[slot]
    return IndirectObject(clean, corrupt, answers, wrong, prompts, labels)


def _single_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, int]:
    """Returns {word: token id} for those of the words that are one token after a space."""
    before = tokenizer.encode(" to").tolist()
    found = {word: tokenizer.encode(f" to {word}").tolist() for word in words}
    return {
        word: ids[-1]
        for word, ids in found.items()
        if ids[:-1] == before and tokenizer.decode(ids[-1:]).strip() == word
    }
