"""Atomic writes of files, with one writing process at a time; errors of disks; versions of file formats."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from glassformer.errors import FORBIDDEN, RequestError, WorkError, shown

# Disk errors

UNTOUCHED = "what was saved before is untouched"
NO_SPACE, FULL = "the disk is full", (errno.ENOSPC, errno.EDQUOT)
OF_CACHE = "free some space, or choose another folder with GLASSFORMER_CACHE"


@contextmanager
def disk_errors(target: str | Path, advice: str = UNTOUCHED, network: bool = False) -> Iterator[None]:
    """Converts errors of writing `target` to one-sentence errors: a RequestError if writing is not permitted, otherwise
    a WorkError. With `network`, errors that a network may have raised pass unchanged: a shared disk raises some of them
    too."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        full = number is not None and int(number[1]) in FULL
        raise WorkError(f"{target} cannot be written ({NO_SPACE if full else error}); {advice}", code="disk") from error
    except OSError as error:
        away = isinstance(error, ConnectionError | TimeoutError) or (error.errno is None and type(error) is not OSError)
        if network and away:
            raise
        why = NO_SPACE if error.errno in FULL else error.strerror or str(error)
        message = f"{target} cannot be written ({why}); {advice}"
        if error.errno in FORBIDDEN:
            raise RequestError(message, code="disk", field=str(target), value=str(target)) from error
        raise WorkError(message, code="disk") from error


# Atomic replacement of files and folders

TEMPORARY = ".glassformer-tmp-"
"""Prefix of the name of every temporary file and folder"""
STALE_SECONDS = 24 * 3600
"""Age after which a temporary file of another machine is assumed to belong to a killed process"""


def put(temporary: Path, final: Path) -> None:
    """Renames a complete file or folder to `final`. After a power cut, `final` is either the old one or the complete
    new one."""
    for path in (*(temporary.rglob("*") if temporary.is_dir() else ()), temporary):
        _flush(path)
    os.replace(temporary, final)
    _flush(final.parent)


@contextmanager
def atomic_file(final: str | Path, private: bool = False, advice: str = UNTOUCHED) -> Iterator[Path]:
    """Yields the path of an empty file that replaces `final` if the block ends without an error, and is removed
    otherwise: a reader finds the old file or the complete new one. Makes the folder. Raises WorkError.

    `private`: other users may not read the file."""
    final = Path(final)
    with temporary_file(final, private, advice) as temporary:
        yield temporary
        put(temporary, final)


@contextmanager
def temporary_file(near: Path, private: bool = False, advice: str = UNTOUCHED) -> Iterator[Path]:
    """Yields the path of an empty file in the folder of `near`, to be filled and moved with `put` in the block. If it
    is not moved, it is removed. Raises WorkError, which names `near`."""
    with disk_errors(near, advice):
        temporary = _unused(near.parent, near.suffix)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old text or the complete new one. Raises WorkError."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `final` if the block ends without an error, and is removed
    otherwise. Raises WorkError.

    Such folders of the cache are named by a hash of their content: if another process was faster, its `final` stays.
    """
    with disk_errors(final, OF_CACHE, network=True):
        temporary = _unused(final.parent)
        temporary.mkdir()
        try:
            yield temporary
            try:
                put(temporary, final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields an empty folder. Its files are moved to `folder`, in the order of their names, if the block ends without
    an error. Until then `folder` does not change, and afterwards the temporary folder is gone. Raises WorkError."""
    with disk_errors(folder):
        temporary = _unused(folder)
        temporary.mkdir()
        try:
            yield temporary
            for file in sorted(temporary.iterdir()):
                put(file, folder / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk, so that it survives a power cut."""
    with suppress(OSError) if path.is_dir() else nullcontext():  # not every system can flush a folder
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" and path.is_file() else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unused(folder: Path, suffix: str = "") -> Path:
    """Returns the path of a new temporary in `folder`, which is made and cleared of old temporaries."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    _sweep(folder)
    return folder / f"{TEMPORARY}{_machine_hash()}-{os.getpid()}-{secrets.token_hex(8)}{suffix}"


def _sweep(folder: Path) -> None:
    """Removes temporaries of killed processes: on this machine at once, those of other machines by age."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            process = _process_of(path)
            ended = process is not None and not _running(process)
            # Files in a folder count too: tokenising a large corpus may take longer.
            if ended or time.time() - max(one.stat().st_mtime for one in (path, *path.glob("*"))) > STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _process_of(temporary: Path) -> int | None:
    """Returns the process id in the name of a temporary; None if it is from another machine."""
    machine, _, rest = temporary.name.removeprefix(TEMPORARY).partition("-")
    process = rest.partition("-")[0]
    return int(process) if machine == _machine_hash() and process.isdecimal() else None


def unfinished(folder: Path, suffix: str = "") -> str:
    """Returns a clause about a temporary file in a folder, from an interrupted or running write; empty if there is
    none.

    suffix    end of the name of the file to be written"""
    for path in sorted(folder.glob(f"{TEMPORARY}*{suffix}")):
        process = _process_of(path)
        if process is not None and _running(process):
            return f"process {process} is writing it; wait for its end"
        return f"a write that was interrupted left {path.name} there; write it again with --force"
    return ""


def _machine_hash() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:8]


# Outputs of verbs: only files of this program are replaced

WRITTEN = "written.json"
"""Cache file that lists the files written by this program: {folder or file: {name: [bytes, modification time]}}"""
MARKS = {".html": b'name="generator" content="Glassformer"', ".png": b"Software\0Glassformer"}
"""Mark near the start of this program's pages and figures, by suffix"""
MARKED_BYTES = 1 << 16
"""Number of bytes at the start of a file that are searched for its mark"""


@contextmanager
def output(
    out: str | Path, *names: str, force: bool | None = False, sources: Iterable[Path] = (), alone: bool = False
) -> Iterator[Path]:
    """Yields the path of an output for a verb to write, and records the files written. Raises RequestError as
    `check_output` does."""
    place = check_output(out, *names, force=force, sources=sources, alone=alone)
    before = _stamps(place, names)
    try:
        yield place
    finally:
        key, after = os.path.realpath(place), _stamps(place, names)
        known = _record(place)
        mine = {name: now for name, now in after.items() if now != before.get(name) or now == known.get(name)}
        if mine:
            kept = {name: stamp for name, stamp in known.items() if (place / name).exists()}  # written by other verbs
            remember(WRITTEN, key, {**kept, **mine})


def is_written(place: Path, *names: str) -> bool:
    """Returns True if this program wrote all the files that an output replaces, and they have not changed since."""
    known, held = _record(place), _stamps(place, names)
    return bool(held) and all(known.get(name) == stamp for name, stamp in held.items())


def check_output(
    out: str | Path, *names: str, force: bool | None = False, sources: Iterable[Path] = (), alone: bool = False
) -> Path:
    """Returns the path of an output after checking that it can be written. Leaves no trace.

    out        file, or with `names` a folder
    names      patterns of the files and folders in it that are replaced or removed
    force      replace files from other sources too; None for a verb that never does
    sources    files and folders that the output is made from: it may be neither one of them nor a folder inside one
    alone      refuse a folder with other files, hidden ones excepted, unless it has a file of `names`

    Raises RequestError."""
    place = _writable(out, file=not names)
    refuse_sources(place, *sources, file=not names)
    if not force:
        refuse_foreign(
            place, *names, remedy="name another" + ("" if force is None else ", or replace with force (--force)")
        )
        if alone and place.is_dir() and not _stamps(place, names):
            others = sorted(one.name for one in place.iterdir() if not one.name.startswith("."))
            if others:
                raise RequestError(
                    f"{place} holds other files ({', '.join(map(shown, others[:5]))}); "
                    "name a new folder, or write next to them with force (--force)",
                    code="exists", field="out", value=str(place),
                )  # fmt: skip
    return place


def refuse_foreign(place: Path, *names: str, ours: bool = False, remedy: str = "name another folder") -> None:
    """Raises RequestError if an output would replace a file that this program did not write or that has changed since.

    names      as in `check_output`
    ours       True if a record in the folder shows that the verb wrote it, perhaps on another machine"""
    known = _record(place)
    foreign = [
        name for name, stamp in _stamps(place, names).items()
        if not ours and known.get(name) != stamp and not _marked(place / name)
    ]  # fmt: skip
    if foreign:
        held = f"holds {', '.join(map(shown, foreign[:5]))}," if names else "exists, and is"
        raise RequestError(
            f"{place} {held} not written by glassformer or changed since; {remedy}",
            code="exists", field="out", value=str(place),
        )  # fmt: skip


def refuse_sources(place: Path, *sources: Path, file: bool = False, inside: bool = True) -> None:
    """Raises RequestError if an output is one of the sources that it is made from, under any name.

    file      the output is a file, which may be new in the folder of a source
    inside    refuse an output inside a source, too"""
    target = Path(os.path.realpath(place))
    for source in sources:
        if not os.path.exists(source):  # not the name of a file
            continue
        origin = Path(os.path.realpath(source))
        same = target == origin or (target.exists() and os.path.samefile(target, origin))
        within = inside and origin.is_dir() and origin in target.parents and (not file or target.exists())
        if same or (within and not _record(target)):
            where = "is what is read" if same else f"is inside {source}, which is read"
            raise RequestError(
                f"{place} {where}; name another place to write", code="conflict", field="out", value=str(place)
            )


def _stamps(place: Path, names: tuple[str, ...]) -> dict[str, list[int]]:
    """Returns {name: [bytes, modification time]} of the files of an output; links are not followed."""
    found = {path for name in names for path in place.glob(name)} if names else {place}
    files = {one for path in found for one in ((path, *path.rglob("*")) if path.is_dir() else (path,))}
    stamps = {}
    for path in sorted(files):
        with suppress(FileNotFoundError, NotADirectoryError):
            if path.is_symlink() or not path.is_dir():
                stat = path.lstat()
                stamps[path.relative_to(place).as_posix()] = [stat.st_size, stat.st_mtime_ns]
    return stamps


def _record(place: Path) -> dict[str, Any]:
    held = remembered(WRITTEN, os.path.realpath(place))
    return held if isinstance(held, dict) else {}


def _marked(path: Path) -> bool:
    mark = MARKS.get(path.suffix)
    if mark is None or path.is_symlink():
        return False
    try:
        with path.open("rb") as file:
            return mark in file.read(MARKED_BYTES)
    except OSError:
        return False


def _writable(name: str | Path, file: bool) -> Path:
    """Returns the path of a file or folder after checking that it can be written, without a trace. Raises
    RequestError."""
    path = Path(name)
    if not str(name):
        raise RequestError("out is empty; name a file or folder", code="missing", field="out", value="")
    try:
        if file and path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise RequestError(f"{path} is {what}; name a file", code="exists", field="out", value=str(path))
        folder = path.parent if file else path
        new = [one for one in (folder, *folder.parents) if not one.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return path
        finally:
            for one in new:
                with suppress(OSError):
                    one.rmdir()
    except (FileExistsError, NotADirectoryError):
        raise RequestError(
            f"{path} is a file, or is inside one; name a folder", code="exists", field="out", value=str(path)
        ) from None
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise RequestError(
            f"{str(path)!r} cannot be written ({why}); choose another place",
            code="disk", field="out", value=str(path),
        ) from None  # fmt: skip


# Cache

MOST = 1 << 20
"""Largest size of a file of measurements, in bytes"""


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Returns the folder of the cache: `cache_dir`, `$GLASSFORMER_CACHE`, or `~/.cache/glassformer`."""
    named = cache_dir or os.environ.get("GLASSFORMER_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "glassformer"


def remembered(file: str, key: str) -> Any:
    """Returns the measurement stored as `key` in a file of the cache folder; None if it is missing, or if the file is
    too large or damaged. The caller has to check the value, since other programs may have written it."""
    return _known(file).get(key)


def remember(file: str, key: str, value: Any) -> None:
    """Stores a measurement for later processes, as the last of its file; the oldest are dropped if the file is too
    large. If the folder cannot be written, nothing is stored and the value is measured again next time. Processes take
    turns."""
    with suppress(WorkError, OSError, RuntimeError):  # no space, no permission, no home folder
        place = cache_folder()
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place, wait=True):
            known = _known(file)
            known.pop(key, None)
            known[key] = value
            while len(text := json.dumps(known)) > MOST and len(known) > 1:
                known.pop(next(iter(known)))
            replace_text(place / file, text)


def _known(file: str) -> dict[str, Any]:
    try:
        path = cache_folder() / file
        known = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= MOST else None
    except (OSError, ValueError, RuntimeError):
        return {}
    return known if isinstance(known, dict) else {}


# Single writer

OWNER = "owner.json"
"""File of the process that writes a folder on a shared disk. Its counter increases while the work continues.

File-system locks are unreliable on a shared disk, and the clocks of two machines differ. So a process counts as dead if
its counter does not change for `PATIENCE` seconds on the observer's clock, or if it ran on this machine and has
ended."""
BEAT = 10.0
"""Seconds between two increments of the counter"""
PATIENCE = 60.0
"""Seconds without an increment after which an owner counts as dead"""
LOST = 75
"""Exit status of a process whose run another process has taken over"""


def only_writer(
    folder: Path | None,
    shared: bool = False,
    beat: float = BEAT,
    patience: float = PATIENCE,
    lost: Callable[[], None] = lambda: os._exit(LOST),
) -> AbstractContextManager[Callable[[], bool]]:
    """Makes the folder and locks it: another process that would write there is refused. The context manager gives a
    function that returns False once the locked folder was removed, moved or replaced; for None, a shared folder, and on
    Windows, it always returns True. Raises RequestError.

    folder     if None, nothing is locked
    shared     also refuse processes of other machines; wait for a dead owner's timeout and take over
    beat, patience, lost
               if shared: seconds between updates of the owner's count in the folder, seconds without an update after
               which an owner counts as dead, and the function that a process calls if it was suspended so long that
               another one took over"""
    if folder is None:
        return nullcontext(_always)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return _owned(folder, beat, patience, lost) if shared else _locked(folder)


def _always() -> bool:
    return True


@contextmanager
def _locked(folder: Path, wait: bool = False) -> Iterator[Callable[[], bool]]:
    """Locks a folder against other processes. `wait` waits for another process's lock, leaves no file, and does not
    lock folders on NFS, which supports locks only of files."""
    try:
        import fcntl
    except ImportError:  # Windows: the folder is not locked
        yield _always
        return
    path = folder if wait else folder / ".lock"
    handle = os.open(path, os.O_RDONLY if wait else os.O_RDWR | os.O_CREAT)

    def in_place() -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(handle))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that does not answer
            return True

    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{folder} is being written by another process; wait for it or name another folder"
            raise RequestError(message, code="conflict", field="out", value=str(folder)) from None
        except OSError:
            if not wait:
                raise
        yield in_place
    finally:
        os.close(handle)


def being_written(folder: Path) -> bool:
    """Returns True while a process holds the lock of `only_writer` on a folder; always False on Windows."""
    try:
        import fcntl

        handle = os.open(folder / ".lock", os.O_RDWR)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class OwnerWatch:
    """Observes the owner of a folder."""

    def __init__(self, place: Path, patience: float = PATIENCE):
        self.path, self.patience = place / OWNER, patience
        self.held: dict[str, Any] = {}
        self.since = time.monotonic()

    def alive(self) -> bool:
        """Returns True if there is an owner that may be running; one seen for the first time counts as running."""
        held = _owner(self.path)
        if held != self.held:
            self.held, self.since = held, time.monotonic()
        return bool(held) and not _gone(held) and time.monotonic() - self.since < self.patience

    @property
    def words(self) -> str:
        return f"process {self.held.get('pid')} on {self.held.get('host')}"


@contextmanager
def _owned(place: Path, beat: float, patience: float, lost: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    mine = {
        "host": platform.node(), "pid": os.getpid(), "machine": _machine(), "job": os.environ.get("SLURM_JOB_ID"),
        "token": uuid.uuid4().hex,
    }  # fmt: skip
    path, ended = place / OWNER, threading.Event()
    with disk_errors(place):
        _take(path, mine, OwnerWatch(place, patience), beat)

    def count() -> None:
        number = 0
        while not ended.wait(beat):
            if _owner(path).get("token", mine["token"]) != mine["token"]:
                lost()
                return
            number += 1
            with suppress(WorkError):  # the run itself reports a full or unresponsive disk
                if place.is_dir():  # a folder that was removed is not made again
                    replace_text(path, json.dumps({**mine, "count": number}))

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield _always
    finally:
        ended.set()
        counting.join()
        if _owner(path).get("token") == mine["token"]:
            path.unlink(missing_ok=True)


def _take(path: Path, mine: dict[str, Any], watch: OwnerWatch, beat: float) -> None:
    """Makes the owner file, which only one process can do; the file of a dead process is moved away first."""
    first: dict[str, Any] | None = None
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({**mine, "count": 0}))
            return
        except FileExistsError:
            pass
        if not watch.alive() or (mine["job"] is not None and watch.held.get("job") == mine["job"]):  # requeued
            away = path.with_name(f"{OWNER}.{mine['token']}")
            with suppress(FileNotFoundError):
                os.replace(path, away)
                away.unlink()
            continue
        first = first or watch.held
        if watch.held != first:
            message = f"{path.parent} is being trained by {watch.words}; wait for it or name another folder"
            raise RequestError(message, code="conflict", field="out", value=str(path.parent))
        time.sleep(min(beat, watch.patience / 10))


def _owner(path: Path) -> dict[str, Any]:
    """Returns the content of the owner file; {} if the file is missing. A file that is being written gives an owner
    without a name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    return tree if isinstance(tree, dict) and tree else {"unreadable": text[:100]}


def _gone(held: dict[str, Any]) -> bool:
    """Returns True if the owner ran on this machine and has ended."""
    pid = held.get("pid")
    return held.get("machine") == _machine() and isinstance(pid, int) and pid > 0 and not _running(pid)


def _running(pid: int) -> bool:
    """Returns False if no process of this machine has this id."""
    if sys.platform == "win32":  # where such a signal would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _machine() -> str:
    """Returns an identifier of this boot of the machine and of its process namespace, since containers on one machine
    may reuse process ids."""
    told = [platform.node()]
    with suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        told.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(told)


# Models of files that this package writes and reads: checkpoints, metrics.jsonl, results.json

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Length = Annotated[float, Field(ge=0)]


SCHEMAS = {
    "results": 1, "ladder": 1, "scaling": 1, "design": 1, "checkpoint": 1, "index": 1, "prompt cache": 1,
    "shards": 2, "tokenizer": 1,
}  # fmt: skip
"""Version of each file format, by kind of file. It is increased by a change that an earlier reader would misread."""


def check_schema(kind: str, found: object, path: str | Path) -> None:
    """Raises RequestError if `found`, the version of the file at `path`, is not the one that this program reads."""
    if found != SCHEMAS[kind]:
        raise RequestError(
            f"{path} has schema {shown(found)}, and this program reads schema {SCHEMAS[kind]}; name another one",
            code="schema", field="schema", value=found, expected=str(SCHEMAS[kind]),
        )  # fmt: skip


class Written(BaseModel):
    """Part of a file of this package: types are exact, numbers finite; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class Measures(Written):
    """Loss on held-out text in nats per token, and measures derived from it; see `training.evaluate`."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: Count
