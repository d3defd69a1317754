"""Corpora through the `datasets` package: the Hugging Face Hub, a folder of tables, or a dataset saved to
disk.

    hf:NAME[:CONFIG][#SPLIT][,column=COLUMN][,documents=N]

NAME is `owner/name` or a local folder. SPLIT is `train` unless named. COLUMN is `text`, or the only column of
strings. With `documents=N` the first N are streamed and kept in the cache, and nothing else is downloaded;
without it `datasets` downloads the split and maps it into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glassformer.errors import RequestError, WorkError, did_you_mean
from glassformer.files import atomic_file
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import Corpus, Document, mended
from glassformer.text.files import is_saved, open_file, refuse_empty
from glassformer.text.storage import digest

INSTEAD = "pass a text file, a folder, or an embedded corpus (python-docs, python-source) instead"
ID_COLUMNS = ("input_ids", "ids", "tokens")
"""Names of columns that are read as token ids by default, in a dataset without a text."""
USUAL_COLUMNS = ("text", "content", "document", "article", "story", "body")


@dataclass(frozen=True)
class HubName:
    """Parts of a name `hf:...`; None for a part that is left out."""

    name: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    documents: int | None = None


def parse_hub_name(data: str) -> HubName:
    """Returns the parts of a name `hf:NAME[:CONFIG][#SPLIT][,column=COLUMN][,documents=N]`. Raises RequestError for a
    name of another form, and for a local folder that does not exist."""
    options: dict[str, str] = {}
    name, *rest = data.removeprefix("hf:").split(",")
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals or not value or key not in ("column", "documents"):
            hint = did_you_mean(key, ("column", "documents"))
            raise RequestError(
                f"data={data!r}: {item!r} must be column=NAME or documents=N{hint}",
                code="syntax", field="data", value=item,
            )  # fmt: skip
        options[key] = value
    documents = options.get("documents")
    if documents is not None and not (documents.isdecimal() and int(documents) > 1):
        raise RequestError(
            f"data={data!r}: documents={documents} must be a whole number of at least 2",
            code="range", field="data.documents", value=documents,
        )  # fmt: skip
    name, _, split = name.partition("#")
    config = ""
    if not Path(name).expanduser().exists():  # a local path may have a colon in it
        name, _, config = name.partition(":")
    local = name.startswith(("~", ".", "/")) or name.count("/") > 1
    if local and not Path(name).expanduser().is_dir():
        raise RequestError(
            f"data={data!r}: the folder {name} does not exist; give a folder of tables or hf:owner/name",
            code="missing", field="data", value=name,
        )  # fmt: skip
    if not name:
        raise RequestError(
            f"data={data!r} names no dataset; write hf:owner/name or hf:FOLDER", code="missing", field="data"
        )
    count = int(documents) if documents else None
    return HubName(
        str(Path(name).expanduser()) if local else name,
        config or None,
        split or None,
        options.get("column"),
        count,
    )


def open_hub(data: str, cache: Path, progress: OnProgress = silent) -> Corpus:
    """Opens the corpus that `data`, a name `hf:...`, means. No code of a dataset is ever executed."""
    wanted = parse_hub_name(data)
    datasets = _datasets(data)
    if wanted.documents is not None and not Path(wanted.name).exists():
        kept = cache / "hub" / f"{digest(wanted)}.jsonl"
        if not kept.exists():
            table = _loaded(datasets, data, wanted, streaming=True)
            column = _column(data, wanted, table)
            _keep(kept, _network_checked(data, _strings(table, column)), wanted.documents, progress)
        corpus = open_file(kept, data)
        return Corpus(data, corpus.fingerprint, corpus.source, corpus.size, {"documents_limit": wanted.documents})

    table = _loaded(datasets, data, wanted, streaming=False)
    column = _column(data, wanted, table)

    def documents() -> Iterator[Document]:
        for index, text in enumerate(itertools.islice(_strings(table, column), wanted.documents)):
            if text:
                yield Document(f"{wanted.name}#{index}", text)

    sha, size = hashlib.sha256(b"hub"), 0
    for document in documents():
        text = document.text.encode()
        sha.update(hashlib.sha256(text).digest())
        size += len(text)
        progress("reading", size, None)
    notes = {"column": column, "split": str(wanted.split or table.split or "train")}
    return refuse_empty(Corpus(data, sha.hexdigest(), documents, size, notes), f"data={data!r}")


def hub_ids(data: str) -> tuple[Any, Any] | None:
    """Returns (ids to train on, held-out ids), each an iterator of arrays, of a dataset saved to disk, from the named
    column or one of `ID_COLUMNS`. Held-out ids are the split "validation", None without it or if `data` names a split.
    Returns None for other data, and for a dataset without such a column."""
    wanted = parse_hub_name(data)
    if not is_saved(Path(wanted.name)):
        return None
    table = _loaded(_datasets(data), data, wanted, streaming=False)
    names = [name for name, feature in table.features.items() if _holds_ids(feature)]
    column = wanted.column if wanted.column in names else next((name for name in ID_COLUMNS if name in names), None)
    if column is None or (wanted.column is not None and column != wanted.column):
        return None
    held_out = None
    if wanted.split is None and (Path(wanted.name) / "validation").is_dir():
        rest = _loaded(_datasets(data), data, replace(wanted, split="validation"), streaming=False)
        held_out = _ids(rest, column)
    return _ids(table, column), held_out


def _holds_ids(feature: Any) -> bool:
    """Returns True if the feature of a column is integers, or rows of integers."""
    kind = getattr(getattr(feature, "feature", feature), "dtype", None)
    return isinstance(kind, str) and kind.startswith(("int", "uint"))


def _ids(table: Any, column: str) -> Iterator[Any]:
    """Yields the token ids of a column, as an array for some rows at a time."""
    for rows in table.select_columns([column]).with_format("arrow").iter(batch_size=256):
        values = rows[column].combine_chunks()
        yield (values.flatten() if hasattr(values, "flatten") and "list" in str(values.type) else values).to_numpy(
            zero_copy_only=False
        )


def _datasets(data: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"data={data!r} needs the package datasets: pip install 'glassformer[data]'; or {INSTEAD}",
            code="missing", field="datasets",
        ) from None  # fmt: skip
    datasets.disable_progress_bars()
    return datasets


def _loaded(datasets: Any, data: str, wanted: HubName, streaming: bool) -> Any:
    """Returns one split of a dataset as a table (`Dataset`, or `IterableDataset` when streaming). Raises RequestError
    or WorkError."""
    folder = Path(wanted.name)
    try:
        if is_saved(folder):
            found = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            found = datasets.load_dataset(str(folder.resolve()), wanted.config, streaming=streaming)
        else:
            with _no_waiting(datasets):
                found = datasets.load_dataset(wanted.name, wanted.config, streaming=streaming)
    except Exception as problem:
        raise _sentence(data, problem) from problem
    if not isinstance(found, dict):
        return found
    split = wanted.split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if split not in found:
        known = ", ".join(map(repr, found))
        raise RequestError(
            f"data={data!r} has no split {split!r}, only {known}; write {data.partition('#')[0]}#SPLIT",
            code="unknown", field="data.split", value=split,
        )  # fmt: skip
    return found[split]


@contextlib.contextmanager
def _no_waiting(datasets: Any) -> Iterator[None]:
    """Sets `datasets` to offline mode inside the block if the Hub's name does not resolve.

    Cached data is then found at once, and missing data fails at once, instead of after 23 seconds of retries.
    """
    from huggingface_hub import constants

    proxies = urllib.request.getproxies()  # behind a proxy the name need not resolve here
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or "huggingface.co"
    if not (proxies.get("https") or proxies.get("all")):
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
            try:
                yield
            finally:
                constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
            return
    yield


def _sentence(data: str, problem: Exception) -> Exception:
    """Returns a RequestError, or for an unreachable Hub a WorkError, instead of an exception of `datasets` or the
    network."""
    kind = type(problem).__name__
    detail = (str(problem).strip().splitlines() or [""])[0].rstrip(".")[:200]
    unreachable = (
        "ConnectionError",
        "ConnectError",
        "Timeout",
        "OfflineMode",
        "ProxyError",
        "SSLError",
        "LocalEntryNotFound",
    )
    chain: BaseException | None = problem
    while chain is not None:
        if any(word in type(chain).__name__ for word in unreachable):
            return WorkError(
                f"data={data!r}: the Hugging Face Hub cannot be reached ({kind}: {detail}); {INSTEAD}", code="network"
            )
        chain = chain.__cause__ or chain.__context__
    return RequestError(
        f"data={data!r} cannot be opened by datasets ({kind}: {detail}); "
        f"check the name, the :CONFIG and the #SPLIT, or {INSTEAD}",
        code="damaged", field="data", value=data,
    )  # fmt: skip


def _network_checked(data: str, texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts of a stream. Raises WorkError if it is interrupted."""
    try:
        yield from texts
    except Exception as problem:
        raise WorkError(
            f"data={data!r}: the stream broke off ({type(problem).__name__}: {problem}); run it again, or {INSTEAD}",
            code="network",
        ) from problem  # fmt: skip


def _column(data: str, wanted: HubName, table: Any) -> str:
    """Returns the name of the column to read: the one in `wanted`, else `text` or a synonym, else the only column of
    strings. Raises RequestError."""
    features = table.features
    if features is None:  # a stream that does not declare its columns: use its first row
        first: dict[str, Any] = next(iter(table), {})
        strings, every = [name for name, value in first.items() if isinstance(value, str)], list(first)
    else:
        kinds = {name: getattr(feature, "dtype", None) for name, feature in features.items()}
        strings = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
        every = list(kinds)
    if wanted.column is not None:
        if wanted.column not in strings:
            hint = did_you_mean(wanted.column, strings)
            raise RequestError(
                f"data={data!r}: column={wanted.column} is not a column of strings; "
                f"the columns of strings are {', '.join(strings) or 'none'}{hint}",
                code="unknown", field="data.column", value=wanted.column,
            )  # fmt: skip
        return wanted.column
    for name in USUAL_COLUMNS:
        if name in strings:
            return name
    if len(strings) == 1:
        return strings[0]
    raise RequestError(
        f"data={data!r}: which column is the text? It has {', '.join(every) or 'none'}; write {data},column=NAME",
        code="missing", field="data.column",
    )  # fmt: skip


def _strings(table: Any, column: str) -> Iterator[str]:
    """Yields the texts of a column in order, without nulls."""
    for rows in table.select_columns([column]).iter(batch_size=256):
        for text in rows[column]:
            if text is not None:
                yield mended(text)


def _keep(kept: Path, texts: Iterable[str], count: int, progress: OnProgress) -> None:
    """Writes the first `count` texts of a stream as JSON lines to `kept`."""
    with atomic_file(kept) as temporary, open(temporary, "w", encoding="ascii") as file:
        for done, text in enumerate(itertools.islice(texts, count)):
            file.write(json.dumps({"text": text}) + "\n")
            progress("downloading", done + 1, count)
