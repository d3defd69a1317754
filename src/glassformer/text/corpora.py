"""Opening of DATA as a corpus: a text file, a folder, `-`, `hf:owner/name`, `pairs:LANGUAGE`, `gettext:LANGUAGE`, or
the name of a task, of a published text or of an embedded corpus."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from glassformer.errors import RequestError
from glassformer.files import cache_folder
from glassformer.names.checks import unknown_data
from glassformer.names.known import NAMED_TEXTS
from glassformer.progress import OnProgress, silent
from glassformer.text.catalogues import CATALOGUES, open_catalogues
from glassformer.text.documents import Corpus, Document
from glassformer.text.embedded import EMBEDDED
from glassformer.text.files import COLUMN, is_saved, open_file, open_folder, spool
from glassformer.text.languages import PREFIX, open_pairs
from glassformer.text.tasks import is_task, open_task

__all__ = ["Corpus", "Document", "EMBEDDED", "open_corpus"]

ALIASES = {"number-words": f"{PREFIX}numbers"}


def open_corpus(data: str | Path, cache_dir: str | Path | None = None, progress: OnProgress | None = None) -> Corpus:
    """Opens the corpus that `data` names, and reads it once for its fingerprint.

    A file: JSON lines (`.jsonl`, field `text`, or that of `FILE,column=FIELD`), else text, cut at `<|endoftext|>` if it
    contains that, else one document. A folder: every text file below it is a document, symbolic links followed. `-`:
    standard input, kept in the cache. `hf:`: see `text/hub.py`; `pairs:`: `text/languages.py`; `gettext:`:
    `text/catalogues.py`; `induction` and other tasks: `text/tasks.py`; `shakespeare` and other published texts:
    `text/named.py`. Text is UTF-8, for every tokenizer: a few invalid bytes become U+FFFD and are counted in `notes`, a
    file with more is refused, or skipped in a folder. A byte-order mark is dropped, line ends are kept.

    Raises RequestError for an unknown name, or a corpus without any text.
    """
    data, cache, progress = str(data), cache_folder(cache_dir), progress or silent
    if not data:
        raise RequestError(
            f"data='' names nothing; give a text file, a folder, -, hf:owner/name, {' or '.join(EMBEDDED)}",
            code="missing", field="data",
        )  # fmt: skip
    if data == "-":
        return spool(sys.stdin.buffer, "stdin", data, cache)
    if data in EMBEDDED:
        return EMBEDDED[data](cache, progress)
    if data in NAMED_TEXTS:
        from glassformer.text.named import open_named

        return open_named(data, cache, progress)
    if data in ALIASES or data.startswith(PREFIX):
        return open_pairs(ALIASES.get(data, data))
    if is_task(data):
        return open_task(data)
    if data.startswith(CATALOGUES):
        return open_catalogues(data)
    if data.startswith("hf:"):
        return _hub(data, cache, progress)
    path, column = Path(data).expanduser(), COLUMN
    place, _, field = data.rpartition(",column=")
    if place and field and not os.path.exists(path):
        path, column = Path(place).expanduser(), field
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL byte in the name
        raise unknown_data(data) from None
    except OSError as problem:  # its folder may be inaccessible
        raise RequestError(
            f"data={data!r} cannot be read ({problem.strerror or problem})", code="disk", field="data", value=data
        ) from problem
    if stat.S_ISDIR(mode) and is_saved(path):
        return _hub(f"hf:{data}", cache, progress)
    if stat.S_ISDIR(mode):
        return open_folder(path, column)
    if stat.S_ISREG(mode):
        return open_file(path, data=data, column=column)
    try:
        stream = open(path, "rb")  # noqa: SIM115 - a pipe, as in <(zcat text.gz)
    except OSError as problem:
        raise RequestError(
            f"data={data!r} cannot be read ({problem.strerror or problem})", code="disk", field="data", value=data
        ) from problem
    with stream:
        return spool(stream, path.name, data, cache)


def _hub(data: str, cache: Path, progress: OnProgress) -> Corpus:
    from glassformer.text.hub import open_hub

    return open_hub(data, cache, progress)
