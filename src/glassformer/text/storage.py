"""Where the text folder keeps what it computed, and how it gets there: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from glassformer.errors import WorkError

OnProgress = Callable[[str, int, int | None], None]
"""`progress(stage, done, total)`; `total` is None where it is not known beforehand."""

TEMPORARY = ".glassformer-tmp-"  # how the name of a temporary begins, ours and nobody else's
STALE_SECONDS = 24 * 3600  # a temporary this old belongs to a process that was killed


def silent(stage: str, done: int, total: int | None) -> None:
    """The progress callback of those who did not bring one."""


def digest(*parts: object) -> str:
    """A short stable name for a tuple of plain values: the first 32 hex digits of SHA-256."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turns the ways in which a disk can refuse `target` into one WorkError sentence each."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WorkError(
                f"the disk that holds {target} is full; free some space, "
                "or choose a folder on a larger disk (GLASSFORMER_CACHE names that of the cache)",
                code="disk",
            ) from problem  # fmt: skip
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise WorkError(
                f"{target} cannot be written ({problem.strerror}); "
                "choose a folder of your own (GLASSFORMER_CACHE names that of the cache)",
                code="disk",
            ) from problem  # fmt: skip
        raise


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """An empty temporary folder that becomes `final` if the block ends well, and is removed if not.

    Folders here are named by a hash of what they hold: where another process was faster, its `final` stays.
    """
    with writing(final):
        temporary = _fresh(final.parent)
        temporary.mkdir()
        try:
            yield temporary
            try:
                os.replace(temporary, final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """A new file in `folder`, for the block to fill and rename; what it leaves of it is removed."""
    with writing(folder):
        temporary = _fresh(folder)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """A temporary path beside `final`, renamed over it when the block ends well, removed when it does not."""
    with temporary_file(final.parent) as temporary:
        yield temporary
        os.replace(temporary, final)


def _fresh(folder: Path) -> Path:
    """The path of a temporary in `folder`, which now exists, that nobody else has."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    return folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


def _sweep(folder: Path) -> None:
    """Removes what a killed process left behind, so that a cache does not grow by its accidents."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            # The files of a folder, too: tokenising a large corpus may take longer than that.
            if time.time() - max(found.stat().st_mtime for found in (path, *path.glob("*"))) > STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
