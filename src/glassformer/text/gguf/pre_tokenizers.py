"""Pre-tokenizers of byte-level BPE: their names in `tokenizer.ggml.pre`, and their steps.

The steps are those of the tokenizer.json files that models of each name were published with; llama.cpp
(`llm_tokenizer_bpe` in src/llama-vocab.cpp) writes the same cuts as regular expressions. It applies no normalizer, so
neither does a tokenizer from a GGUF file, though some of those models have NFC.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Step = tuple[str, str | bool]
"""A step of a pre-tokenizer: (`split`, regex) | (`digits`, True to isolate each) | (`punctuation`, behavior) |
(`bytes`, True for a space before the text)."""

BYTES: Step = ("bytes", False)
EACH_DIGIT: Step = ("digits", True)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_REST_OF_CASES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _cases(after: str) -> str:
    """Returns a regex of words in which a capital letter after a lower-case one starts a new word; `after` is a regex
    appended to each word, such as that of an optional contraction ('s, 're)."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{_UPPER}]*[{_LOWER}]+{after}|{start}[{_UPPER}]+[{_LOWER}]*{after}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
GPT4O = rf"{_cases(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_REST_OF_CASES}"
TEKKEN = rf"{_cases('')}|\p{{N}}|{_REST_OF_CASES}"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

_HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters with case, of an older Unicode. Escapes protect characters that a normalizing editor would change.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK_V3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*"
    r"|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer: its steps, and its names in `tokenizer.ggml.pre` (a written file has the first). `whole_words`:
    True if a piece that is a token is taken whole, before any merge; `add_bos`: True if llama.cpp puts the start token
    before a text."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    whole_words: bool = False
    add_bos: bool = False


def _split(*regexes: str) -> tuple[Step, ...]:
    return tuple(("split", regex) for regex in regexes)


RULES = (
    PreTokenizer(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "exaone4", "mellum"),
            *("a.x-4.0", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de"),
            "jina-v2-code",
        ),
        (*_split(GPT2), BYTES),
    ),
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (EACH_DIGIT, *_split(GPT2), BYTES),
    ),
    PreTokenizer(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            "jina-v5-nano",
        ),
        (*_split(LLAMA3), BYTES),
        whole_words=True,
        add_bos=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (*_split(LLAMA3), BYTES)),
    PreTokenizer(
        (
            *("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"),
            "f2llmv2",
        ),
        (*_split(QWEN2), BYTES),
    ),
    PreTokenizer(("qwen35",), (*_split(QWEN35), BYTES)),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (*_split(GPT4O), BYTES)),
    PreTokenizer(("tekken",), (*_split(TEKKEN), BYTES), whole_words=True, add_bos=True),
    PreTokenizer(
        ("falcon",),
        (("punctuation", "Contiguous"), *_split(GPT2), BYTES, ("digits", False), *_split("[0-9][0-9][0-9]")),
    ),
    PreTokenizer(("default",), (*_split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), BYTES)),
    PreTokenizer(
        ("deepseek-llm",),
        (
            *_split("[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            *_split(r"\s+$", _HAN_TO_HANGUL),
            EACH_DIGIT,
            BYTES,
        ),
    ),
    PreTokenizer(
        ("deepseek-coder",),
        (*_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL), EACH_DIGIT, BYTES),
    ),
    PreTokenizer(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        (*_split(r"\p{N}{1,3}", _HAN_AND_KANA, DEEPSEEK_V3), BYTES),
    ),
    PreTokenizer(("bloom", "poro-chat", "gpt3-finnish"), (*_split(BLOOM), BYTES)),
    PreTokenizer(("viking",), (*_split(BLOOM), EACH_DIGIT, BYTES)),
)

BY_NAME = {name: rule for rule in RULES for name in rule.names}


def described(steps: tuple[Step, ...]) -> dict[str, Any]:
    """Returns the steps as the value of `pre_tokenizer` in a tokenizer.json."""

    def one(step: Step) -> dict[str, Any]:
        kind, value = step
        if kind == "split":
            return {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False}
        if kind == "digits":
            return {"type": "Digits", "individual_digits": value}
        if kind == "punctuation":
            return {"type": "Punctuation", "behavior": value}
        return {"type": "ByteLevel", "add_prefix_space": value, "trim_offsets": True, "use_regex": False}

    return {"type": "Sequence", "pretokenizers": [one(step) for step in steps]}


def recognized(pre_tokenizer: dict[str, Any] | None) -> tuple[Step, ...]:
    """Returns the steps of a tokenizer.json's pre-tokenizer, equal for different notations of equal cuts. An unknown
    step becomes (`other`, its JSON)."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in recognized(part))
    if kind == "ByteLevel":
        steps: tuple[Step, ...] = (("bytes", pre_tokenizer["add_prefix_space"]),)
        return (*_split(GPT2), *steps) if pre_tokenizer["use_regex"] else steps
    if kind == "Digits":
        return (("digits", pre_tokenizer["individual_digits"]),)
    if kind == "Punctuation":
        return (("punctuation", pre_tokenizer["behavior"]),)
    if kind == "Split":
        regex, how = pre_tokenizer["pattern"].get("Regex"), (pre_tokenizer["behavior"], pre_tokenizer["invert"])
        # Removing the text between matches equals isolating them, if matches cover every text.
        if regex is not None and (how == ("Isolated", False) or (how == ("Removed", True) and regex.endswith(r"|\s+"))):
            return (EACH_DIGIT,) if regex == r"\p{N}" else _split(regex)
    return (("other", json.dumps(pre_tokenizer, ensure_ascii=False, sort_keys=True)),)
