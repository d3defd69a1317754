"""Metadata of a GGUF that do not depend on the architecture: records, tokenizer, settings of decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from glassformer.conversion import answers
from glassformer.errors import RequestError, shown

SAMPLING = "general.sampling."
SETTINGS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Metadata key of a decoding setting -> name in generation_config.json."""
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("general.name", "general.author", "general.version", "general.organization", "general.finetune",
         "general.basename", "general.description", "general.quantized_by", "general.size_label", "general.license",
         "general.license.", "general.url", "general.doi", "general.uuid", "general.repo_url", "general.source.",
         "general.base_model.", "general.dataset.", "general.datasets", "general.tags", "general.languages"),
        "is a record of where the model comes from",
    ),
    **dict.fromkeys(("general.file_type", "general.quantization_version"), "repeats what each tensor says"),
    **dict.fromkeys(("general.alignment", "split."), "is read with the tensors"),
    **dict.fromkeys(("imatrix.", "quantize."), "is a record of how the weights were quantised"),
    **dict.fromkeys(
        (f"{SAMPLING}xtc_threshold", f"{SAMPLING}mirostat_tau", f"{SAMPLING}mirostat_eta",
         f"{SAMPLING}penalty_last_n"),
        "counts with another setting, which is named if it is not applied",
    ),
    **dict.fromkeys(
        ("tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix",
         "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap",
         "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"),
        "is read for the kinds of tokenizers that have it",
    ),
    **dict.fromkeys(
        ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.fim_mid_token_id",
         "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id", "tokenizer.ggml.middle_token_id"),
        "names tokens with which a caller asks for the middle of a text",
    ),
    **dict.fromkeys(("tokenizer.ggml.add_sep_token",), "is for two texts in one, as rerankers read them"),
    **dict.fromkeys(("tokenizer.ggml.cls_token_id",), "repeats bos_token_id, which is read"),
    **dict.fromkeys(("tokenizer.ggml.token_type_count",), "is a shape, which the tensors have"),
    **dict.fromkeys(("tokenizer.huggingface.json",), "repeats the tokenizer"),
    **dict.fromkeys(("tokenizer.chat_template.", "tokenizer.chat_templates"), "is read with the other templates"),
}  # fmt: skip
"""Keys, or prefixes ending with a dot, that are ignored without effect -> reason."""
NEUTRAL: dict[str, tuple[Any, ...]] = {f"{SAMPLING}xtc_probability": (0,), f"{SAMPLING}mirostat": (0,)}
"""Keys that this package does not apply -> values without effect."""
FIRST = 40
"""Most characters of a metadata value in a warning."""
WHOLE = -1
"""`penalty_last_n` for all tokens so far, the way repetitions are counted here."""


class Metadata(dict[str, Any]):
    """Metadata of a GGUF, with a record of the keys that were read."""

    def __init__(self, pairs: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def fitting(self, key: str, fits: Callable[[Any], bool]) -> Any:
        """Returns the value under `key` if `fits(value)`; otherwise None, and the key stays unread."""
        return self.get(key) if fits(super().get(key)) else None

    def unread(self) -> dict[str, Any]:
        return {key: value for key, value in sorted(self.items()) if key not in self.seen}


def shortest(value: Any) -> Any:
    """Returns the shortest decimal of a 32-bit float, 1e-05 for 9.999999747378752e-06; other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 1e30 else value


def decoding(metadata: Metadata) -> dict[str, Any]:
    """Returns the settings of decoding in a GGUF's metadata, by their names in generation_config.json.

    do_sample is True for a temperature above 0. A repetition penalty counts only if it covers all tokens so far."""
    reach = dict.get(metadata, f"{SAMPLING}penalty_last_n")
    found = {}
    for key, name in SETTINGS.items():
        value = shortest(metadata.fitting(SAMPLING + key, answers.KNOWN[name]))
        if value is not None and (key != "penalty_repeat" or value == 1 or reach == WHOLE):
            found[name] = value
        elif value is not None:
            metadata.seen.remove(SAMPLING + key)
    return {**found, "do_sample": found["temperature"] > 0} if "temperature" in found else found


def sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns GGUF metadata that make llama.cpp decode with these settings of generation_config.json, regardless of its
    defaults; {} without settings."""
    if not generation.keys() & {"do_sample", *SETTINGS.values()}:
        return {}
    drawn, penalty = bool(generation.get("do_sample")), float(generation.get("repetition_penalty") or 1.0)
    said = {
        "temp": float(generation.get("temperature", 1.0)) if drawn else 0.0,
        "top_k": int(generation.get("top_k") or 0),
        "top_p": float(generation.get("top_p") or 1.0),
        "min_p": float(generation.get("min_p") or 0.0),
        **({"penalty_repeat": penalty, "penalty_last_n": WHOLE} if penalty != 1 else {}),
    }
    return {SAMPLING + key: value for key, value in said.items()}


def check(metadata: Metadata, path: str, architecture: str) -> None:
    """Warns of unread metadata that may matter. Raises RequestError for a file without a whole model."""
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise RequestError(
            f"{path}: general.type={shown(kind)}: the file holds no whole model",
            code="unsupported", field="general.type", value=kind, expected="model",
        )  # fmt: skip
    strange = {
        key: value for key, value in metadata.unread().items()
        if not key.startswith(f"{architecture}.") and not _is_harmless(key, value)
    }  # fmt: skip
    if strange:
        told = ", ".join(f"{shown(key)}={_start(value)}" for key, value in [*strange.items()][:8])
        warnings.warn(f"{path} has metadata that are not applied and may matter: {told}")


def _start(value: Any) -> str:
    """Returns the first FIRST characters of a value for a message, on one line, with an ellipsis if there are more."""
    text = shown(value, FIRST + 1)
    return text if len(text) <= FIRST else f"{text[:FIRST]}…"


def _is_harmless(key: str, value: Any) -> bool:
    if key in NEUTRAL:
        return not isinstance(value, np.ndarray) and value in NEUTRAL[key]
    return key in WITHOUT_EFFECT or any(key.startswith(one) for one in WITHOUT_EFFECT if one.endswith("."))
