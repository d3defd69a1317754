"""Files of sentence-transformers next to a model's: the pooling of hidden states into one vector per text."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

from glassformer.config import read_tree
from glassformer.errors import RequestError, shown
from glassformer.files import atomic_file
from glassformer.generation.vectors import Pooling
from glassformer.parts.head import Pool
from glassformer.text.subword import SETTINGS_FILE

MODULES, LENGTH, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
LENGTHS = (LENGTH, *(f"sentence_{kind}_config.json" for kind in
           ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")))  # fmt: skip
"""File names of the first step's settings; the first file that is not empty counts."""
POOLING = "1_Pooling/config.json"
FILES = (MODULES, *LENGTHS, PROMPTS, POOLING, "2_Normalize/config.json")
"""Files that a folder of sentence-transformers has in addition to one of transformers."""
MODES: dict[str, Pool] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
FLAG = re.compile(r"pooling_mode_(\w+?)(_tokens?)?$")
"""Pattern of the flag of a pooling mode, as sentence-transformers wrote it before 5.4."""
READ = {
    MODULES: {"type", "path"},
    LENGTH: {"max_seq_length"},
    PROMPTS: {"prompts", "default_prompt_name", "similarity_fn_name"},
    POOLING: {"pooling_mode", "include_prompt"},
}
"""File -> keys that are read from it."""
WITHOUT_EFFECT = {
    **dict.fromkeys(("idx", "name", "kwargs"), "names a step, or what a caller may pass to it"),
    **dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), "repeats the width of the model"),
    **dict.fromkeys(("unpad_inputs", "backend"), "says how the same vectors are computed"),
    **dict.fromkeys(("__version__", "requirements"), "names versions of packages"),
}
"""Keys that change no vector -> reason."""
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
OUTPUT = "sentence_embedding"
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    LENGTH: {
        "do_lower_case": (False,),
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
        "module_output_name": ("token_embeddings",),
        "tokenizer_name_or_path": (),
        **dict.fromkeys(("processing_kwargs", *ARGUMENTS), ({},)),
    },
    PROMPTS: {"model_type": ("SentenceTransformer",)},
    "Normalize": {"module_input_name": (OUTPUT,), "module_output_name": (OUTPUT,)},
}
"""File or step -> keys that this package does not apply -> values that change no vector."""
OF_QUERIES = ("query_length", "document_length", "query_expansion")
"""Settings of LENGTH for texts that a caller marks as queries or documents."""
MOST_TOKENS = 1 << 28


def read(folder: Path) -> Pooling | None:
    """Returns the pooling that a folder describes; None for a folder without files of sentence-transformers. Raises
    RequestError for unknown steps, because vectors would differ without them."""
    if not (folder / MODULES).is_file():
        return None
    steps = read_tree(folder / MODULES)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise RequestError(f"{folder / MODULES} is not a list of modules", code="type", field=MODULES)
    for step in steps:
        _check(folder / MODULES, MODULES, step)
    kinds = [str(step.get("type")).rpartition(".")[2] for step in steps]
    own = all(str(step.get("type")).startswith("sentence_transformers.") for step in steps)
    if not own or kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        types = kinds if own else [str(step.get("type")) for step in steps]
        raise RequestError(
            f"{folder / MODULES} has the steps {shown(', '.join(types))}; known are Transformer, "
            "Pooling and, after them, Normalize, of sentence_transformers",
            code="unknown", field="modules", value=kinds, expected="Transformer, Pooling, Normalize",
        )  # fmt: skip
    places = [_place(folder, step.get("path")) for step in steps]
    if places[0] != folder:
        raise RequestError(
            f"{folder / MODULES}: the model is in the folder {shown(steps[0]['path'])}, and only one in the folder "
            "itself is read; move its files there",
            code="unsupported", field="modules", value=steps[0]["path"], expected="an empty path",
        )  # fmt: skip
    place = places[1] / "config.json"
    said = _mapping(place)
    modes = _modes(said)
    if len(modes) != 1 or modes[0] not in MODES:
        raise RequestError(
            f"{place}: pooling_mode={shown(', '.join(modes))}: it must be one of {', '.join(MODES)}",
            code="unknown", field="pooling", value=modes, expected=", ".join(MODES),
        )  # fmt: skip
    _check(place, POOLING, {key: value for key, value in said.items() if not FLAG.fullmatch(key)})
    if not isinstance(included := said.get("include_prompt", True), bool):
        raise RequestError(code="type", field="include_prompt", value=included, expected="true or false")
    normalize = "Normalize" in kinds
    if normalize and (places[2] / "config.json").is_file():
        _check(places[2] / "config.json", "Normalize", _mapping(places[2] / "config.json"))
    longest, prompt = _longest(folder), _prompt(folder, normalize)
    return Pooling(MODES[modes[0]], normalize, longest, prompt, included)


def _place(folder: Path, path: Any) -> Path:
    """Returns the folder of a step, `folder` / `path`. Raises RequestError for a path outside of `folder`."""
    if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
        raise RequestError(code="range", field="modules", value=path, expected="the path of a folder inside this one")
    return folder / path


def _check(place: Path, file: str, said: dict[str, Any]) -> None:
    """Raises RequestError if `said`, the content of `file`, has a key that may change a vector and is not applied."""
    neutral = NEUTRAL.get(file, {})
    for key, value in said.items():
        if value is None or key in WITHOUT_EFFECT or key in READ.get(file, ()) or value in neutral.get(key, ()):
            continue
        raise RequestError(
            f"{place}: {shown(key)}={shown(value)} is not supported; vectors may depend on it",
            code="unsupported" if key in neutral else "unknown", field=f"{file}:{key}"[:100], value=value,
        )  # fmt: skip


def _modes(said: dict[str, Any]) -> list[str]:
    """Returns the names of the pooling modes in `said`: in one key since sentence-transformers 5.4, in a flag each
    before."""
    given = said.get("pooling_mode")
    if given is not None:
        return [str(mode) for mode in given] if isinstance(given, list) else [str(given)]
    flags = [FLAG.fullmatch(name) for name, value in said.items() if value]
    return [flag[1] for flag in flags if flag is not None] or ["mean"]


def _longest(folder: Path) -> int | None:
    """Returns the number of tokens at which texts are truncated before embedding; None if the folder does not limit
    it."""
    files = [name for name in LENGTHS if (folder / name).is_file()]
    name, said = next(((name, said) for name in files if (said := _mapping(folder / name))), (LENGTH, {}))
    _check(folder / name, LENGTH, {key: value for key, value in said.items() if key not in OF_QUERIES})
    if told := [f"{key}={shown(said[key])}" for key in OF_QUERIES if said.get(key) is not None]:
        warnings.warn(f"{folder / name}: {', '.join(told)} is not applied: queries and documents are read as any text")
    most = said.get("max_seq_length")
    if most is None and (folder / SETTINGS_FILE).is_file():
        settings = _mapping(folder / SETTINGS_FILE)
        most = settings.get("model_max_length", settings.get("max_len"))
        if isinstance(most, int | float) and most >= MOST_TOKENS:  # transformers writes 1e30 for no limit
            return None
    if most is not None and (type(most) is not int or not 1 <= most < MOST_TOKENS):
        raise RequestError(
            f"{folder}: max_seq_length={shown(most)} must be a positive whole number",
            code="range", field=f"{LENGTH}:max_seq_length", value=most,
        )  # fmt: skip
    return most


def _prompt(folder: Path, normalize: bool) -> str:
    """Returns the text that precedes each text to embed, "" by default. Raises RequestError for an unknown key or name;
    warns of a similarity that ranks otherwise than the cosine, which is used here."""
    if not (folder / PROMPTS).is_file():
        return ""
    said = _mapping(folder / PROMPTS)
    _check(folder / PROMPTS, PROMPTS, said)
    similarity = said.get("similarity_fn_name")
    if similarity not in (None, "cosine") and not (normalize and similarity in ("dot", "euclidean")):
        warnings.warn(f"{folder / PROMPTS}: similarity_fn_name={shown(similarity)}: passages are ranked by cosine here")
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
    """Replaces the files of sentence-transformers in a folder by those of `pooling`, for vectors of `width` elements;
    for None, only removes them."""
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
        raise RequestError(f"{path} is not a mapping", code="type", field=path.name)
    return said


def _write(path: Path, value: Any) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
