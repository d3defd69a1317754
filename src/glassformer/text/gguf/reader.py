"""Tokenizer of a GGUF file, from its metadata."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.text.gguf.fields import (
    CHAT_TEMPLATE,
    LARGEST_MERGES,
    LARGEST_VOCABULARY,
    PREFIX,
    SPECIAL_IDS,
    GGUFFields,
    TokenType,
)
from glassformer.text.gguf.pre_tokenizers import BY_NAME, described
from glassformer.text.subword import SPACE, FileTokenizer, one_sentence

CONTINUATION = "##"  # of WordPiece
LARGEST_WORD = 100  # characters; WordPiece maps a longer one to unknown, in every published BERT
LARGEST_SPLITS = 1 << 27  # sum of squared token lengths; a vocabulary of 256,000 pieces has a tenth of it
CHARSMAP_HEADER = 4  # bytes: the length of the trie that follows


@dataclass(frozen=True)
class GGUFVocabulary:
    """Checked vocabulary of a GGUF: all `tokens` differ, the arrays have equal lengths, ids are in range."""

    fields: GGUFFields
    tokens: list[str]
    types: np.ndarray  # (v,) int64, of TokenType
    ids: dict[str, int]  # by the keys of SPECIAL_IDS

    def text(self, name: str) -> str | None:
        return self.tokens[self.ids[name]] if name in self.ids else None

    def scores(self) -> np.ndarray:
        scores = self.fields.numbers("scores", len(self.tokens), "fiu")
        if scores is None:
            raise RequestError(
                f"{PREFIX}scores is missing; a vocabulary of this kind has one for each token",
                code="missing", field=f"{PREFIX}scores",
            )  # fmt: skip
        scores = scores.astype(np.float64)
        if not np.isfinite(scores).all():
            wrong = int(np.argmin(np.isfinite(scores)))
            raise RequestError(
                f"{PREFIX}scores[{wrong}]={scores[wrong]} must be a finite number",
                code="range", field=f"{PREFIX}scores[{wrong}]", value=scores[wrong],
            )  # fmt: skip
        return scores

    def merges(self) -> list[tuple[str, str]] | None:
        lines = self.fields.texts("merges", LARGEST_MERGES)
        if lines is None:
            return None
        known, merges = set(self.tokens), list[tuple[str, str]]()
        for index, line in enumerate(lines):
            cut = line.find(" ", 1)  # a part may itself start with a space
            left, right = line[:cut], line[cut + 1 :]
            if cut < 0 or not {left, right, left + right} <= known:
                raise RequestError(
                    f"{PREFIX}merges[{index}]={line[:60]!r} must be two tokens of this vocabulary with a space "
                    "between them, whose concatenation is a token too",
                    code="unknown", field=f"{PREFIX}merges[{index}]", value=line,
                )  # fmt: skip
            merges.append((left, right))
        if len(set(merges)) < len(merges):
            raise RequestError(
                f"{PREFIX}merges has {len(merges) - len(set(merges))} of its merges twice",
                code="conflict", field=f"{PREFIX}merges",
            )  # fmt: skip
        return merges


@dataclass(frozen=True)
class Kind:
    """Meaning of a value of `tokenizer.ggml.model`: the function `build`, which returns the parts of a tokenizer.json,
    and llama.cpp's defaults for special ids and for tokens around a text."""

    build: Callable[[GGUFVocabulary], dict[str, Any]]
    ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False
    last: str = "eos"  # key of SPECIAL_IDS: the token that `add_eos` puts after a text
    asks: bool = True  # True if the file may override it


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> FileTokenizer:
    """Returns the tokenizer that the `tokenizer.*` keys of a GGUF file describe.

    `tokenizer.ggml.model` may be `gpt2` (byte-level BPE, cut as `tokenizer.ggml.pre` names), `llama` (SentencePiece
    BPE: of two neighbours, those whose concatenation has the best score merge first), `t5` (Unigram) or `bert`
    (WordPiece). Arrays may be lists or NumPy arrays. Ids are those of llama.cpp, with the special tokens it adds under
    `add_specials=True`. Raises RequestError for a key that is missing, of a wrong type, too large, or contradicts
    another.
    """
    fields = GGUFFields(metadata)
    model = fields.text("model")
    if model is None:
        raise RequestError(
            f"{PREFIX}model is missing; this GGUF file brings no tokenizer", code="missing", field=f"{PREFIX}model"
        )
    if model not in KINDS:
        raise RequestError(
            f"{PREFIX}model={model[:60]!r} is not supported; known are {', '.join(KINDS)}{did_you_mean(model, KINDS)}",
            code="unknown", field=f"{PREFIX}model", value=model,
        )  # fmt: skip
    kind = KINDS[model]
    vocabulary = _vocabulary(fields, kind)
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary, kind),
        **kind.build(vocabulary),
    }
    from tokenizers import Tokenizer as Library

    with one_sentence(f"this {model} tokenizer of a GGUF file cannot be built", "convert the model again"):
        library = Library.from_str(json.dumps(parts))
    return FileTokenizer(library, _settings(vocabulary))


def _vocabulary(fields: GGUFFields, kind: Kind) -> GGUFVocabulary:
    tokens = fields.texts("tokens", LARGEST_VOCABULARY)
    if not tokens:
        raise RequestError(
            f"{PREFIX}tokens is {'missing' if tokens is None else 'empty'}; a tokenizer needs tokens",
            code="missing", field=f"{PREFIX}tokens",
        )  # fmt: skip
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]  # llama.cpp's names
    _refuse_twins(tokens)
    size = len(tokens)
    ids = {name: index for name, index in kind.ids.items() if index < size}
    for name in SPECIAL_IDS:
        named = fields.token_id(f"{name}_token_id", size)
        if named is not None:
            ids[name] = named
    types = fields.numbers("token_type", size, "iu")
    if types is None:
        types = np.full(size, TokenType.NORMAL)
        types[list(ids.values())] = TokenType.CONTROL
    elif not ((types >= 0) & (types <= max(TokenType))).all():
        wrong = int(np.argmax((types < 0) | (types > max(TokenType))))
        raise RequestError(
            f"{PREFIX}token_type[{wrong}]={types[wrong]} must lie between 0 and {max(TokenType):d}",
            code="range", field=f"{PREFIX}token_type[{wrong}]", value=types[wrong],
        )  # fmt: skip
    return GGUFVocabulary(fields, tokens, types.astype(np.int64), ids)


def _refuse_twins(tokens: list[str]) -> None:
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first.setdefault(token, index) != index:
            raise RequestError(
                f"{PREFIX}tokens has {token[:60]!r} at {first[token]} and at {index}; each token must be there once",
                code="conflict", field=f"{PREFIX}tokens", value=token,
            )  # fmt: skip


def _added(vocabulary: GGUFVocabulary) -> list[dict[str, Any]]:
    """Returns the `added_tokens` of a tokenizer.json, which are matched in a text before any other step."""
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [
        _added_token(vocabulary, index, special[TokenType(kind)])
        for index, kind in enumerate(vocabulary.types.tolist())
        if kind in special
    ]


def _added_token(vocabulary: GGUFVocabulary, index: int, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": vocabulary.tokens[index], "special": special, **flags}


def _post_processor(vocabulary: GGUFVocabulary, kind: Kind) -> dict[str, Any] | None:
    """Returns the `post_processor` of a tokenizer.json: the first and last token that llama.cpp puts around a text;
    None if it adds neither."""
    fields = vocabulary.fields
    rule = BY_NAME.get(fields.text("pre") or "")
    add_bos, add_eos = kind.add_bos or (rule is not None and rule.add_bos), kind.add_eos
    if kind.asks:
        add_bos, add_eos = fields.flag("add_bos_token", add_bos), fields.flag("add_eos_token", add_eos)
    first, last = ["bos"] * add_bos, [kind.last] * add_eos
    if not first + last:
        return None
    for name in first + last:
        if name not in vocabulary.ids:
            raise RequestError(
                f"{PREFIX}{name}_token_id is missing, though this tokenizer adds that token to a text",
                code="missing", field=f"{PREFIX}{name}_token_id",
            )  # fmt: skip

    def specials(names: list[str]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": vocabulary.text(name), "type_id": 0}} for name in names]

    def sequence(name: str) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": 0}}

    tokens = {vocabulary.tokens[vocabulary.ids[name]]: vocabulary.ids[name] for name in first + last}
    return {
        "type": "TemplateProcessing",
        "single": [*specials(first), sequence("A"), *specials(last)],
        "pair": [*specials(first), sequence("A"), sequence("B"), *specials(last)],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in tokens.items()},
    }


def _settings(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """Returns the content of a tokenizer_config.json: special tokens and chat templates."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{setting: vocabulary.text(name) for name, setting in SPECIAL_IDS.items() if name in vocabulary.ids},
    }
    templates = {
        key.removeprefix(CHAT_TEMPLATE).removeprefix(".") or "default": vocabulary.fields.metadata[key]
        for key in vocabulary.fields.metadata
        if key == CHAT_TEMPLATE or key.startswith(f"{CHAT_TEMPLATE}.")
    }
    for name, template in templates.items():
        if not isinstance(template, str):
            raise RequestError(
                f"the chat template {name[:60]!r} is of the type {type(template).__name__}; it must be a string",
                code="type", field=CHAT_TEMPLATE if name == "default" else f"{CHAT_TEMPLATE}.{shown(name, 60)}",
            )  # fmt: skip
    if list(templates) == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def _byte_level(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    name = vocabulary.fields.text("pre") or "default"
    if name not in BY_NAME:
        few, more = list(BY_NAME)[:8], len(BY_NAME) - 8
        near = did_you_mean(name, BY_NAME) or f"; known are {', '.join(few)} and {more} more"
        raise RequestError(
            f"{PREFIX}pre={name[:60]!r} names no way to cut text that is known here{near}",
            code="unknown", field=f"{PREFIX}pre", value=name,
        )  # fmt: skip
    merges = vocabulary.merges()
    if merges is None:
        raise RequestError(
            f"{PREFIX}merges is missing; byte-level BPE has a list of them, empty if it is bytes",
            code="missing", field=f"{PREFIX}merges",
        )  # fmt: skip
    rule = BY_NAME[name]
    return {
        "pre_tokenizer": described(rule.steps),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {**_bpe(vocabulary, merges), "ignore_merges": rule.whole_words},
    }


def _bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _sentencepiece(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    prefix = vocabulary.fields.flag("add_space_prefix", True)
    merges = vocabulary.merges()
    if merges is None:
        pieces = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED}
        scores, types = vocabulary.scores().tolist(), vocabulary.types.tolist()
        merges = merges_of_scores(
            {token: scores[index] for index, token in enumerate(vocabulary.tokens) if types[index] in pieces}
        )
    unspaced = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    without_prefix = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": spaces_seen({"type": "Prepend", "prepend": SPACE} if prefix else None),
        "decoder": {
            "type": "Sequence",
            "decoders": [unspaced, {"type": "ByteFallback"}, {"type": "Fuse"}, *without_prefix],
        },
        "model": {
            **_bpe(vocabulary, merges),
            "unk_token": vocabulary.text("unknown"),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def merges_of_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns every pair of pieces whose concatenation is a piece, ordered by the score of the concatenation, the best
    first, then by the length of the left part, the longest first. SentencePiece merges by scores, not by a list of
    merges."""
    if sum(len(piece) ** 2 for piece in scores) > LARGEST_SPLITS:
        raise RequestError(
            f"{PREFIX}tokens has pieces of up to {max(map(len, scores))} characters; that is too long to find how "
            "they merge",
            code="range", field=f"{PREFIX}tokens",
        )  # fmt: skip
    merges = [
        (piece[:cut], piece[cut:])
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    if len(merges) > LARGEST_MERGES:
        raise RequestError(
            f"{PREFIX}tokens has pieces that merge in {len(merges)} ways; more than {LARGEST_MERGES} are refused",
            code="range", field=f"{PREFIX}tokens", value=len(merges),
        )  # fmt: skip
    return sorted(merges, key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))


def spaces_seen(*before: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the `normalizer` of a tokenizer.json with the steps `before` (None for no step), and after them one that
    replaces every space by U+2581."""
    seen = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {"type": "Sequence", "normalizers": [step for step in (*before, seen) if step is not None]}


def replaced(regex: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": regex}, "content": by}


ONE_SPACE = [replaced(r"\A +| +\z", ""), replaced(" {2,}", " ")]
PREFIX_OF_WORDS = replaced(r"\A(?= *[^ ])", SPACE)  # no prefix for a text of spaces only


def _unigram(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    fields, scores = vocabulary.fields, vocabulary.scores().tolist()
    one_space = fields.flag("remove_extra_whitespaces", False)
    prefix = fields.flag("add_space_prefix", False) or one_space
    steps = [*_charsmap(fields), *(ONE_SPACE if one_space else []), PREFIX_OF_WORDS if prefix else None]
    # Padding rows of a model's table occur in no text: as pieces, their scores would count.
    last = int(np.max(np.nonzero(vocabulary.types != TokenType.UNUSED)[0], initial=0)) + 1
    fill = [_added_token(vocabulary, index, special=True) for index in range(last, len(vocabulary.tokens))]
    return {
        "added_tokens": _added(vocabulary) + fill,
        "normalizer": spaces_seen(*steps),
        "decoder": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "always" if prefix else "never",
            "split": False,
        },
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.ids.get("unknown"),
            "vocab": list(zip(vocabulary.tokens[:last], scores, strict=False)),
            "byte_fallback": False,
        },
    }


def _charsmap(fields: GGUFFields) -> list[dict[str, Any]]:
    """Returns a list of one step of a normalizer, SentencePiece's table of replacements; [] without a table. The table
    has the length of a trie, the trie, and texts that end with a 0."""
    table = fields.numbers("precompiled_charsmap", None, "iu")
    if table is None or not len(table):
        return []
    if table.dtype.itemsize > 1 and not ((table >= -128) & (table < 256)).all():
        raise RequestError(
            f"{PREFIX}precompiled_charsmap must hold bytes", code="range", field=f"{PREFIX}precompiled_charsmap"
        )
    data = table.astype(np.uint8).tobytes()
    trie = int.from_bytes(data[:CHARSMAP_HEADER], "little")
    if len(data) <= CHARSMAP_HEADER or trie % 4 or CHARSMAP_HEADER + trie >= len(data):
        raise RequestError(
            f"{PREFIX}precompiled_charsmap of {len(data)} bytes names a table of {trie} bytes; that does not fit in it",
            code="damaged", field=f"{PREFIX}precompiled_charsmap",
        )  # fmt: skip
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}]


def _wordpiece(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    fields = vocabulary.fields
    lowercase = fields.flag("normalizer.lowercase", True)
    pieces = vocabulary.types == TokenType.NORMAL
    # The file marks the start of a word with U+2581, BERT continuations with ##.
    words = [
        token if not piece else token.removeprefix(SPACE) if token.startswith(SPACE) else CONTINUATION + token
        for token, piece in zip(vocabulary.tokens, pieces.tolist(), strict=True)
    ]
    _refuse_twins(words)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": fields.flag("normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.text("unknown") or "[UNK]",
            "continuing_subword_prefix": CONTINUATION,
            "max_input_chars_per_word": LARGEST_WORD,
            "vocab": {word: index for index, word in enumerate(words)},
        },
    }


KINDS = {
    "gpt2": Kind(_byte_level, ids={}),
    "llama": Kind(_sentencepiece, ids={"bos": 1, "eos": 2, "unknown": 0}, add_bos=True),
    "t5": Kind(_unigram, ids={"eos": 1, "unknown": 2, "padding": 0}, add_eos=True),
    "bert": Kind(
        _wordpiece,
        ids={"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
        add_bos=True,
        add_eos=True,
        last="seperator",
        asks=False,
    ),
}
