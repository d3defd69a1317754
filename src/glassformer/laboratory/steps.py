"""Changes that lead from one model to another, one at a time.

A step is one or several changes of an expression, `rope` or `rmsnorm+norm.eps=1e-06`. Steps are found by trying the
short names of the grammar, then single fields by their path; each step that is kept reduces the number of differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.comparison.arms import DesignArm
from glassformer.config import ModelConfig, flatten
from glassformer.errors import RequestError, shown
from glassformer.names.grammar import CHANGES
from glassformer.naming import words
from glassformer.naming.changes import change_of
from glassformer.naming.models import trial
from glassformer.parts.core.base import to_plain
from glassformer.runs.diff import GROUPS, group_of

RECIPE = "recipe"
MOST = 12
"""Most steps of a ladder: beyond them two models have little in common."""
NAMED = 4
"""Most differences that an error names."""

Leaf = tuple[str, Any]
"""(path in a model, value)."""


@dataclass(frozen=True)
class Point:
    """Fields of an arm that a ladder compares: the model without the vocabulary, which depends on the text, and without
    the context, which all arms share; and its changes of the recipe."""

    leaves: frozenset[Leaf]

    @classmethod
    def of(cls, arm: DesignArm) -> Point:
        """Makes the compared fields of an arm. Raises RequestError."""
        recipe = {(f"{RECIPE}.{field}", value) for field, value in arm.recipe.items()}
        return cls(_leaves(arm.config, arm.own("vocab_size")) | recipe)

    def apart(self, other: Point) -> frozenset[Leaf]:
        """Returns the (path, value) pairs of config fields that only one of the two models has."""
        return self.leaves ^ other.leaves

    def places(self, other: Point) -> list[str]:
        """Returns the paths of the config fields in which two models differ, kinds of parts first."""
        return sorted({path for path, _ in self.apart(other)}, key=lambda path: (not path.endswith(".kind"), path))


def _leaves(config: ModelConfig, vocab_size: int | None) -> frozenset[Leaf]:
    """Returns (path, value) of every field of the model and of every layer, with defaults resolved."""
    told = config.replace(vocab_size=vocab_size or 1, context=1).resolved()
    tree = told.replace(init=config.init, mup=config.mup).to_dict()
    del tree["stack"]
    blocks = list(told.layers())
    flat = {id(block): flatten(to_plain(block)) for block in blocks}  # equal layers share one block
    layers = {
        f"layers.{at}.{path}": value for at, block in enumerate(blocks) for path, value in flat[id(block)].items()
    }
    return frozenset((path, _hashable(value)) for path, value in {**flatten(tree), **layers}.items())


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)


def as_steps(given: str | Sequence[str]) -> list[str]:
    """Parses the text `rope,rmsnorm` into a list of changes; items of a list are kept whole, because values may contain
    commas. Raises RequestError for an empty list, an empty or repeated change, and an unknown one."""
    steps = [one.strip().removeprefix("+") for one in (given.split(",") if isinstance(given, str) else given)]
    if not all(steps) or not steps:
        raise RequestError(code="missing", field="changes", value=given, expected="changes such as rope,rmsnorm,swiglu")
    for step in steps:
        if steps.count(step) > 1:
            raise RequestError(f"--changes names {step} twice", code="conflict", field="changes", value=step)
        if step.replace("_", "").isdecimal():
            raise RequestError(
                f"--changes {step}: a ladder is of changes such as rope,rmsnorm; a budget is given in --tokens",
                code="type", field="changes", value=step, expected="changes such as rope,rmsnorm",
            )  # fmt: skip
        for change in CHANGES.split(step):
            if not change.startswith(f"{RECIPE}."):
                change_of(change)
    return steps


def between(base: DesignArm, target: DesignArm, steps: Sequence[str] | None = None) -> list[str]:
    """Finds the changes that lead from the model `base` to the model of `target`, in the order of the axes from the
    embedding up; or returns `steps`, each with the numbers that its part has in the target in place of the defaults.

    Raises RequestError if both are the same model, if the steps do not lead from one to the other (with the remaining
    differences), and if a step has no effect at its place or in the end."""
    start, goal = Point.of(base), Point.of(target)
    if start == goal:
        raise RequestError(
            f"{base.name} and {target.name} are the same model, trained alike: there is nothing to change between them",
            code="conflict", field="to", value=target.name, expected="another model",
        )  # fmt: skip
    if steps is None:
        found = _found(base, goal, _words(start, goal))
        found = _with_numbers(base, goal, _ordered(base, goal, found))
        found += _found(base.changed(found), goal, _paths(Point.of(base.changed(found)), goal))
    else:
        found = _with_numbers(base, goal, list(steps))
    here = Point.of(base.changed(found))
    if here != goal:
        raise _unreached(base, target, found, here, goal, steps is not None)
    check_steps(base, found)
    return found


def check_steps(base: DesignArm, steps: Sequence[str]) -> None:
    """Raises RequestError for a change of the list that has no effect at its place, or that later changes undo."""
    if len(steps) > MOST:
        raise RequestError(
            f"{len(steps)} changes lie between the two models, and a ladder has at most {MOST}: {', '.join(steps)}",
            code="range", field="changes", value=len(steps), expected=f"at most {MOST}",
        )  # fmt: skip
    points = [Point.of(base.changed(steps[:at])) for at in range(len(steps) + 1)]
    for at, step in enumerate(steps):
        if points[at] == points[at + 1]:
            raise _nothing(step, f"does nothing to {base.changed(steps[:at]).name}")
        if (without := [*steps[:at], *steps[at + 1 :]]) and Point.of(base.changed(without)) == points[-1]:
            twin = base.changed(without).name
            raise _nothing(step, f"changes nothing in the end: without it {twin} is the same model")


def _nothing(step: str, says: str) -> RequestError:
    message = f"+{step} {says}; leave it out, or give --changes in another order"
    return RequestError(message, code="conflict", field="changes", value=step, expected="a change that does something")


# The search


def _tried(base: DesignArm, steps: Sequence[str]) -> Point | None:
    try:
        with trial():
            return Point.of(base.changed(steps))
    except RequestError:
        return None


def _found(base: DesignArm, goal: Point, candidates: Sequence[str]) -> list[str]:
    """Returns the changes that a greedy search chooses from `candidates`: each reduces the differences from the goal,
    the one that leaves fewest first."""
    steps: list[str] = []
    here = Point.of(base)
    useful = list(candidates)
    while here != goal and useful:
        tried = {one: point for one in useful if (point := _tried(base, [*steps, one])) is not None}
        least = {one: len(point.apart(goal)) for one, point in tried.items()}
        useful = [one for one, left in least.items() if left < len(here.apart(goal))]
        if not useful:
            break
        best = min(useful, key=least.__getitem__)
        steps.append(best)
        here = tried[best]
        useful.remove(best)
    return steps


def _words(start: Point, goal: Point) -> list[str]:
    """Returns candidate changes: short names, those that take a value with each differing value of the target, and the
    changes of the recipe."""
    values = dict.fromkeys(setting(value) for path, value in sorted(goal.leaves - start.leaves, key=str))
    found = []
    for word in (word for some in words().values() for word in some):
        if word.read is None or word.optional:
            found.append(word.name)
        if word.read is not None:
            found += [f"{word.name}:{value}" for value in values if _reads(f"{word.name}:{value}")]
    recipe = {path: value for path, value in goal.leaves - start.leaves if path.startswith(f"{RECIPE}.")}
    return [*found, *(f"{path}={value}" for path, value in sorted(recipe.items()))]


def _reads(change: str) -> bool:
    try:
        change_of(change)
    except RequestError:
        return False
    return True


def setting(value: object) -> str:
    """Formats a value as in a change of an expression, `+field=VALUE`."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _paths(here: Point, goal: Point) -> list[str]:
    """Returns candidate changes by path that set every differing field to the target's value; in all layers first, then
    in one."""
    found: dict[str, None] = {}
    held = dict(here.leaves)
    for path, value in sorted(goal.leaves - here.leaves, key=str):
        if path not in held:
            continue  # a field of a missing part cannot be set
        first, *rest = path.split(".")
        if first == "layers":
            rest = rest[1:]  # without the index of the layer
            found[f"{'.'.join(rest)}={setting(value)}"] = None
            if len(rest) > 2:  # a part within the mixer
                found[f"{'.'.join(rest[1:])}={setting(value)}"] = None
        elif "norm" in first and rest:
            found[f"{'.'.join(['norm', *rest])}={setting(value)}"] = None
        found[f"{path}={setting(value)}"] = None
    layers = [{path.split(".")[1] for path, _ in point.leaves if path.startswith("layers.")} for point in (here, goal)]
    if layers[0] != layers[1]:
        found[f"layers={len(layers[1])}"] = None
    return list(found)


def _groups(apart: frozenset[Leaf]) -> set[str]:
    """Returns the axes (norm, mixer, ...) to which the differing fields belong."""
    return {group_of(path.replace("layers.", "stack.", 1).split(".")) for path, _ in apart}


def _ordered(base: DesignArm, goal: Point, steps: Sequence[str]) -> list[str]:
    """Returns the changes ordered by axis, from the embedding up, if they lead to the same model in that order."""

    def axis(step: str) -> int:
        changed = _groups(Point.of(base).apart(_tried(base, [step]) or goal))
        return min((GROUPS.index(group) for group in changed), default=len(GROUPS))

    sorted_ = sorted(steps, key=axis)
    return sorted_ if _tried(base, sorted_) == Point.of(base.changed(steps)) else list(steps)


def _with_numbers(base: DesignArm, goal: Point, steps: Sequence[str]) -> list[str]:
    """Returns the changes, each extended by the target's non-default numbers of the part that it changes, such as
    `rmsnorm` by its eps."""
    made = list(steps)
    whole = _tried(base, made)
    if whole is None:
        return made  # `between` raises the error for it
    for number in _found(base.changed(made), goal, _paths(whole, goal)):
        for at in range(len(made) - 1, -1, -1):
            before, after = (_tried(base, made[:end]) for end in (at, at + 1))
            trial = [*made[:at], f"{made[at]}+{number}", *made[at + 1 :]]
            there = _tried(base, trial)
            if before is None or after is None or there is None or not _same_part(before.apart(after), number):
                continue
            now = _tried(base, made)
            if now is not None and len(there.apart(goal)) < len(now.apart(goal)):
                made = trial
                break
    return made


def _same_part(changed: frozenset[Leaf], number: str) -> bool:
    """Returns True if the field with the path `number` belongs to a part that was replaced by another kind."""
    part = number.partition("=")[0].rpartition(".")[0]
    kinds = {path.rpartition(".")[0] for path, _ in changed if path.endswith(".kind") or "." in path}
    return bool(part) and any(path == part or path.endswith(f".{part}") for path in kinds)


def _unreached(
    base: DesignArm, target: DesignArm, found: Sequence[str], here: Point, goal: Point, given: bool
) -> RequestError:  # fmt: skip
    left = here.places(goal)
    held, wanted = dict(here.leaves), dict(goal.leaves)
    told = "; ".join(f"{path} is {shown(held.get(path))}, not {shown(wanted.get(path))}" for path in left[:NAMED])
    more = f"; and {len(left) - NAMED} more" if len(left) > NAMED else ""
    way = f"after {', '.join(found)}" if found else "at once"
    who = "--changes do not lead" if given else "no known changes lead"
    return RequestError(
        f"{who} from {base.name} to {target.name}: {way} {told}{more}; "
        + ("add what is missing" if given else "give --changes, or a target that the changes reach"),
        code="conflict", field="changes" if given else "to", value=target.name, expected="a model that changes lead to",
    )  # fmt: skip
