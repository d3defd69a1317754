"""A whole expression, or the name of a text, refused if it names nothing. Torch is not needed."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names import grammar, places
from glassformer.names.known import (
    CORPORA,
    DATA_PREFIXES,
    DEVICES,
    FAMILIES,
    GUIDES,
    NAMED_TEXTS,
    OPTIMIZERS,
    PACKAGED,
    PRESETS,
    SHORT_NAMES,
    SIZED_TOKENIZERS,
    TASKS,
    TOKENIZER_FORMS,
    TOKENIZERS,
)
from glassformer.names.sizes import is_size, shape

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
        return
    if places.is_folder(path):
        if weights and not any((path / file).exists() for file in (places.SINGLE, places.INDEX)):
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
            f"{field}: no file or folder is named {shown(path, 200)}{did_you_mean(path, neighbours(path))}",
            code="missing", field=field, value=path,
        )  # fmt: skip


def check_guide(name: str) -> None:
    """Raises RequestError for the name of a guide that is not known."""
    if name not in GUIDES:
        raise RequestError(
            f"no guide is named {shown(repr(name))}{did_you_mean(name, GUIDES)}; the guides are {', '.join(GUIDES)}",
            code="unknown", field="guide", value=name,
        )  # fmt: skip


def neighbours(name: str) -> list[str]:
    """Returns the paths of the files and folders next to a path."""
    path = Path(name)
    try:
        return [str(path.with_name(entry.name)) for entry in path.expanduser().parent.iterdir()]
    except (OSError, ValueError, RuntimeError):
        return []


def unknown_data(data: str) -> RequestError:
    """Returns the refusal of a text that is not found, with the nearest names."""
    hint = did_you_mean(data, [*neighbours(data), *CORPORA, *NAMED_TEXTS, *TASKS])
    return RequestError(
        f"data={shown(repr(data))} names no file, no folder, no published text ({', '.join(NAMED_TEXTS)}) and no "
        f"embedded corpus ({', '.join(CORPORA)}){hint}",
        code="unknown", field="data", value=data,
    )  # fmt: skip
