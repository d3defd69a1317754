"""A whole expression, or the name of a text, refused if it names nothing. Torch is not needed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names import grammar, places
from glassformer.names.known import (
    ALL_READINGS,
    CLAIMS,
    CORPORA,
    DATA_PREFIXES,
    DEVICES,
    FAMILIES,
    GUIDES,
    MACHINES,
    NAMED_TEXTS,
    OPTIMIZERS,
    PACKAGED,
    PRESETS,
    READINGS,
    SHORT_NAMES,
    SIZED_TOKENIZERS,
    TASKS,
    TOKENIZER_FORMS,
    TOKENIZERS,
)
from glassformer.names.sizes import is_size, shape

_ABLATED = re.compile(r"layers\.(\d{1,9})(?:\.(mixer|ffn)|\.(heads|neurons|experts)\.(\d{1,9}(?:,\d{1,9})*))?")
"""Name of a component for --ablate."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
"""Keys of config.json that hold a number of layers."""
BLOCKS, HEADER = re.compile(rb"\.block_count\x04\0\0\0(.{4})", re.DOTALL), 1 << 16
"""Number of layers in the metadata of a .gguf file, a whole number of 32 bits, and bytes in which it is looked for."""
PARTS = "glassformer.parts"
"""Group of the entry points of parts that are installed from outside; the package's own parts register in this module's
place, and a part of a user's own with them."""


def check_model(expression: str, weights: bool = False, text: bool = False) -> None:
    """Raises RequestError for an expression that certainly names no model.

    `weights` asks for a model with weights, `text` for one that reads text. An expression that passes may still be
    refused when its files are read.
    """
    name, size, changes = grammar.parse(expression, names_a_model)
    if name in PRESETS or name in FAMILIES:
        if weights:
            raise places.without_weights(name, str(expression) if grammar.exists(str(expression)) else "")
    elif name in PACKAGED:
        places.packaged(name)
    elif name.startswith("hf:"):
        places.hub_name(name)
    else:
        check_files(name, weights, text)
    if size:
        shape(size)
    for change in changes:
        check_change(change)


def check_files(name: str, weights: bool, text: bool) -> None:
    """Raises RequestError if the files of a checkpoint or config are certainly incomplete."""
    path = places.existing(name)
    if path is None:
        raise places.unknown(name, weights)
    if not path.is_dir():
        if weights and path.suffix not in (*places.WEIGHTS, ".json", ".yaml", ".yml"):
            with suppress(OSError):
                places.refuse_text(path)
        return
    if places.is_folder(path):
        if weights and not any((path / file).exists() for file in places.FOLDER_WEIGHTS):
            raise RequestError(places.no_weights(path), code="missing", field=places.SINGLE)
        if text and not (path / places.TOKENIZER).exists():
            raise places.no_tokenizer(path)
    elif not places.has_params(path) and not any((path / file).exists() for file in ("config.yaml", "latest")):
        raise places.no_config(path)


def check_change(change: str) -> None:
    """Raises RequestError for a short name that no part has. Parts from outside may add some."""
    name = change.partition(":")[0]
    if "=" in change or name in SHORT_NAMES or knows_others():
        return
    raise places.unknown_change(name, SHORT_NAMES)


def knows_others() -> bool:
    """Returns True if there may be parts from outside the package."""
    return PARTS in sys.modules or bool(entry_points(group=PARTS))


def check_optimizer(name: str) -> None:
    """Raises RequestError for an optimizer that no part has. Parts from outside may add some."""
    if name not in OPTIMIZERS and not knows_others():
        raise _unknown("optimizer", name, OPTIMIZERS)


def check_device(name: str) -> None:
    """Raises RequestError for a device of no known type."""
    if (kind := name.partition(":")[0]) not in DEVICES:
        raise _unknown("device", name, DEVICES, kind)


def check_tokenizer(name: str, others: tuple[str, ...] = ()) -> None:
    """Raises RequestError for a tokenizer that is neither a name nor an existing path; `others` are more names to
    propose."""
    kind, colon, _ = name.partition(":")
    if not (kind in TOKENIZERS and (not colon or kind in SIZED_TOKENIZERS)) and places.existing(name) is None:
        raise unknown_tokenizer(name, others)


def check_tokenizers(names: list[str]) -> None:
    """Raises RequestError for a list of tokenizers with a name that is neither that of a tokenizer nor that of a model
    with a tokenizer."""
    if not names:
        raise RequestError(f"give {TOKENIZER_FORMS}, a tokenizer.json or a model", code="missing", field="tokenizers")
    for name in names:
        if name in PACKAGED:
            places.packaged(name)
        elif name.startswith("hf:"):
            places.hub_name(name)
        elif name in PRESETS or name in FAMILIES:
            raise places.without_weights(name, name if grammar.exists(name) else "")
        else:
            check_tokenizer(name, others=tuple(PACKAGED))


def unknown_tokenizer(name: str, others: tuple[str, ...] = ()) -> RequestError:
    """Returns the refusal of a tokenizer that is neither a name nor an existing path."""
    hint = did_you_mean(name.partition(":")[0], (*TOKENIZERS, *others))
    return RequestError(
        f"tokenizer {shown(repr(name))} is not auto, {TOKENIZER_FORMS}, or the path of a tokenizer.json{hint}",
        code="unknown", field="tokenizer", value=name,
    )  # fmt: skip


def _unknown(field: str, value: str, known: tuple[str, ...], word: str = "") -> RequestError:
    hint = did_you_mean(word or value, known) or f"; known: {', '.join(known)}"
    return RequestError(
        f"{field}={shown(repr(value))} is unknown{hint}",
        code="unknown", field=field, value=value, expected=", ".join(known),
    )  # fmt: skip


def names_a_model(piece: str) -> bool:
    """Returns True for NAME[@SIZE][+CHANGE...] of a model that has a name here: a folder called so does not hide it."""
    first, *wanted = grammar.CHANGES.split(piece)
    name, at, size = first.partition("@")
    known = name in PRESETS or name in FAMILIES or name in PACKAGED
    return (
        known
        and (not at or is_size(size))
        and all("=" in one or one.partition(":")[0] in SHORT_NAMES for one in wanted)
    )


def check_data(data: str) -> None:
    """Raises RequestError for the name of a text if there is certainly no such text."""
    named = data in (*CORPORA, *NAMED_TEXTS) or data.partition(":")[0] in TASKS or data.startswith(DATA_PREFIXES)
    path = data.partition(",column=")[0].partition(",dtype=")[0]
    if not data or data == "-" or named or places.existing(path) or places.existing(data):
        return
    raise unknown_data(data)


def check_path(path: str, field: str) -> None:
    """Raises RequestError for a file or folder that does not exist."""
    if path != "-" and places.existing(path) is None:
        raise RequestError(
            f"{field}: no file or folder is named {shown(path, 200)}{did_you_mean(path, places.neighbours(path))}",
            code="missing", field=field, value=path,
        )  # fmt: skip


def check_experiment(path: str) -> None:
    """Raises RequestError for the file of an experiment if it does not exist, or is the name of a model."""
    if places.existing(path) is None and names_a_model(path):
        raise RequestError(
            f"{shown(path)} is the name of a model, and run takes the file of an experiment: glassformer generate, "
            "chat, inspect and train take a model",
            code="type", field="file", value=path, expected="a file such as recipes/gpt2-to-llama.yaml",
        )  # fmt: skip
    check_path(path, "file")


def check_guide(name: str) -> None:
    """Raises RequestError for the name of a guide that is not known."""
    if name not in GUIDES:
        raise RequestError(
            f"no guide is named {shown(repr(name))}{did_you_mean(name, GUIDES)}; the guides are {', '.join(GUIDES)}",
            code="unknown", field="guide", value=name,
        )  # fmt: skip


def check_claim(name: str) -> None:
    """Raises RequestError for the name of a claim that is not known."""
    if name not in CLAIMS:
        raise RequestError(
            f"no claim is named {shown(repr(name))}"
            + (did_you_mean(name, CLAIMS) or f"; `glassformer claims` lists all {len(CLAIMS)}"),
            code="unknown", field="claim", value=name,
        )  # fmt: skip


def check_machine(text: str, known: Collection[str] = MACHINES) -> None:
    """Raises RequestError for NAME or NAME:COUNT of an accelerator that is not known."""
    name = text.partition(":")[0]
    if name not in known:
        near = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise RequestError(
            f"no machine is named {shown(name)!r}{near}",
            code="unknown", field="machine", value=name, expected=", ".join(known),
        )  # fmt: skip


def check_reading(name: str) -> None:
    """Raises RequestError for the name of a reading that is not known."""
    known = (*READINGS, ALL_READINGS)
    if name not in known:
        near = did_you_mean(name, known) or f"; there are {', '.join(READINGS)}, and {ALL_READINGS}"
        raise RequestError(f"no reading is named {name!r}{near}", code="unknown", field="reading", value=name)


def ablated_part(named: str) -> tuple[int, str | None, list[int]]:
    """Returns layer, part and indices of a component: 2, "heads" and [1, 3] of layers.2.heads.1,3, or 2, None and [] of
    layers.2. Raises RequestError for a name of another kind."""
    found = _ABLATED.fullmatch(named)
    if found is None:
        raise RequestError(
            f"ablate={named!r}: use layers.2, layers.2.mixer, layers.2.ffn, layers.2.heads.1,3, and neurons or "
            "experts in the same way",
            code="syntax", field="ablate", value=named,
        )  # fmt: skip
    layer, whole, several, indices = found.groups()
    return int(layer), whole or several, [int(index) for index in indices.split(",")] if indices else []


def check_ablated(named: Iterable[str], model: str) -> None:
    """Raises RequestError for a name of no kind of component, or of a layer that a checkpoint lacks by its config."""
    layers = {one: ablated_part(one)[0] for one in named}
    name, _, changes = grammar.parse(model, names_a_model)
    path = places.packaged(name) if name in PACKAGED else places.existing(name)
    count = None if path is None or changes else _layers(path)
    if count is None:
        return
    for one, layer in layers.items():
        if layer >= count:
            raise RequestError(
                f"ablate={one}: layer {layer} is out of range: {model} has layers 0 to {count - 1}",
                code="range", field="layer", value=layer,
            )  # fmt: skip


def _layers(path: Path) -> int | None:
    """Returns the number of layers of a checkpoint by its config.json or the header of a .gguf file; None if they do
    not say, and for two towers."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        if path.is_file():
            with path.open("rb") as file:
                found = BLOCKS.search(file.read(HEADER)) if file.read(4) == b"GGUF" else None
            return None if found is None else int.from_bytes(found[1], "little")
        tree = json.loads((path / places.CONFIG).read_text(encoding="utf-8"))
        if not tree.get("is_encoder_decoder"):
            return next((tree[key] for key in LAYERS if isinstance(tree.get(key), int)), None)
    return None


def check_table(data: str) -> None:
    """Raises RequestError for a table of finished runs that does not exist."""
    if places.existing(data) is None:
        near = did_you_mean(data, places.neighbours(data))
        raise RequestError(
            f"data={shown(repr(data))} names no .csv file and no folder of runs{near}; "
            "with models before it, --data names a text",
            code="missing", field="data", value=data,
        )  # fmt: skip


def unknown_data(data: str) -> RequestError:
    """Returns the refusal of a text that is not found, with the nearest names."""
    hint = did_you_mean(data, [*places.neighbours(data), *CORPORA, *NAMED_TEXTS, *TASKS])
    return RequestError(
        f"data={shown(repr(data))} names no file, no folder, no published text ({', '.join(NAMED_TEXTS)}) and no "
        f"embedded corpus ({', '.join(CORPORA)}){hint}",
        code="unknown", field="data", value=data,
    )  # fmt: skip
