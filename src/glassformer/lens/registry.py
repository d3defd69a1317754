"""Default inputs of each reading of one text, for `glassformer inspect --reading`, and the components of its
`--ablate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError, WorkError
from glassformer.introspection import at_rest, eager, edit
from glassformer.lens.ablation import head_ablation
from glassformer.lens.attribution import logit_attribution
from glassformer.lens.distance import attention_distance
from glassformer.lens.edits import (
    ablate_experts,
    ablate_ffn,
    ablate_heads,
    ablate_layer,
    ablate_mixer,
    ablate_neurons,
)
from glassformer.lens.heads import head_scores
from glassformer.lens.inspection import FINE, Inspection
from glassformer.lens.maps import side_by_side, spell
from glassformer.lens.meaning import meaning_scores
from glassformer.lens.neighbours import embedding_neighbours
from glassformer.lens.passes import OnPass
from glassformer.lens.patching import activation_patching, indirect_object
from glassformer.lens.positions import position_picture
from glassformer.lens.reading import Reading
from glassformer.lens.rollout import attention_rollout
from glassformer.lens.routing import expert_routing
from glassformer.lens.similarity import token_similarity
from glassformer.lens.sinks import attention_sinks, massive_activations
from glassformer.model import Model
from glassformer.names.checks import ablated_part, check_reading
from glassformer.names.known import ALL_READINGS
from glassformer.parts.core.running import Edit
from glassformer.text import OnProgress, Tokenizer

REPEATED, PAIRS, NEIGHBOURS, MOST_WORDS = 50, 2, 6, 12
PATCHING = "activation_patching"
ABLATED = 256
"""Number of tokens at the end of the text on which every head is ablated, a limit because each pass covers only a few
heads."""


@dataclass(frozen=True, eq=False)
class ReadingInputs:
    """Inputs of readings: a model and a text, tokens (1, s), with its inspection. `against` (1, s) is another text,
    into whose run activation patching puts values of `tokens`; None without one."""

    model: Model
    tokens: Tensor
    tokenizer: Tokenizer
    seen: Inspection
    against: Tensor | None = None
    progress: OnPass | None = None

    @property
    def head(self) -> tuple[int, int]:
        """Tuple (layer, head) of the head with the most content-dependent attention, according to the inspection."""
        found = self.seen.notable(1)["elsewhere"] or list(self.seen.heads[:1])
        return (found[0].layer, found[0].head) if found else (0, 0)


def _side_by_side(q: ReadingInputs) -> Reading:
    return side_by_side(q.model, q.tokens, *q.head, tokenizer=q.tokenizer, pool=FINE)


def _patching(q: ReadingInputs) -> Reading:
    """Returns the reading of activation patching between the text and `against`, by the logit of the text's
    continuation minus the logit of the continuation of `against`; without `against`, the reading of the indirect-object
    task, whatever the text."""
    if q.against is None:
        task = indirect_object(q.tokenizer, n=PAIRS)
        return activation_patching(
            q.model, task.clean, task.corrupt, task.metric, labels=task.labels, progress=q.progress
        )
    right, other = (_follows(q.model, tokens) for tokens in (q.tokens, q.against))
    if right == other:
        word = spell(right, q.tokenizer)
        raise RequestError(
            f"{word!r} follows both texts: give one that another word follows, to tell them apart by",
            code="conflict", field="against", value=word,
        )  # fmt: skip

    def lead(logits: Tensor) -> Tensor:
        return logits[:, -1, right] - logits[:, -1, other]

    words = [spell(token, q.tokenizer) for token in q.tokens[0].tolist()]
    return activation_patching(q.model, q.tokens, q.against, lead, labels=words, progress=q.progress)


@torch.no_grad()
def _follows(model: Model, tokens: Tensor) -> int:
    """Returns the id of the token that the model predicts as most likely after a text."""
    module = eager(model)
    with at_rest(model):
        return int(module.unembed(module.hidden_states(tokens)[:, -1:]).argmax())


def _head_scores(q: ReadingInputs) -> Reading:
    return head_scores(q.model, length=max(2, min(REPEATED, eager(q.model).config.context // 2)))


def _neighbours(q: ReadingInputs) -> Reading:
    some = list(dict.fromkeys(q.tokens[0].tolist()))[:MOST_WORDS]
    k = min(NEIGHBOURS, eager(q.model).vocab_size - 1)
    return embedding_neighbours(q.model, some, k=k, tokenizer=q.tokenizer)


READINGS: dict[str, Callable[[ReadingInputs], Reading]] = {
    "attention_rollout": lambda q: attention_rollout(q.model, q.tokens, q.tokenizer, pool=FINE),
    "side_by_side": _side_by_side,
    "logit_attribution": lambda q: logit_attribution(q.model, q.tokens, tokenizer=q.tokenizer),
    "head_ablation": lambda q: head_ablation(q.model, q.tokens[:, -ABLATED:], progress=q.progress),
    PATCHING: _patching,
    "head_scores": _head_scores,
    "meaning_scores": lambda q: meaning_scores(q.model, q.tokenizer),
    "attention_distance": lambda q: attention_distance(q.model, q.tokens),
    "attention_sinks": lambda q: attention_sinks(q.model, q.tokens),
    "massive_activations": lambda q: massive_activations(q.model, q.tokens),
    "token_similarity": lambda q: token_similarity(q.model, q.tokens, pool=FINE),
    "position_picture": lambda q: position_picture(q.model),
    "embedding_neighbours": _neighbours,
    "expert_routing": lambda q: expert_routing(q.model, q.tokens, tokenizer=q.tokenizer),
}
"""Name of a function in `gf.lens` -> function that computes its reading from the inputs."""


def chosen(names: Sequence[str]) -> list[str]:
    """Returns the requested names of readings without duplicates, with `ALL` replaced by the names of all readings.
    Raises RequestError for an unknown name."""
    for name in names:
        check_reading(name)
    return list(READINGS) if ALL_READINGS in names else list(dict.fromkeys(names))


def ask(names: Sequence[str], inputs: ReadingInputs, progress: OnProgress) -> Iterator[tuple[str, Reading | str]]:
    """Yields (name, reading) for each name, or (name, reason) if this model or text cannot have the reading."""
    for name in names:
        try:
            yield name, READINGS[name](replace(inputs, progress=partial(progress, name)))
        except (RequestError, WorkError) as problem:
            yield name, str(problem)


_ABLATED: dict[str | None, Callable[..., dict[str, Edit]]] = {
    None: ablate_layer, "mixer": ablate_mixer, "ffn": ablate_ffn,
    "heads": ablate_heads, "neurons": ablate_neurons, "experts": ablate_experts,
}  # fmt: skip


def ablation(named: str) -> dict[str, Edit]:
    """Returns the edit that removes the component `named`: layers.2, layers.2.mixer, layers.2.ffn, layers.2.heads.1,3
    and neurons or experts in the same way. Raises RequestError for a name of another kind."""
    layer, part, indices = ablated_part(named)
    return _ABLATED[part](layer, *([indices] if indices else []))


def check_edits(config: ModelConfig, edits: Sequence[Mapping[str, Edit]]) -> None:
    """Raises RequestError for an edit of a layer, head, unit or expert that a model of this config lacks, before the
    model has weights: its outline reads two tokens with the edits."""
    outline, tokens = config.outline(), torch.zeros(1, 2, dtype=torch.long, device="meta")
    with ExitStack() as edited, torch.no_grad():
        for one in edits:
            edited.enter_context(edit(outline, one))
        with suppress(NotImplementedError, RuntimeError):  # an outline has no values, which some experts need
            outline(tokens) if outline.encoder is None else outline(tokens, source=tokens)
