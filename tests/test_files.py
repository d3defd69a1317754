"""Files are written whole or not at all; a folder has one writer: held, refused, taken over, lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError

from glassformer import files
from glassformer.errors import WorkError
from glassformer.files import OWNER, OwnerWatch, only_writer, remember, remembered
from tests.refused import failed, refused

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [None, FULL, KeyboardInterrupt()])
def test_a_file_is_replaced_whole_or_not_at_all(error: BaseException | None, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    files.replace_text(path, "old\n")
    try:
        with files.atomic_file(path, private=True) as temporary:
            temporary.write_text("new")
            assert temporary.parent == path.parent and temporary.suffix == path.suffix
            assert path.read_text() == "old\n"
            if error is not None:
                raise error
    except (WorkError, KeyboardInterrupt) as caught:
        assert caught is error or (caught.code, caught.__cause__) == ("disk", FULL)  # type: ignore[union-attr]
    else:
        assert error is None and path.stat().st_mode & 0o077 == 0
    assert path.read_text() == ("old\n" if error else "new")
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut would leave an empty file under the old name."""
    done: list[tuple[str, int]] = []
    flush, rename = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda handle: (done.append(("flush", os.fstat(handle).st_ino)), flush(handle)))
    monkeypatch.setattr("os.replace", lambda *ends: (done.append(("rename", os.stat(ends[0]).st_ino)), rename(*ends)))
    for write in (files.atomic_file, files.atomic_folder):
        done.clear()
        final = tmp_path / write.__name__
        with write(final) as temporary:
            inner = temporary / "inner" if temporary.is_dir() else temporary
            inner.write_text("x")
        moved = final.stat().st_ino
        held = {(final / "inner" if final.is_dir() else final).stat().st_ino, moved}
        at = done.index(("rename", moved))
        assert {node for what, node in done[:at] if what == "flush"} == held
        assert done[at + 1 :] == [("flush", tmp_path.stat().st_ino)]


def test_files_of_a_folder_move_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with failed(code="disk"), files.staged(tmp_path) as temporary:
        (temporary / "a").write_text("new")
        raise FULL
    assert (tmp_path / "a").read_text() == "old"
    with files.staged(tmp_path) as temporary:
        for name in "ba":
            (temporary / name).write_text(name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a", "b": "b"}


def test_leftovers_of_a_dead_process_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    """A process that is killed leaves its temporary folder, which stays while it lives and goes once it is dead."""
    code = "from glassformer import files; from pathlib import Path; import time\n"
    code += f"with files.staged(Path({str(tmp_path)!r})) as place:\n"
    code += "    (place / 'weights').write_text('x'); print('ready', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    files.replace_text(tmp_path / "a", "x")
    assert [path.is_dir() for path in tmp_path.glob(f"{files.TEMPORARY}*")] == [True]
    process.kill()
    process.communicate()
    files.replace_text(tmp_path / "a", "x")
    assert os.listdir(tmp_path) == ["a"]


def test_errors_of_a_network_are_not_the_disks(tmp_path: Path) -> None:
    class Away(OSError):
        """An OSError as libraries of the network define it."""

    for error in (ConnectionResetError(104, "reset"), TimeoutError(), Away("no route")):
        with pytest.raises(type(error)), files.disk_errors(tmp_path, network=True):
            raise error
    for error in (
        FULL,
        TimeoutError(errno.ETIMEDOUT, "a shared disk does not answer"),
        OSError("3 written"),
        SafetensorError("x"),
    ):
        with failed(code="disk"), files.disk_errors(tmp_path):
            raise error
    with refused(code="disk", field=str(tmp_path)), files.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_full_disk_is_named_by_any_library(tmp_path: Path) -> None:
    """The sentence of safetensors is that of a file in a tmpfs of 3 MB."""
    rust = "Error while serializing: I/O error: No space left on device (os error 28)"
    said = []
    for error in (FULL, SafetensorError(rust)):
        with failed(code="disk") as caught, files.disk_errors(tmp_path):
            raise error
        said.append(str(caught.value))
    assert said[0] == said[1] and files.NO_SPACE in said[0]


def test_a_folder_on_one_machine_has_one_writer(tmp_path: Path) -> None:
    with only_writer(None), only_writer(tmp_path / "run"):
        with refused(code="conflict", field="out"), only_writer(tmp_path / "run"):
            raise AssertionError
        with pytest.raises(BlockingIOError), only_writer(tmp_path / "other"):
            raise BlockingIOError
    with only_writer(tmp_path / "run"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folder")
def test_a_writer_knows_that_its_folder_is_gone(tmp_path: Path) -> None:
    """Moved and back, replaced by another one with a lock, and removed."""
    folder, other = tmp_path / "run", tmp_path / "other"
    with only_writer(folder) as in_place, only_writer(None) as always:
        assert in_place() and always()
        folder.rename(other)
        assert not in_place()
        other.rename(folder)
        assert in_place()
        folder.rename(other)
        folder.mkdir()
        (folder / ".lock").touch()
        assert not in_place()
        shutil.rmtree(folder)
        assert not in_place() and always()


def test_the_owner_of_a_shared_folder_does_not_make_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with only_writer(folder, True, BEAT, PATIENCE):
        shutil.rmtree(folder)
        time.sleep(5 * BEAT)
        assert not folder.exists()


BEAT, PATIENCE = 0.02, 0.3


def left(place: Path, **fields: object) -> None:
    """Writes the owner file of a process that has ended, or is on another machine."""
    (place / OWNER).write_text(json.dumps({"host": "elsewhere", "pid": 1, "machine": "x", "token": "t", **fields}))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with only_writer(tmp_path, True, BEAT, PATIENCE):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
        with refused(code="conflict", field="out"), only_writer(tmp_path, True, BEAT, PATIENCE):
            raise AssertionError
    assert not list(tmp_path.iterdir())


def test_an_owner_elsewhere_is_gone_when_it_stops_counting(tmp_path: Path) -> None:
    """Time is measured by the watcher's clock; the file's times are ignored."""
    left(tmp_path)
    os.utime(tmp_path / OWNER, (0, 0))
    began = time.monotonic()
    watch = OwnerWatch(tmp_path, PATIENCE)
    assert watch.alive()
    with only_writer(tmp_path, True, BEAT, PATIENCE):
        assert time.monotonic() - began >= PATIENCE
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("how", ["process", "job", "torn"])
def test_one_that_is_known_to_be_gone_is_not_waited_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known to be gone are an ended process of this machine, and the same job before it was queued again. A torn file
    has no known owner, so that it is waited for."""
    with only_writer(tmp_path, True, BEAT, PATIENCE):
        here = json.loads((tmp_path / OWNER).read_text())["machine"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    left(tmp_path, **{"process": {"machine": here, "pid": 2**22 + 1}, "job": {"job": "17"}, "torn": {}}[how])
    if how == "torn":
        (tmp_path / OWNER).write_text("{")
    began = time.monotonic()
    with only_writer(tmp_path, True, BEAT, PATIENCE):
        assert (time.monotonic() - began < PATIENCE) == (how != "torn")


def test_one_that_was_held_up_too_long_ends(tmp_path: Path) -> None:
    """If another process has taken over, the file is not its own, and it leaves the file unchanged."""
    lost = threading.Event()
    with only_writer(tmp_path, True, BEAT, PATIENCE, lost.set):
        left(tmp_path)
        assert lost.wait(5)
    assert json.loads((tmp_path / OWNER).read_text())["host"] == "elsewhere"


def test_processes_that_remember_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in place of processes: each opens the lock by itself."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: remember("kept.json", f"key {at}", at), range(80)))
    assert [remembered("kept.json", f"key {at}") for at in range(80)] == list(range(80))
