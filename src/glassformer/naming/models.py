"""Configs of models that whole expressions name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig, TowerConfig, flatten
from glassformer.errors import RequestError
from glassformer.names import grammar
from glassformer.names.known import FAMILIES, PACKAGED
from glassformer.names.places import no_config, unknown
from glassformer.names.sizes import is_size
from glassformer.naming.changes import Undone, caution, change_of, changes_mixers, of_mixers, undone
from glassformer.naming.sizes import resize, widened
from glassformer.typed import typed


@typed
def preset(expression: str | Path) -> ModelConfig:
    """Returns the config that an expression names, without weights.

    Parameters
    ----------
    expression
        NAME[@SIZE][+CHANGE...]: a published model, optionally at another size and with changed parts; or the path of a
        .yaml or .json config, a run folder, a checkpoint folder, a .gguf file.

    Returns
    -------
    ModelConfig
        The model as a value.

    Raises
    ------
    RequestError
        With the nearest names, the field, or the reason why two parts do not fit together.

    Examples
    --------
    >>> gf.preset("gpt2").num_params()
    124439808
    >>> gf.preset("llama@10m+gqa:2+window:128").n_layers
    6
    """
    name, size, changes = parse(expression)
    config = _named(name)
    return changed(resize(config, size) if size else config, changes)


@contextmanager
def trial() -> Iterator[None]:
    """Suppresses all warnings inside the block, for changes that are only tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def undone_by(expression: str) -> list[str]:
    """Returns a sentence for each choice that a later change of the expression undoes. Raises RequestError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Undone)
        preset(expression)
    return [str(one.message) for one in caught if one.category is Undone]


def parse(expression: str | Path) -> tuple[str, str | None, list[str]]:
    """Splits an expression into (name, size or None, changes). The name of a known model means that model, even if the
    current folder has a file of that name; ./NAME is the file. Raises RequestError."""
    return grammar.parse(expression, _names_a_model)


def own_value(expression: str, config: ModelConfig, field: str) -> Any:
    """Returns `config`'s value of a field if a change of the expression sets this field, else None."""
    named = {change.partition("=")[0].strip() for change in parse(expression)[2]}
    return getattr(config, field) if field in named else None


def split_recipe(expression: str) -> tuple[str, dict[str, str]]:
    """Returns (the expression without its changes of the recipe, these as {field: value}); such a change is
    +recipe.FIELD=VALUE. Raises RequestError without a field or a value."""
    name, size, changes = parse(expression)
    kept, overrides = split_changes(changes)
    return "+".join([f"{name}@{size}" if size else name, *kept]), overrides


def split_changes(changes: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns (changes of the model, changes of the recipe as {field: value}). Raises RequestError without a field or a
    value."""
    kept, overrides = [], {}
    for change in changes:
        if not change.startswith(f"{grammar.RECIPE}."):
            kept.append(change)
            continue
        field, _, value = (part.strip() for part in change.removeprefix(f"{grammar.RECIPE}.").partition("="))
        if not field or not value:
            raise RequestError(
                f"+{change}: use +recipe.FIELD=VALUE, such as +recipe.warmup=0.1",
                code="syntax", field="recipe", value=change,
            )  # fmt: skip
        overrides[field] = value
    return kept, overrides


def at_size(expression: str, size: str) -> str:
    """Returns the expression with a size, written before its changes. Raises RequestError if it already has one.

    >>> at_size("llama+gqa:2", "0.3m")
    'llama@0.3m+gqa:2'
    """
    name, own, changes = parse(expression)
    if own:
        raise RequestError(
            f"{expression} already has a size; leave @{own} out: the sizes are those asked for",
            code="conflict", field="size", value=own, expected=expression.replace(f"@{own}", "", 1),
        )  # fmt: skip
    return "+".join([f"{name}@{size}", *changes])


def without_size(expression: str) -> str:
    """Returns the expression without its @SIZE."""
    name, _, changes = parse(expression)
    return "+".join([name, *changes])


def changed(config: ModelConfig, changes: Sequence[str]) -> ModelConfig:
    """Returns the config after these changes of an expression; warns of choices that they undo. Raises RequestError."""
    before = config
    if width := _other_width(config, changes):
        config = widened(config, width)
    derived = config
    for at, change in enumerate(changes):
        try:
            was, config = config, change_of(change)(config)
        except RequestError as error:
            raise error if change in str(error) else error.of(f"+{change}") from None
        for sentence in undone(was, config, change, changes[:at]):
            warnings.warn(sentence, Undone, stacklevel=2)
        if sentence := caution(change):
            warnings.warn(sentence, stacklevel=2)
    _refuse_lost(config, changes)
    config = _scaled(before, config)
    config.check()
    if sentence := _following(before, derived, config):
        warnings.warn(sentence, Undone, stacklevel=2)
    return config


def _other_width(config: ModelConfig, changes: Sequence[str]) -> int | None:
    """Returns the width (d_model) that a change sets, if it differs from the model's; else None."""
    named = [value.strip() for path, _, value in (one.partition("=") for one in changes) if path.strip() == "d_model"]
    width = int(named[-1]) if named and named[-1].isdecimal() else 0
    return width if width and width != config.d_model else None


def _following(before: ModelConfig, derived: ModelConfig, config: ModelConfig) -> str:
    """Returns a sentence about the sizes that were set for the old width and now follow from the new one; "" if none
    did."""
    now, chosen = flatten(config.resolved().to_dict()), flatten(config.to_dict())
    said: dict[str, str] = {}
    for path, (old, new) in before.diff(derived).items():
        if new is None and isinstance(old, int) and isinstance(size := now.get(path), int) and chosen.get(path) is None:
            said.setdefault(".".join(path.split(".")[-2:]), f"from {old:,} to {size:,}")
    sizes = ", ".join(f"{name} {size}" for name, size in said.items())
    tail = "; set one to keep it, such as +hidden=N"
    return f"+d_model={config.d_model} changes the sizes that follow from the width: {sizes}{tail}" if said else ""


def _scaled(before: ModelConfig, config: ModelConfig) -> ModelConfig:
    """Returns the config with token embeddings scaled by sqrt(d_model), if it has a new position that is published so
    (sinusoidal) and no scale is set. Otherwise such positions would outweigh all tokens (docs/log.md)."""

    def scale(was: TowerConfig | None, tower: TowerConfig) -> TowerConfig:
        old, new = was.embedding.position if was else None, tower.embedding.position
        if new is None or not new.scales_tokens or (old is not None and old.scales_tokens):
            return tower
        if tower.embedding.scale is not None:
            return tower
        return tower.replace(embedding=tower.embedding.replace(scale=math.sqrt(tower.d_model or config.d_model)))

    encoder = config.encoder and scale(before.encoder, config.encoder)
    changed = scale(before, config)
    assert isinstance(changed, ModelConfig)
    return changed if encoder is None else changed.replace(encoder=encoder)


def _refuse_lost(config: ModelConfig, changes: Sequence[str]) -> None:
    """Raises RequestError if a mixer replaces one that an earlier change was about, and does not support that change
    itself: gqa:2+mla is refused because mla+gqa:2 is."""
    mixers = [at for at, change in enumerate(changes) if changes_mixers(change)]
    for change in changes[: mixers[-1]] if mixers else ():
        if of_mixers(change):
            try:
                change_of(change)(config)
            except RequestError as error:
                if isinstance(error.__context__, ValidationError):  # a later change sets another value
                    continue
                raise error.of(f"+{change}, before +{changes[mixers[-1]]}") from None


def _names_a_model(piece: str) -> bool:
    """Returns True if a text is NAME[@SIZE][+CHANGE...] of a known model, so that a folder of that name does not hide
    it."""
    first, *wanted = grammar.CHANGES.split(piece)
    name, at, size = first.partition("@")
    if not (name in PRESETS or name in FAMILIES or name in PACKAGED) or (at and not is_size(size)):
        return False
    try:
        for change in wanted:
            change_of(change)
    except RequestError:
        return False
    return True


def _named(name: str) -> ModelConfig:
    if name in PRESETS or name in FAMILIES:
        return PRESETS[FAMILIES.get(name, name)]()
    from glassformer import conversion

    if conversion.is_checkpoint(name):
        return conversion.read_config(name)
    path = Path(name)
    if grammar.exists(name) and path.is_dir():
        if (path / "config.yaml").is_file():
            return ModelConfig.from_file(path / "config.yaml")
        conversion.refuse_weights(path)
        raise no_config(path)
    if grammar.exists(name) and path.is_file():
        conversion.refuse_weights(path)
        return ModelConfig.from_file(path)
    raise unknown(name)
