"""Inspection of a model that reads a text: its page, and its predictions with and without some components."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from glassformer.errors import RequestError
from glassformer.figures import fixed
from glassformer.laboratory.inspection import inspect
from glassformer.lens.inspected import HeadMap
from glassformer.lens.inspection import Inspection
from glassformer.lens.page.words import visible
from glassformer.serving.computing import Served
from glassformer.studio.kept import KEPT, PageShelf

PREDICTED = 8
"""Number of predicted tokens that are listed."""
MOST = 512
"""Largest number of tokens of a text."""


@lru_cache(maxsize=KEPT)
def inspected(served: Served, label: str, text: str, ablate: tuple[str, ...]) -> Inspection:
    """Returns the inspection of a model on a text, without the components `ablate`, as the command line gives it, but
    under the name `label`.

    Raises RequestError for a text that the model cannot read, and for a component that it lacks."""
    loaded = served.loaded
    if loaded.tokenizer is None:
        raise RequestError(f"{served.name} has no tokenizer", code="missing", field="model", value=served.name)
    if (length := len(loaded.tokenizer.encode_prompt(text))) > MOST:
        raise RequestError(
            f"the text has {length:,} tokens; a page of the studio reads at most {MOST}",
            code="range", field="text", value=length, expected=f"at most {MOST} tokens",
        )  # fmt: skip
    found = inspect(loaded, text, ablate=list(ablate), progress=False, command=command(served.name, text, ablate))
    assert isinstance(found, Inspection)
    without = f" without {', '.join(ablate)}" if ablate else ""
    return replace(found, name=f"{label}{without}")


def command(name: str, text: str, ablate: tuple[str, ...]) -> str:
    """Returns the command line that gives the inspection of a model on a text."""
    flags = "".join(f" --ablate {one}" for one in ablate)
    return f"glassformer inspect {shlex.quote(name)} --text {shlex.quote(text)}{flags}"


def look(served: Served, label: str, text: str, ablate: tuple[str, ...], kept: PageShelf) -> dict[str, Any]:
    """Returns the name of an inspection's page in `kept`, the components that can be removed, and losses and
    predictions with and without those of `ablate`; the page shows the model as `label`. Raises RequestError for a text
    that the model cannot read and a component that it lacks."""
    whole = inspected(served, label, text, ())
    seen = inspected(served, label, text, ablate) if ablate else whole
    python = f", ablate={list(ablate)}" if ablate else ""
    return {
        "page": kept.put(seen.html()),
        "layers": _layers(served, whole),
        "words": [visible(word) for word in whole.words],
        "generates": served.session is not None,
        "answers": [_answer(one) for one in ((whole, seen) if ablate else (whole,))],
        "commands": [command(served.name, text, ablate)],
        "python": [f"gf.inspect({served.name!r}, {text!r}{python})"],
    }


def _layers(served: Served, seen: Inspection) -> list[dict[str, Any]]:
    """Returns the components of each layer that an edit can remove; for each head, the kind and the entropy of its
    attention on this text."""
    kinds = {(head.layer, head.head): kind for kind, some in seen.notable().items() for head in some}
    found = []
    for layer, block in enumerate(served.loaded.config.layers()):
        heads = [
            {"head": head.head, "what": _what(head, kinds), "entropy": fixed(head.attention_entropy, 2)}
            for head in seen.heads
            if head.layer == layer
        ]
        found.append({"layer": layer, "mixer": block.mixer.kind, "heads": heads, "ffn": block.ffn is not None})
    return found


def _what(head: HeadMap, kinds: Mapping[tuple[int, int], str]) -> str:
    """Returns the target of a head's attention in one word: first, before, itself or other; "" without a clear
    target."""
    if head.rests:
        return "first"
    if head.watches:
        return "before"
    return {"itself": "itself", "elsewhere": "other"}.get(kinds.get((head.layer, head.head), ""), "")


def _answer(seen: Inspection) -> dict[str, Any]:
    found = seen.to_dict()
    last = found["lens"]["predictions"][-1][:PREDICTED]
    return {
        "name": found["name"], "loss": fixed(seen.mean_loss, 3),
        "next": [{"word": one["word"], "probability": f"{100 * (one['probability'] or 0):.1f} %"} for one in last],
    }  # fmt: skip
