"""Answers of a model to held-out sources, compared with the correct ones."""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from glassformer.generation import generate
from glassformer.model import Model
from glassformer.runs.results import Answers
from glassformer.text import Tokens
from glassformer.text.catalogues import placeholders
from glassformer.training import ObjectiveConfig
from glassformer.training.objectives import Answered, Asked

PAIRS = 500
"""Maximum number of held-out pairs (source, target) that a model answers."""
ROWS = 64
"""Number of answers that are generated in one batch."""
SAMPLES = 8
HAN, KANA = re.compile(r"[\u3400-\u9fff]"), re.compile(r"[\u3040-\u30ff]")


def answers(model: Model, text: Tokens, objective: ObjectiveConfig, context: int, pairs: int = PAIRS) -> Answers | None:
    """Returns the model's answers to held-out sources, greedy if they are generated; None for a model or an objective
    without answers.

    exact         share of answers that equal the target
    overlap       for spans, the mean F1 of words (Rajpurkar et al. 2016, 1606.05250)
    confusion     for classes, texts by correct class (row) and answer (column)
    placeholders  share of the sources with placeholders whose answer has equal ones
    bleu, chrf    of the corpus (Papineni et al. 2002; Popovic 2015), by sacrebleu with its own tokenisation, for
                  Chinese targets the one for Chinese; None if it is not installed (the extra `translate`)
    """
    if told := objective.answered(model, text, pairs, context):
        return _given(told, objective.labels(model.config), objective.overlap)
    asked = objective.asked(text, pairs, model.config)
    if not asked:
        return None
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].target))
    written: list[str] = [""] * len(asked)
    for first in range(0, len(order), ROWS):
        some = order[first : first + ROWS]
        for i, ids in zip(some, greedy(model, [asked[i] for i in some], text.tokenizer.eos_id, context), strict=True):
            written[i] = text.tokenizer.decode(ids)
    sources, right = ([text.tokenizer.decode(side.tolist()) for side in sides] for sides in
                      ([one.source for one in asked], [one.target for one in asked]))  # fmt: skip
    held = [(placeholders(source), placeholders(answer)) for source, answer in zip(sources, written, strict=True)]
    kept = [given == found for given, found in held if given]
    return Answers(
        pairs=len(asked),
        exact=float(np.mean([answer == target for answer, target in zip(written, right, strict=True)])),
        placeholders=float(np.mean(kept)) if kept else None,
        samples=[list(one) for one in zip(sources, right, written, strict=True)][:: -(-len(asked) // SAMPLES)],
        **scores(written, right),
    )


def _given(told: Sequence[Answered], labels: Sequence[str], overlap: bool) -> Answers:
    """Returns the scores of answers that were chosen, not generated: exact share, confusion of `labels`, and with
    `overlap` the mean F1 of words."""
    place = {label: number for number, label in enumerate(labels)}
    confusion = np.zeros((len(labels), len(labels)), int)
    if labels:
        np.add.at(confusion, tuple(zip(*((place[one.right], place[one.answer]) for one in told), strict=True)), 1)
    return Answers(
        pairs=len(told),
        exact=float(np.mean([one.right == one.answer for one in told])),
        overlap=float(np.mean([shared_words(one.right, one.answer) for one in told])) if overlap else None,
        labels=list(labels),
        confusion=confusion.tolist(),
        samples=[list(one) for one in told][:: -(-len(told) // SAMPLES)],
    )


def shared_words(right: str, answer: str) -> float:
    """Returns the F1 of the words of two texts, 2 s / (a + b), for texts of a and b words with s words in common; case,
    punctuation and articles are ignored, as in the evaluation of SQuAD."""
    sides = [Counter(_words(text)) for text in (right, answer)]
    totals = [side.total() for side in sides]
    if not all(totals):
        return float(totals[0] == totals[1])
    return 2 * (sides[0] & sides[1]).total() / sum(totals)


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def greedy(model: Model, asked: Sequence[Asked], end: int | None, context: int) -> list[list[int]]:
    """Returns the token ids of the model's greedy answer to each of `asked`, without the end token `end`: at most twice
    the length of its target plus 8, and at most the room that the context has after the prompt."""
    prompts = [one.opening.tokens.tolist() for one in asked]
    sources = [one.opening.source for one in asked]
    given = None if sources[0] is None else [source.tolist() for source in sources if source is not None]
    rooms = [
        max(1, min(context - len(prompt), 2 * len(one.target) + 8)) for prompt, one in zip(prompts, asked, strict=True)
    ]
    together = max(1, min(max(rooms), context - max(map(len, prompts))))
    rows = generate(model, prompts, together, source=given, eos_id=[] if end is None else end)
    found = [row[len(prompt) :][:room] for row, prompt, room in zip(rows, prompts, rooms, strict=True)]
    cut = [i for i, ids in enumerate(found) if together == len(ids) < rooms[i] and ids[-1] != end]
    if cut:  # cut by the context of a longer prompt in the batch
        for i, ids in zip(cut, greedy(model, [asked[i] for i in cut], end, context), strict=True):
            found[i] = ids
    return [ids[:-1] if ids[-1] == end else ids for ids in found]


def scores(written: list[str], right: list[str]) -> dict[str, Any]:
    """Returns {bleu, chrf, signatures} of the answers `written` against `right`; scores None without sacrebleu
    installed."""
    try:
        sacrebleu = importlib.import_module("sacrebleu")
    except ImportError:
        return {"bleu": None, "chrf": None, "signatures": []}
    han, kana = (sum(1 for text in right if letters.search(text)) for letters in (HAN, KANA))
    chinese = han > len(right) / 2 > kana
    measures = sacrebleu.BLEU(tokenize="zh" if chinese else None), sacrebleu.CHRF()
    bleu, chrf = (one.corpus_score(written, [right]).score for one in measures)
    return {"bleu": bleu, "chrf": chrf, "signatures": [str(one.get_signature()) for one in measures]}
