"""Published models as cards with the words of their parts, and how two models differ."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig, Stage
from glassformer.figures import count, wiring_drawing
from glassformer.figures.terminal import size
from glassformer.laboratory.anatomy import Anatomy
from glassformer.names.explained import texts
from glassformer.names.known import FAMILIES, YEARS
from glassformer.naming.changes import has_word, word_of, words
from glassformer.naming.models import preset
from glassformer.parts.core.base import WORDS
from glassformer.planning import plan
from glassformer.report.sketch import describe, marked, sketch
from glassformer.studio.blocks import blocks

HEADS = {"mha", "gqa", "mqa"}
AXES = ("mixer", "position", "visibility", "ffn", "norm", "residual")
"""Axes of the filters of models, in their order on a card."""


@cache
def gallery() -> dict[str, Any]:
    """Returns a card for each published model, and by axis the words that cards are filtered by.

    A card has the words of all its layers, so that a word which only some layers have is found too."""
    families = {published: family for family, published in FAMILIES.items()}
    cards = [_card(name, families.get(name, "")) for name in PRESETS]
    explained = texts()
    filters = {
        axis: [
            {"word": word, "meaning": explained.get(word, {}).get("what", "")}
            for word in dict.fromkeys(word for card in cards for word in card["parts"][axis])
        ]
        for axis in AXES
    }
    return {"cards": cards, "filters": filters}


def _card(name: str, family: str) -> dict[str, Any]:
    config = PRESETS[name]()
    parameters = config.num_params()
    state = config.state_bytes(config.context) / config.context if config.writes else None
    return {
        "name": name, "family": family, "year": YEARS[name], "parameters": parameters, "size": count(parameters),
        "layers": config.n_layers, "width": config.d_model, "context": f"{config.context:,}", "state": size(state),
        "encoder": config.encoder is not None, "generates": config.writes, "parts": parts_of(config),
    }  # fmt: skip


def parts_of(config: ModelConfig) -> dict[str, list[str]]:
    """Returns the words of the parts that any layer has, by axis; the kind of a part that no word names."""
    found: dict[str, dict[str, None]] = {axis: {} for axis in AXES}
    tree = config.to_dict()
    for tower, plain in ((config, tree), (config.encoder, tree["encoder"])):
        if tower is None:
            continue
        added = plain["embedding"]["position"]
        for i, stage in enumerate(tower.stack):
            for j, block in enumerate(stage.blocks):
                for axis, part in _parts(plain["stack"][i]["blocks"][j], added).items():
                    if part is not None:
                        found[axis][_word(axis, json.dumps(part, sort_keys=True))] = None
                    elif axis == "position" and not (block.mixer.knows_order or block.mixer.reads_memory):
                        found[axis]["nope"] = None
                alone = config.replace(stack=(Stage(blocks=(block,)),), encoder=None)
                found["mixer"] |= dict.fromkeys(word for word in _properties() if has_word(alone, word))
    if HEADS & found["mixer"].keys():  # the word of its heads says more
        found["mixer"].pop("attention", None)
    return {axis: list(some) for axis, some in found.items()}


def _parts(block: dict[str, Any], added: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    mixer = block["mixer"]
    own = {"mixer": mixer, "position": mixer.get("position") or added, "visibility": mixer.get("visibility")}
    return own | {axis: block[axis] for axis in ("ffn", "norm", "residual")}


@cache
def _word(axis: str, part: str) -> str:
    plain = json.loads(part)
    return (word_of(axis, plain) or plain["kind"]).partition(":")[0]


@cache
def _properties() -> list[str]:
    """Returns the words of properties that some mixers have, such as qknorm."""
    return [word.name for word in words()["mixer"] if word.name in WORDS and word.change]


def difference(first: str, second: str) -> dict[str, Any]:
    """Returns two drawings with the places that differ marked, the parts that differ, and the costs side by side.

    Raises RequestError."""
    names, configs = [first, second], [preset(first), preset(second)]
    sketches = marked([sketch(config.to_dict()) for config in configs])
    anatomy = Anatomy(first, configs[0], second, configs[1])
    costs = plan([first] if first == second else [first, second])
    return {
        "names": names,
        "drawings": [
            wiring_drawing(one, describe(name, one)) for name, one in zip(names, sketches, strict=True)
        ],
        "ideas": [dict(zip(("part", "first", "second", "change"), row, strict=True)) for row in anatomy.ideas],
        "costs": blocks(costs.lines()),
        "commands": [f"glassformer inspect {first} --diff {second}", f"glassformer plan {first} {second}"],
        "python": [f'gf.inspect("{first}", diff="{second}")', f'gf.plan(["{first}", "{second}"])'],
    }  # fmt: skip
