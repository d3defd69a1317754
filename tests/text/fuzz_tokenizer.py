"""Randomly damaged tokenizer files: `python -m tests.text.fuzz_tokenizer --seconds 60`.

Small files of every kind of part are changed as JSON (values exchanged, moved, doubled, left out) or as bytes, read,
and used. Only a tokenizer or a RequestError of one sentence may come back, soon and in little memory. A process of its
own reads them, since the library could end it or never return; what it was about to read is known from its number.
Prints how many were tried, and what became of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from glassformer.errors import RequestError
from glassformer.text.tokenizers import ByteTokenizer, CharTokenizer, FileTokenizer, load_tokenizer

SLOW = 2.0  # seconds of the processor, whatever else it has to do
LARGE = 200_000  # KiB that one input may add to the peak of memory
ADDRESSES = 2 << 30  # bytes that the process may ask for beyond its first ones
TEXTS = ["a ab  ñ漢 Abc, 12345.\n", "<s>x</s> [CLS] <0xC3>\t", "ab" * 200, "\u2581aＡ\u00a0😀ﬁ", ""]
FILES = ("tokenizer.json", "tokenizer_config.json", "glassformer_tokenizer.json")

# Valid files

SPECIAL = [AddedToken(text, special=True) for text in ("<s>", "</s>")]
ORDINARY = AddedToken("[IMG]", single_word=True, lstrip=True, rstrip=True, normalized=True)
VOCABULARY = {word: index for index, word in enumerate(("<unk>", "a", "b", "ab", "▁", "▁a", "##b", "<0xC3>", "Ġ", "é"))}
SCORES = [(word, -0.5 * index) for word, index in VOCABULARY.items()]


def _library(model: Any, *parts: Any, padded: bool = False) -> Library:
    """With parts of any kind; each finds its place by its type."""
    library = Library(model)
    kinds = {"normalizer": normalizers.Normalizer, "pre_tokenizer": pre_tokenizers.PreTokenizer,
             "post_processor": processors.PostProcessor, "decoder": decoders.Decoder}  # fmt: skip
    for part in parts:
        setattr(library, next(name for name, kind in kinds.items() if isinstance(part, kind)), part)
    library.add_special_tokens(SPECIAL)
    library.add_tokens([ORDINARY])
    if padded:
        library.enable_padding(length=64)
        library.enable_truncation(8, stride=2)
    return library


def charsmap(text: bytes = b"A") -> bytes:
    """A table as SentencePiece compiles them, that maps one character: a full-width A to `text`.

    A double array: unit = offset << 10 | leaf << 8 | label, and a value (bit 31 set) at the end of each key.
    """
    key, units = "Ａ".encode(), {0: 0}
    at, base = 0, 1
    for byte in key:
        while base ^ byte in units or base ^ byte == 0:
            base += 1
        units[at] |= (base ^ at) << 10
        at = base ^ byte
        units[at] = byte
        base += 256
    units[at] |= 1 << 8 | (base ^ at) << 10
    units[base] = 1 << 31
    array = np.zeros(max(units) + 257, "<u4")
    array[list(units)] = list(units.values())
    return (array.nbytes).to_bytes(4, "little") + array.tobytes() + text + b"\0"


def libraries() -> list[Library]:
    """Together they have every part of the library."""
    n, p, d = normalizers, pre_tokenizers, decoders
    ends = [("<s>", 10), ("</s>", 11)]
    template = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ends)
    bytes_ = processors.ByteLevel(trim_offsets=False)
    return [
        _library(
            models.BPE(VOCABULARY, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True),
            n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁"), n.Replace(Regex("[0-9]{3}"), "#")]),
            template,
            d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]),
        ),
        _library(
            models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ã": 4, "±": 5}, [("a", "b")], dropout=0.1),
            n.Sequence([n.NFC(), n.Strip()]),
            p.Sequence([p.Split(Regex(r"\s?\w+|\s+"), "isolated", invert=True), p.ByteLevel(False, use_regex=False)]),
            processors.Sequence([bytes_, template]),
            d.ByteLevel(),
        ),
        _library(
            models.Unigram(SCORES, 0, byte_fallback=True),
            n.Sequence([n.Nmt(), n.Precompiled(charsmap()), n.NFKC(), n.Replace(Regex(" {2,}"), " ")]),
            p.Metaspace("▁", "first", split=True),
            d.Metaspace("▁", "first"),
            template,
            padded=True,
        ),
        _library(
            models.WordPiece(VOCABULARY, unk_token="<unk>", max_input_chars_per_word=9),
            n.BertNormalizer(),
            p.BertPreTokenizer(),
            processors.BertProcessing(("</s>", 11), ("<s>", 10)),
            d.WordPiece(),
        ),
        _library(
            models.WordLevel(VOCABULARY, unk_token="<unk>"),
            n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase(), n.NFKD(), n.ByteLevel()]),
            p.Sequence([p.WhitespaceSplit(), p.Digits(True), p.Punctuation("removed"), p.UnicodeScripts()]),
            processors.RobertaProcessing(("</s>", 11), ("<s>", 10)),
            d.CTC(),
        ),
        _library(
            models.WordLevel(VOCABULARY, unk_token="<unk>"),
            p.Sequence([p.Whitespace(), p.CharDelimiterSplit("|"), p.FixedLength(3)]),
            d.BPEDecoder("▁"),
        ),
    ]


@cache
def corpus() -> dict[str, list[Any]]:
    """By the name of the file, as plain values."""
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"}, "eos_token": "</s>",
        "unk_token": None, "chat_template": "{{ messages }}", "added_tokens_decoder": {"0": {"content": "<unk>"}},
        "auto_map": {"AutoTokenizer": ["a.B", None]}, "model_max_length": 1e30, "extra_special_tokens": ["<x>"],
    }  # fmt: skip
    own = [ByteTokenizer(), CharTokenizer("abñ ", unknown=True, separator=True), CharTokenizer("ab")]
    with tempfile.TemporaryDirectory() as place:
        for index, tokenizer in enumerate(own):
            tokenizer.save(Path(place, str(index)))
        fields = [json.loads(Path(place, str(i), FILES[2]).read_bytes()) for i in range(len(own))]
        twins = [json.loads(Path(place, str(i), FILES[0]).read_bytes()) for i in range(len(own))]
    whole = [json.loads(library.to_str()) for library in libraries()]
    return {FILES[0]: whole + twins[1:], FILES[1]: [settings, {}], FILES[2]: fields}


# Changed ones

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 9, 255, 1 << 16, (1 << 24) - 1, 1 << 24, 1 << 31, (1 << 32) - 1]
VALUES += [1 << 32, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 0.0, -0.5, 1e-320, 1e308, 1e999, -1e999, 1e999 - 1e999]
VALUES += [
    "",
    "a",
    "▁",
    " ",
    "\n",
    "\0",
    "\ud800",
    "é😀",
    "x" * 3000,
    "(",
    "[",
    "a{1000}{1000}",
    "(a|b|ab)*c",
    "(?<=a*)b",
]
VALUES += [
    "^",
    "$",
    "(?i)",
    r"\p{L}+",
    r"(a+)+$",
    "QQ==",
    "AAAA",
    "/////w==",
    "<s>",
    "[IMG]",
    "ab",
    "a b",
    [],
    {},
    [[]],
]
VALUES += [
    ["a", "b"],
    ["a", 0.5],
    {"String": ""},
    {"Regex": ""},
    {"Regex": "."},
    {"Sequence": {"id": "A", "type_id": 0}},
]
VALUES += [
    "BPE",
    "Unigram",
    "WordPiece",
    "WordLevel",
    "Sequence",
    "Split",
    "ByteLevel",
    "Precompiled",
    "Isolated",
    "Right",
]
VALUES += ["always", "never", "ByteFallback", "TemplateProcessing", "LongestFirst", "BatchLongest", {"Fixed": 1 << 40}]
PIECES = [b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\", b"-1", b"1e3", b"NaN", b"null", b"true", b"0" * 5000, b" "]
PIECES += [b"[" * 3000, b'{"a":' * 3000, b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\0", b"18446744073709551616"]


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield value, key
        yield from spots(one)


def changed(tree: Any, others: list[Any], rng: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        found = list(spots(tree))
        if not found:
            return rng.choice(VALUES)
        place, key = rng.choice(found)
        kind = rng.randrange(8)
        if kind <= 2:
            place[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind <= 4:  # something from elsewhere, at best of the same name
            there = [spot for other in [tree, *others] for spot in spots(other)]
            alike = [spot for spot in there if spot[1] == key and rng.random() < 0.8] or there
            other, name = rng.choice(alike)
            place[key] = copy.deepcopy(other[name])
        elif kind == 5:
            del place[key]
        elif kind == 6 and isinstance(place, dict):
            place[rng.choice(["type", "a", "<s>", "zz", "pattern", "content", "é"])] = place[key]
        elif isinstance(place, list):
            place[key:key] = [place[key]] * rng.choice([1, 2, 300])
        else:  # wrapped
            part = {"normalizers", "pretokenizers", "processors", "decoders"}
            place[key] = {"type": "Sequence", rng.choice(sorted(part)): [place[key]] * rng.choice([1, 2, 9])}
    return tree


def bitten(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(found) + 1)
        end = at + rng.choice([0, 0, 1, 4, 40])
        found[at:end] = rng.choice([rng.choice(PIECES), bytes([rng.randrange(256)]), b"", found[end : end + 64]])
    return bytes(found[: rng.randrange(len(found) + 1)] if rng.random() < 0.1 else found)


def files(seed: int, number: int) -> dict[str, bytes]:
    """A folder with one changed file; the same one for the same numbers."""
    rng = random.Random(f"{seed} {number}")
    name = rng.choices(FILES, (8, 1, 1))[0]
    tree = rng.choice(corpus()[name])
    if rng.random() < 0.75:
        data = json.dumps(changed(tree, corpus()[name], rng), ensure_ascii=rng.random() < 0.5)
        made = data.encode("utf-8", "surrogatepass")
    else:
        made = bitten(json.dumps(tree).encode(), rng)
    whole = {FILES[0]: json.dumps(rng.choice(corpus()[FILES[0]])).encode()} if name == FILES[1] else {}
    return {**whole, name: made}


# One input


def use(folder: Path) -> None:
    """Everything that is asked of a tokenizer, and that what it is stays the same on disk."""
    tokenizer = load_tokenizer(folder)
    length = tokenizer.token_bytes()
    random_merges = isinstance(tokenizer, FileTokenizer) and tokenizer.description()["model"].get("dropout")
    assert length.shape == (tokenizer.vocab_size,) and length.min() >= 0
    for text in TEXTS:
        with contextlib.suppress(RequestError):  # it lacks <unk>, say
            ids = tokenizer.encode(text)
            assert ids.tolist() == tokenizer.encode_batch([text])[0].tolist() or random_merges
            assert isinstance(tokenizer.decode(ids), str)
            if isinstance(tokenizer, FileTokenizer):
                tokenizer.encode(text, parse_specials=True, add_specials=True)
    tokenizer.save(folder / "copy")
    try:
        again = load_tokenizer(folder / "copy")
    except RequestError as problem:
        raise AssertionError("what it saves cannot be read") from problem
    assert again.fingerprint() == tokenizer.fingerprint()


def outcome(seed: int, number: int) -> str:
    """Returns `read`, the start of the error's sentence, or, after a `!`, a finding: a crash, a slow or large read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        for name, data in files(seed, number).items():
            Path(place, name).write_bytes(data)
        peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            use(Path(place))
            found = "read"
        except RequestError as problem:
            sentence = str(problem).replace(place, "")
            found = re.sub(r"\d[\d.e+]*", "N", sentence.partition("(")[0]).strip()[:60]
            if "\n" in sentence or len(sentence) > 1000:
                found = f"! a sentence: {sentence[:200]!r}"
        except BaseException as problem:
            where = traceback.extract_tb(problem.__traceback__)[-1]
            found = f"! {type(problem).__name__}: {str(problem)[:200]} at {where.line}"
        took, grew = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    return f"! {took:.1f} s, {grew} KiB" if took > SLOW or grew > LARGE else found


def work(seed: int, begin: int) -> None:
    """Prints the outcome of every input from the number given on, a line each."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + ADDRESSES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    corpus()
    print("ready", flush=True)
    number = begin
    while True:
        print(json.dumps(outcome(seed, number)), flush=True)
        number += 1


# Many inputs


@dataclass
class Result:
    tried: int = 0
    found: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[int]] = field(default_factory=dict)
    """Finding -> the numbers of the inputs."""


@contextlib.contextmanager
def worker(seed: int, begin: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", f"from tests.text.fuzz_tokenizer import work; work({seed}, {begin})"]
    # The library also prints its panics to the terminal.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(seed: int = 0, inputs: int | None = None, seconds: float = float("inf")) -> Result:
    """Tries the first `inputs` of a seed, or until `seconds` have passed."""
    result, end = Result(), time.monotonic() + seconds

    def enough() -> bool:
        return result.tried == inputs or time.monotonic() > end

    def note(what: str) -> None:
        if what.startswith("! "):
            result.findings.setdefault(what[2:], []).append(result.tried)
        result.found[what] += 1
        result.tried += 1

    while not enough():
        with worker(seed, result.tried) as process:
            assert process.stdout is not None
            lines = Lines(process.stdout.fileno())
            assert lines.next(60) == "ready"
            while not enough():
                line = lines.next(5 * SLOW)
                if line is None:  # it hangs, or has ended
                    ended = process.poll() if lines.closed and process.wait() is not None else None
                    note("! it never returns" if ended is None else f"! the process ends by {ended}")
                    break
                note(json.loads(line))
    return result


class Lines:
    """Lines of a pipe, each read within a time."""

    def __init__(self, pipe: int):
        self.pipe, self.held, self.closed = pipe, b"", False

    def next(self, seconds: float) -> str | None:
        end = time.monotonic() + seconds
        while b"\n" not in self.held:
            ready, _, _ = select([self.pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            if not (data := os.read(self.pipe, 1 << 16)):
                self.closed = True
                return None
            self.held += data
        line, _, self.held = self.held.partition(b"\n")
        return line.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    arguments = parser.parse_args()
    result = run(arguments.seed, seconds=arguments.seconds)
    print(f"{result.tried} tokenizer files (seed {arguments.seed}), {len(result.findings)} findings")
    for outcome, count in result.found.most_common(25):
        print(f"{count:8d}  {outcome}")
    for what, numbers in list(result.findings.items())[:10]:
        smallest = min((files(arguments.seed, number) for number in numbers[:100]), key=lambda one: len(str(one)))
        print(f"{len(numbers)} times: {what}, as number {numbers[0]}\n  {str(smallest)[:3000]}")


if __name__ == "__main__":
    main()
