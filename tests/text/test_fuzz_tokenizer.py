"""Tokenizer files that would not end: a few seconds of what `python -m tests.text.fuzz_tokenizer` does for as long as
one likes, and the chains that would make of a short text a long one."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers

from glassformer.errors import RequestError
from glassformer.text.growth import LARGEST_GROWTH, growth
from glassformer.text.tokenizers import load_tokenizer
from tests.refused import refused
from tests.text import fuzz_tokenizer
from tests.text.fuzz_tokenizer import FILES, charsmap, corpus, run, use


def test_thousands_of_changed_files() -> None:
    result = run(seed=0, inputs=2000)
    assert not result.findings, next(iter(result.findings.items()))
    assert result.tried == sum(result.found.values()) == 2000
    assert result.found["read"] > 300 and result.found["/tokenizer.json is not a tokenizer.json"] > 600


@pytest.mark.parametrize("name", FILES)
def test_the_unchanged_files_are_read(name: str, tmp_path: Path) -> None:
    for index, tree in enumerate(corpus()[name]):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / FILES[0]).write_text(json.dumps(corpus()[FILES[0]][0]))
        (folder / name).write_text(json.dumps(tree))
        use(folder)


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("os.abort()", "the process ends by -6"),
        ("time.sleep(60)", "it never returns"),
        ("""print('"! 9.0 s, 7 KiB"', flush=True)""", "9.0 s, 7 KiB"),
    ],
)
def test_crashes_and_hangs_are_findings(code: str, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def worker(seed: int, begin: int) -> Iterator[subprocess.Popen[bytes]]:
        """The second input is a bad one."""
        good = "" if begin else """print('"read"', flush=True)\n"""
        program = f"import os, time\nprint('ready', flush=True)\n{good}{code}"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    monkeypatch.setattr(fuzz_tokenizer, "worker", worker)
    monkeypatch.setattr(fuzz_tokenizer, "SLOW", 0.1)
    result = run(inputs=2)
    assert result.found == {"read": 1, f"! {finding}": 1} and result.findings == {finding: [1]}


def replaced(before: str, after: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": before}, "content": after}


def precompiled(text: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap(text)).decode()}


A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
END = {"SpecialToken": {"id": "<s>", "type_id": 0}}


def template(*pieces: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    special = {"id": "<s>", "ids": [10] * ids, "tokens": ["<s>"] * ids}
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [A, B], "special_tokens": {"<s>": special}}


def chained(name: str, inner: str, *steps: Any) -> dict[str, Any]:
    return {name: {"type": "Sequence", inner: list(steps)}}


NORMALIZERS = ("normalizer", "normalizers")
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
DOUBLED = replaced("a", "aa")
HUGE = {
    "doubled": chained(*NORMALIZERS, *[DOUBLED] * 40),
    "in a chain of chains": chained(*NORMALIZERS, *[chained(*NORMALIZERS, *[DOUBLED] * 10)["normalizer"]] * 4),
    "in the words of old files": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
    "by an unknown type": {"normalizer": {"type": "x", "normalizers": [DOUBLED] * 40}},
    "two long ones": chained(*NORMALIZERS, *[replaced("a", 999 * "a")] * 2),
    "between characters": chained(*NORMALIZERS, *[replaced("", "a")] * 40),
    "by nothing found": chained(*NORMALIZERS, *[{**DOUBLED, "pattern": {"Regex": "x*"}}] * 40),
    "put before": {"normalizer": {"type": "Prepend", "prepend": "a" * 99_999}},
    "bytes of bytes": chained(*NORMALIZERS, *[{"type": "ByteLevel"}] * 30),
    "a form and back": chained(*NORMALIZERS, *[{"type": "NFKD"}, replaced("ل", "ﷺ")] * 9),
    "one of a table": {"normalizer": precompiled(b"A" * 99_999)},
    "bytes cut again": chained("pre_tokenizer", "pretokenizers", *[BYTES] * 30),
    "the text twice": chained("post_processor", "processors", *[template(A, A)] * 30),
    "a long end": {"post_processor": template(A, *[END] * 400, ids=400)},
    "a text of nothing first": chained("post_processor", "processors", template(), *[template(A, A)] * 30),
    "spelled out": chained("decoder", "decoders", *[DOUBLED] * 40),
    "everywhere a little": chained(*NORMALIZERS, *[DOUBLED] * 9) | chained("decoder", "decoders", *[DOUBLED] * 9),
}


@pytest.mark.parametrize("parts", HUGE.values(), ids=HUGE)
def test_steps_that_lengthen_text_too_much_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**corpus()["tokenizer.json"][0], **parts}))
    with refused(code="range", field="tokenizer.json:pre_tokenizer") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


TABLE = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": [[[{"String": "a"}, "aa"]] * 40]}, "is not a JSON object"),
        (chained("decoder", "decoders", [{"String": "a"}, "aa"]), "is not a JSON object"),
        ({"normalizer": ["/////w=="]}, "is not a JSON object"),
        ({"normalizer": TABLE}, "precompiled_charsmap has 4 bytes and says that only its index has 4294967295"),
        (chained(*NORMALIZERS, DOUBLED, {"precompiled_charsmap": "/////w=="}), "precompiled_charsmap has 4 bytes"),
    ],
)
def test_malformed_parts_that_the_library_accepts_are_refused(parts: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**corpus()["tokenizer.json"][0], **parts}))
    with pytest.raises(RequestError, match=says):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        chained(*NORMALIZERS, *[replaced("a", "b")] * 500),
        chained(*NORMALIZERS, *[replaced("aa", "b")] * 500),
        chained(*NORMALIZERS, *[replaced("abc", "dcba")] * 9),
        {"normalizer": precompiled("\u0635\u0644\u0649 \u0627\u0644\u0644\u0647".encode())},
        {"post_processor": template(END, A, END)},
    ],
)
def test_long_chains_that_make_nothing_longer_are_not(parts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**corpus()["tokenizer.json"][0], **parts}))
    load_tokenizer(tmp_path)


def test_published_families_are_not() -> None:
    """The files that `transformers` builds for published families pass, and so does the table of SentencePiece that
    their files may add."""
    names = (
        "SeamlessM4T Nougat CLIP Albert FNet Bert XLNet Herbert MPNet Qwen2 Whisper Deberta T5 XLMRoberta Llama Gemma"
    )
    found = {}
    for name in names.split():
        library = getattr(transformers, f"{name}Tokenizer")()._tokenizer
        found[name] = growth(json.loads(library.to_str()))
    assert max(found, key=lambda name: found[name]) == "SeamlessM4T"
    assert 18 * found["SeamlessM4T"] == 41_472 <= LARGEST_GROWTH


def test_two_tokens_of_one_id_are_refused(tmp_path: Path) -> None:
    """The library would choose one of the two tokens for the id differently in each process."""
    tree = corpus()["tokenizer.json"][0]
    tree = {**tree, "model": {**tree["model"], "vocab": {**tree["model"]["vocab"], "twin": 2}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with refused(code="conflict", field="tokenizer.json:model.vocab"):
        load_tokenizer(tmp_path)
