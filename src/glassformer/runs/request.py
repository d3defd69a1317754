"""Request of a run as a value: model, recipe and text."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.config import ModelConfig
from glassformer.files import replace_text
from glassformer.parts.core.base import part_classes, to_plain
from glassformer.parts.core.outside import modules_of, sources_of
from glassformer.runs.results import Key, PartSource, RunResult
from glassformer.text import Tokens
from glassformer.training import Recipe

REQUEST = "request.json"
RUN = "run"
"""Folder of the training run inside the folder of a request."""


@dataclass(frozen=True)
class TextPlaces:
    """Folders of a prepared text, and a hash of the content of each."""

    tokenizer: str
    train: str
    validation: str
    content: tuple[str, str, str]
    """Hashes of training tokens, held-out tokens and tokenizer."""

    @classmethod
    def of(cls, text: Tokens, tokenizer: Path) -> TextPlaces:
        """Returns the places of a text. `tokenizer` is the folder to which the caller saves the tokenizer before a run
        reads it."""
        content = (text.train.folder.name, text.validation.folder.name, text.tokenizer.fingerprint())
        train, validation = (str(side.folder.resolve()) for side in (text.train, text.validation))
        return cls(str(tokenizer.resolve()), train, validation, content)

    def open(self) -> Tokens:
        return Tokens.open(tokenizer=self.tokenizer, train=self.train, validation=self.validation)


@dataclass(frozen=True)
class PretrainedPlace:
    """File and fingerprint of the initial weights of a run (`training.Pretrained`)."""

    path: Path
    fingerprint: str


@dataclass(frozen=True)
class RunRequest:
    """Request of one run. `identity` holds all values that decide the run."""

    name: str
    config: ModelConfig
    recipe: Recipe
    text: TextPlaces
    log_to: tuple[str, ...] = ()
    """Sinks that also receive the numbers of each step (`training.sinks`)."""
    loss_alone: bool = False
    """True for a trial: only the loss of the trained model is measured, without longer contexts and text."""
    pretrained: PretrainedPlace | None = None
    """Initial weights; None for weights drawn from the seed."""

    @property
    def imports(self) -> dict[str, str]:
        """Mapping {module: folder} of the parts from outside the package, to import before the config is read. Raises
        RequestError for a part that another process cannot import."""
        return modules_of([*part_classes(self.config), *part_classes(self.recipe)])

    @property
    def sources(self) -> dict[str, PartSource]:
        """Sources of the parts from outside the package, by module."""
        return sources(self.config, self.recipe)

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def key(self) -> Key:
        return self.name, self.seed

    @property
    def identity(self) -> dict[str, Any]:
        """Values that decide the run, as plain data of request.json: name, config, recipe, hashes of text and
        weights."""
        return {
            "name": self.name,
            "config": self.config.to_dict(),
            "recipe": to_plain(self.recipe),
            "tokens": list(self.text.content),
            **({} if self.pretrained is None else {"pretrained": self.pretrained.fingerprint}),
        }

    def place(self, folder: Path) -> Path:
        return place_of(folder, self.name, self.seed)

    def answered_by(self, result: RunResult) -> bool:
        """Returns True if the result is of this model, recipe and seed, with all requested measures."""
        if result.loss_alone and not self.loss_alone:
            return False
        same = (self.config.to_dict(), to_plain(self.recipe)) == (result.config, result.recipe)
        begun = None if self.pretrained is None else self.pretrained.fingerprint
        return result.key == self.key and same and result.pretrained == begun

    def write(self, place: Path, shared: bool = False) -> None:
        """Writes request.json to the folder `place`, for the process that trains the run; `shared`: the run shares its
        device with others."""
        text = {"tokenizer": self.text.tokenizer, "train": self.text.train, "validation": self.text.validation}
        begins = {} if self.pretrained is None else {"pretrained_file": str(self.pretrained.path.resolve())}
        besides = {
            **begins, "text": text, "log_to": list(self.log_to), "imports": self.imports,
            "sources": {name: source.sha256 for name, source in self.sources.items()},
            "loss_alone": self.loss_alone, "shared": shared,
        }  # fmt: skip
        replace_text(place / REQUEST, json.dumps({**self.identity, **besides}))


def sources(config: ModelConfig, recipe: Recipe) -> dict[str, PartSource]:
    """Returns the sources of a model's and a recipe's parts from outside the package, by module."""
    found = sources_of([*part_classes(config), *part_classes(recipe)])
    return {name: PartSource(**source) for name, source in found.items()}


def place_of(folder: Path, name: str, seed: int) -> Path:
    """Returns the folder of a run inside the folder of its results."""
    plain = re.sub(r"[^A-Za-z0-9.@+_=-]+", "_", name)[:80]  # readable, and different for different names
    slug = plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return folder / "runs" / f"{slug}-seed{seed}"


def text_of_runs(folder: Path) -> Tokens | None:
    """Opens the prepared text of the first run in a folder that names one; None without such a run. Raises
    RequestError."""
    for path in sorted(folder.rglob(REQUEST)):
        if places := read_request(path.parent).get("text"):
            return Tokens.open(**places)
    return None


def read_request(place: Path) -> dict[str, Any]:
    """Returns the content of request.json; {} if it is missing or unreadable."""
    try:
        tree = json.loads((place / REQUEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}
