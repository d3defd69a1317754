"""The prompt cache on disk: a long prompt is prefilled once, and later runs continue from its state."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glassformer.errors import RequestError, WorkError
from glassformer.files import SCHEMAS, atomic_file, check_schema
from glassformer.generation.steps import new_state
from glassformer.model import Model
from glassformer.parts.state import ModelState

__all__ = ["check_keeps", "kept_tokens", "load_state", "save_state"]

KIND = "glassformer-state-"
FORMAT = f"{KIND}{SCHEMAS['prompt cache']}"
TOKENS = "tokens"
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.int32: "I32",
}  # fmt: skip
"""Names of a state's dtypes in safetensors files."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES if dtype != torch.int32}
SAMPLES = 16
"""Number of elements of each weight that the fingerprint hashes."""


def check_keeps(model: Model) -> None:
    """Raises RequestError for a model with a prefix, whose first tokens attend to the last ones of the prompt."""
    if model.takes_prefix:
        raise RequestError(
            "this model reads each prompt as a whole, its prefix, so a longer one cannot continue from its state; "
            "leave the kept state out",
            code="conflict", field="state", expected="None",
        )  # fmt: skip


def save_state(path: str | Path, state: ModelState, tokens: list[int], model: Model) -> None:
    """Writes the filled part of `state`, which has read exactly `tokens`, to a safetensors file.

    The file is written whole or not at all. Raises RequestError for a state of several rows or of other tokens,
    WorkError if the disk refuses."""
    check_keeps(model)
    if state.batch != 1 or state.documents is not None or state.positions is not None:
        raise RequestError(
            "a state is kept of one row, without padding or documents", code="unsupported", field="state"
        )
    if len(tokens) != state.length or not tokens:
        raise RequestError(
            f"the state has read {state.length} tokens, and {len(tokens)} were given",
            code="conflict", field="tokens", value=len(tokens),
        )  # fmt: skip
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _filled(state, state.length).items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.") if tensors else "float32"
    told = {"format": FORMAT, "model": fingerprint(model), "dtype": dtype, "furthest": str(state.furthest)}
    path = Path(path)
    if not path.parent.is_dir():
        raise WorkError(f"{path} cannot be written: the folder {path.parent} is missing", code="disk")
    with atomic_file(path, private=True) as temporary:
        save_file({**tensors, TOKENS: torch.tensor(tokens, dtype=torch.int32)}, temporary, told)


def load_state(
    path: str | Path, model: Model, max_len: int | None = None, dtype: torch.dtype | None = None, rewind: int = 0
) -> tuple[ModelState, list[int]]:
    """Returns a saved state and the tokens that it has read. Decoding continues from it exactly as from the state that
    was saved.

    `max_len` is the number of tokens that it has room for, by default the model's context; `dtype`, unless None, is the
    dtype that the file must have; `rewind` is as for `Model.init_state`. Raises RequestError for a file that does not
    hold a state of this model."""
    with _opened(path, model) as (file, ids, kept):
        if dtype not in (None, kept):
            raise RequestError(
                f"{path} was kept in {kept}, and dtype={dtype} was asked for",
                code="conflict", field="dtype", value=str(dtype),
            )  # fmt: skip
        if model.config.state_bytes(len(ids), kept) > os.path.getsize(path):  # checked before memory is allocated
            raise RequestError(
                f"{path} is damaged: it is smaller than the state of {len(ids)} tokens",
                code="damaged", field=Path(path).name,
            )  # fmt: skip
        max_len = max(model.config.context, len(ids)) if max_len is None else max_len
        if max_len < len(ids):
            raise RequestError(
                f"max_len={max_len} is too short for {path}, which has {len(ids)} tokens",
                code="range", field="max_len", value=max_len,
            )  # fmt: skip
        state = new_state(model, 1, max_len, kept, rewind)
        _fill(state, len(ids), file, path)
    return state, ids


def kept_tokens(path: str | Path, model: Model) -> list[int]:
    """Returns the tokens that a state on disk has read, without loading the state. Raises RequestError as `load_state`
    does."""
    with _opened(path, model) as (_, ids, _):
        return ids


@contextmanager
def _opened(path: str | Path, model: Model) -> Iterator[tuple[Any, list[int], torch.dtype]]:
    """Yields the open file, the tokens that its state has read, and the dtype. Raises RequestError for another file."""
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            if version := re.fullmatch(rf"{KIND}([0-9]{{1,6}})", told.get("format", "")):
                check_schema("prompt cache", int(version[1]), path)
            if told.get("format") != FORMAT or TOKENS not in file.keys() or told.get("dtype") not in DTYPES:  # noqa: SIM118
                raise RequestError(
                    f"{path} is not a state that was kept (its header is another one)",
                    code="damaged", field=Path(path).name,
                )  # fmt: skip
            if told.get("model") != fingerprint(model):
                raise RequestError(
                    f"{path} is the state of another model, or of this one in another precision",
                    code="changed", field="model",
                )  # fmt: skip
            tokens = file.get_slice(TOKENS)
            if tokens.get_dtype() != "I32" or len(tokens.get_shape()) != 1 or not tokens.get_shape()[0]:
                raise RequestError(
                    f"{path} is damaged: its tokens must be a list of integers", code="damaged", field=Path(path).name
                )
            ids, vocab_size = file.get_tensor(TOKENS), model.vocab_size
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise RequestError(
                    f"{path} is damaged: it has tokens outside the vocabulary of {vocab_size}",
                    code="damaged", field=Path(path).name,
                )  # fmt: skip
            yield file, ids.tolist(), DTYPES[told["dtype"]]
    except FileNotFoundError:
        raise RequestError(f"the file {path} is missing", code="missing", field=Path(path).name) from None
    except (OSError, SafetensorError) as problem:
        raise RequestError(
            f"{path} is not a state that was kept ({' '.join(str(problem).split())[:200]})",
            code="damaged", field=Path(path).name,
        ) from None  # fmt: skip


def _fill(state: ModelState, length: int, file: Any, path: str | Path) -> None:
    """Copies the file's tensors into the part of the state that `length` tokens fill. Raises RequestError if names,
    dtypes or shapes differ."""
    wanted = _filled(state, length)
    if set(file.keys()) != {*wanted, TOKENS}:
        raise RequestError(
            f"{path} is damaged: it does not have the tensors of {length} tokens of this model",
            code="damaged", field=Path(path).name,
        )  # fmt: skip
    for name, tensor in wanted.items():
        found = file.get_slice(name)
        kind, shape = found.get_dtype(), tuple(found.get_shape())
        if (kind, shape) != (NAMES[tensor.dtype], tuple(tensor.shape)):
            raise RequestError(
                f"{path} does not fit: {name} is {kind} {shape}, and the state of {length} tokens has "
                f"{NAMES[tensor.dtype]} {tuple(tensor.shape)} there; with windows and recurrences, "
                "rewind must be what it was",
                code="conflict", field="rewind", value=state.rewind,
            )  # fmt: skip
    for name, tensor in wanted.items():
        tensor.copy_(file.get_tensor(name))
    furthest = file.metadata().get("furthest", "")
    if not re.fullmatch(r"[0-9]{1,12}", furthest):
        raise RequestError(
            f"{path} is damaged: furthest={furthest[:40]!r} must be a number of tokens",
            code="damaged", field=Path(path).name,
        )  # fmt: skip
    state.seek(length, int(furthest))


def _filled(state: ModelState, length: int) -> dict[str, Tensor]:
    held = [(i, layer) for i, layer in enumerate(state.layers) if layer is not None]
    return {f"{i}.{name}": tensor for i, layer in held for name, tensor in layer.upto(length).items()}


def fingerprint(model: Model) -> str:
    """Returns a hash of the config, and of name, dtype, shape and some elements of every weight. It does not depend on
    the memory layout of bf16 weights."""
    found = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    weights = {name.replace("head.packed.", "head."): weight for name, weight in model.state_dict().items()}
    if model.config.head.tied:  # the same tensor as the embedding
        weights.pop("head.weight", None)
    for name, weight in sorted(weights.items()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + _some(weight))
    return found.hexdigest()


def _some(weight: Tensor) -> bytes:
    if not weight.numel():
        return b""
    places = torch.linspace(0, weight.numel() - 1, SAMPLES, dtype=torch.float64).long().to(weight.device)
    numbers = weight[torch.unravel_index(places, weight.shape)] if weight.dim() else weight[None]
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()
