"""Arms that start from the weights of the checkpoints that their expressions name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.loaded import Loaded
from glassformer.naming.loading import load
from glassformer.runs.request import PretrainedPlace, place_of
from glassformer.text import Tokenizer
from glassformer.training import Pretrained

FOLDER, SUFFIX = "pretrained", ".safetensors"
NOTE = "All arms start from pretrained weights: seeds differ only in the order of the text."


def check_begun(models: Sequence[object], tokenizer: object) -> None:
    """Raises RequestError if one of `models`, which are to start from pretrained weights, is not an expression, or if
    `tokenizer` is not "auto"."""
    if other := next((model for model in models if not isinstance(model, str)), None):
        message = "--pretrained starts from the checkpoints that expressions name; give a name or a path, not a config"
        raise RequestError(message, code="type", field="pretrained", value=type(other).__name__, expected="expressions")
    if tokenizer != "auto":
        raise RequestError(
            f"--tokenizer {tokenizer}: pretrained weights fit only the tokens of the checkpoint's tokenizer; "
            "leave it out",
            code="conflict", field="tokenizer", value=tokenizer, expected="left out",
        )  # fmt: skip


def loaded_arms(models: Mapping[str, str]) -> dict[str, Loaded]:
    """Loads the checkpoint that each expression names and applies its changes; returns {arm name: model with weights}.
    Raises RequestError if a tokenizer is missing, or if the arms' tokenizers differ."""
    found = {name: load(model, dtype=torch.float32) for name, model in models.items()}
    first = next(iter(found))
    for name, loaded in found.items():
        if loaded.tokenizer is None:
            raise RequestError(
                f"{name} has no tokenizer, so its weights know no text", code="missing", field="tokenizer", value=name
            )
        if loaded.tokenizer.fingerprint() != tokenizer_of(found).fingerprint():
            raise RequestError(
                f"{name} and {first} were trained with different tokenizers: their losses do not compare",
                code="conflict", field="tokenizer", value=name, expected=f"that of {first}",
            )  # fmt: skip
    return found


def trained_arm(expression: str, tokenizer: str | Tokenizer) -> tuple[ModelConfig, Tokenizer, Pretrained]:
    """Loads the checkpoint that an expression names and applies its changes; returns (config, tokenizer, weights).
    Raises RequestError as `check_begun` and `loaded_arms` do."""
    check_begun([expression], tokenizer)
    found = loaded_arms({expression: expression})
    loaded = found[expression]
    return loaded.config, tokenizer_of(found), Pretrained.of(loaded.model, expression)


def tokenizer_of(found: Mapping[str, Loaded]) -> Tokenizer:
    """Returns the tokenizer that the loaded models of all arms share."""
    tokenizer = next(iter(found.values())).tokenizer
    assert tokenizer is not None  # `loaded_arms` refuses an arm without a tokenizer
    return tokenizer


def beginnings(found: Mapping[str, Loaded], folder: Path) -> dict[str, tuple[Pretrained, PretrainedPlace]]:
    """Returns {arm name: (its initial weights, record of the file in `folder`/pretrained that holds them for its
    runs)}."""
    made = {}
    for name, loaded in found.items():
        weights = Pretrained.of(loaded.model, name)
        path = folder / FOLDER / f"{place_of(folder, name, 0).name.removesuffix('-seed0')}{SUFFIX}"
        made[name] = weights, PretrainedPlace(path, weights.fingerprint)
    return made


def adapted_notes(found: Mapping[str, Loaded]) -> list[str]:
    """Returns notes for the report: that all arms start from pretrained weights, and a sentence for each way in which a
    loaded model differs from its checkpoint."""
    return [NOTE, *(f"{name}: {words}." for name, loaded in found.items() for words in loaded.adapted)]
