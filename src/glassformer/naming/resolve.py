"""Models in every form that verbs accept: text, a path, a config, a built model, a loaded one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch

from glassformer.config import ModelConfig
from glassformer.conversion import is_checkpoint
from glassformer.errors import RequestError
from glassformer.loaded import Loaded
from glassformer.machine import WEIGHT_DTYPES, device_named, dtype_of
from glassformer.model import Model
from glassformer.names.known import PACKAGED
from glassformer.names.places import existing, packaged
from glassformer.naming.loading import load
from glassformer.naming.models import parse, preset
from glassformer.training import Run

ModelLike = str | Path | ModelConfig | Model | Loaded | Run
"""Type of a model argument: an expression, a path, a config, a built model, a loaded model, or a run."""


@overload
def resolve(
    model: ModelLike, *, weights: Literal[False] = False, dtype: torch.dtype | str | None = None, device: Any = None
) -> ModelConfig: ...


@overload
def resolve(
    model: ModelLike,
    *,
    weights: Literal[True],
    seed: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
) -> Loaded: ...


def resolve(
    model: ModelLike,
    *,
    weights: bool = False,
    seed: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
) -> ModelConfig | Loaded:
    """Returns the config of a model, or with `weights` the model ready to run.

    Parameters
    ----------
    model
        An expression such as `llama@10m+gqa:2`, a path of a config or checkpoint, a `ModelConfig`, a built `Model`,
        a `Loaded`, or the `Run` that `train` returns. A change of the recipe in an expression is refused.
    weights
        Return a `Loaded`. A built `Model` has no tokenizer.
    seed
        With `weights`, the seed of random weights for a name without weights and for a `ModelConfig`, which are refused
        without a seed.
    dtype, device
        As in `load`. A `Model` or `Loaded` in another dtype or on another device is copied, and stays as it is.

    Returns
    -------
    ModelConfig or Loaded

    Raises
    ------
    RequestError
        If the value names no model, or names one without weights where weights are needed.

    Examples
    --------
    >>> resolve("llama@1m").n_layers
    6
    """
    if isinstance(model, Run):
        model = model.loaded
    if weights and seed is not None and not has_weights(model):
        config = resolve(model)
        return _moved(Loaded(config.build(seed).eval(), config, None), dtype, device)
    if isinstance(model, str | Path):
        return load(model, dtype=dtype, device=device) if weights else preset(str(model))
    if isinstance(model, ModelConfig):
        if weights:
            message = "a ModelConfig has no weights; give a built model (config.build()), a run folder or a checkpoint"
            raise RequestError(message, code="missing", field="model", value="ModelConfig", expected="a trained model")
        return model
    if isinstance(model, Model):
        if model.config is None:
            message = "this Model was built from parts, not from a config; give its ModelConfig"
            raise RequestError(message, code="missing", field="model", value="Model", expected="a ModelConfig")
        model = Loaded(model, model.config, None) if weights else model.config
        return model if isinstance(model, ModelConfig) else _moved(model, dtype, device)
    if isinstance(model, Loaded):
        return _moved(model, dtype, device) if weights else model.config
    message = (
        f"a value of type {type(model).__name__} names no model; give an expression such as 'llama@10m', a path, a "
        "ModelConfig, a Model, a Loaded or a Run"
    )
    raise RequestError(message, code="type", field="model", value=type(model).__name__, expected="a model")


def has_weights(model: ModelLike) -> bool:
    """Returns True for a built, loaded or trained model, and for an expression that names a run or checkpoint."""
    if isinstance(model, str | Path):
        return is_checkpoint(parse(model)[0])
    return isinstance(model, Model | Loaded | Run)


def files_of(*models: ModelLike) -> list[Path]:
    """Returns the paths of the files and folders that these models are read from; configs and published models have
    none."""
    names = [parse(model)[0] for model in models if isinstance(model, str | Path)]
    found = [packaged(name) if name in PACKAGED else existing(name) for name in names]
    return [path for path in found if path is not None]


def name_of(model: ModelLike) -> str:
    """Returns the expression or path of a model, or the name of the class of a value."""
    return str(model) if isinstance(model, str | Path) else type(model).__name__


def _moved(loaded: Loaded, dtype: torch.dtype | str | None, device: Any) -> Loaded:
    """Returns the model in a dtype and on a device, None for those it has; a copy if anything has to change. Raises
    RequestError."""
    dtype = None if dtype is None else dtype_of(dtype, known=WEIGHT_DTYPES)
    place = None if device is None else torch.device(device_named(device))
    if all(
        (dtype is None or not weight.is_floating_point() or weight.dtype == dtype)
        and (place is None or (weight.device.type, weight.device.index or 0) == (place.type, place.index or 0))
        for weight in loaded.model.parameters()
    ):
        return loaded
    return replace(loaded, model=copy.deepcopy(loaded.model).to(device=place, dtype=dtype))
