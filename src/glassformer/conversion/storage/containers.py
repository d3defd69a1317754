"""Recognition and opening of files of weights by their content."""

from __future__ import annotations

import os
from pathlib import Path

from glassformer.conversion.storage.base import TensorFile, opened
from glassformer.conversion.storage.gguf import open_gguf
from glassformer.conversion.storage.pickled import PickledFile
from glassformer.conversion.storage.safetensors import SafetensorsFile, open_folder
from glassformer.errors import RequestError
from glassformer.names.places import FOREIGN, WEIGHTS, ZIP, is_zip, no_container, pickled

PICKLE = (ZIP, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _start(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(32)


def is_gguf(path: Path) -> bool:
    """Returns True for a file that starts with GGUF's first four bytes."""
    return path.is_file() and _start(path).startswith(b"GGUF")


def means_weights(path: Path) -> bool:
    """Returns True for a file or folder of weights, readable here or not: by a file's first bytes, which no text has,
    or by the name of a file, in a folder of any file."""
    if path.is_dir():
        return any(file.suffix in WEIGHTS for file in path.iterdir())
    start = _start(path)
    safetensors = start[7:9] == b"\0{"
    return path.suffix in WEIGHTS or safetensors or start.startswith((b"GGUF", *PICKLE, *FOREIGN))


def open_tensors(path: str | Path) -> TensorFile:
    """Opens the weights at `path` by their content: safetensors, GGUF (all parts of a split one), or a folder of
    Hugging Face.

    Raises RequestError for everything else; for a pickle with a sentence on how to convert it."""
    path = Path(path)
    if os.path.isdir(path):
        return open_folder(path)
    start = _start(path)
    if start.startswith(b"GGUF"):
        return open_gguf(path)
    if start.startswith(PICKLE) and start[8:9] != b"{":
        _refuse_code(path)
        raise RequestError(pickled(path), code="unsupported", field=path.name)
    for magic, sentence in FOREIGN.items():
        if start.startswith(magic):
            raise RequestError(f"{path} {sentence}", code="unsupported", field=path.name)
    if start[8:9] != b"{":
        raise no_container(path, start)
    return SafetensorsFile(path)


def _refuse_code(path: Path) -> None:
    """Raises RequestError if a torch file at `path` refers to a class or function that tensors do not need, with its
    name."""
    try:
        if is_zip(path):
            PickledFile(path).close()
    except RequestError as problem:
        if problem.code == "unsupported":
            raise
