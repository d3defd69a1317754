"""Answers about a model that is being composed: its drawing with places to click, and the choices at each place."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import count, wiring_drawing
from glassformer.figures.terminal import size
from glassformer.laboratory.anatomy import Anatomy
from glassformer.names.explained import texts
from glassformer.names.sizes import SIZES
from glassformer.naming.changes import has_word, holds, words
from glassformer.naming.models import parse, preset, trial, undone_by
from glassformer.planning import plan
from glassformer.planning.counts import component_table
from glassformer.report.sketch import describe, marked, sketch
from glassformer.studio.blocks import blocks

PLACES: dict[str, tuple[str, ...]] = {
    "mixer": ("mixer", "position", "visibility", "rotary_scaling"),
    "ffn": ("ffn",),
    "norm": ("norm",),
    "final_norm": ("norm",),
    "embedding_norm": ("model", "norm"),
    "wiring": ("residual",),
    "embedding": ("position", "model"),
    "position": ("position",),
    "head": ("head", "reparam"),
    "repeat": ("size",),
}
"""Place in a drawing -> axes whose choices a click on it opens."""
AXES = ("mixer", "position", "visibility", "ffn", "norm", "residual")
"""Axes of parts of layers; a word of one is marked as present with any value."""
AROUND = ("size", "mixer", "position", "visibility", "ffn", "norm", "residual", "head", "model")
"""Axes whose choices are shown while no place is chosen."""


def compose(expression: str, base: str | None = None) -> dict[str, Any]:
    """Returns drawing, counts, notes and commands of a model; with `base`, the places that differ are marked.

    Raises RequestError for an unknown expression."""
    config = preset(expression)
    sketches = [sketch(config.to_dict())]
    other = None
    if base is not None:
        other = preset(base)
        sketches = marked([*sketches, sketch(other.to_dict())])
    anatomy = Anatomy(expression, config, base, other)
    quoted = f'"{expression}"'
    return {
        "expression": expression,
        "drawing": wiring_drawing(sketches[0], describe(expression, sketches[0]), places=True),
        "places": PLACES,
        "around": AROUND,
        "summary": anatomy.summary,
        "notes": undone_by(expression),
        "components": blocks([component_table(anatomy.counts.components)]),
        "symbols": {letter: f"{value:,}" for letter, value in anatomy.counts.symbols.items()},
        "ideas": [dict(zip(("part", "first", "second", "change"), row, strict=True)) for row in anatomy.ideas],
        "commands": [f"glassformer inspect {expression}" + (f" --diff {base}" if base else "")],
        "python": [f"gf.preset({quoted})" if base is None else f'gf.inspect({quoted}, diff="{base}")'],
    }


def exports(expression: str) -> dict[str, Any]:
    """Returns the tools that can load a model, and for each other tool the parts of the model that block it; also the
    command and the Python call that print the same.

    Raises RequestError for an unknown expression."""
    from glassformer.laboratory.exporting import Exports

    return {
        "exports": blocks(Exports(expression, preset(expression)).lines()),
        "commands": [f"glassformer inspect {expression} --exports"],
        "python": [f'gf.inspect("{expression}", exports=True)'],
    }


def choices(expression: str, axis: str) -> dict[str, Any]:
    """Returns the choices of an axis, each with its effect on a model's costs or the reason why it does not fit.

    Raises RequestError for an unknown axis or expression."""
    config = preset(expression)
    if axis == "size":
        found = [_sized(expression, config, name) for name in SIZES]
    else:
        known = words()
        if axis not in known:
            raise RequestError(
                f"no axis is named {axis}", code="unknown", field="axis", value=axis, expected=", ".join(known)
            )
        explained = texts()
        found = []
        for word in known[axis]:
            about = explained.get(word.name, {})
            value = word.example if word.read is not None and not word.optional else ""
            change = f"{word.name}:{value}" if value else word.name
            one = {"word": word.name, "value": value, "takes_value": word.read is not None, "example": word.example,
                   "meaning": about.get("what", ""), "formula": about.get("formula", "")}  # fmt: skip
            has = has_word(config, word.name) if axis in AXES else holds(change, config)
            found.append(one | {"current": has} | _chosen(expression, config, change))
    return {"axis": axis, "choices": found}


def _sized(expression: str, config: ModelConfig, name: str) -> dict[str, Any]:
    base, own, changes = parse(expression)
    sized = "+".join([f"{base}@{name}", *changes])
    layers, width, heads = SIZES[name]
    about = {"word": f"@{name}", "value": "", "takes_value": False, "example": "", "formula": "",
             "current": own == name, "meaning": f"{layers} layers, width {width:,}, {heads} heads"}  # fmt: skip
    try:
        with trial():
            return about | {"expression": sized, "dropped": []} | _effect(config, preset(sized))
    except RequestError as problem:
        return about | {"refused": str(problem)}


def _chosen(expression: str, config: ModelConfig, change: str) -> dict[str, Any]:
    """Returns the costs of a model after a change against those before, and the changes `dropped` because they do not
    fit with it; or, as `refused`, the reason why the change does not fit."""
    try:
        with trial():
            changes, after = _fitting(expression, change)
            dropped = [one for one in parse(expression)[2] if one not in changes and _word(one) != _word(change)]
            return {"dropped": dropped} | _effect(config, after)
    except RequestError as problem:
        return {"refused": str(problem)}


def _effect(before: ModelConfig, after: ModelConfig) -> dict[str, Any]:
    text = min(before.context, after.context)
    return {
        "parameters": _change(before.num_params(), after.num_params(), count),
        "flops": _change(before.flops(text), after.flops(text), count),
        "state": _change(_state(before, text), _state(after, text), size),
    }


def _state(config: ModelConfig, context: int) -> int:
    return config.state_bytes(context) if config.writes else 0


def _change(before: float, after: float, words: Any) -> dict[str, Any]:
    """Returns `after` (the new value as text), `share` (its change in per cent, or as a multiple from 10 on, "" without
    a change), and `grows`."""
    share = f"{(after - before) / before:+.1%}".replace("-", "−") if before and after != before else ""
    if share[1:] == "0.0%":
        share = f"{share[0]}<0.1%"
    if before and after >= 10 * before:
        share = f"× {after / before:,.0f}"
    return {"after": words(after), "share": share, "grows": after > before}


def with_change(expression: str, change: str) -> str:
    """Returns the shortest expression of a model after a change: a change of the same name is replaced, one that does
    not fit with it is dropped, and those without effect are left out. Raises RequestError if it does not fit the model.

    >>> with_change("llama@10m+gqa:2+rope", "gqa:3")
    'llama@10m+gqa:3'
    >>> with_change("llama@10m+gqa:2", "mamba")
    'llama@10m+mamba'
    """
    first = _named(expression)
    with trial():
        changes, target = _fitting(expression, change)
        for one in list(changes):
            fewer = [other for other in changes if other is not one]
            with suppress(RequestError):
                if preset("+".join([first, *fewer])) == target:
                    changes = fewer
    return "+".join([first, *changes])


def _fitting(expression: str, change: str) -> tuple[list[str], ModelConfig]:
    """Returns the changes of an expression after `change` was added, and the config: a change of the same name, or one
    that does not fit with it, is dropped. Raises RequestError if `change` does not fit the model."""
    kept = [one for one in parse(expression)[2] if _word(one) != _word(change)]
    tried = [[*kept, change], *([*(other for other in kept if other is not one), change] for one in kept), [change]]
    refused: RequestError | None = None
    for changes in tried:
        try:
            return changes, preset("+".join([_named(expression), *changes]))
        except RequestError as problem:
            refused = refused or problem
    assert refused is not None
    raise refused


def _named(expression: str) -> str:
    """Returns an expression without its changes: NAME or NAME@SIZE."""
    name, own_size, _ = parse(expression)
    return f"{name}@{own_size}" if own_size else name


def _word(change: str) -> str:
    path, equals, _ = change.partition("=")
    return path.strip() if equals else change.partition(":")[0]


def cost(expression: str, **options: Any) -> dict[str, Any]:
    """Returns the printed plan of a model as blocks, with its command and its line of Python.

    Raises RequestError for options that cannot be planned."""
    planned = plan([expression], **options)
    given = {name: value for name, value in options.items() if value not in (None, False)}
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())
    keywords = "".join(f", {name}={value!r}".replace("'", '"') for name, value in given.items())
    return {
        "costs": blocks(planned.lines()),
        "commands": [f"glassformer plan {expression} {flags}".strip()],
        "python": [f'gf.plan("{expression}"{keywords})'],
    }
