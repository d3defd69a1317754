"""Scores of heads by meaning: attention from a word to its subject, from a pronoun to its antecedent, and to
punctuation, on sentences made from templates.

A template marks the query word, the word that a head by meaning attends to, and another word of the same kind:

    The farmer behind the doors sleeps every day.      `sleeps` attends to `farmer`; the other noun is `doors`
    Behind the doors the farmer sleeps every day.      here the other noun is the farther one

In half of the sentences the other word is nearer, so a head that attends to the nearest noun, or a fixed distance back,
leads in one half and trails in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.introspection import at_rest, eager, looking, rows_of
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.lens.tables import attention_table, draw_table, figure_size, heads_of, strongest
from glassformer.model import Model
from glassformer.parts.precision import exact
from glassformer.text import Tokenizer

Pieces = tuple[tuple[str, str], ...]
"""Pieces of a sentence, (text, role). Roles: `query`, the word whose attention is measured; `right`, its subject,
antecedent or comma; `other`, another word of that kind; `end`, the last token of any other word; or ""."""

SUBJECT: tuple[Pieces, ...] = (
    (("The", ""), (" {a}", "right"), (" behind the", ""), (" {b}", "other"), (" {verb}", "query")),
    (("Behind the", ""), (" {b}", "other"), (" the", ""), (" {a}", "right"), (" {verb}", "query")),
)
REFERENCE: tuple[Pieces, ...] = (
    (("After", ""), (" {a}", "right"), (" had seen", ""), (" {b}", "other"), (" there,", ""), (" {he}", "query")),
    (("After", ""), (" {b}", "other"), (" had seen", ""), (" {a}", "right"), (" there,", ""), (" {he}", "query")),
)
PUNCTUATION: tuple[Pieces, ...] = (
    (("In the", ""), (" garden", "end"), (",", "right"), (" {a}", "query"), (" met", "query"), (" {b}", "query")),
    (("Without a", ""), (" word", "end"), (",", "right"), (" the", "query"), (" {noun}", "query"), (" left", "query")),
)
TEMPLATES = {"subject": SUBJECT, "reference": REFERENCE, "punctuation": PUNCTUATION}
KINDS = tuple(TEMPLATES)

NOUNS = (
    ("farmer", "farmers"), ("teacher", "teachers"), ("doctor", "doctors"), ("singer", "singers"), ("girl", "girls"),
    ("boy", "boys"), ("dog", "dogs"), ("king", "kings"),
)  # fmt: skip
"""Subjects of the sentences: (singular, plural) of each noun."""
PLACES = (
    ("door", "doors"), ("tree", "trees"), ("house", "houses"), ("car", "cars"), ("wall", "walls"), ("desk", "desks"),
)  # fmt: skip
VERBS = (("sleeps", "sleep"), ("works", "work"), ("waits", "wait"), ("laughs", "laugh"), ("sings", "sing"))
WOMEN = ("Anna", "Mary", "Kate", "Laura", "Alice", "Jane", "Emma", "Sarah", "Linda", "Lucy")
MEN = ("Paul", "John", "Tom", "Mark", "Peter", "Simon", "David", "James", "Robert", "Henry")


@dataclass(frozen=True, eq=False, repr=False)
class MeaningScores(Reading):
    """Scores of heads that attend by meaning. `scores`: kind -> (layers, heads), mean attention, 0 to 1, from the query
    word to its subject, antecedent or comma. NaN if a layer has no such head."""

    title: ClassVar[str] = "Heads by meaning"

    scores: dict[str, Float[Tensor, "l n"]]
    leads: dict[str, Float[Tensor, "l n"]]
    """Kind -> (layers, heads), the score minus the attention to another word of that kind, -1 to 1; 0 for a head
    without preference."""
    sentences: int
    """Number of sentences of each kind."""
    examples: dict[str, str]
    """Kind -> one of its sentences."""

    def __str__(self) -> str:
        lines = [f"mean attention on {self.sentences} sentences of each kind, and its lead over the other word"]
        for kind, lead in self.leads.items():
            best = [
                f"layer {layer} head {head} {self.scores[kind][layer, head]:.2f} ({value:+.2f})"
                for layer, head, value in strongest(lead, 3)
            ]
            lines.append(f"{kind}: {', '.join(best)}")
        return "\n".join(lines)

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the tables need."""
        wide, high = figure_size(next(iter(self.leads.values())), len(self.leads))
        return super().figure(width or wide, height or high)

    def draw(self, figure: Any) -> None:
        axes = style.axes(figure, 1, len(self.leads), x="head", y="layer", sharey=True)
        for ax, (kind, table) in zip([axes] if len(self.leads) == 1 else axes.flat, self.leads.items(), strict=True):
            draw_table(ax, table, signed=True, label="lead over the other word")
            ax.set_title(kind, loc="left", color=style.INK, fontsize=10)
            ax.label_outer(remove_inner_ticks=True)


def meaning_scores(
    model: Model, tokenizer: Tokenizer, n: int = 16, seed: int = 0, kinds: Sequence[str] = KINDS
) -> MeaningScores:
    """Returns the scores of all heads for attention to a subject, an antecedent and a comma, on `n` sentences of each
    kind.

    subject      from a verb to its subject, against another noun of the other number before it
    reference    from a pronoun to the name of its gender, against the other name
    punctuation  from the words after a comma to the comma, against the token before it

    For a word of several tokens, the query is the last one and the keys are all. Heads of these kinds were found in
    BERT by Clark et al. 2019, 1906.04341, and Voita et al. 2019, 1905.09418. Attention to a word does not show that it
    is used: `ablate_heads` does. Raises RequestError for a model without attention heads, and an unknown kind."""
    check_whole("n", n)
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if unknown := [kind for kind in kinds if kind not in TEMPLATES]:
        raise RequestError(
            f"kinds={unknown[0]!r}: use {', '.join(KINDS)}", code="unknown", field="kinds", value=unknown[0]
        )
    counts = heads_of(model, "mixer.pattern")
    layers = [at for at, heads in enumerate(counts) if heads]
    scores, leads, examples = {}, {}, {}
    for kind in kinds:
        draw = Random(f"{seed} {kind}")
        sentences = [sentence(kind, row, draw) for row in range(n)]
        found = [read(model, tokenizer, one, layers) for one in sentences]
        right, other = (
            attention_table(
                [
                    torch.stack([one[role][at] for one in found]).mean(0) if at in layers else None
                    for at in range(len(counts))
                ]
            )
            for role in ("right", "other")
        )
        scores[kind], leads[kind] = right, right - other
        examples[kind] = "".join(text for text, _ in sentences[0])
    return MeaningScores(scores, leads, n, examples)


def sentence(kind: str, row: int, draw: Random) -> Pieces:
    """Returns a sentence of a kind ("subject", "reference" or "punctuation") as pieces, with random words; templates
    alternate from row to row."""
    singular = draw.randrange(2)
    woman, man = draw.choice(WOMEN), draw.choice(MEN)
    a, b, he = (woman, man, "she") if singular else (man, woman, "he")
    noun, place, verb = draw.choice(NOUNS), draw.choice(PLACES), draw.choice(VERBS)
    words = {"a": a, "b": b, "he": he, "noun": noun[0]}
    if kind == "subject":
        words = {"a": noun[1 - singular], "b": place[singular], "verb": verb[1 - singular]}
    form = TEMPLATES[kind][row % len(TEMPLATES[kind])]
    return tuple((text.format(**words), role) for text, role in form)


def places_of(tokenizer: Tokenizer, pieces: Pieces) -> tuple[list[int], dict[str, list[int]]]:
    """Returns (token ids of a sentence, {role of `Pieces`: positions of its tokens}). For the query word, only the
    position of its last token is given.

    Raises RequestError if the tokenizer joins marked words with their neighbours."""
    texts = list(accumulate(text for text, _ in pieces))
    rows = [tokenizer.encode(text).tolist() for text in texts]
    ids, found = rows[-1], dict[str, list[int]]()
    start = 0
    for (text, role), row in zip(pieces, rows, strict=True):
        if role and (len(row) <= start or ids[: len(row)] != row):
            raise RequestError(
                f"this tokenizer cuts {texts[-1]!r} across the word {text.strip()!r}; the sentences cannot be marked",
                code="unsupported", field="tokenizer",
            )  # fmt: skip
        if role:
            some = range(start, len(row))
            found.setdefault(role.replace("end", "other"), []).extend(some[-1:] if role in ("query", "end") else some)
        start = len(row)
    return ids, found


@torch.no_grad()
def read(model: Model, tokenizer: Tokenizer, pieces: Pieces, layers: Sequence[int]) -> dict[str, dict[int, Tensor]]:
    """Runs the model on a sentence, and returns {role: {layer: (heads,)}}: the mean attention from the query word (such
    as a verb) to the word with that role. Role `right` is the correct word, such as the verb's subject; `other` is
    another word of its kind."""
    ids, places = places_of(tokenizer, pieces)
    looks = {at: Attended(places) for at in layers}
    named = {f"layers.{at}.mixer.pattern": look for at, look in looks.items()}
    with at_rest(model), looking(model, named):
        eager(model).hidden_states(rows_of(model, torch.tensor([ids])))
    return {
        role: {at: look.sums[role] / len(places["query"]) for at, look in looks.items()} for role in ("right", "other")
    }


class Attended:
    """Observer of an attention pattern that sums, for each head, the attention from a sentence's query word to the
    correct word (role `right` of `Pieces`) and to another word of its kind (`other`): role -> (heads,)."""

    def __init__(self, places: dict[str, list[int]]):
        self.places = places
        self.sums: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        rows = [at - first for at in self.places["query"] if first <= at < first + x.shape[2]]
        for role in ("right", "other"):
            mass = exact(x[0][:, rows][..., self.places[role]]).sum((1, 2))
            self.sums[role] = self.sums.get(role, 0) + mass
