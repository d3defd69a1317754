"""Checkpoints that a crash at any instant leaves loadable.

    RUN/checkpoints/step_00001000/   model.safetensors  optimizer.safetensors  watch.json  state.json
    RUN/latest                       name of the newest complete checkpoint, replaced last and atomically

With several ranks, each writes its own shards (`parallel/pieces.py`) as model-00002-of-00004.safetensors and so on; any
number of ranks, in any layout, can read them. A checkpoint is written to a temporary folder, flushed to disk, renamed,
and only then named in `latest`. state.json holds the SHA-256 of the other files; no file is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from glassformer.errors import RequestError, WorkError, error_of, plain_error, shown
from glassformer.files import SCHEMAS, check_schema, disk_errors, put, replace_text
from glassformer.parallel.pieces import Held, IndexBox, Piece, known_anywhere, places_of, written_here
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.stored import StoredPieces, write_pieces

KEEP = 2
_STATE_BYTES = 1 << 20
_WATCH_BYTES = 1 << 28
WATCH = "watch.json"
OPTIMIZER = "optimizer"
MODEL = "model"
NUMBERS = "numbers"
"""Key of the optimizer's scalars in the header of its file."""
_FILE = re.compile(rf"({MODEL}|{OPTIMIZER})(?:-(\d{{5,9}})-of-(\d{{5,9}}))?\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """Contents of one rank's part of a checkpoint: tensor shards and scalars for each kind of file (model, optimizer);
    on rank 0 also the run's state and that of the watch."""

    step: int
    pieces: dict[str, list[Piece]]
    numbers: dict[str, Any]
    state: dict[str, Any]
    watch: str | None

    @classmethod
    def of(
        cls,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        watch: dict[str, Any] | None,
        groups: ProcessGroups,
    ) -> Snapshot:
        moments = Held.of_optimizer(model, optimizer)
        held = {MODEL: Held.of_model(model), OPTIMIZER: moments}
        pieces = {kind: written_here(one.pieces, groups) for kind, one in held.items()}
        return cls(
            step, pieces, moments.numbers, json.loads(json.dumps(state)), None if watch is None else json.dumps(watch)
        )

    def copied(self, room: dict[tuple[str, str, IndexBox], Tensor]) -> Snapshot:
        """Returns a copy of the snapshot that can be written while training continues. `room`: buffers reused for the
        copies of each snapshot, because the first touch of new memory takes longer than the copy."""

        def copy(kind: str, piece: Piece) -> Piece:
            key = kind, piece.name, piece.box
            if key not in room:
                room[key] = torch.empty(piece.values.shape, dtype=piece.values.dtype)
            return piece._replace(values=room[key].copy_(piece.values))

        return replace(self, pieces={kind: [copy(kind, one) for one in some] for kind, some in self.pieces.items()})


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    watch: dict[str, Any] | None = None,
    groups: ProcessGroups | None = None,
) -> Path:
    """Writes the checkpoint of `step` and makes it the latest; keeps the last two. Raises WorkError, also if the folder
    `run` does not exist.

    All ranks call it; `state` and `watch` are those of rank 0."""
    groups = groups or ProcessGroups.alone()
    return write(run, Snapshot.of(step, model, optimizer, state, watch, groups), groups)


def write(run: Path, snapshot: Snapshot, groups: ProcessGroups) -> Path:
    """Writes a snapshot as `save` does; returns the checkpoint's folder."""
    final = run / "checkpoints" / _folder_name(snapshot.step)
    temporary = final.with_name(f".{final.name}.tmp")

    def begin() -> bool:
        if not groups.leads or latest(run) == final:  # saved before; the latest checkpoint is never removed
            return groups.leads
        if (size := len(json.dumps(snapshot.state))) > _STATE_BYTES // 2:  # hashes and indentation come on top
            raise WorkError(
                f"{final} was not written: its state.json would have {size:,} bytes, more than could be read back; "
                f"the state of a callback is too large",
                code="range",
            )  # fmt: skip
        with disk_errors(final):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(exist_ok=True)  # but not the run, which may have been removed
            temporary.mkdir()
        return False

    def mine() -> dict[str, str]:
        with disk_errors(final):
            return _write_files(temporary, snapshot, groups)

    try:
        if any(together(groups, begin)):
            return final
        hashes = {name: found for files in together(groups, mine) for name, found in files.items()}
        together(groups, lambda: _commit(run, temporary, final, snapshot, hashes) if groups.leads else None)
    finally:
        if groups.leads:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _write_files(folder: Path, snapshot: Snapshot, groups: ProcessGroups) -> dict[str, str]:
    """Writes and flushes this rank's files; returns {file name: SHA-256}."""
    hashes = {}
    for kind, pieces in snapshot.pieces.items():
        more = {NUMBERS: json.dumps(snapshot.numbers)} if kind == OPTIMIZER and snapshot.numbers else {}
        path = folder / file_name(kind, groups.rank, groups.world)
        write_pieces(path, pieces, more)
        hashes[path.name] = _flush_and_hash(path)
    return hashes


def file_name(kind: str, rank: int, world: int) -> str:
    """Returns the name of the checkpoint file with a rank's shards. `kind`: "model" or "optimizer". One process writes
    KIND.safetensors."""
    return f"{kind}.safetensors" if world == 1 else f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"


def _commit(run: Path, temporary: Path, final: Path, snapshot: Snapshot, hashes: dict[str, str]) -> None:
    """Completes a checkpoint whose tensor files all ranks have written: adds the watch and state.json, renames the
    folder from `temporary` to `final`, and makes it the latest."""
    with disk_errors(final):
        if snapshot.watch is not None:
            (temporary / WATCH).write_text(snapshot.watch, encoding="utf-8")
            hashes[WATCH] = _hash(temporary / WATCH)
        whole = {"schema": SCHEMAS["checkpoint"], "step": snapshot.step, **snapshot.state, "sha256": hashes}
        (temporary / "state.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)  # left by a crash before `latest` named it
        put(temporary, final)
        replace_text(run / "latest", final.name + "\n")
    for old in sorted(final.parent.glob("step_*"))[:-KEEP]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


class Background:
    """Thread that writes checkpoints, one at a time, while training continues."""

    def __init__(self, groups: ProcessGroups):
        self.groups = groups.aside()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._room: dict[tuple[str, str, IndexBox], Tensor] = {}

    def save(
        self,
        run: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        watch: dict[str, Any] | None = None,
    ) -> None:
        """Saves a checkpoint as `checkpoint.save` does, but returns once the values are copied. The previous save must
        have been waited for."""
        assert self._pending is None
        snapshot = Snapshot.of(step, model, optimizer, state, watch, self.groups).copied(self._room)
        self._pending = self._thread.submit(write, run, snapshot, self.groups)

    def close(self) -> None:
        """Waits until the pending write has ended, successfully or not."""
        self._thread.shutdown()

    def wait(self) -> Path | None:
        """Waits for the pending checkpoint and returns its folder; None if no checkpoint is pending. Raises
        WorkError."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()


def together(groups: ProcessGroups, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every rank and returns all ranks' results. If it fails on one rank, all raise that rank's
    RequestError or WorkError."""
    mine, error = None, None
    try:
        mine = work()
    except (RequestError, WorkError) as problem:
        error = problem
    told = groups.gather([mine, error and plain_error(error)])
    if error is not None:
        raise error
    for _, wrong in told:
        if wrong is not None:
            raise error_of(wrong)
    return [one for one, _ in told]


def latest(run: Path) -> Path | None:
    """Returns the folder of a run's newest complete checkpoint, or None before the first.

    Raises RequestError if `latest` names a missing checkpoint."""
    pointer = run / "latest"
    try:
        name = pointer.read_text(encoding="utf-8")[:64].strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{pointer} cannot be read: {error}", code="damaged", field="latest") from None
    found = run / "checkpoints" / name
    if "/" in name or "\\" in name or not name.startswith("step_") or not (found / "state.json").is_file():
        wrong = f"{pointer} names {name!r}, which is not a checkpoint in {run / 'checkpoints'}"
        raise RequestError(wrong + _way_on(run, name), code="missing", field="latest", value=name)
    return found


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's state.json. Raises RequestError if the file is missing or damaged."""
    with way_on(checkpoint):
        return _state(checkpoint)


def read_watch(checkpoint: Path) -> dict[str, Any]:
    """Returns the state of the watch (detector of spikes) that a checkpoint holds. Raises RequestError if its file is
    missing or damaged."""
    path = checkpoint / WATCH
    with way_on(checkpoint):
        try:
            if path.stat().st_size > _WATCH_BYTES or _hash(path) != _state(checkpoint)["sha256"].get(WATCH):
                raise RequestError(
                    f"{path} is damaged: its SHA-256 is not the one in state.json", code="damaged", field=WATCH
                )
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{path} cannot be read: {error}", code="damaged", field=WATCH) from None


def load_model(checkpoint: Path, model: nn.Module, groups: ProcessGroups | None = None) -> None:
    """Fills this rank's weights and buffers from a checkpoint. Raises RequestError if it is damaged or of another
    model."""
    groups = groups or ProcessGroups.alone()
    held = Held.of_model(model)
    known = known_anywhere(held.wholes, groups)

    def read() -> None:
        with _stored(checkpoint, MODEL) as stored:
            _match(held.wholes, known, stored.shapes, checkpoint)
            for piece in held.pieces:
                stored.read(piece.name, piece.box, piece.values)

    _verify(checkpoint, MODEL, groups)
    together(groups, read)


def load_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, groups: ProcessGroups | None = None
) -> None:
    """Restores the optimizer's state from a checkpoint, so that training continues as if it had not stopped. Raises
    RequestError if the checkpoint is damaged or of another model."""
    groups = groups or ProcessGroups.alone()
    parameters = dict(model.named_parameters())
    places, known = places_of(model), known_anywhere(parameters, groups)

    def read() -> None:
        with _stored(checkpoint, OPTIMIZER) as stored:
            numbers: dict[str, Any] = {}
            for metadata in stored.metadata:
                numbers |= _numbers(metadata.get(NUMBERS, "{}"), checkpoint)
            for key in [*stored.shapes, *numbers]:
                part, _, name = key.partition(".")
                if name not in known:
                    where = checkpoint / file_name(OPTIMIZER, 0, 1)
                    raise RequestError(
                        f"{where} has state of {shown(name)}: it belongs to another model",
                        code="conflict", field=f"optimizer.{shown(name)}",
                    )  # fmt: skip
                if (own := parameters.get(name)) is not None:
                    moved = numbers[key] if key in numbers else stored.like(key, own, places.get(name))
                    optimizer.state[own][part] = moved

    _verify(checkpoint, OPTIMIZER, groups)
    together(groups, read)


def _numbers(text: str, checkpoint: Path) -> dict[str, Any]:
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, dict) or any(isinstance(value, (dict, list, str)) for value in numbers.values()):
        where = checkpoint / file_name(OPTIMIZER, 0, 1)
        raise RequestError(
            f"{where} is damaged: {NUMBERS} of its header are not numbers", code="damaged", field=NUMBERS
        )
    return numbers


def _files(checkpoint: Path, kind: str) -> dict[Path, str]:
    """Returns {file: SHA-256} for a checkpoint's files of a kind (model or optimizer), by rank. Raises RequestError if
    state.json lacks one of the files, or if the folder has one that state.json does not name."""
    hashes = _state(checkpoint)["sha256"]
    named = {name for name in hashes if (match := _FILE.fullmatch(name)) and match[1] == kind}
    names = [file_name(kind, rank, len(named)) for rank in range(max(1, len(named)))]
    if missing := [name for name in names if name not in named]:
        raise RequestError(
            f"{checkpoint / 'state.json'} does not name {missing[0]}",
            code="missing", field=f"state.json:sha256.{missing[0]}",
        )  # fmt: skip
    lying = {path.name for path in checkpoint.glob(f"{kind}*.safetensors")}
    if extra := sorted(lying - named):
        raise RequestError(f"{checkpoint / extra[0]} is not named in state.json", code="unknown", field=extra[0])
    return {checkpoint / name: hashes[name] for name in names}


def _verify(checkpoint: Path, kind: str, groups: ProcessGroups) -> None:
    """Compares a checkpoint's files of a kind (model or optimizer) with their recorded hashes, a share of the files on
    each rank. Raises RequestError on all ranks if one differs."""

    def share() -> None:
        with way_on(checkpoint):
            for path, expected in list(_files(checkpoint, kind).items())[groups.rank :: groups.world]:
                try:
                    if _hash(path) != expected:
                        raise RequestError(
                            f"{path} is damaged: its SHA-256 is not the one in state.json",
                            code="damaged", field=path.name,
                        )  # fmt: skip
                except OSError as error:
                    raise RequestError(f"{path} cannot be read: {error}", code="damaged", field=path.name) from None

    together(groups, share)


@contextmanager
def _stored(checkpoint: Path, kind: str) -> Iterator[StoredPieces]:
    """Yields the tensors that a checkpoint's files of a kind (model or optimizer) hold; the files must be verified
    already."""
    with way_on(checkpoint):
        try:
            stored = StoredPieces(list(_files(checkpoint, kind)))
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{checkpoint} cannot be read: {error}", code="damaged", field=kind) from None
    with stored:
        yield stored


@contextmanager
def way_on(checkpoint: Path) -> Iterator[None]:
    """Context manager inside which the message of a RequestError gets a further sentence: the checkpoint to continue
    from."""
    try:
        yield
    except RequestError as error:
        told = f"{error}{_way_on(checkpoint.parents[1], checkpoint.name)}"
        raise RequestError(told, code=error.code, field=error.field, value=error.value) from None


def _way_on(run: Path, damaged: str) -> str:
    """Returns the end of a message on a damaged checkpoint: how to continue from the newest undamaged one, or that none
    exists. Slow, because it reads and hashes the files of checkpoints."""
    for other in sorted((run / "checkpoints").glob("step_*"), reverse=True):
        if other.name != damaged and is_whole(other):
            return f"; {other.name} is whole: to continue from it, write {other.name} into {run / 'latest'}"
    return "; no other checkpoint of this run is whole, so start in another folder"


def is_whole(checkpoint: Path) -> bool:
    """Returns True if all files of a checkpoint have the hashes that its state.json records."""
    try:
        files = {**_files(checkpoint, MODEL), **_files(checkpoint, OPTIMIZER)}
        if kept := _state(checkpoint)["sha256"].get(WATCH):
            files[checkpoint / WATCH] = kept
        return all(_hash(path) == expected for path, expected in files.items())
    except (OSError, RequestError):
        return False


def _state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "state.json"
    try:
        if path.stat().st_size > _STATE_BYTES:
            raise RequestError(f"{path} is too large to be a checkpoint's state", code="range", field="state.json")
        state = json.loads(path.read_text(encoding="utf-8"))
        if (
            not isinstance(state, dict)
            or not isinstance(state.get("step"), int)
            or not isinstance(state.get("sha256"), dict)
        ):
            raise RequestError(f"{path} is not a checkpoint's state", code="damaged", field="state.json")
        check_schema("checkpoint", state.get("schema"), path)
        if checkpoint.name != (name := _folder_name(state["step"])):
            raise RequestError(
                f"{path} is of {name}, which is another checkpoint", code="conflict", field="state.json:step"
            )
        if strange := [name for name in state["sha256"] if name != WATCH and not _FILE.fullmatch(name)]:
            raise RequestError(
                f"{path} names {shown(strange[0])!r}, which is not a file of a checkpoint",
                code="unknown", field="state.json:sha256",
            )  # fmt: skip
        return state
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} cannot be read: {error}", code="damaged", field="state.json") from None


def _folder_name(step: int) -> str:
    return f"step_{step:08d}"


def _match(wanted: dict[str, tuple[int, ...]], known: set[str], given: dict[str, tuple[int, ...]], where: Path) -> None:
    """Raises RequestError if a checkpoint's tensors differ from the model's in name or shape. `wanted`: {name: shape}
    of tensors with a shard on this rank; `known`: names of all the model's tensors; `given`: {name: shape} in the
    checkpoint."""
    for name, shape in wanted.items():
        if name not in given:
            raise RequestError(f"{where} has no tensor {name}: it belongs to another model", code="missing", field=name)
        if given[name] != shape:
            raise RequestError(
                f"{where}: {name} has shape {given[name]} and the model wants {shape}",
                code="conflict", field=name, value=given[name],
            )  # fmt: skip
    if extra := sorted(given.keys() - known):
        raise RequestError(
            f"{where} has a tensor {shown(extra[0])} that the model lacks: it belongs to another model",
            code="unknown", field=shown(extra[0]),
        )  # fmt: skip


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_and_hash(path: Path) -> str:
    with path.open("rb+") as file, ThreadPoolExecutor(1) as other:  # the disk and the processor at once
        flushed = other.submit(os.fsync, file.fileno())
        found = _hash(path)
        flushed.result()
    return found
