"""What a folder of sentence-transformers says besides its model: how hidden states become one vector for a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from glassformer.config import read_tree
from glassformer.errors import RequestError, shown
from glassformer.files import atomic_file
from glassformer.generation.vectors import Pooling
from glassformer.parts.head import Pool
from glassformer.text.subword import SETTINGS_FILE

MODULES, LENGTH, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
FILES = (MODULES, LENGTH, PROMPTS, POOLING)
"""Files of a folder of sentence-transformers that a folder of transformers lacks."""
MODES: dict[str, Pool] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
FLAG = re.compile(r"pooling_mode_(\w+?)(_tokens?)?$")
"""A flag for each mode, as sentence-transformers wrote them before 5.4."""
HARMLESS = {"__version__", "similarity_fn_name", "model_type", "prompts", "default_prompt_name"}
"""Keys of PROMPTS that are read, and those that change no vector."""
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
    modes = _modes(said)
    if len(modes) != 1 or modes[0] not in MODES:
        raise RequestError(
            f"{place} asks for {shown(', '.join(modes)) or 'no pooling'}; it must be one of {', '.join(MODES)}",
            code="unknown", field="pooling", value=modes, expected=", ".join(MODES),
        )  # fmt: skip
    prompt = _prompt(folder)
    return Pooling(
        MODES[modes[0]], "Normalize" in kinds, _longest(folder), prompt, said.get("include_prompt") is not False
    )


def _modes(said: dict[str, Any]) -> list[str]:
    """Returns the names of the modes of pooling: one key since sentence-transformers 5.4, a flag for each before."""
    given = said.get("pooling_mode")
    if given is not None:
        return [str(mode) for mode in given] if isinstance(given, list) else [str(given)]
    flags = [FLAG.fullmatch(name) for name, value in said.items() if value is True]
    return [flag[1] for flag in flags if flag is not None]


def _longest(folder: Path) -> int | None:
    """Returns the number of tokens after which a text is cut; None if the folder does not limit it."""
    said = _mapping(folder / LENGTH) if (folder / LENGTH).is_file() else {}
    if said.get("do_lower_case") is True:
        raise RequestError(
            f"{folder / LENGTH}: do_lower_case=true is not supported; let the tokenizer's normalizer lower the text",
            code="unsupported", field=f"{LENGTH}:do_lower_case", value=True, expected="false",
        )  # fmt: skip
    most = said.get("max_seq_length")
    if most is None and (folder / SETTINGS_FILE).is_file():
        most = _mapping(folder / SETTINGS_FILE).get("model_max_length")
        if isinstance(most, int | float) and most >= MOST_TOKENS:  # transformers writes 1e30 for no limit
            return None
    if most is not None and (type(most) is not int or not 1 <= most < MOST_TOKENS):
        raise RequestError(
            f"{folder}: max_seq_length={shown(most)} must be a positive whole number",
            code="range", field=f"{LENGTH}:max_seq_length", value=most,
        )  # fmt: skip
    return most


def _prompt(folder: Path) -> str:
    """Returns the text that precedes each text to embed. Raises RequestError for an unknown key or name."""
    if not (folder / PROMPTS).is_file():
        return ""
    said = _mapping(folder / PROMPTS)
    if unknown := [key for key, value in said.items() if key not in HARMLESS and value is not None]:
        raise RequestError(
            f"{folder / PROMPTS}: {shown(unknown[0])} is not supported; vectors may depend on it",
            code="unknown", field=f"{PROMPTS}:{unknown[0]}"[:100], value=said[unknown[0]],
        )  # fmt: skip
    name, prompts = said.get("default_prompt_name"), said.get("prompts") or {}
    known = isinstance(prompts, dict) and (name is None or isinstance(name, str))
    prompt = (prompts.get(name) if name is not None else "") if known else None
    if not isinstance(prompt, str):
        raise RequestError(
            f"{folder / PROMPTS}: prompts has no text of the name {shown(name)}",
            code="unknown", field="default_prompt_name", value=name,
        )  # fmt: skip
    return prompt


def replace(folder: Path, pooling: Pooling | None, width: int) -> None:
    """Writes the files that only sentence-transformers reads; without `pooling`, only removes them."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if pooling is None:
        return
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    steps = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    mode = next(mode for mode, how in MODES.items() if how == pooling.how)
    said = {"embedding_dimension": width, "pooling_mode": mode, "include_prompt": pooling.include_prompt}
    (folder / POOLING).parent.mkdir(exist_ok=True)
    _write(folder / POOLING, said)
    if pooling.prompt:
        _write(folder / PROMPTS, {"prompts": {"text": pooling.prompt}, "default_prompt_name": "text"})
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
