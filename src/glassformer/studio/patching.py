"""Values of one text put into another while a model reads it, chosen by clicks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, capture, edit
from glassformer.lens.edits import patch
from glassformer.lens.page.words import speller, visible
from glassformer.lens.patching import activation_patching
from glassformer.serving.computing import Served
from glassformer.studio.inside import read_tokens
from glassformer.studio.numbers import number_table

MOST = 32
"""Largest number of tokens of each text."""
NEXT = 6
"""Number of next tokens that are listed."""
WORK = 1e12
"""Largest number of FLOPs for trying every place."""


def patched(
    served: Served, text: str, other: str, site: str, places: Sequence[tuple[int, int]], every: bool
) -> dict[str, Any]:
    """Returns what a model predicts after a text, after another one, and after the other one with values of the first
    put in at `places`, pairs of layer and position. With `every`, also the share of the answer that each place brings
    back.

    Raises RequestError for texts of different length, a model that generates no text, and too much to try."""
    model = served.loaded.model
    if not model.writes:
        raise RequestError(f"{served.name} generates no text", code="unsupported", field="model", value=served.name)
    (ids, words), (other_ids, other_words) = (read_tokens(served, one, MOST) for one in (text, other))
    if len(ids) != len(other_ids):
        raise RequestError(
            f"the texts have {len(ids)} and {len(other_ids)} tokens; a value can only be put where both have a token",
            code="conflict", field="other", value=len(other_ids), expected=f"{len(ids)} tokens",
        )  # fmt: skip
    layers = served.loaded.config.n_layers
    for layer, at in places:
        if layer >= layers or at >= len(ids):
            raise RequestError(
                f"layer {layer}, token {at} is out of range: {layers} layers, {len(ids)} tokens",
                code="range", field="places", value=[layer, at],
            )  # fmt: skip
    first, second = (torch.tensor([one], device=model.device) for one in (ids, other_ids))
    names = [f"layers.{layer}.{site}" for layer in range(layers)]
    with at_rest(model), torch.no_grad():
        run = capture(model, first, sorted({names[layer] for layer, _ in places})) if places else {}
        answers = [_last(model, one) for one in (first, second)]
        with ExitStack() as stack:
            for layer, at in places:
                stack.enter_context(edit(model, patch(run, names[layer], at)))
            answers.append(_last(model, second))
    best = [int(one.argmax()) for one in answers[:2]]
    table = _every(served, first, second, best, site, words) if every else None
    listed = [f"({layer}, {at})" for layer, at in places]
    return {
        "words": words, "other": other_words, "layers": layers,
        "differ": [a != b for a, b in zip(ids, other_ids, strict=True)],
        "answers": [_answer(served, one) for one in (answers if places else answers[:2])],
        "restored": _restored(answers, best) if places and best[0] != best[1] else None,
        "every": table, "places": listed,
        "commands": [f"glassformer inspect {shlex.quote(served.name)} --text {shlex.quote(text)} --against "
                     f"{shlex.quote(other)} --reading activation_patching --out patched"],
        "python": ["import torch", f"llm = gf.load({served.name!r})",
                   f"run = gf.capture(llm.model, [{ids}], 'layers.*.{site}')",
                   f"edits = [gf.lens.patch(run, f'layers.{{layer}}.{site}', at) for layer, at in {list(places)}]",
                   f"tokens = torch.tensor([{other_ids}], device=llm.model.device)",
                   "with gf.edit(llm.model, *edits): logits = llm.model(tokens)"],
    }  # fmt: skip


def _last(model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits (v,) after a text."""
    found: Tensor = model.unembed(model.hidden_states(tokens)[:, -1:])[0, 0].float()
    return found


def _lead(logits: Tensor, best: Sequence[int]) -> float:
    return float(logits[best[0]] - logits[best[1]])


def _restored(answers: Sequence[Tensor], best: Sequence[int]) -> str:
    """Returns, in per cent, the share of the logit difference between both texts that the patched places bring back."""
    clean, corrupt, found = (_lead(one, best) for one in answers)
    return f"{(found - corrupt) / (clean - corrupt):.0%}".replace("-", "−")


def _answer(served: Served, logits: Tensor) -> list[dict[str, str]]:
    """Returns the `NEXT` most likely tokens by `logits` (v,), with their probabilities."""
    spell = speller(served.loaded.tokenizer)
    shares = logits.softmax(-1)
    return [
        {"word": visible(spell(one)), "probability": f"{100 * float(shares[one]):.1f} %"}
        for one in shares.topk(min(NEXT, len(shares))).indices.tolist()
    ]


def _every(
    served: Served, first: Tensor, second: Tensor, best: Sequence[int], site: str, words: list[str]
) -> dict[str, Any]:
    """Returns a table of the share of the logit difference that each place brings back, layers by tokens."""
    config = served.loaded.config
    if best[0] == best[1]:
        word = visible(speller(served.loaded.tokenizer)(best[0]))
        raise RequestError(
            f"{word!r} follows both texts: give one that another word follows, to tell them apart by",
            code="conflict", field="other", value=word,
        )  # fmt: skip
    differs = int((first != second)[0].int().argmax())
    columns = list(range(differs, first.shape[1]))
    work = 2.0 * config.num_params() * config.n_layers * len(columns) * first.shape[1]
    if work > WORK:
        raise RequestError(
            f"trying every place takes {work:.1e} FLOPs; a page tries at most {WORK:.0e}: give shorter texts that "
            "differ later",
            code="range", field="text", value=first.shape[1],
        )  # fmt: skip

    def lead(logits: Tensor) -> Tensor:
        return logits[:, -1, best[0]] - logits[:, -1, best[1]]

    found = activation_patching(served.loaded.model, first, second, lead, [site], columns)
    grid = found.grids[site]
    rows = [str(i) for i in range(len(grid))]
    return number_table(grid.nan_to_num(0.0), rows, [words[i] for i in columns]) | {"first": differs}
