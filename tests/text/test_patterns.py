"""Patterns of a tokenizer.json: those of published models are read, and those that would not end are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from glassformer.text.gguf.pre_tokenizers import RULES
from glassformer.text.patterns import LONGEST, check
from glassformer.text.tokenizers import FileTokenizer, load_tokenizer
from tests.refused import refused
from tests.text.fuzz_tokenizer import corpus

UPPER, LOWER = (rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]" for han in ("&&[^\\p{Han}]", ""))
PUBLISHED = {  # in addition to those of text/gguf, which llama.cpp knows by name
    "qwen2 in transformers": PRETOKENIZE_REGEX,
    "clip": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "gpt-4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
             r"|\s+(?!\S)|\s+",
    "gpt-4 possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "kimi": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{UPPER}+(?i:'s|'t)?|\p{{N}}{{1,3}}|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2 in posix": r" ?[[:alpha:]]+| ?[[:digit:]]+| ?[^\s[:alpha:][:digit:]]+|\s+(?!\S)|\s+",
    "smiles": r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9])",
    "sentencepiece": r"^▁+$", "spaces": r"\s{2,}|[\n\r\t]", "spaces before": r" +▁", "all": r"[\s\S]",
    "thousands": r"\d{1,3}(?=(?:\d{3})*\b)", "thousands of any digits": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "words": r"\w+(?:'\w+)?|[^\w\s]", "addresses": r"[\w.+-]+@[\w-]+\.[\w.-]+",
    "names": r"[A-Z]?[a-z]+|[A-Z]+(?=[A-Z]|$)",
    "space around": r"^\s+|\s+$", "before a mark": r"\s+([?.!,])", "tags": r"<[^>\s]*>", "a dot": r"\x{2e}|\u002e|\056",
}  # fmt: skip
NAMED = {
    f"{rule.names[0]} {i}": regex for rule in RULES for i, (kind, regex) in enumerate(rule.steps) if kind == "split"
}


@pytest.mark.parametrize("pattern", [*PUBLISHED.values(), *NAMED.values()], ids=[*PUBLISHED, *NAMED])
def test_a_published_pattern_is_read(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**corpus()["tokenizer.json"][1], **split(pattern)}))
    load_tokenizer(path)
    Regex(pattern)  # which the library takes too


def split(pattern: str) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


LONG = [
    "(?:x+x+)y", "(x+x+)+y", "(a|b|ab)*c", r"(a+)+$", "x*x*$", "(?:x|x)*y", "x+(?=x+y)", "(?:x+y|x+z)+w", "x+a?b?x+y",
    "(?:x?){9}x+x+y", "x?" * 30 + "x" * 30, "(x?){20}y", r"\s+\s+\S", ".*.*a", "(?>x+x+y)z", "(?:(?:x+)+)y",
    "x+(?:x+y|z)", r"[a-z]+\p{L}+[0-9]", "é+É*é+y", r"\w+\p{Ll}+!", "(?i)a+A+b", r"(x)\1", r"(?<a>x)\g<a>",
    "(?:ab|a|b)+c", "(?:a{1,3})+c", "x{0,5000}x{0,5000}y", "(?:x{3,}){2,}z", "x+(x|y)+z", "(?:(x+)|y)*z",
    "(?:x(?!$).++x|x+?)++y", "(?:(?:x+y|x)+)+", "(?>(?:x+y|x)+)z", "x{1,300}x{1,300}y", "a" * (LONGEST + 1),
]  # fmt: skip


@pytest.mark.parametrize("pattern", LONG)
def test_a_pattern_that_may_not_end_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        check(pattern)
    steps = split(pattern)["pre_tokenizer"]
    replaced = {"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": "a"}}
    nested = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, steps]}}
    for index, parts in enumerate([split(pattern), replaced, nested]):
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps({**corpus()["tokenizer.json"][1], **parts}))
        with refused(code="unsupported", field="tokenizer.json:pre_tokenizer.pattern") as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


SAME = ["x+a+y", "x++x+y", "(?>x+)y", "(?:ab|c)+d", "(?:a|b)*c", "x+,x+y", r"[^\d]+\d+z", r"\p{Lu}+\p{Ll}+!", "é+1+é",
        r"[a&&b]+b+c", "x*x*", "(?:x*x*)*", r"\P{L}+\p{L}+1", r"[^é]+\d", "(?#x+x+y)a",
        "x{2}x+y", "(?-i:a+)A+b", "x{2,1}y"]  # fmt: skip


@pytest.mark.parametrize("pattern", SAME)
def test_unambiguous_pattern_is_accepted(pattern: str) -> None:
    check(pattern)


ATOMS = st.sampled_from(["x", "x", "y", "a", ".", "[xy]", "[^y]", r"\w", r"\s"])
SIGNS = st.sampled_from(["", "", "+", "*", "?", "{1,3}", "{2,}", "+?", "++", "{2}"])
GROUPS = st.sampled_from(["(?:", "(", "(?>", "(?=", "(?!"])


def joined(pieces: list[tuple[str, str]]) -> str:
    return "".join(piece + ("" if piece.startswith(("(?=", "(?!")) else sign) for piece, sign in pieces)


PATTERNS = st.recursive(
    st.lists(st.tuples(ATOMS, SIGNS), min_size=1, max_size=4).map(joined),
    lambda inner: st.lists(
        st.tuples(
            st.one_of(
                ATOMS,
                st.tuples(GROUPS, st.lists(inner, min_size=1, max_size=2)).map(lambda g: f"{g[0]}{'|'.join(g[1])})"),
            ),
            SIGNS,
        ),
        min_size=1,
        max_size=3,
    ).map(joined),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(PATTERNS)
def test_accepted_pattern_ends_in_time(pattern: str) -> None:
    """A cubic pattern takes 85 million steps on 800 characters, about a second, and a quadratic one a few ms."""
    try:
        check(pattern)
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:
        return
    for text in ("x" * 800, "xy" * 400, "x" * 799 + "y"):
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            cut.pre_tokenize_str(text)
            best = min(best, time.process_time() - began)
            if best < 0.3:
                break
        assert best < 0.3, f"{best:.2f} s"


def test_failed_pattern_match_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """The error of a library that the user made is reported, since its patterns are not checked."""
    library = Library(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    with refused(code="failed", field="tokenizer"):
        FileTokenizer(library).encode("x" * 600)
