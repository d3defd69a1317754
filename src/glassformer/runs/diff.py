"""Differences between the configs of arms: parts and leaves by path in the config's own words, by axis; the recipe
last."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

RECIPE = "recipe"
GROUPS = ("embedding", "position", "mixer", "norm", "ffn", "residual", "head", "size", "other", RECIPE)
_PARTS = GROUPS[:-3]
_SIZES = ("vocab_size", "d_model", "context", "max_len", "stack")
ABSENT = "\0absent"
_DEEPEST = 30
CLOSE = 1e-3
"""Relative difference below which fractions count as equal: learning rates of a rule differ with the size of the
arms."""


@dataclass(frozen=True)
class Difference:
    """Place at which configs differ: its axis (`group`), its path, and its value in each config as text, None if
    absent."""

    group: str
    path: str
    values: tuple[str | None, ...]

    @property
    def usual(self) -> str | None:
        """Value of more than half of the configs; None if that is absence, or no value is so common."""
        value, times = Counter(self.values).most_common(1)[0]
        return value if 2 * times > len(self.values) else None


def differences(configs: Sequence[dict]) -> list[Difference]:
    """Returns the places at which the configs differ, sorted by their group as in `GROUPS`."""
    found = list(_walk((), list(configs)))
    return sorted(found, key=lambda one: GROUPS.index(one.group))


def value_at(tree: Any, path: str) -> Any:
    """Returns the value that a config has at the path of a `Difference`; None if the path is absent."""
    for step in path.split("."):
        if isinstance(tree, list):
            tree = tree[int(step)] if int(step) < len(tree) else None
        else:
            tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def group_of(path: Sequence[str]) -> str:
    """Returns the group of a config path in the table of differences: the innermost part named in the path (such as
    mixer, position, norm), or "recipe"; without one, "size" or "other"."""
    if path and path[0] == RECIPE:
        return RECIPE
    for step in reversed(path):
        for group in _PARTS:
            if step == group or (group == "norm" and step.endswith("norm")):
                return group
    return "size" if path and path[0] in _SIZES else "other"


def alike(values: Sequence[Any]) -> bool:
    """Returns True if all values are equal; fractions count as equal up to a relative difference of `CLOSE`."""
    return all(_alike(values[0], value) for value in values[1:])


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, float) and isinstance(b, float) and not (a.is_integer() and b.is_integer()):
        return math.isclose(a, b, rel_tol=CLOSE) or (math.isnan(a) and math.isnan(b))
    return json.dumps(a, sort_keys=True, default=str) == json.dumps(b, sort_keys=True, default=str)


def _walk(path: tuple[str, ...], values: list[Any]) -> Iterator[Difference]:
    """Yields the differences between `values`, the configs' values at `path`: field by field for parts of one kind,
    entry by entry for lists of parts; otherwise one difference for the whole value."""
    if alike(values):
        return
    if len(path) < _DEEPEST and all(isinstance(v, dict) for v in values) and alike([v.get("kind") for v in values]):
        keys = dict.fromkeys(key for v in values for key in v)
        children = [(str(key), [v.get(key, ABSENT) for v in values]) for key in keys]
    elif len(path) < _DEEPEST and all(_is_list_of_parts(v) for v in values):
        longest = max(map(len, values))
        children = [(str(i), [v[i] if i < len(v) else ABSENT for v in values]) for i in range(longest)]
    else:
        yield Difference(group_of(path), ".".join(path), tuple(_words(v, values) for v in values))
        return
    for key, below in children:
        yield from _walk((*path, key), below)


def _is_list_of_parts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _words(value: Any, beside: Sequence[Any]) -> str | None:
    """Returns a config's value as text, None if it is absent; a part is shown without the fields that other configs'
    parts share, and without switches that are off in all."""
    if isinstance(value, str) and value == ABSENT:
        return None
    if not isinstance(value, dict):
        return leaf(value)
    parts = [v for v in beside if isinstance(v, dict)]
    return part(value, {key for key in value if key != "kind" and (_shared(key, parts) or _off(key, parts))})


def _off(key: Any, parts: Sequence[dict]) -> bool:
    """Returns True if the field is False or absent in all parts: a part without the switch behaves like one with it
    off."""
    return all(part.get(key, False) is False for part in parts)


def _shared(key: Any, parts: Sequence[dict]) -> bool:
    """Returns True if at least two parts have this field, all with equal values."""
    values = [part[key] for part in parts if key in part]
    return len(values) > 1 and alike(values)


def part(value: dict, skip: set[Any] | frozenset[Any] = frozenset(), depth: int = 0) -> str:
    """Returns a part of a config as one line without the fields `skip`: `glu(hidden=1024, activation=silu)`."""
    inside = []
    for key, item in value.items():
        if key == "kind" or key in skip or item is None:
            continue
        inside.append(f"{key}={_inner(item, depth)}")
    kind = value.get("kind")
    body = ", ".join(inside)
    if kind is None:
        return f"({body})"
    return f"{kind}({body})" if body else str(kind)


def _inner(item: Any, depth: int) -> str:
    if depth >= 6:
        return "…"
    if isinstance(item, dict):
        return part(item, depth=depth + 1)
    if isinstance(item, list):
        return f"[{', '.join(_inner(one, depth + 1) for one in item)}]"
    return leaf(item)


def leaf(value: Any) -> str:
    """Returns a single value as short text for display: fractions rounded to three significant digits, None as `none`,
    strings without quotes, other values as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}" if value.is_integer() else f"{value:.3g}"
    return json.dumps(value, default=str)


# --- Names for paths ---

_NAMES = {
    "mixer": "Mixer", "ffn": "Feed-forward", "norm": "Norm", "residual": "Wiring", "position": "Position",
    "embedding": "Embedding", "head": "Output head", "final_norm": "Final norm", "qk_norm": "Norm of queries and keys",
    "stack": "Layers", "n_heads": "heads", "n_kv_heads": "key/value heads", "head_dim": "width of a head",
    "hidden": "hidden width", "d_model": "width", "vocab_size": "size of the vocabulary", "repeat": "number of layers",
    "tied": "shared with the embedding", "bias": "bias", "out_bias": "bias of the output", "eps": "epsilon",
    "visibility": "what is seen", "init": "Initial weights", "recipe": "Recipe", "max_len": "longest text",
    "std": "standard deviation",
}  # fmt: skip


def plain_name(path: str, alone: bool) -> str:
    """Returns the path of a config's field in words: `stack.0.blocks.0.mixer.n_kv_heads` as `Mixer: key/value heads`.

    `alone`: every arm has one kind of block, so that its number is omitted."""
    steps = path.split(".")
    where, names = [], []
    if steps[-1] == "norm" and "blocks" in steps:
        names.append("blocks")
    for i, step in enumerate(steps):
        if step.isdigit():
            if i and steps[i - 1] == "stack" and not alone:
                where.append(f"stage {int(step) + 1}")
            elif i and steps[i - 1] == "blocks" and not alone:
                where.append(f"block {int(step) + 1}")
            continue
        if (step == "stack" or step == "blocks") and i + 1 < len(steps):
            continue
        names.append(_NAMES.get(step, step.replace("_", " ")))
    if len(names) > 1 and names[-1] in ("Position", "Norm"):
        words = f"{names[-1]}, in the {names[-2].lower()}"
    else:
        first, *rest = dict.fromkeys(names or ["Layers"])
        words = ": ".join([first[:1].upper() + first[1:], *(name[:1].lower() + name[1:] for name in rest)])
    return f"{words} ({', '.join(where)})" if where else words
