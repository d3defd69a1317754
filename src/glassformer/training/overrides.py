"""Fields of a recipe set by text: the +recipe.FIELD=VALUE of an expression."""

from __future__ import annotations

from collections.abc import Mapping

from glassformer.errors import RequestError
from glassformer.parts.core.base import PartConfig, to_plain
from glassformer.parts.core.tree import set_value
from glassformer.training.recipe import Recipe

_PATHS = {
    "warmup": "schedule.warmup", "schedule.kind": "schedule", "optimizer.kind": "optimizer",
    "objective.kind": "objective", "betas.0": "optimizer.betas.0", "betas.1": "optimizer.betas.1",
    "adam_eps": "optimizer.eps",
}  # fmt: skip
_AXES = ("schedule", "optimizer", "objective")
"""Fields of the recipe whose value is a config with fields, such as optimizer.betas."""


def with_recipe(recipe: Recipe, overrides: Mapping[str, str]) -> Recipe:
    """Returns the recipe with the fields in `overrides` changed. `warmup` sets the field of the schedule, `betas` and
    `adam_eps` fields of the optimizer; another schedule or optimizer has its default fields. Raises RequestError for
    an unknown field, and for another optimizer if the recipe sets fields of the present optimizer."""
    paths = {field: _PATHS.get(field, field) for field in overrides}
    if kind := next((overrides[field] for field in overrides if paths[field] == "optimizer"), None):
        _refuse_losing(recipe.optimizer, kind)
    tree = to_plain(recipe)
    same = {field for field in overrides if paths[field] in _AXES and overrides[field] == tree[paths[field]]["kind"]}
    # axes first, because the other fields belong to them
    for field in sorted(overrides.keys() - same, key=lambda field: paths[field] not in _AXES):
        set_value(tree, paths[field].split("."), overrides[field], f"recipe.{field}")
        if paths[field] in _AXES:
            tree = to_plain(Recipe.of(**tree))
    return Recipe.of(**tree)


def _refuse_losing(given: PartConfig, kind: str) -> None:
    """Raises RequestError if a change to the optimizer `kind` would silently drop fields that were set for `given`, the
    present optimizer."""
    own = [field for field, value in given if kind != given.kind and value != type(given).model_fields[field].default]
    if own:
        names = " and ".join(own)
        raise RequestError(
            f"+recipe.optimizer={kind}: {names} of {given.kind} would be lost; set them as "
            f"+recipe.optimizer.FIELD=VALUE of the optimizer that has them",
            code="conflict", field="recipe.optimizer", value=kind, expected=given.kind,
        )  # fmt: skip
