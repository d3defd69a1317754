"""GGUF metadata of a tokenizer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.errors import RequestError
from glassformer.text.gguf.fields import CHAT_TEMPLATE, CHAT_TEMPLATES, PREFIX, SPECIAL_IDS, TokenType
from glassformer.text.gguf.pre_tokenizers import RULES, Step, recognized
from glassformer.text.gguf.reader import CONTINUATION, ONE_SPACE, PREFIX_OF_WORDS, merges_of_scores, spaces_seen
from glassformer.text.plain import equivalent
from glassformer.text.subword import SPACE, FileTokenizer, byte_alphabet
from glassformer.text.vocabulary import Tokenizer

SCORE_OF_UNUSED = -10000.0  # no text should be split into such tokens
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True)
class Parts:
    """Content of a tokenizer's tokenizer.json (`whole`), with all tokens and their types (`TokenType`) by id."""

    tokenizer: FileTokenizer
    whole: dict[str, Any]
    tokens: list[str]  # every id, holes filled
    types: np.ndarray  # (v,) int32

    @property
    def model(self) -> dict[str, Any]:
        return self.whole["model"]

    def of_type(self, kind: TokenType) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types.tolist(), strict=True) if found == kind]


def tokenizer_to_gguf(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the `tokenizer.*` keys of a GGUF file with which llama.cpp encodes as `tokenizer` does.

    Supported are byte-level BPE (and bytes, which equal it without merges), SentencePiece BPE, Unigram and WordPiece.
    Ids without a token, and those up to `vocab_size` (the rows of the model's embedding), become unused tokens
    `[PADn]`. A feature that llama.cpp lacks raises RequestError that names it. If llama.cpp itself departs from the
    published tokenizer, so does the file: it leaves out the NFC normalizer of byte-level BPE, puts a space before a
    text where the Metaspace of SentencePiece BPE finds one already or follows a special token, leaves combining marks
    out of the words of `gpt-4o` and `tekken`, and strips more of them for WordPiece.

    Numbers are NumPy arrays of the types that llama.cpp reads. `tokenizer.ggml.merges` may be an empty list of strings,
    and must be in the file nevertheless.
    """
    file = tokenizer if isinstance(tokenizer, FileTokenizer) else equivalent(tokenizer)
    whole = file.description()
    kind = whole["model"].get("type")
    if kind not in WRITERS:
        raise RequestError(
            f"a {tokenizer.kind} tokenizer cannot be written to GGUF, as llama.cpp lacks this kind; "
            "train the model with tokenizer byte or bpe",
            code="unsupported", field="tokenizer", value=tokenizer.kind,
        )  # fmt: skip
    tokens, types = _vocabulary(file, whole, vocab_size)
    written = WRITERS[kind](Parts(file, whole, tokens, types))
    fields = {"tokens": tokens, "token_type": types, **written}
    metadata = {PREFIX + key: value for key, value in fields.items()}
    template = file.settings.get("chat_template")
    if isinstance(template, str):
        metadata[CHAT_TEMPLATE] = template
    elif isinstance(template, list):
        metadata |= _named_templates(template)
    return metadata


def _missing(rule: str) -> RequestError:
    return RequestError(
        f"this tokenizer cannot be written to GGUF, as llama.cpp has no {rule}",
        code="unsupported", field="tokenizer", value=rule,
    )  # fmt: skip


def _need(met: bool, rule: str) -> None:
    if not met:
        raise _missing(rule)


def _vocabulary(file: FileTokenizer, whole: dict[str, Any], vocab_size: int | None) -> tuple[list[str], np.ndarray]:
    known = file.ids()
    size = file.vocab_size if vocab_size is None else vocab_size
    if size < file.vocab_size:
        raise RequestError(
            f"vocab_size={size} is less than the {file.vocab_size} ids of this tokenizer",
            code="range", field="vocab_size", value=size,
        )  # fmt: skip
    by_id = {index: token for token, index in known.items()}
    added = {token["id"]: token for token in whole["added_tokens"]}
    model = whole["model"]
    fallback = bool(model.get("byte_fallback"))
    unknown = model.get("unk_id", known.get(model.get("unk_token")) if fallback else None)

    def kind(index: int) -> TokenType:
        token = by_id.get(index)
        if token is None or token == f"[PAD{index}]":
            return TokenType.UNUSED
        if index == unknown:
            return TokenType.UNKNOWN
        if index in added:
            return TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        return TokenType.BYTE if fallback and token in BYTE_TOKENS else TokenType.NORMAL

    for token in added.values():
        flag = next((flag for flag in ("single_word", "lstrip", "rstrip") if token[flag]), None)
        _need(flag is None, f"token that is found in a text under a condition, as {token['content']!r} with {flag}")
    types = np.array([kind(index) for index in range(size)], np.int32)
    return [by_id.get(index) or _filler(index, known) for index in range(size)], types


def _filler(index: int, known: dict[str, int]) -> str:
    name = f"[PAD{index}]"
    while name in known:
        name = f"[{name}]"
    return name


def _special_ids(parts: Parts, last: str = "eos") -> dict[str, Any]:
    """Returns the metadata of special tokens: their ids (`bos_token_id` and so on), and the flags add_bos_token and
    add_eos_token, True if a text gets `bos` before it, and `last` after it. Raises RequestError for other tokens around
    a text."""
    file, known = parts.tokenizer, parts.tokenizer.ids()
    ids = {
        name: known[file.special_tokens[setting]]
        for name, setting in SPECIAL_IDS.items()
        if file.special_tokens.get(setting) in known
    }
    if file.eos_id is not None and last == "eos":
        ids["eos"] = file.eos_id
    before, after = _around(parts.whole["post_processor"])
    _need(len(before) <= 1 and len(after) <= 1, f"way to put {before} before a text and {after} after it")
    if before:
        ids["bos"] = before[0]
    if after:
        same = ids.setdefault(last, after[0]) == after[0]
        _need(same, f"way to end a text with token {after[0]} where the {SPECIAL_IDS[last]} is {ids[last]}")
    named: dict[str, Any] = {f"{name}_token_id": index for name, index in ids.items()}
    return {**named, "add_bos_token": bool(before), "add_eos_token": bool(after)}


def _around(post_processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Returns (ids before a text, ids after it) that a tokenizer.json's post-processor adds."""
    kind = post_processor["type"] if post_processor else None
    if post_processor is None or kind == "ByteLevel":  # it only moves offsets
        return [], []
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [post_processor["cls"][1]], [post_processor["sep"][1]]
    before, after = list[int](), list[int]()
    if kind == "Sequence":
        for part in post_processor["processors"]:
            first, last = _around(part)
            before, after = first + before, after + last
        return before, after
    _need(kind == "TemplateProcessing", f"post-processor {kind}")
    side, texts = before, 0
    for piece in post_processor["single"]:
        if "Sequence" in piece:
            side, texts = after, texts + 1
        else:
            side += post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    _need(texts == 1, f"template that has a text {texts} times")
    return before, after


def _bpe(parts: Parts) -> dict[str, Any]:
    model = parts.model
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        _need(not model[name], f"BPE with {name}={model[name]!r}")
    _need(parts.tokenizer.eos_id is not None, "vocabulary without an end-of-text token; name an eos_token")
    steps = recognized(parts.whole["pre_tokenizer"])
    return _byte_level(parts, steps) if any(kind == "bytes" for kind, _ in steps) else _sentencepiece(parts)


def _byte_level(parts: Parts, steps: tuple[Step, ...]) -> dict[str, Any]:
    wrong = next((step["type"] for step in _normalizers(parts) if step["type"] != "NFC"), None)
    _need(wrong is None, f"byte-level BPE with the normalizer {wrong}")
    _need(("bytes", True) not in steps, "byte-level BPE that puts a space before a text (add_prefix_space)")
    lacking = set(byte_alphabet()) - set(parts.tokens)
    _need(not (parts.model["unk_token"] and lacking), f"byte-level BPE with an unknown token and without {lacking}")
    merges = [f"{left} {right}" for left, right in parts.model["merges"]]
    whole_words = parts.model["ignore_merges"]
    rules = [rule for rule in RULES if rule.whole_words == whole_words and (rule.steps == steps or not merges)]
    if not rules:
        taken = "takes words that are tokens whole (ignore_merges)" if whole_words else "merges only"
        raise _missing(f"byte-level BPE that {taken} and cuts a text by {_shown(steps)}")
    return {"model": "gpt2", "pre": rules[0].names[0], "merges": merges, **_special_ids(parts)}


def _sentencepiece(parts: Parts) -> dict[str, Any]:
    model = parts.model
    prefix = _space_prefix(parts)
    missing = BYTE_TOKENS - set(parts.of_type(TokenType.BYTE))
    _need(not missing, f"SentencePiece BPE without byte fallback; {min(missing, default='')} is missing")
    _need(not model["ignore_merges"], "SentencePiece BPE that takes whole words first (ignore_merges)")
    kinds = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = {token for kind in kinds for token in parts.of_type(kind)}
    # Some files also list merges that spell out a special token, which no text should become.
    merges = [(left, right) for left, right in model["merges"] if {left, right, left + right} <= pieces]
    rank = _ranks(merges)
    scores = {token: -float(rank.get(token, 0)) for token in parts.tokens if token in pieces}
    implied = merges_of_scores(scores)
    surplus = set(implied) ^ set(merges)
    _need(not surplus, f"SentencePiece BPE in which only some pairs of a piece merge, as in {min(surplus, default='')}")
    return {
        "model": "llama",
        "pre": "default",
        "scores": _written([scores.get(token, 0.0) for token in parts.tokens], parts),
        "add_space_prefix": prefix,
        # Pairs of one piece in another order than scores imply: llama.cpp reads scores, other programs the merges.
        **({} if implied == merges else {"merges": [f"{left} {right}" for left, right in merges]}),
        **_special_ids(parts),
    }


def _ranks(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Returns {piece: rank}, 1 for the piece that is merged first; pieces that no merge makes are left out. Raises
    RequestError if merges into one piece differ in rank."""
    rank: dict[str, int] = {}
    last = ""
    for left, right in merges:
        piece = left + right
        _need(piece not in rank or piece == last, f"SentencePiece BPE in which merges into {piece!r} differ in rank")
        rank.setdefault(piece, len(rank) + 1)
        last = piece
    return rank


def _written(scores: list[float], parts: Parts) -> np.ndarray:
    return np.where(parts.types == TokenType.UNUSED, SCORE_OF_UNUSED, np.array(scores)).astype(np.float32)


def _space_prefix(parts: Parts) -> bool:
    """Returns True if SentencePiece BPE puts a space before a text, recognised in any of the notations for it. Raises
    RequestError for an unknown notation."""
    steps, pre = _normalizers(parts), parts.whole["pre_tokenizer"]
    cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if pre in (None, cut):  # no space is left to cut at
        for prefix in ({"type": "Prepend", "prepend": SPACE}, None):
            if steps == spaces_seen(prefix)["normalizers"]:
                return prefix is not None
    if not steps and pre and pre["type"] == "Metaspace" and pre["replacement"] == SPACE and not pre["split"]:
        return pre["prepend_scheme"] != "never"
    raise _missing(f"BPE that prepares text by {_shown(steps)} and {_shown(pre)}")


def _normalizers(parts: Parts) -> list[dict[str, Any]]:
    normalizer = parts.whole["normalizer"]
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:200]


def _unigram(parts: Parts) -> dict[str, Any]:
    model = parts.model
    _need(not model.get("byte_fallback"), "Unigram with byte fallback")
    _need(model["unk_id"] is not None, "Unigram without an unknown token")
    _need(parts.tokenizer.eos_id is not None, "vocabulary without an end-of-text token; name an eos_token")
    scores = [score for _, score in model["vocab"]]
    return {
        "model": "t5",
        "pre": "default",
        "scores": _written(scores + [0.0] * (len(parts.tokens) - len(scores)), parts),
        **_unigram_spaces(parts),
        **_special_ids(parts),
        "unknown_token_id": model["unk_id"],
    }


def _unigram_spaces(parts: Parts) -> dict[str, Any]:
    """Returns the metadata of Unigram's treatment of spaces, and its table of replacements, from any of the notations
    for them. Raises RequestError for an unknown notation."""
    steps, pre = _normalizers(parts), parts.whole["pre_tokenizer"]
    table: dict[str, Any] = {}
    if steps and steps[0]["type"] == "Precompiled":
        data = base64.b64decode(steps[0]["precompiled_charsmap"])
        table = {"precompiled_charsmap": np.frombuffer(data, np.uint8)}
        steps = steps[1:]
    words = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    # The table of T5 turns all other whitespace into spaces.
    published = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, words]}
    if (pre == published and table and not steps) or (pre == words and steps == ONE_SPACE):
        inner = next((token for token in parts.of_type(TokenType.NORMAL) if SPACE in token[1:]), None)
        _need(inner is None, f"Unigram that cuts a text at spaces and yet has {inner!r}")
        return {**table, "add_space_prefix": True, "remove_extra_whitespaces": True}
    for one_space, prefix in ((False, False), (False, True), (True, True)):
        before = [*(ONE_SPACE if one_space else []), PREFIX_OF_WORDS if prefix else None]
        if pre is None and steps == spaces_seen(*before)["normalizers"]:
            return {**table, "add_space_prefix": prefix, "remove_extra_whitespaces": one_space}
    raise _missing(f"Unigram that prepares text by {_shown(steps)} and {_shown(pre)}")


def _wordpiece(parts: Parts) -> dict[str, Any]:
    model, normalizer = parts.model, parts.whole["normalizer"]
    _need(model["continuing_subword_prefix"] == CONTINUATION, f"WordPiece with {model['continuing_subword_prefix']!r}")
    _need(
        bool(normalizer) and normalizer["type"] == "BertNormalizer" and normalizer["clean_text"]
        and normalizer["handle_chinese_chars"] and parts.whole["pre_tokenizer"] == {"type": "BertPreTokenizer"},
        "WordPiece that prepares text otherwise than BERT",
    )  # fmt: skip
    special = _special_ids(parts, last="seperator")
    for name in ("bos_token_id", "seperator_token_id"):
        _need(name in special, f"WordPiece without {SPECIAL_IDS[name.removesuffix('_token_id')]}")
    special["unknown_token_id"] = parts.tokenizer.ids().get(model["unk_token"])
    _need(special["unknown_token_id"] is not None, "WordPiece without its unknown token")
    lowercase, strip = normalizer["lowercase"], normalizer["strip_accents"]
    words = [
        token if kind != TokenType.NORMAL else token.removeprefix(CONTINUATION) if token.startswith(CONTINUATION)
        else SPACE + token
        for token, kind in zip(parts.tokens, parts.types.tolist(), strict=True)
    ]  # fmt: skip
    twins = len(words) - len(set(words))
    _need(not twins, f"WordPiece in which {twins} tokens are alike but for {CONTINUATION!r}")
    return {
        "model": "bert",
        "pre": "default",
        "tokens": words,
        "scores": np.zeros(len(words), np.float32),
        "normalizer.lowercase": lowercase,
        "normalizer.strip_accents": lowercase if strip is None else strip,
        **special,
    }


def _named_templates(templates: list[Any]) -> dict[str, Any]:
    named = {
        entry["name"]: entry["template"]
        for entry in templates
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    others = {name: text for name, text in named.items() if name != "default"}
    default = {CHAT_TEMPLATE: named["default"]} if "default" in named else {}
    listed = {CHAT_TEMPLATES: list(others)} if others else {}
    return {**default, **listed, **{f"{CHAT_TEMPLATE}.{name}": text for name, text in others.items()}}


WRITERS: dict[str, Callable[[Parts], dict[str, Any]]] = {"BPE": _bpe, "Unigram": _unigram, "WordPiece": _wordpiece}
