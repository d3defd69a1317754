"""generation_config.json: the tokens that end an answer and the settings of sampling, carried from folder to folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassformer.config import read_tree
from glassformer.conversion.fields import Fields
from glassformer.errors import shown
from glassformer.text import Tokenizer
from glassformer.text.pairs import START

FILE = "generation_config.json"
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
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _tokens),
    "early_stopping": lambda value: _flag(value) or value == "never",
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _number),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), _number),
}
"""Settings that are carried -> check of the value."""
WITHOUT_EFFECT = {
    **dict.fromkeys(("eos_token_id", "_from_model_config", "transformers_version"), "is read elsewhere, or a record"),
    **dict.fromkeys(
        ("cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
         "prefill_chunk_size", "continuous_batching_config"),
        "says how the same tokens are computed",
    ),
    **dict.fromkeys(
        ("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
         "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
         "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
        "says how tokens are guessed ahead, which changes no distribution",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "says what a call of transformers returns",
    ),
    **dict.fromkeys(("num_return_sequences", "max_time"), "is for the caller to say: n, and an interrupt"),
    "remove_invalid_values": "hides logits that are not numbers, which are an error here",
}  # fmt: skip
"""Settings that change no text in this package -> reason."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_h": (),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "stop_strings": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
}
"""Settings that this package does not apply -> values that change no text."""


def read(folder: Path, fields: Fields) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Returns (ids of the tokens that end an answer, known settings of decoding) of a checkpoint's `folder`; `fields`
    are those of its config.json.

    Without a generation_config.json the fields of config.json count, as in older folders. Warns of settings that are
    not applied. Raises RequestError for a file that cannot be read."""
    path, config_eos = folder / FILE, fields.get("eos_token_id")
    if path.is_file():
        said = read_tree(path)
        said = said if isinstance(said, dict) else {}
    else:
        path, said = Path(fields.where), {name: fields.get(name) for name in (*KNOWN, *NEUTRAL)}
    value = config_eos if said.get("eos_token_id") is None else said["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    settings = {name: said[name] for name, fits in KNOWN.items() if fits(said.get(name))}
    if unread := [name for name in said if _is_unread(name, said[name])]:
        told = ", ".join(f"{shown(name)}={shown(said[name])}" for name in unread[:8])
        warnings.warn(f"{path} has settings of decoding that are not applied: {told}")
    return tuple(one for one in ids[:MOST_ENDS] if _is_count(one)), settings


def _is_unread(name: str, value: Any) -> bool:
    """Returns True if this setting may change a generated text and is not applied."""
    if value is None or value == -1 or name in WITHOUT_EFFECT:  # -1 marks an unset token or number
        return False
    return value not in NEUTRAL[name] if name in NEUTRAL else name not in KNOWN or not KNOWN[name](value)


def special_ids(tokenizer: Tokenizer | None, ends: Sequence[int]) -> dict[str, int | None]:
    """Returns {"bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ...}, None for a token that the tokenizer
    lacks. Of several `ends` the tokenizer's counts, or else the first, because config.json holds one."""
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos", "pad")}
    if ends and ids["eos"] not in ends:
        ids["eos"] = ends[0]
    return {f"{name}_token_id": value for name, value in ids.items()}


def written(ids: Mapping[str, Any], ends: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of generation_config.json; without settings and with at most one end it is marked as derived
    from config.json."""
    if len(ends) < 2 and not settings:
        return {"_from_model_config": True, **ids}
    return {**ids, **({"eos_token_id": list(ends)} if len(ends) > 1 else {}), **settings}
