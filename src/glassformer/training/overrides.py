"""Fields of a recipe set by text: the +recipe.FIELD=VALUE of an expression."""

from __future__ import annotations

from collections.abc import Mapping

from glassformer.parts.base import to_plain
from glassformer.parts.tree import set_value
from glassformer.training.recipe import Recipe

_PATHS = {
    "warmup": "schedule.warmup", "schedule.kind": "schedule", "optimizer.kind": "optimizer",
    "betas.0": "optimizer.betas.0", "betas.1": "optimizer.betas.1", "adam_eps": "optimizer.eps",
}  # fmt: skip
_AXES = ("schedule", "optimizer")
"""Fields of the recipe whose value is a choice with fields of its own."""


def with_recipe(recipe: Recipe, overrides: Mapping[str, str]) -> Recipe:
    """The recipe with these fields changed. `warmup` is the schedule's, `betas` and `adam_eps` are the optimizer's;
    another schedule or optimizer comes with its own defaults. Raises RequestError for a field that there is not."""
    paths = {field: _PATHS.get(field, field) for field in overrides}
    tree = to_plain(recipe)
    for field in sorted(overrides, key=lambda field: paths[field] not in _AXES):  # these first: the others are theirs
        set_value(tree, paths[field].split("."), overrides[field], f"recipe.{field}")
        if paths[field] in _AXES:
            tree = to_plain(Recipe.of(**tree))
    return Recipe.of(**tree)
