"""Initial weights of a training run, in place of random ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.files import atomic_file, replace_text

NAME = "name"


@dataclass(frozen=True)
class Pretrained:
    """Initial weights from a model that was trained before, or converted. `name` identifies them in messages."""

    name: str
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, name: str = "the model given") -> Pretrained:
        """Makes initial weights from a model: copies of all values that its checkpoint would hold, in fp32. Raises
        RequestError for quantised weights."""
        values = {path: value.detach().cpu() for path, value in model.state_dict().items()}
        for path, parameter in model.named_parameters():
            if path not in values or not parameter.dtype.is_floating_point:
                raise RequestError(
                    f"{name}: {path} is packed, and packed weights cannot be trained; load it unpacked",
                    code="unsupported", field=path,
                )  # fmt: skip
        floats = {path: value.float() if value.is_floating_point() else value for path, value in values.items()}
        return cls(name, {path: value.clone() for path, value in floats.items()})

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the weights' names, shapes and values."""
        hashed = hashlib.sha256()
        for path, value in sorted(self.tensors.items()):
            hashed.update(f"{path}{tuple(value.shape)}{value.dtype}".encode())
            hashed.update(value.contiguous().numpy().tobytes())
        return hashed.hexdigest()

    def check(self, config: ModelConfig) -> None:
        """Raises RequestError if the weights differ in names or shapes from those of a model of this config."""
        wanted = {path: tuple(value.shape) for path, value in config.outline().state_dict().items()}
        given = {path: tuple(value.shape) for path, value in self.tensors.items()}
        for path in sorted(wanted.keys() | given.keys()):
            if wanted.get(path) != given.get(path):
                shapes = (str(shapes.get(path, "not there")) for shapes in (given, wanted))
                raise RequestError(
                    f"{self.name} has other weights than the model that is to be trained: {path} is "
                    f"{' and there '.join(shapes)}; its vocabulary is the tokenizer's, its context the recipe's",
                    code="conflict", field="pretrained", value=self.name,
                )  # fmt: skip

    def save(self, path: Path) -> None:
        with atomic_file(path) as temporary:
            save_file(dict(self.tensors), temporary, metadata={NAME: self.name})

    @classmethod
    def read(cls, path: str | Path, fingerprint: str) -> Pretrained:
        """Reads weights from a file that `save` wrote. Raises RequestError if they have another fingerprint or the file
        is damaged."""
        try:
            with safe_open(path, "pt") as file:
                held = cls(
                    (file.metadata() or {}).get(NAME, ""), {key: file.get_tensor(key) for key in file.offset_keys()}
                )
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path} cannot be read: {error}", code="damaged", field=Path(path).name) from None
        if held.fingerprint != fingerprint:
            raise RequestError(
                f"{path} no longer holds the initial weights of its runs; name another folder",
                code="changed", field=Path(path).name,
            )  # fmt: skip
        return held


FILE = "pretrained.json"
"""File in a run folder that records the origin of the initial weights."""


def write_origin(folder: Path, given: Pretrained | None) -> None:
    if given is not None:
        replace_text(folder / FILE, json.dumps({NAME: given.name, "sha256": given.fingerprint}))


def origin(folder: Path) -> tuple[str | None, str | None]:
    """Returns (name, fingerprint) of the initial weights of the run in a folder; (None, None) if they are random.
    Raises RequestError for a damaged file."""
    try:
        held = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return str(held[NAME])[:200], str(held["sha256"])
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(
            f"{folder / FILE} is not what a run leaves there; name another folder", code="damaged", field=FILE
        ) from None


def check_origin(folder: Path, given: Pretrained | None) -> None:
    """Raises RequestError if the run in the folder started with other weights."""
    name, began = origin(folder)
    if began != (given and given.fingerprint):
        asked = "weights drawn for it" if given is None else f"those of {given.name}"
        name = name or "weights drawn for it"
        raise RequestError(
            f"{folder} was started with {name}, and {asked} were asked for; name another folder",
            code="conflict", field="pretrained", value=asked, expected=name,
        )  # fmt: skip
