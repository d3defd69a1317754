"""Checkpoints that a crash at any instant leaves loadable.

    RUN/checkpoints/step_00001000/   model.safetensors  optimizer.safetensors  watch.json  state.json
    RUN/latest                       the name of the newest whole checkpoint, replaced last and atomically

A checkpoint is written beside its place, flushed to the disk, renamed, and only then named in `latest`. state.json
holds the SHA-256 of the others; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from glassformer.errors import RequestError, WorkError, shown

KEEP = 2
_STATE_BYTES = 1 << 20
_WATCH_BYTES = 1 << 28
WATCH = "watch.json"
OPTIMIZER = "optimizer.safetensors"
NUMBERS = "numbers"
"""Key of the optimizer's plain numbers in that file's header."""


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    watch: dict[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint of `step` and makes it the latest; keeps the last two. Raises WorkError."""
    final = run / "checkpoints" / _folder_name(step)
    if latest(run) == final:  # saved before, and a checkpoint that is named is never taken away
        return final
    if (size := len(json.dumps(state))) > _STATE_BYTES // 2:  # hashes and indentation come on top
        raise WorkError(
            f"{final} was not written: its state.json would have {size:,} bytes, more than could be read back; the "
            f"state of a callback is too large"
        )
    temporary = final.with_name(f".{final.name}.tmp")
    with disk_errors(final):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            moments, numbers = optimizer_state(model, optimizer)
            more = {NUMBERS: json.dumps(numbers)} if numbers else {}
            files: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {
                "model": (model_tensors(model), {}), "optimizer": (moments, more),
            }  # fmt: skip
            hashes = {}
            for name, (values, metadata) in files.items():
                path = temporary / f"{name}.safetensors"
                save_file(values, path, metadata={"format": "pt", **metadata})
                hashes[path.name] = _flush_and_hash(path)
            if watch is not None:
                _write(temporary / WATCH, json.dumps(watch))
                hashes[WATCH] = _hash(temporary / WATCH)
            _write(
                temporary / "state.json",
                json.dumps({"schema": 1, "step": step, **state, "sha256": hashes}, indent=1),
            )
            _flush_folder(temporary)
            shutil.rmtree(final, ignore_errors=True)  # left by a crash before it was named
            os.replace(temporary, final)
            _flush_folder(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        replace_text(run / "latest", final.name + "\n")
    for old in sorted(final.parent.glob("step_*"))[:-KEEP]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None where there is none yet.

    Raises RequestError where `latest` names something that is not there."""
    pointer = run / "latest"
    try:
        name = pointer.read_text(encoding="utf-8")[:64].strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{pointer} cannot be read: {error}") from None
    found = run / "checkpoints" / name
    if "/" in name or "\\" in name or not name.startswith("step_") or not (found / "state.json").is_file():
        wrong = f"{pointer} names {name!r}, which is no checkpoint in {run / 'checkpoints'}"
        raise RequestError(wrong + _way_on(run, name))
    return found


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json. Raises RequestError."""
    with way_on(checkpoint):
        return _state(checkpoint)


def read_watch(checkpoint: Path) -> dict[str, Any]:
    """What the monitor kept. Raises RequestError where it is missing or damaged."""
    path = checkpoint / WATCH
    with way_on(checkpoint):
        try:
            if path.stat().st_size > _WATCH_BYTES or _hash(path) != _state(checkpoint)["sha256"].get(WATCH):
                raise RequestError(f"{path} is damaged: its SHA-256 is not the one in state.json")
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{path} cannot be read: {error}") from None


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Fills the model's weights and what it keeps beside them. Raises RequestError where they are damaged or of another
    model."""
    tensors = _load(checkpoint, "model.safetensors")
    wanted = model.state_dict()
    _match(wanted, tensors, checkpoint)
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(tensors[name])


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills `optimizer.state`, so that the next step is the one that would have followed. Raises RequestError where it
    is damaged or of another model."""
    tensors = _load(checkpoint, OPTIMIZER)
    with safe_open(checkpoint / OPTIMIZER, "pt") as file:
        numbers = _numbers((file.metadata() or {}).get(NUMBERS, "{}"), checkpoint)
    parameters = dict(model.named_parameters())
    for key, value in {**tensors, **numbers}.items():
        part, _, name = key.partition(".")
        if name not in parameters:
            raise RequestError(f"{checkpoint / OPTIMIZER} has state of {shown(name)}: it belongs to another model")
        own = parameters[name]
        optimizer.state[own][part] = value.to(own.device) if isinstance(value, Tensor) else value


def _numbers(text: str, checkpoint: Path) -> dict[str, Any]:
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, dict) or any(isinstance(value, (dict, list, str)) for value in numbers.values()):
        raise RequestError(f"{checkpoint / OPTIMIZER} is damaged: {NUMBERS} of its header are no numbers")
    return numbers


@contextlib.contextmanager
def way_on(checkpoint: Path) -> Iterator[None]:
    """Around what finds it damaged: the sentence then ends with what can be done."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{error}{_way_on(checkpoint.parents[1], checkpoint.name)}") from None


def _way_on(run: Path, damaged: str) -> str:
    """Names the newest other checkpoint that is whole. Its files are read to see that, so only where one is damaged."""
    for other in sorted((run / "checkpoints").glob("step_*"), reverse=True):
        if other.name != damaged and _is_whole(other):
            return f"; {other.name} is whole: to go on from there, write {other.name} into {run / 'latest'}"
    return "; no other checkpoint of this run is whole, so begin anew in another folder"


def _is_whole(checkpoint: Path) -> bool:
    try:
        hashes = _state(checkpoint)["sha256"]
        files = ["model.safetensors", OPTIMIZER, *([WATCH] if WATCH in hashes else [])]
        return all(_hash(checkpoint / name) == hashes.get(name) for name in files)
    except (OSError, RequestError):
        return False


def _state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "state.json"
    try:
        if path.stat().st_size > _STATE_BYTES:
            raise RequestError(f"{path} is too large to be a checkpoint's state")
        state = json.loads(path.read_text(encoding="utf-8"))
        if (
            not isinstance(state, dict)
            or not isinstance(state.get("step"), int)
            or not isinstance(state.get("sha256"), dict)
        ):
            raise RequestError(f"{path} is not a checkpoint's state")
        if checkpoint.name != (name := _folder_name(state["step"])):
            raise RequestError(f"{path} is of {name}, which is another checkpoint")
        return state
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} cannot be read: {error}") from None


def _folder_name(step: int) -> str:
    return f"step_{step:08d}"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers: the vectors of a power iteration are training state too."""
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`optimizer.state` by PART.PARAMETER: its tensors, and its plain numbers, which a tensor would round."""
    tensors, numbers = {}, {}
    for name, parameter in model.named_parameters():
        for part, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{part}.{name}"] = value.detach().cpu().contiguous()
            elif value is None or isinstance(value, (bool, int, float)):
                numbers[f"{part}.{name}"] = value
            else:
                kind = f"{type(optimizer).__name__}.state[{name}][{part}]"
                raise TypeError(f"{kind} is a {type(value).__name__}; a checkpoint holds tensors and numbers")
    return tensors, numbers


def _match(wanted: dict[str, Tensor], given: dict[str, Tensor], where: Path) -> None:
    for name, value in wanted.items():
        if name not in given:
            raise RequestError(f"{where} has no tensor {name}: it belongs to another model")
        if given[name].shape != value.shape:
            raise RequestError(
                f"{where}: {name} has shape {tuple(given[name].shape)} and the model wants {tuple(value.shape)}"
            )
    if extra := sorted(given.keys() - wanted.keys()):
        raise RequestError(f"{where} has a tensor {extra[0]} that the model lacks: it belongs to another model")


def _load(checkpoint: Path, name: str) -> dict[str, Tensor]:
    path = checkpoint / name
    with way_on(checkpoint):
        expected = _state(checkpoint)["sha256"].get(name)
        try:
            if _hash(path) != expected:
                raise RequestError(f"{path} is damaged: its SHA-256 is not the one in state.json")
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path} cannot be read: {error}") from None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_and_hash(path: Path) -> str:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can flush a folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    _write(temporary, text)
    os.replace(temporary, path)
    _flush_folder(path.parent)


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """One sentence for a full or forbidden disk."""
    try:
        yield
    except SafetensorError as error:
        raise WorkError(f"{target} could not be written: {error}; the checkpoint before it is untouched") from None
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise WorkError(f"{target} could not be written: {why}; what was saved before is untouched") from None
