"""What a folder of sentence-transformers says besides its model: how hidden states become one vector for a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glassformer.config import read_tree
from glassformer.errors import RequestError, shown
from glassformer.files import atomic_file
from glassformer.generation.vectors import Pooling
from glassformer.parts.head import Pool

MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
MODES: dict[str, Pool] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"
}  # fmt: skip
MOST_TOKENS = 1 << 28


def read(folder: Path) -> Pooling | None:
    """None for a folder that is none of sentence-transformers. Raises RequestError for steps that are not known here:
    a vector without them would be another one."""
    if not (folder / MODULES).is_file():
        return None
    steps = read_tree(folder / MODULES)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise RequestError(f"{folder / MODULES} is no list of modules", code="type", field=MODULES)
    kinds = [str(step.get("type")).rpartition(".")[2] for step in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise RequestError(
            f"{folder / MODULES} has the steps {shown(', '.join(kinds))}; known are Transformer, Pooling and, after "
            "them, Normalize",
            code="unknown", field="modules", value=kinds, expected="Transformer, Pooling, Normalize",
        )  # fmt: skip
    place = folder / Path(str(steps[1].get("path"))).name / "config.json"
    said = _mapping(place)
    modes = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in MODES:
        raise RequestError(
            f"{place} asks for {shown(', '.join(modes)) or 'no pooling'}; one of {', '.join(MODES)} is right",
            code="unknown", field="pooling", value=modes, expected=", ".join(MODES),
        )  # fmt: skip
    most = _mapping(folder / LENGTH).get("max_seq_length") if (folder / LENGTH).is_file() else None
    if most is not None and (type(most) is not int or not 1 <= most < MOST_TOKENS):
        raise RequestError(
            f"{folder / LENGTH}: max_seq_length={shown(most)}: a positive whole number is right",
            code="range", field=f"{LENGTH}:max_seq_length", value=most,
        )  # fmt: skip
    return Pooling(MODES[modes[0]], "Normalize" in kinds, most)


def write(folder: Path, pooling: Pooling, width: int) -> None:
    """The files that sentence-transformers reads beside the model's."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    steps = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    modes = {mode: how == pooling.how for mode, how in MODES.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    if pooling.max_tokens is not None:
        _write(folder / LENGTH, {"max_seq_length": pooling.max_tokens, "do_lower_case": False})
    _write(folder / MODULES, steps)


def _mapping(path: Path) -> dict[str, Any]:
    said = read_tree(path)
    if not isinstance(said, dict):
        raise RequestError(f"{path} is no mapping", code="type", field=path.name)
    return said


def _write(path: Path, value: Any) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
