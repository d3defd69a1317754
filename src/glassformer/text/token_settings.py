"""Keys of a tokenizer_config.json: those applied here, those without effect, and those that may change a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from glassformer.text.growth import SEQUENCES

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
READ = {*ROLES, "chat_template", "model_max_length"}
"""Keys that other modules read; model_max_length is for text embedding."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token that control its matching in a text."""
LISTS = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
"""Keys of lists of special tokens, or of mappings from names to them; the second is read if the first is empty."""
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("tokenizer_class", "processor_class", "auto_map", "backend", "files_loaded", "name_or_path", "_commit_hash",
         "transformers_version", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file", "gguf_file",
         "normalizer_file", "is_local", "local_files_only", "use_fast", "from_slow", "trust_remote_code", "model_type",
         "tokenizer_type", "max_model_input_sizes", "device_map", "subfolder", "proxies", "legacy_format"),
        "names a class, a version or a file",
    ),
    **dict.fromkeys(
        ("padding_side", "max_length", "max_len", "stride", "truncation_strategy", "padding", "truncation",
         "pad_to_multiple_of", "pad_token_type_id", "tokenizer_padding", "tokenizer_truncation"),
        "holds where a caller pads or cuts texts",
    ),
    **dict.fromkeys(
        ("model_input_names", "verbose", "trim_offsets", "return_token_type_ids", "return_attention_mask"),
        "says what a call of transformers returns or prints",
    ),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), "is dropped by transformers if there is a tokenizer.json"),
    **dict.fromkeys(("vocab", "merges", "vocab_size"), "repeats the tokenizer.json"),
    **dict.fromkeys(("response_template", "response_schema"), "takes answers apart"),
    "chat_control_tokens": "lists tokens to keep out of messages; no special token is read in messages here",
    **dict.fromkeys(
        ("errors", "sp_model_kwargs", "do_basic_tokenize", "never_split", "spaces_between_special_tokens"),
        "is for tokenizers written in Python",
    ),
    **dict.fromkeys(("tgt_lang", "use_default_system_prompt"), "is set by the generation settings, or the template"),
}  # fmt: skip
"""Keys that change no token and no text here -> reason."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "split_special_tokens": (False,),
    "truncation_side": ("right",),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (False,),
    "fix_mistral_regex": (False,),
}
"""Keys that this package does not apply -> values that change no token."""


class FileSteps:
    """Effects of a tokenizer.json on a text, in terms of the keys of a tokenizer_config.json.

    `description` is the file without its vocabulary, `model` the kind of its model, `vocabulary` its tokens."""

    def __init__(self, description: Mapping[str, Any], model: str, vocabulary: Iterable[str]) -> None:
        self.description, self.model, self.vocabulary = description, model, vocabulary
        self.steps = [*_steps(description.get("normalizer")), *_steps(description.get("pre_tokenizer"))]

    def values(self, kind: str, key: str) -> list[Any]:
        """Returns the values under `key` of each normalizer and pre-tokenizer of type `kind`."""
        return [step.get(key) for step in self.steps if step["type"] == kind]

    def has(self, kind: str) -> bool:
        return any(step["type"] == kind for step in self.steps)

    def lowers(self) -> bool:
        return self.has("Lowercase") or True in self.values("BertNormalizer", "lowercase")

    def strips(self) -> bool:
        said = self.values("BertNormalizer", "strip_accents")
        return self.has("StripAccents") or True in said or (None in said and self.lowers())

    def prefixes(self) -> bool:
        schemes = {*self.values("Metaspace", "prepend_scheme")} - {"never"}
        return self.has("Prepend") or bool(schemes) or True in self.values("ByteLevel", "add_prefix_space")

    def prefixes_all(self) -> bool | None:
        """Returns True if the file puts a space at the start of a text and after each special token, False if only at
        the start of a text; None without the steps Prepend and Metaspace, and for a model other than BPE."""
        if self.model != "bpe" or not (self.has("Prepend") or self.has("Metaspace")):
            return None
        return "first" not in self.values("Metaspace", "prepend_scheme")

    def around(self) -> tuple[str | None, list[str], str | None]:
        """Returns (token that the file puts before a text, all tokens that it puts around one, last token after it);
        None for a missing token."""
        for step in _steps(self.description.get("post_processor")):
            if {"cls", "sep"} <= step.keys():
                return step["cls"][0], [step["cls"][0], step["sep"][0]], step["sep"][0]
            if single := step.get("single"):
                named = [one["SpecialToken"]["id"] if "SpecialToken" in one else None for one in single]
                return named[0], [one for one in named if one is not None], named[-1]
        return None, [], None

    def named(self, place: int, said: Any) -> Any:
        """Returns the first (`place` 0) or last (-1) token that the file puts around a text; `said` if it does not put
        tokens on both sides."""
        first, _, last = self.around()
        return said if first is None or last is None else (first, last)[place]

    def ends(self, said: Any) -> bool:
        """Returns False only for a Unigram model whose texts get tokens after them, none before, and not `said` among
        them."""
        first, tokens, _ = self.around()
        return self.model != "unigram" or first is not None or not tokens or said in tokens

    def added(self) -> set[str]:
        return {token["content"] for token in self.description["added_tokens"]}

    def count(self, pattern: str) -> int:
        return sum(re.fullmatch(pattern, token) is not None for token in self.vocabulary)


UNCLEANED = ("bpe", "wordpiece")
"""Kinds of models whose decoded text keeps its spaces: transformers does not clean up BPE, and models of WordPiece
generate no text."""
BUILT: dict[str, Callable[[FileSteps, Any], Any]] = {
    "do_lower_case": lambda steps, _: steps.lowers(),
    "strip_accents": lambda steps, _: steps.strips(),
    "tokenize_chinese_chars": lambda steps, _: True in steps.values("BertNormalizer", "handle_chinese_chars"),
    "add_prefix_space": lambda steps, _: steps.prefixes(),
    "legacy": lambda steps, _: steps.prefixes_all(),
    "extra_ids": lambda steps, _: steps.count(r"<extra_id_\d+>"),
    "offset": lambda steps, _: steps.count(r"<unk_\d+>") + 2,
    "clean_up_tokenization_spaces": lambda steps, said: said if steps.model in UNCLEANED else False,
    "src_lang": lambda steps, said: said if not steps.around()[1] or said in steps.around()[1] else "",
    "cls_token": lambda steps, said: steps.named(0, said),
    "sep_token": lambda steps, said: steps.named(-1, said),
    "eos_token": lambda steps, said: said if steps.ends(said) else "",
    **dict.fromkeys(("mask_token", "mask_token_sent"), lambda steps, said: said if said in steps.added() else ""),
}
"""Keys that make transformers rebuild steps of a tokenizer -> function of the file's steps and the key's value that
returns the value to which the tokenizer.json corresponds; None if the key has no effect."""


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a part of a tokenizer.json; of a sequence, each step inside it."""
    inner = next((part[name] for name in SEQUENCES if name in part), None) if part else ()
    if part and inner is None:
        yield part
    for one in inner or ():
        yield from _steps(one)


def tokens(settings: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Returns {text of a token: its flags (`FLAGS`), as far as given} for the tokens that the settings list as special
    or added."""
    listed = settings.get("added_tokens_decoder")
    given: list[tuple[Any, bool]] = [(one, False) for one in _listed(listed)]
    given += [(said, True) for name, said in settings.items() if _is_role(name)]
    newer = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    given += [(one, True) for said in (newer, settings.get("model_specific_special_tokens")) for one in _listed(said)]
    found: dict[str, dict[str, bool]] = {}
    for token, special in given:
        text = text_of(token)
        if text:
            said = token if isinstance(token, dict) else {}
            flags = found.setdefault(text, {key: said[key] for key in FLAGS if isinstance(said.get(key), bool)})
            flags["special"] = special or flags.get("special", False)
    return found


def _is_role(name: str) -> bool:
    return name.endswith("_token") and name not in WITHOUT_EFFECT and name != "mask_token"


def _listed(said: Any) -> Iterable[Any]:
    return said.values() if isinstance(said, dict) else said if isinstance(said, list) else ()


def text_of(token: Any) -> str | None:
    """Returns the text of a token in a tokenizer_config.json: the string itself, or "content" of {"content": "</s>",
    ...}; None for another value."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def merged(settings: dict[str, Any], roles: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings; if they list no added tokens, they are completed by `roles`, the content of a
    special_tokens_map.json, and `added`, the content of an added_tokens.json."""
    if "added_tokens_decoder" in settings:
        return settings
    listed = {str(index): {"content": text} for text, index in added.items()}
    return {**settings, **{name: _typed(said) for name, said in roles.items()},
            **({"added_tokens_decoder": listed} if listed else {})}  # fmt: skip


def _typed(said: Any) -> Any:
    """Returns a token, or a list of tokens, in the form that transformers writes into a tokenizer_config.json."""
    if isinstance(said, list):
        return [_typed(one) for one in said]
    return {"__type": "AddedToken", **said} if isinstance(said, dict) and "content" in said else said


def unheeded(settings: Mapping[str, Any], steps: FileSteps) -> dict[str, Any]:
    """Returns the settings that may change a token or a text and are not applied here."""
    return {name: value for name, value in settings.items() if _matters(name, value, steps)}


def _matters(name: str, value: Any, steps: FileSteps) -> bool:
    if value is None or value in ([], {}):
        return False
    if name in BUILT:
        said = text_of(value) if name.endswith(("_token", "_sent")) else value
        return BUILT[name](steps, said) not in (said, None)
    if name in NEUTRAL:
        return value not in NEUTRAL[name]
    if name in READ or name in WITHOUT_EFFECT or name == "added_tokens_decoder" or name in LISTS:
        return False
    return not (_is_role(name) and text_of(value) is not None)
