"""generation_config.json: where an answer ends and how it is drawn, carried from folder to folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassformer.config import read_tree
from glassformer.text import Tokenizer
from glassformer.text.pairs import START

FILE = "generation_config.json"
RULES = ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "no_repeat_ngram_size")
"""Of the tokens that may be written from a source; older folders have them in config.json."""
MOST_ENDS = 64
MOST_WORDS = 4096
LARGEST = 1 << 31


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_count(value)


def _words(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_WORDS and all(map(_ids, value))


def _ids(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MOST_ENDS and all(map(_is_count, value))


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_WORDS and all(map(_is_count, value))


KNOWN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("do_sample", "renormalize_logits", "use_cache"), _flag),
    **dict.fromkeys(("top_k", "num_beams", "no_repeat_ngram_size"), _is_count),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), _is_count),
    **dict.fromkeys(("bos_token_id", "pad_token_id", START), _is_count),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _is_count),
    "bad_words_ids": _words,
    "suppress_tokens": _tokens,
    "early_stopping": lambda value: _flag(value) or value == "never",
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _number),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), _number),
}
"""Settings that are carried, and what each of them may be."""


def read(folder: Path, config_eos: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(ids at which the folder says that an answer ends, its settings that are known). `config_eos` is what config.json
    says of the ids; it counts where generation_config.json says nothing. Raises RequestError for a file that is none.
    """
    said = read_tree(path) if (path := folder / FILE).is_file() else {}
    said = said if isinstance(said, dict) else {}
    value = config_eos if said.get("eos_token_id") is None else said["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    settings = {name: said[name] for name, fits in KNOWN.items() if fits(said.get(name))}
    return tuple(one for one in ids[:MOST_ENDS] if _is_count(one)), settings


def special_ids(tokenizer: Tokenizer | None, ends: Sequence[int]) -> dict[str, int | None]:
    """{"bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ...}, of the `ends` the tokenizer's own or the first:
    a config.json has room for one."""
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos", "pad")}
    if ends and ids["eos"] not in ends:
        ids["eos"] = ends[0]
    return {f"{name}_token_id": value for name, value in ids.items()}


def written(ids: Mapping[str, Any], ends: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json."""
    if len(ends) < 2 and not settings:
        return {"_from_model_config": True, **ids}
    return {**ids, **({"eos_token_id": list(ends)} if len(ends) > 1 else {}), **settings}
