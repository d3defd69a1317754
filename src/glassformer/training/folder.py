"""Folder of a run: what may be written into it, and its writer."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glassformer import machine
from glassformer.config import ModelConfig, first_difference, read_tree
from glassformer.errors import RequestError
from glassformer.files import disk_errors, refuse_foreign, replace_text
from glassformer.names.places import has_params, is_folder
from glassformer.parts.core.base import part_classes, to_plain
from glassformer.parts.core.outside import FILE as SOURCES
from glassformer.parts.core.outside import check_sources, sources_of
from glassformer.text import Tokenizer
from glassformer.training import checkpoint
from glassformer.training.pretrained import Pretrained, check_origin, write_origin
from glassformer.training.recipe import Recipe

COMMAND = "command.txt"
"""File with the command that repeats a run, if the command line started it."""
HELD = (
    "recipe.yaml", "config.yaml", "config.json", "*tokenizer*", "metrics.jsonl", "dynamics.jsonl", "pretrained.json",
    SOURCES, COMMAND,
    "model*.safetensors", "checkpoints", "latest", "report.html", "answers.json",
)  # fmt: skip
"""Patterns of files of an earlier run, which a new run would replace, or mix with its own files."""
FREE = {"device", "threads", "compile", "checkpoint_seconds", "async_save", "watch"}
"""Fields of the recipe that may change when a run is resumed."""


def check_folder(out: str | Path | None, resume: bool, try_to_write: bool = True) -> Path | None:
    """Returns the folder `out` of a run as a path; the folder may not exist yet. Raises RequestError if it cannot be
    written, holds a run that is not to be resumed, or holds other files. Leaves the disk unchanged.

    `try_to_write`: makes the folder and removes it again; only one of several processes may do so."""
    if out is None:
        if resume:
            message = "resume needs the run's folder (--out RUN)"
            raise RequestError(message, code="missing", field="out", expected="a run folder")
        return None
    if not str(out):
        raise RequestError("--out is empty; name a folder", code="missing", field="out", value="", expected="a folder")
    folder = Path(out)
    new = [place for place in (folder, *folder.parents) if not place.is_dir()]
    for place in new:
        if place.exists():
            raise RequestError(
                f"--out {folder}: {place} is a file; name a folder", code="exists", field="out", value=str(folder)
            )
    found = checkpoint.latest(folder)
    if found is not None and not resume:
        raise RequestError(
            f"{folder} already holds a run; continue with --resume, or name another folder",
            code="exists",
            field="resume",
        )
    begun = found is not None or _begun(folder)
    if not begun and (is_folder(folder) or has_params(folder)):
        raise RequestError(
            f"{folder} holds a model that is not a run, and its tokenizer; name another folder",
            code="exists", field="out", value=str(folder),
        )  # fmt: skip
    refuse_foreign(folder, *HELD, ours=begun)
    if not try_to_write:
        return folder
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    finally:
        for place in new:
            with suppress(OSError):
                place.rmdir()
    return folder


def _begun(folder: Path) -> bool:
    """Returns True if the folder holds a run, which may have ended before its first checkpoint."""
    try:
        Recipe.from_file(folder / "recipe.yaml")
    except (RequestError, OSError):
        return False
    return True


def open_folder(
    folder: Path | None,
    config: ModelConfig,
    recipe: Recipe,
    tokenizer: Tokenizer,
    resume: bool,
    pretrained: Pretrained | None = None,
) -> None:
    """Writes the initial files of a run; on resuming, only checks that the files match the arguments."""
    if folder is None:
        return
    if resume:
        check_same_run(folder, config, recipe, pretrained)
        return
    with disk_errors(folder):
        recipe.save(folder / "recipe.yaml")  # first, because it marks the other files as a run's
        config.save(folder / "config.yaml")
        if sources := sources_of([*part_classes(config), *part_classes(recipe)]):
            replace_text(folder / SOURCES, json.dumps(sources))
        write_origin(folder, pretrained)
        tokenizer.save(folder)


def as_it_began(recipe: Recipe, found: Path | None) -> Recipe:
    """Returns the recipe with the dtype of the checkpoint `found` if the recipe's dtype is `auto`, because `auto` could
    choose another one on another machine; without a checkpoint, the recipe itself."""
    begun = None if found is None or recipe.dtype != "auto" else checkpoint.read_state(found).get("dtype")
    return recipe.replace(dtype=begun) if isinstance(begun, str) and begun in machine.DTYPES else recipe


def check_same_run(folder: Path, config: ModelConfig, recipe: Recipe, pretrained: Pretrained | None = None) -> None:
    """Raises RequestError if a run to be resumed would differ from its start: in the model, the recipe, the source code
    of a part from outside the package, or the initial weights."""
    check_origin(folder, pretrained)
    check_sources(_hashes(folder), f"the start of the run in {folder}")
    if difference := ModelConfig.from_file(folder / "config.yaml").diff(config):
        path, (was, now) = next(iter(difference.items()))
        raise RequestError(
            f"{folder} holds another model: {path} was {was} and is now {now}", code="changed", field=path, value=now
        )
    begun = Recipe.from_file(folder / "recipe.yaml")
    if change := first_difference(to_plain(begun), to_plain(recipe), besides=FREE):
        path, was, now = change
        raise RequestError(
            f"{folder} was started with {path}={was}, and {path}={now} was asked for; name another folder",
            code="changed", field=path, value=now,
        )  # fmt: skip


def _hashes(folder: Path) -> dict[str, str]:
    """Returns {module: SHA-256 of its source} for the modules from outside the package whose parts (mixers, norms, ...)
    the run's model uses. Leaves out `__main__`, because a script may change in lines other than those of its parts.
    Raises RequestError if the file with the sources is damaged."""
    held = read_tree(folder / SOURCES) if (folder / SOURCES).is_file() else {}
    try:
        return {name: str(source["sha256"]) for name, source in held.items() if name != "__main__"}
    except (AttributeError, KeyError, TypeError):
        raise RequestError(
            f"{folder / SOURCES} is damaged; name another folder", code="damaged", field=SOURCES
        ) from None


@contextmanager
def deferred_interrupt(asked: threading.Event, heard: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """Context manager inside which Ctrl-C and SIGTERM set the event `asked` instead of interrupting a step; a second
    Ctrl-C interrupts at once. `heard` is called with the number of the first signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        heard(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
