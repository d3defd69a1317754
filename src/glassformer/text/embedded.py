"""Corpora that come with every Python: the documentation and the source of its standard library.

Both are read from the files, never imported: importing some modules has effects (`antigravity` opens a browser).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from glassformer.errors import WorkError
from glassformer.files import atomic_file
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import Corpus, Document
from glassformer.text.files import open_file, read_span

# Tests repeat each other, bundled wheels and site-packages are not the library, encodings are generated tables, and
# pydoc_data is prose that `python-docs` contains.
LEFT_OUT = frozenset({
    "test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "encodings", "pydoc_data",
    "__pycache__",
})  # fmt: skip
EXTRACTION = 1  # version of the content of `python-docs`


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def sources(root: Path) -> list[Path]:
    """Returns the paths of the standard library's .py files below `root`, sorted, without tests and machine-dependent
    files."""
    found: list[Path] = []
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # site-packages may be large
        found += [Path(place, name) for name in files if name.endswith(".py")]
    found = [path for path in found if not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata"))]
    if not found:
        raise WorkError(
            f"the source files of Python's standard library are not in {root}, "
            "so the embedded corpora cannot be read; give a text file or a folder instead",
            code="missing",
        )  # fmt: skip
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def open_python_source(cache: Path, progress: OnProgress = silent) -> Corpus:
    """Opens a corpus of the standard library's source files, a document each."""
    root = standard_library()
    paths = sources(root)
    sha, size = _hash(paths)

    def documents() -> Iterator[Document]:
        for path in paths:
            if text := _read(path):
                yield Document(path.relative_to(root).as_posix(), text)

    return Corpus("python-source", sha, documents, size, {"python": platform.python_version()})


def open_python_docs(cache: Path, progress: OnProgress = silent) -> Corpus:
    """Opens a corpus of prose about Python: a document for each help topic of the language, then for the docstrings of
    each module.

    Extracting the docstrings takes seconds, so they are written once to the cache, under a name derived from the source
    files.
    """
    root = standard_library()
    paths = sources(root)
    topics = root / "pydoc_data" / "topics.py"
    sha, _ = _hash([*paths, topics] if topics.exists() else paths, seed=f"docs {EXTRACTION}")
    kept = cache / "embedded" / f"python-docs-{sha[:32]}.jsonl"
    names = kept.with_suffix(".names.json")
    if not (kept.exists() and names.exists()):
        with atomic_file(kept) as temporary, atomic_file(names) as temporary_names:
            named = []
            with open(temporary, "w", encoding="ascii") as file:
                for name, text in _documented(root, paths, topics, progress):
                    file.write(json.dumps({"text": text}) + "\n")
                    named.append(name)
            temporary_names.write_text(json.dumps(named), encoding="ascii")
    corpus = open_file(kept, "python-docs")

    def documents() -> Iterator[Document]:
        for name, document in zip(json.loads(names.read_text(encoding="ascii")), corpus.documents(), strict=True):
            yield Document(name, document.source)

    return Corpus("python-docs", corpus.fingerprint, documents, corpus.size, {"python": platform.python_version()})


def _documented(root: Path, paths: list[Path], topics: Path, progress: OnProgress) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each help topic of the language, then of the docstrings of each module."""
    for name, text in _topics(topics):
        yield f"topic {name}", text
    for done, path in enumerate(paths):
        progress("reading docstrings", done, len(paths))
        module = _module_name(path.relative_to(root))
        if text := docstrings(path, module):
            yield module, text
    progress("reading docstrings", len(paths), len(paths))


EMBEDDED: dict[str, Callable[[Path, OnProgress], Corpus]] = {
    "python-docs": open_python_docs,
    "python-source": open_python_source,
}


def _hash(paths: list[Path], seed: str = "") -> tuple[str, int]:
    sha, size = hashlib.sha256(seed.encode()), 0
    for path in paths:
        data = path.read_bytes()
        sha.update(hashlib.sha256(data).digest())
        size += len(data)
    return sha.hexdigest(), size


def _read(path: Path) -> str:
    return "".join(read_span(path, 0, path.stat().st_size)).removeprefix("\ufeff")


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _topics(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the help topics in pydoc_data's file `path`, in name order; no topics if Python lacks the
    file."""
    if not path.exists():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            yield from ((name, topics[name]) for name in sorted(topics))


def docstrings(path: Path, module: str) -> str:
    """Returns the docstrings of a source file in its order, each after the full name (and the parameters) of its
    object; "" for a file that cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in the library do not concern our user
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 and templates hold files of another Python version
        return ""
    found: list[str] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""
            if text := ast.get_docstring(node):
                found.append(f"{name}{parameters}\n\n{text}\n")
        for child in ast.iter_child_nodes(node):
            inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
            visit(child, f"{name}.{inner}" if inner else name)

    visit(tree, module)
    return "\n\n".join(found)
