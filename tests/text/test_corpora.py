from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from glassformer.errors import Code, RequestError, WorkError
from glassformer.names.known import NAMED_TEXTS
from glassformer.text import corpora, embedded, files, hub, named
from glassformer.text.corpora import open_corpus
from glassformer.text.documents import Corpus
from tests.refused import failed, refused


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def test_a_text_file_is_one_document_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffzwölf\r\n\n  lines ".encode())
    corpus = open_corpus(str(path))
    assert texts(corpus) == ["zwölf\r\n\n  lines "]  # no mark, line ends and spaces as they were
    assert texts(corpus) == texts(corpus)
    assert corpus.name == "a.txt" and corpus.describe()["fingerprint"] == corpus.fingerprint


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one"), ("b.md", "one"), ("c.txt", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (open_corpus(tmp_path / name).fingerprint for name in ("a.txt", "b.md", "c.txt"))
    assert a == b != c


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    assert texts(open_corpus(path)) == ["caf\ufffd"]


RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n" * 20


@pytest.mark.parametrize("chunk", [7, 256 * 1024])
def test_bytes_that_are_not_utf8_are_counted(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", chunk)  # characters of several bytes cross reads
    path = tmp_path / "a.txt"
    for right in (RUSSIAN, "\ufeff" + RUSSIAN, RUSSIAN + "\ufffd \U0001f600"):  # U+FFFD itself is text
        path.write_text(right)
        assert open_corpus(path).describe().get("replaced_bytes") is None
    path.write_bytes(RUSSIAN.encode() + "naïve café ".encode("latin-1") + b"\xed\xa0\x80 " + "я".encode()[:1])
    assert open_corpus(path).describe()["replaced_bytes"] == 2 + 3 + 1


def test_another_encoding_is_refused_and_skipped_in_a_folder(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "b.txt").write_bytes(RUSSIAN.encode("cp1251"))
    wrong = len(RUSSIAN) - sum(map(RUSSIAN.count, " ,-.\n"))
    with refused(code="damaged", field="data") as caught:
        open_corpus(tmp_path / "b.txt")
    assert caught.value.value == wrong
    with refused(code="missing", field="data"):
        open_corpus(tmp_path)
    (tmp_path / "a.txt").write_bytes("some café".encode("latin-1"))
    (tmp_path / "c.txt").write_bytes("a naïve café".encode("latin-1"))
    corpus = open_corpus(tmp_path)
    assert [document.name for document in corpus.documents()] == ["a.txt", "c.txt"]
    assert corpus.describe()["skipped"] == {"not UTF-8": 1} and corpus.describe()["replaced_bytes"] == 3


def test_one_byte_in_a_hundred_may_be_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xe9" * 100 + b"e" * 9900)
    assert open_corpus(path).describe()["replaced_bytes"] == 100
    path.write_bytes(b"\xe9" * 101 + b"e" * 9899)
    with refused(code="damaged", field="data") as caught:
        open_corpus(path)
    assert caught.value.value == 101


def test_separators_cut_a_file_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\n\ntwo é\n<|endoftext|><|endoftext|>three\n<|endoftext|>\n")
    for chunk in (1, 2, 13, 14, 1000):
        monkeypatch.setattr(files, "CHUNK", chunk)
        assert texts(open_corpus(path)) == ["one", "two é", "three"]


def test_a_large_document_is_streamed_as_it_would_be_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.txt"
    text = "".join(f"{number} é 漢\n" for number in range(3000))
    path.write_text(text)
    monkeypatch.setattr(files, "WHOLE", 1000)
    monkeypatch.setattr(files, "CHUNK", 777)  # characters of several bytes cross reads
    (document,) = open_corpus(path).documents()
    assert not isinstance(document.source, str)
    assert document.text == text and "".join(document.pieces(50)) == text


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": "tw\\ud800o\\n"}\n{"text": ""}\n{"text": "<|endoftext|>"}')
    assert texts(open_corpus(path)) == ["one", "tw\ufffdo\n", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [("{", "syntax", "a.jsonl:2"), ("[]", "missing", "a.jsonl:2.text"), ('{"txt": "a"}', "missing", "a.jsonl:2.text"),
     ('{"text": 3}', "missing", "a.jsonl:2.text"), ("[" * 100_000, "syntax", "a.jsonl:2")],
)  # fmt: skip
def test_a_wrong_json_line_is_placed(line: str, code: Code, field: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with refused(code=code, field=field):
        texts(open_corpus(path))


def test_folder_is_read_in_order_and_lists_skipped_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    for name, content in (
        ("b.txt", b"second"), ("a.md", b"first"), ("README", b"zeroth"), ("sub/c.py", b"third"),
        ("d.jsonl", b'{"text": "x"}'),
        ("image.png", b"\x89PNG"), ("binary.txt", b"a\0b"), ("empty.txt", b""), ("mark.txt", b"\xef\xbb\xbf"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    corpus = open_corpus(str(tmp_path))
    assert texts(corpus) == ["zeroth", "first", "second", "x", "third"]
    assert [document.name for document in corpus.documents()][-1] == "sub/c.py"
    assert corpus.describe()["skipped"] == {"binary": 1, "empty": 2, "other suffixes": 1, "unreadable": 2}
    (tmp_path / "b.txt").rename(tmp_path / "bb.txt")
    assert open_corpus(tmp_path).fingerprint == corpus.fingerprint
    (tmp_path / "bb.txt").write_text("changed")
    assert open_corpus(tmp_path).fingerprint != corpus.fingerprint


def locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes listing and entering `folder` fail for every user, root too."""
    real = {name: getattr(os, name) for name in ("scandir", "stat")}

    def refuse(name: str, inside: bool):
        def call(path: object = ".", *arguments: object, **options: object) -> object:
            where = Path(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
            if where is not None and (folder in where.parents or (where == folder and not inside)):
                raise PermissionError(errno.EACCES, "Permission denied", str(where))
            return real[name](path, *arguments, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refuse(name, inside=name != "scandir"))


def test_folders_that_cannot_be_read_are_counted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "b.txt").write_text("more")
    locked(tmp_path / "secret", monkeypatch)
    corpus = open_corpus(tmp_path)
    assert texts(corpus) == ["text"] and corpus.describe()["skipped"] == {"unreadable folders": 1}
    for name in ("secret", "secret/b.txt"):
        with refused(code="disk", field="data"):
            open_corpus(tmp_path / name)


def test_a_pipe_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(corpora, "open", refuse, raising=False)
    with refused(code="disk", field="data"):
        open_corpus(tmp_path / "pipe")


def test_links_to_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    for name in ("data/sub", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "sub" / "a.txt").write_text("here")
    (tmp_path / "elsewhere" / "deep" / "b.txt").write_text("there")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "twice").symlink_to(tmp_path / "data" / "sub")
    (tmp_path / "data" / "sub" / "loop").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere" / "deep" / "back").symlink_to(tmp_path / "elsewhere")
    corpus = open_corpus(tmp_path / "data")
    assert [(document.name, document.text) for document in corpus.documents()] == [
        ("linked/deep/b.txt", "there"),
        ("sub/a.txt", "here"),
    ]
    assert corpus.describe()["skipped"] == {}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [("a.txt", b"", "missing"), ("a.txt", b" \n", "missing"), ("a.jsonl", b"\n", "missing"),
     ("a.txt", b"text\0", "type"), ("t.parquet", b"PAR1\0", "type"),
     ("a.txt", b"<|endoftext|>", "missing")],
)  # fmt: skip
def test_a_file_without_text_is_refused(name: str, content: bytes, code: Code, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(code=code, field="data"):
        open_corpus(tmp_path / name)


def test_folder_without_text_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match=r"files skipped: 1 other suffixes \(t.parquet\); tables are read by hf:"):
        open_corpus(tmp_path)


def test_a_missing_name_is_answered_with_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    for wrong, near in (
        ("shakespear.txt", "'shakespeare.txt'"), ("pyton-docs", "'python-docs'"),
        (tmp_path / "shakspeare.txt", "'.*/shakespeare.txt'"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=rf"number-words\); did you mean {near}"):
            open_corpus(wrong)
    with refused(code="missing", field="data"):
        open_corpus("")


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"some\ntext", ["some\ntext"]),
        (b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        (b"{not json\n", ["{not json\n"]),
    ],
)
def test_standard_input_is_kept_and_can_be_read_again(
    content: bytes, expected: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(content))
    corpus = open_corpus("-")
    assert corpus.name == "stdin" and texts(corpus) == expected == texts(corpus)
    assert len(list((cache / "streams").iterdir())) == 1  # no temporary is left


def test_empty_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    with refused(code="missing", field="data"):
        open_corpus("-")


def test_a_pipe_is_spooled_too(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("through a pipe"))
    writer.start()
    assert texts(open_corpus(path)) == ["through a pipe"]
    writer.join()


def test_a_file_that_goes_away_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    corpus = open_corpus(path)
    path.unlink()
    with failed(code="changed"):
        texts(corpus)


# The embedded corpora, on a small library of the test's own and once on the real one.


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "test" / "lib"  # a folder called test above the library excludes nothing
    for name, text in {
        "b.py": '"""About b."""\ndef f(x, *, y=1):\n  """Does\n\n      f."""\n  class C:\n    "Inner."\n',
        "a/__init__.py": "raise SystemExit('imported')\n'''not a docstring'''",
        "a/c.py": "async def g(): 'Waits.'",
        "broken.py": "def (",
        "a/tests/t.py": "'''a test'''",
        "site-packages/s.py": "'''a package'''",
        "config-3.99/x.py": "'''generated'''",
        "_sysconfigdata_x.py": "'''generated'''",
        "pydoc_data/topics.py": "topics = {'z': 'Topic z\\n', 'a': 'Topic a\\n'}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(embedded, "standard_library", lambda: root)
    return root


def test_python_docs(library: Path, cache: Path) -> None:
    corpus = open_corpus("python-docs")
    assert texts(corpus) == [
        "Topic a\n", "Topic z\n", "a.c.g()\n\nWaits.\n",
        "b\n\nAbout b.\n\n\nb.f(x, *, y=1)\n\nDoes\n\nf.\n\n\nb.f.C\n\nInner.\n",
    ]  # fmt: skip
    kept = next((cache / "embedded").iterdir())
    written = kept.stat().st_mtime_ns
    assert open_corpus("python-docs").fingerprint == corpus.fingerprint
    assert kept.stat().st_mtime_ns == written  # extracted once
    (library / "b.py").write_text('"""About another b."""')
    assert "b\n\nAbout another b.\n" in texts(open_corpus("python-docs"))


def test_python_source(library: Path) -> None:
    corpus = open_corpus("python-source")
    assert [document.name for document in corpus.documents()] == [
        "a/__init__.py",
        "a/c.py",
        "b.py",
        "broken.py",
    ]
    assert corpus.describe()["python"]


def test_a_library_without_sources_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "standard_library", lambda: tmp_path)
    for name in ("python-docs", "python-source"):
        with failed(code="missing"):
            open_corpus(name)


def test_the_real_library_is_there() -> None:
    names = [document.name for document in open_corpus("python-source").documents()]
    assert len(names) > 300 and "json/decoder.py" in names
    assert not {part for name in names for part in name.split("/")} & {"test", "tests", "site-packages"}
    text = embedded.docstrings(embedded.standard_library() / "textwrap.py", "textwrap")
    assert "textwrap.dedent(text)\n\nRemove any common leading whitespace" in text


# hf: through the real `datasets`, on data made here; nothing is downloaded.


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(
        {"id": [1, 2, 3, 4], "body": ["one", None, "", "four é"], "title": ["a", "b", "c", "d"]}
    )
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "extra": table.select([0])}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    table.to_parquet(str(tmp_path / "files" / "train.parquet"))
    return tmp_path


def test_local_datasets(tables: Path) -> None:
    for name in ("saved", "several", "several#train", "files", "files,column=body"):
        corpus = open_corpus(f"hf:{tables}/{name}")
        assert texts(corpus) == ["one", "four é"] == texts(corpus)
        assert corpus.describe()["column"] == "body" and corpus.describe()["split"] == "train"
    assert texts(open_corpus(f"hf:{tables}/several#extra")) == ["one"]
    assert texts(open_corpus(f"hf:{tables}/files,column=title")) == ["a", "b", "c", "d"]
    assert texts(open_corpus(f"hf:{tables}/files,column=title,documents=2")) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "code", "field"),
    [
        ("several#trian", "unknown", "data.split"),
        ("files,column=id", "unknown", "data.column"),
        ("files,column=bodi", "unknown", "data.column"),
        ("files,colum=body", "syntax", "data"),
        ("files,documents=x", "range", "data.documents"),
        ("nowhere", "missing", "data"),
    ],
)
def test_a_wrong_dataset_is_one_sentence(name: str, code: Code, field: str, tables: Path) -> None:
    with refused(code=code, field=field) as caught:
        open_corpus(f"hf:{tables}/{name}")
    assert "\n" not in str(caught.value)


def test_two_columns_of_strings_are_a_question(tables: Path) -> None:
    import datasets

    (tables / "two").mkdir()
    datasets.Dataset.from_dict({"left": ["a"], "right": ["b"]}).to_parquet(str(tables / "two" / "train.parquet"))
    with refused(code="missing", field="data.column"):
        open_corpus(f"hf:{tables}/two")


def test_the_first_documents_are_streamed_once(tables: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    real, calls = datasets.load_dataset, []

    def load_dataset(name: str, config: str | None, streaming: bool) -> object:
        calls.append((name, config, streaming))
        return real(str(tables / "files"), streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *_: [])
    for _ in range(2):
        assert texts(open_corpus("hf:some/body:config#train,column=title,documents=3")) == ["a", "b", "c"]
    assert calls == [("some/body", "config", True)]
    (kept,) = (cache / "hub").iterdir()
    assert json.loads(kept.read_text().splitlines()[0]) == {"text": "a"}


def test_offline_is_one_sentence_at_once(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def no_name(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "getaddrinfo", no_name)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    before = constants.HF_HUB_OFFLINE
    for name in ("hf:nobody/nothing", "hf:nobody/nothing,documents=5"):
        with failed(code="network") as caught:
            open_corpus(name)
        assert "\n" not in str(caught.value)
    assert before == constants.HF_HUB_OFFLINE


def test_without_the_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(code="missing", field="datasets"):
        open_corpus("hf:owner/name")


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF"),  # ISO 32000-1, 7.5.2
        (b"\x89PNG\r\n\x1a\n", "a PNG picture"),  # PNG specification, 5.2
        (gzip.compress(b"text", mtime=0), "compressed by gzip"),
        (bz2.compress(b"text"), "compressed by bzip2"),
        (lzma.compress(b"text"), "compressed by xz"),
    ],
)
def test_a_file_of_another_kind_is_named(start: bytes, kind: str, tmp_path: Path) -> None:
    """With and without a NUL byte behind it."""
    for rest in (b"", b"\0", b"plain"):
        (tmp_path / "a").write_bytes(start + rest)
        with refused(code="type", field="data") as caught:
            open_corpus(tmp_path / "a")
        assert f"is {kind}" in str(caught.value)


def test_a_published_text_is_read_from_the_cache_or_refused_with_the_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(data: str, cache: Path, progress: Any) -> Corpus:
        assert data == "hf:Trelis/tiny-shakespeare"
        raise WorkError("the Hub cannot be reached", code="network")

    monkeypatch.setattr(named, "open_hub", offline)
    with refused(code="missing", field="data") as caught:
        open_corpus("shakespeare")
    kept = cache / "texts" / "shakespeare.txt"
    assert str(kept) in str(caught.value) and caught.value.expected == str(kept)
    kept.parent.mkdir(parents=True)
    kept.write_text("To be, or not to be.\n" * 20)
    corpus = open_corpus("shakespeare")
    assert corpus.name == "shakespeare" and next(iter(corpus.documents())).text == kept.read_text()


def test_a_published_text_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    asked = []

    def hub(data: str, cache: Path, progress: Any) -> Corpus:
        asked.append(data)
        return open_corpus("python-docs", cache)

    monkeypatch.setattr(named, "open_hub", hub)
    assert open_corpus("wikitext-2").name == "wikitext-2"
    assert asked == ["hf:Salesforce/wikitext:wikitext-2-raw-v1"] and set(named.TEXTS) == set(NAMED_TEXTS)
