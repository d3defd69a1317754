from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.errors import Code, RequestError
from glassformer.text import subword
from glassformer.text.documents import Document
from glassformer.text.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    make_tokenizer,
)
from tests.refused import refused

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
TRAINING = "the cat sat on the mat, naïve 漢字 and\nso on; the cat sat.\n" * 30
BPE = BPETokenizer.train([TRAINING], 330)
WORD = WordTokenizer.train([TRAINING])


@given(ANY_TEXT)
@settings(deadline=None)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_any_text_comes_back_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@given(ANY_TEXT.filter(bool), st.booleans(), st.booleans())
@settings(deadline=None)
def test_char_round_trip_on_the_trained_alphabet(text: str, unknown: bool, separator: bool) -> None:
    tokenizer = CharTokenizer.train([text], unknown, separator)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.vocab_size == len(set(text)) + unknown + separator
    assert (tokenizer.eos_id is not None) == separator
    if separator:
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@given(st.lists(ANY_TEXT, max_size=4))
@settings(deadline=None, max_examples=30)
def test_a_batch_is_its_texts_one_by_one(texts: list[str]) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        for one, of_batch in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert tokenizer.encode(one).tolist() == of_batch.tolist()


def test_char_ids_are_the_sorted_alphabet_and_nothing_more() -> None:
    tokenizer = CharTokenizer.train(["hello\n", "wörld"])
    assert tokenizer.alphabet == "\ndehlorwö"
    assert tokenizer.vocab_size == 9 and tokenizer.eos_id is None
    assert tokenizer.encode("doh").tolist() == [1, 5, 3]


def test_char_names_the_foreign_character() -> None:
    with refused(code="unknown", field="alphabet") as caught:
        CharTokenizer("abc").encode("aqz")
    assert caught.value.value == "q"
    # beyond the last code point of the alphabet as well as between two of them
    with refused(code="unknown", field="alphabet") as caught:
        CharTokenizer("ac").encode("\U0001f600")
    assert caught.value.value == "\U0001f600"
    with_unknown = CharTokenizer("ac", unknown=True)
    assert with_unknown.encode("abz").tolist() == [0, 2, 2]
    assert with_unknown.decode([0, 2]) == "a\ufffd"
    assert with_unknown.token_bytes().tolist() == [1, 1, 0]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab", separator=True), BPE])
def test_ids_past_the_vocabulary_have_no_text_and_negative_ones_are_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0, tokenizer.vocab_size]) == tokenizer.decode([0])
    with refused(code="range", field="tokens"):
        tokenizer.decode([0, -1])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab"), BPE])
def test_a_lone_surrogate_is_placed(tokenizer: Tokenizer) -> None:
    with refused(code="syntax", field="text") as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.value == 1


def test_broken_utf8_decodes_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([0xE2, 0x28, 256]) == "\ufffd("


def test_text_that_spells_a_special_token_is_encoded_as_text() -> None:
    text = "a<|endoftext|>b"
    assert BPE.eos_id not in BPE.encode(text)
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.token_bytes()[BPE.encode(text)].sum() == len(text)
    assert BPE.encode(text, parse_specials=True).tolist().count(BPE.eos_id) == 1
    assert BPE.eos_id not in BPE.encode_batch([text])[0]  # the switch does not stay on
    assert BPE.decode([BPE.eos_id]) == "" and BPE.decode([BPE.eos_id], keep_specials=True) == "<|endoftext|>"


def test_bpe_training_is_deterministic_and_no_larger_than_asked() -> None:
    again = BPETokenizer.train([TRAINING], 330)
    assert again.fingerprint() == BPE.fingerprint()
    assert BPE.vocab_size <= 330 and BPE.kind == "bpe"
    assert len(BPE.encode(TRAINING)) < len(TRAINING) / 2  # it did learn merges
    assert BPETokenizer.train(["x"], 5000).vocab_size < 300  # too little text for more


def test_bpe_trains_on_a_bounded_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subword, "TRAINING_BYTES", 1000)
    pieces = [f"{number:010d}" for number in range(1000)]
    used = [int(piece) for piece in subword._sample(pieces, 10_000, lambda *_: None)]
    assert 80 <= len(used) <= 100 and max(used) > 950 and max(np.diff(used)) <= 20
    assert sum(map(len, subword._sample(pieces, None, lambda *_: None))) == 1000
    assert len(list(subword._sample(pieces[:50], 500, lambda *_: None))) == 50


# Radford et al. 2019, encoder.py of gpt-2: how GPT-2 cuts a text before its merges apply.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def test_words_are_the_most_frequent_pre_tokens_of_gpt2() -> None:
    text = TRAINING + "a word once, and 漢字 twice. twice"
    counts = Counter(regex.findall(GPT2_WORDS, text))
    twice = {word for word, count in counts.items() if count > 1}
    tokenizer = WordTokenizer.train([text])
    assert tokenizer.vocab_size == len(twice) + 2 and tokenizer.eos_id is not None
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    assert set(texts) == {*twice, "", "<unk>"}
    ids = tokenizer.encode(text)
    assert [texts[token] for token in ids] == [
        word if word in twice else "<unk>" for word in regex.findall(GPT2_WORDS, text)
    ]
    known = "".join(word for word in regex.findall(GPT2_WORDS, text) if word in twice)
    assert tokenizer.token_bytes()[ids].sum() == len(known.encode())
    assert tokenizer.token_bytes()[[tokenizer.unk_id, tokenizer.eos_id]].tolist() == [0, 0]
    few = WordTokenizer.train([text], 6)
    assert few.vocab_size == 6
    assert {few.decode([token]) for token in range(6)} - {"", "<unk>"} <= {word for word, _ in counts.most_common(6)}


def test_unknown_words_are_seen_and_the_spelled_token_is_text() -> None:
    ids = WORD.encode("the dog sat<unk>")
    assert WORD.decode(ids) == "the<unk> sat<unk><unk><unk>" and (ids == WORD.unk_id).sum() == 4
    assert CharTokenizer("ab", unknown=True).unk_id == 2
    assert CharTokenizer("ab").unk_id is None and BPE.unk_id is None


@pytest.mark.parametrize("size", [0, 256, 1_000_001])
def test_bpe_refuses_a_size_that_cannot_be(size: int) -> None:
    with refused(code="range", field="tokenizer"):
        BPETokenizer.train(["x"], size)


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharTokenizer("abñ "), CharTokenizer("ab ñ", unknown=True, separator=True), WORD, BPE],
    ids=["byte", "char", "char+", "word", "bpe"],
)
def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")
    assert (loaded.kind, loaded.vocab_size, loaded.eos_id) == (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.eos_id,
    )
    assert loaded.fingerprint() == tokenizer.fingerprint()
    text = {"char": "ab ñ b", "wordlevel": "the mat sat"}.get(tokenizer.kind, "ab ñ b\n")
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()
    # the tokenizer.json in the folder, which Hugging Face reads, encodes alike
    twin = FileTokenizer.read(tmp_path / "new" / "tokenizer.json")
    assert twin.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert twin.decode(twin.encode(text)) == text
    assert (twin.vocab_size, twin.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    assert not list((tmp_path / "new").glob(".*"))


@given(ANY_TEXT)
@settings(deadline=None, max_examples=40)
def test_the_twin_of_bytes_is_bytes(text: str) -> None:
    assert TWIN_OF_BYTES.encode(text).tolist() == list(text.encode())
    assert TWIN_OF_BYTES.token_bytes().tolist() == ByteTokenizer().token_bytes().tolist()


def _twin_of_bytes() -> FileTokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ByteTokenizer().save(folder)
        return FileTokenizer.read(Path(folder, "tokenizer.json"))


TWIN_OF_BYTES = _twin_of_bytes()


def test_fingerprints_distinguish_tokenizers() -> None:
    kinds = [
        ByteTokenizer(),
        CharTokenizer("ab"),
        CharTokenizer("ac"),
        CharTokenizer("ab", separator=True),
        BPE,
    ]
    assert len({tokenizer.fingerprint() for tokenizer in kinds}) == len(kinds)


def _sentencepiece_like() -> dict:
    """Returns a file like Llama 2's: metaspace, byte fallback, and a padding and a truncation that must not reach a
    corpus."""
    vocabulary = {"<s>": 0, "</s>": 1, "<0xC3>": 2, "<0xB1>": 3, "▁a": 4, "b": 5, "▁": 6, "a": 7, "[IMG]": 8}
    added = [
        {
            "id": i,
            "content": c,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": s,
        }
        for i, c, s in ((0, "<s>", True), (1, "</s>", True), (8, "[IMG]", False))
    ]
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["▁", "a"]], "byte_fallback": True},
    }  # fmt: skip


def test_a_sentencepiece_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(_sentencepiece_like()))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "auto_map": {"x": "y"}})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, FileTokenizer) and tokenizer.eos_id == 1 and tokenizer.kind == "bpe"
    ids = tokenizer.encode("a ab ñ")
    assert ids.tolist() == [7, 4, 5, 6, 2, 3]  # and not cut to the two tokens that the file asks for
    assert tokenizer.token_bytes().tolist() == [0, 0, 1, 1, 2, 1, 1, 1, 5]
    assert tokenizer.token_bytes()[ids].sum() == len("a ab ñ".encode())
    assert tokenizer.decode(ids) == "a ab ñ"
    tokenizer.save(tmp_path / "copy")
    kept = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert kept == {"eos_token": {"content": "</s>"}}  # no untrusted code is copied


@pytest.mark.parametrize(
    ("content", "code", "field"),
    [
        (b"", "damaged", "tokenizer"),
        (b"not json", "damaged", "tokenizer"),
        (b"[]", "damaged", "tokenizer"),
        (b"\xff\xfe\x00", "damaged", "tokenizer"),
        (b"[" * 100_000, "damaged", "tokenizer"),
        (b'{"model": {"type": "BPE"}}', "damaged", "tokenizer"),
        (b'{"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}', "damaged", "tokenizer"),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["zz qq"]}}',
            "damaged",
            "tokenizer",
        ),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
            "range",
            "tokenizer.json:model.vocab",
        ),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "missing",
            "tokenizer.json:model.vocab",
        ),
    ],
)
def test_a_malformed_tokenizer_file_is_one_sentence(content: bytes, code: Code, field: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with refused(code=code, field=field) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_tokenizer_file_refuses_text_it_cannot_encode(tmp_path: Path) -> None:
    CharTokenizer("ab").save(tmp_path)
    tokenizer = FileTokenizer.read(tmp_path / "tokenizer.json")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with refused(code="unsupported", field="tokenizer"):
            encode("abc")
    assert tokenizer.encode("ab").tolist() == [0, 1]


def test_a_tokenizer_file_is_refused_by_its_size_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    with open(path, "wb") as file:
        file.truncate(subword.LARGEST_FILE + 1)  # sparse: nothing is written
    with refused(code="range", field="tokenizer.json"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "fields",
    ["{", "[]", '{"glassformer_tokenizer": 2, "kind": "byte"}',
     '{"glassformer_tokenizer": 1, "kind": "char", "alphabet": 3}',
     '{"glassformer_tokenizer": 1, "kind": "char", "alphabet": "", "unknown": false, "separator": false}'],
)  # fmt: skip
def test_malformed_tokenizer_file_in_our_format_is_refused(fields: str, tmp_path: Path) -> None:
    (tmp_path / "glassformer_tokenizer.json").write_text(fields)
    with pytest.raises(RequestError):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("bite", "unknown"),
        ("chars", "unknown"),
        ("bpe:4k", "type"),
        ("bpe:", "type"),
        ("bpe:10", "range"),
        ("bpe:0", "range"),
        ("word:two", "type"),
        ("word:2", "range"),
        ("wrod:100", "unknown"),
        ("byte:2", "unknown"),
        ("/nowhere/tokenizer.json", "unknown"),
    ],
)
def test_a_wrong_spec_is_one_sentence(spec: str, code: Code) -> None:
    with refused(code=code, field="tokenizer") as caught:
        make_tokenizer(spec, lambda: [Document("a", "text")])
    assert "\n" not in str(caught.value)


def test_trained_tokenizer_is_cached(cache: Path) -> None:
    reads = []

    def documents() -> list[Document]:
        reads.append(1)
        return [Document("a", TRAINING), Document("b", TRAINING)]

    first = make_tokenizer("bpe:300", documents, fingerprint="f")
    assert make_tokenizer("bpe:300", documents, fingerprint="f").fingerprint() == first.fingerprint()
    assert len(reads) == 1
    make_tokenizer("bpe:301", documents, fingerprint="f")
    make_tokenizer("bpe:300", documents, fingerprint="g")
    assert len(reads) == 3
    for path in cache.rglob("tokenizer.json"):
        path.write_text("{")
    with pytest.warns(UserWarning, match="trained again"):
        assert make_tokenizer("bpe:300", documents, fingerprint="f").fingerprint() == first.fingerprint()
    assert make_tokenizer("bpe:300", documents, fingerprint="f").fingerprint() == first.fingerprint()


def test_char_reads_the_whole_corpus_and_separates_only_several_documents() -> None:
    one, two = [Document("a", "abc")], [Document("a", "abc"), Document("b", "xyz")]
    assert make_tokenizer("char", lambda: one).vocab_size == 3
    assert make_tokenizer("char", lambda: one, all_documents=lambda: two).vocab_size == 7


def test_a_path_is_a_spec(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    assert make_tokenizer(str(tmp_path), list).fingerprint() == BPE.fingerprint()
    assert make_tokenizer(str(tmp_path / "tokenizer.json"), list).fingerprint() == BPE.fingerprint()
