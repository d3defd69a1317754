"""What a model that was trained on pairs writes for held-out sources, beside what is right."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from glassformer.generation import stream
from glassformer.model import Model
from glassformer.runs.results import Answers
from glassformer.text import Tokens
from glassformer.text.catalogues import placeholders
from glassformer.training import ObjectiveConfig
from glassformer.training.objectives import Asked

PAIRS = 500
"""Held-out pairs, evenly spread."""
ROWS = 64
"""Written at once."""
SAMPLES = 8


def answers(model: Model, text: Tokens, objective: ObjectiveConfig, context: int, pairs: int = PAIRS) -> Answers | None:
    """Held-out sources are answered greedily. None of a model or an objective that answers nothing.

    exact         share of answers that are the target
    placeholders  share of the sources with placeholders whose answer has the same ones
    bleu, chrf    of the corpus (Papineni et al. 2002; Popovic 2015), by sacrebleu with its own tokenisation; None where
                  that is not installed (the extra `translate`)
    """
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


def greedy(model: Model, asked: Sequence[Asked], end: int | None, context: int) -> list[list[int]]:
    """The likeliest token after the other, to the end of each text; at most twice as many as its target has, and as
    many as the context has room for behind its prompt."""
    prompts = [one.opening.tokens.tolist() for one in asked]
    sources = [one.opening.source for one in asked]
    given = None if sources[0] is None else [source.tolist() for source in sources if source is not None]
    rooms = [
        max(1, min(context - len(prompt), 2 * len(one.target) + 8)) for prompt, one in zip(prompts, asked, strict=True)
    ]
    together = max(1, min(max(rooms), context - max(map(len, prompts))))
    found: list[list[int]] = [[] for _ in asked]
    going = torch.ones(len(asked), dtype=torch.bool)
    for tokens in stream(model, prompts, together, temperature=0.0, source=given):
        here = tokens.cpu()
        going &= here != (-1 if end is None else end)
        for row in going.nonzero()[:, 0].tolist():
            found[row].append(int(here[row]))
            going[row] = len(found[row]) < rooms[row]
        if not going.any():
            break
    if cut := going.nonzero()[:, 0].tolist():  # by the context of a longer prompt beside it
        for row, ids in zip(cut, greedy(model, [asked[row] for row in cut], end, context), strict=True):
            found[row] = ids
    return found


def scores(written: list[str], right: list[str]) -> dict[str, Any]:
    """BLEU and chrF with sacrebleu's signatures, where it is installed."""
    try:
        sacrebleu = importlib.import_module("sacrebleu")
    except ImportError:
        return {"bleu": None, "chrf": None, "signatures": []}
    measures = sacrebleu.BLEU(), sacrebleu.CHRF()
    bleu, chrf = (one.corpus_score(written, [right]).score for one in measures)
    return {"bleu": bleu, "chrf": chrf, "signatures": [str(one.get_signature()) for one in measures]}
