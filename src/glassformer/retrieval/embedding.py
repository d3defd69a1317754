"""Vectors of texts from a list or a file, by any model that `gf.load` reads; optionally written to a file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from glassformer.errors import RequestError, keeping, so_far
from glassformer.figures.terminal import Tabular
from glassformer.files import atomic_file, check_output, output
from glassformer.generation.vectors import Embedder, in_order
from glassformer.naming.resolve import ModelLike, files_of, resolve
from glassformer.runs.events import Notify, reading
from glassformer.runs.live import shown
from glassformer.typed import typed
from glassformer.units import plural

KINDS = (".npy", ".jsonl")


class Embeddings(Tensor, Tabular):
    """Vectors of texts: a tensor (n, d) in fp32. Operations on it return plain tensors."""

    texts: list[str]
    seconds: float
    """Time of the computation"""
    out: str | None
    """File with the vectors; None if they were not written"""
    places: list[int] | None
    """Indices of the embedded texts, if the work ended before all had a vector; None otherwise"""
    raw: ClassVar[bool] = True

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    __str__ = Tensor.__repr__  # as other tensors; `lines` yields the vectors in full

    def __deepcopy__(self, memo: dict[int, Any]) -> Embeddings:
        copied = self.clone().as_subclass(Embeddings)
        vars(copied).update(vars(self))
        return copied

    def lines(self) -> Iterator[str]:
        """Yields one JSON object for each text, or a description of the file if they were written to one."""
        if self.out is None:
            yield from json_lines(self.texts, self.numpy())
        else:
            yield f"{self.out}: {plural(len(self), 'vector')} of {self.shape[1]} in {self.seconds:.1f} s"

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each text: the text, and each coordinate of its vector by number."""
        vectors = self.tolist()
        return [
            {"text": text, **{str(i): one for i, one in enumerate(row)}}
            for text, row in zip(self.texts, vectors, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the `--json` output; the vectors only if they were not written to a file."""
        facts: dict[str, Any] = {"texts": len(self), "width": self.shape[1], "seconds": self.seconds, "out": self.out}
        facts |= {} if self.places is None else {"places": self.places}
        return facts if self.out else {**facts, "vectors": self.tolist()}


@typed
def embed(
    model: ModelLike,
    texts: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool | Notify = True,
) -> Embeddings:
    """Returns a vector for each text, pooled and normalised as the model's folder specifies.

    Without such settings it is the mean over tokens, scaled to length 1.

    Parameters
    ----------
    model
        An encoder with weights, as `gf.load` takes it, or a built or loaded model. If the model's head pools
        (`+pooled:cls`), the vector is the head's.
    texts
        Texts; they are cut to the length in the model's folder, at most the model's context.
    file
        File with further texts: one per line, or a .jsonl file with a field `text`.
    out
        File for the vectors: .npy (n, d) in fp32, or .jsonl. If None, nothing is written. If the work ends early, the
        vectors so far are written next to it, as NAME.partial.jsonl.
    force
        Replace a file that this program did not write. Input files are never replaced.
    progress
        False for silence, or a function that receives events; by default bars in a terminal or notebook.

    Returns
    -------
    Embeddings
        A tensor (n, d) in fp32, in the order of the texts.

    Raises
    ------
    RequestError
        For no texts, a value that is not text, a text without tokens, a model without a tokenizer or with an encoder
        and a decoder, and a file that cannot be read or written.
    WorkError, KeyboardInterrupt
        If the work ends early, with the vectors so far as `error.so_far`.

    Examples
    --------
    >>> import glassformer as gf
    >>> x = gf.embed("minilm", ["That is a happy person", "Today is a sunny day"])  # doctest: +SKIP
    >>> x @ x.T  # doctest: +SKIP
    """
    if not isinstance(texts, str):
        texts = [*texts, *(read_texts(file) if file else ())]
    if out is None:
        return _embedded(model, texts, progress)
    path = Path(out)
    if path.suffix not in KINDS:
        kinds = " or ".join(KINDS)
        raise RequestError(code="range", field="out", value=str(path), expected=f"a file name that ends in {kinds}")
    partial = path.with_name(f"{path.stem}.partial.jsonl")
    sources = [*files_of(model), *([Path(file)] if file else [])]
    check_output(partial, force=force, sources=sources)
    with output(path, force=force, sources=sources):
        try:
            found = _embedded(model, texts, progress)
        except (Exception, KeyboardInterrupt) as error:
            if (made := so_far(error)) is not None:
                with output(partial, force=force):
                    write(partial, made.texts, made.numpy())
                made.out = str(partial)
            raise
        with keeping(lambda: found):
            write(path, found.texts, found.numpy())
    found.out = str(path)
    return found


def _embedded(model: ModelLike, texts: Sequence[str], progress: bool | Notify) -> Embeddings:
    embedder = Embedder(resolve(model, weights=True))
    began, batches = time.perf_counter(), list[tuple[list[int], Tensor]]()

    def made() -> Embeddings | None:
        if not batches:
            return None
        indices, vectors = in_order(batches)
        found = vectors.as_subclass(Embeddings)
        found.texts, found.seconds, found.out = [texts[i] for i in indices], time.perf_counter() - began, None
        found.places = indices if len(indices) < len(texts) else None
        return found

    with keeping(made), shown(progress) as notify:
        for batch in embedder.batches(texts, reading(notify)):
            batches.append(batch)
    found = made()
    assert found is not None
    return found


def read_texts(file: str | Path) -> list[str]:
    """Returns a file's lines, or the `text` of each in .jsonl, without empty ones. Only a newline ends a line, not
    U+2028 or a form feed. Raises RequestError."""
    path = Path(file)
    try:
        read = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, ValueError) as problem:
        raise RequestError(f"{file} cannot be read: {problem}", field="file", value=str(file), code="missing") from None
    rows = [(number, row.removesuffix("\r")) for number, row in enumerate(read, 1) if row.strip()]
    if path.suffix != ".jsonl":
        return [row for _, row in rows]
    found = []
    for number, row in rows:
        try:
            text = json.loads(row)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise RequestError(
                f'{file}: line {number} is not a JSON object with a string "text"',
                code="type", field="file", value=str(file), expected='{"text": "..."}',
            )  # fmt: skip
        found.append(text)
    return found


def write(path: Path, texts: Sequence[str], vectors: np.ndarray) -> None:
    """Writes the vectors in the format of the path's suffix."""
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        if path.suffix == ".npy":
            np.save(file, vectors, allow_pickle=False)
        else:
            file.writelines(f"{line}\n".encode() for line in json_lines(texts, vectors))


def json_lines(texts: Sequence[str], vectors: np.ndarray) -> Iterator[str]:
    """Yields {"text", "vector"} for each text, in ASCII, so that only a newline can be read as the end of a line."""
    for text, vector in zip(texts, vectors.tolist(), strict=True):
        yield json.dumps({"text": text, "vector": vector})
