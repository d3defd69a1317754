"""Sections that the pages of all parts share: words of the grammar, presets that have a part, claims and papers."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

from experiments.docs import escaped
from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig
from glassformer.laboratory.evidence import ClaimRow, overview
from glassformer.laboratory.evidence.stored import MEASURED
from glassformer.laboratory.explaining import presets_with
from glassformer.laboratory.pages.claim_page import ORDER, figure_words, verdict_of
from glassformer.names.explained import texts
from glassformer.names.papers import NUMBER, papers
from glassformer.parts.core.base import _CLASSES, PartConfig, part_classes
from glassformer.training import objectives, optimizers, schedule  # noqa: F401  # fill the registry


def rows_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown; a heading with a colon at its end is of a column of numbers."""
    rules = ["--:" if heading.endswith(":") else "---" for heading in headings]
    lines = [[heading.removesuffix(":") for heading in headings], rules, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def registered() -> dict[str, dict[str, type[PartConfig]]]:
    """Returns the package's kinds of each axis: axis -> kind -> class of the config."""
    found: dict[str, dict[str, type[PartConfig]]] = {}
    for part in _CLASSES:
        if part.__module__.startswith("glassformer."):
            found.setdefault(part.axis, {})[part.kind] = part
    return found


@cache
def published() -> dict[str, ModelConfig]:
    """Returns the config of each preset by name."""
    return {name: make() for name, make in PRESETS.items()}


@cache
def presets_by_part() -> dict[type[PartConfig], tuple[str, ...]]:
    """Returns the presets that have a part, by the class of its config."""
    found: dict[type[PartConfig], list[str]] = {}
    for name, config in published().items():
        for part in dict.fromkeys(part_classes(config)):
            found.setdefault(part, []).append(name)
    return {part: tuple(names) for part, names in found.items()}


def listed(names: Sequence[str]) -> str:
    """Returns names of presets as a list, with their share of all presets."""
    if not names:
        return "no preset"
    return f"{', '.join(f'`{name}`' for name in names)} ({len(names)} of {len(PRESETS)} presets)"


def who_uses_it(part: type[PartConfig], words: Sequence[str]) -> str:
    """Returns the presets that have a part; a row for each of its words if there are several."""
    if len(words) < 2:
        return f"{listed(presets_by_part().get(part, ()))}.".capitalize()
    by_word = {f"`+{word}`": presets_with(word) for word in words}
    held = {name for names in by_word.values() for name in names}
    if rest := tuple(name for name in presets_by_part().get(part, ()) if name not in held):
        by_word["with other fields"] = rest
    return rows_of(("word", "presets"), ((word, listed(names)) for word, names in by_word.items()))


def sentences(words: Sequence[str]) -> str:
    """Returns what `glassformer explain` says of the first of these words."""
    return str(texts()[words[0]]["what"]) if words and words[0] in texts() else ""


def first_sentence(text: str) -> str:
    """Returns the start of a text up to its first full stop."""
    return text.partition(". ")[0].removesuffix(".")


def claims_of(words: Iterable[str]) -> list[ClaimRow]:
    """Returns the claims that `glassformer explain` names for these words."""
    names = dict.fromkeys(name for word in words for name in texts().get(word, {}).get("claims", ()))
    rows = {row.name: row for row in overview(MEASURED)}
    return [rows[name] for name in names]


def measured_claims(words: Iterable[str], up: str) -> str:
    """Returns a table of the claims about these words with their judged figures; `up` is the way to docs."""
    found = [_claim(row, up) for row in claims_of(words)]
    if not found:
        return "No claim about it has been measured here."
    return rows_of(("claim", "measured here", "verdict"), found)


def _claim(row: ClaimRow, up: str) -> list[str]:
    anchor = ORDER[row.claim.kind].lower().replace(",", "").replace(" ", "-")
    figures = () if row.result is None else row.result.outcome.figures
    judged = "; ".join(f"{one.name}: {figure_words(one)}" for one in figures if one.judged)
    return [f"[{row.name}]({up}claims.md#{anchor}): {escaped(row.claim.statement)}", escaped(judged), verdict_of(row)]


def verdicts(words: Iterable[str]) -> str:
    """Returns how many claims about these words have each verdict, in a few words."""
    counted = Counter(verdict_of(row) for row in claims_of(words))
    holds, fails = counted.pop("holds", 0), counted.pop("does not hold", 0)
    found = [f"{holds} {'holds' if holds == 1 else 'hold'}" if holds else "",
             f"{fails} {'does' if fails == 1 else 'do'} not" if fails else "",
             f"{counted.total()} open" if counted else ""]  # fmt: skip
    return ", ".join(filter(None, found))


def papers_in(text: str) -> str:
    """Returns a list of the papers whose numbers a text has; empty without one."""
    known = papers()
    found = [known[number] for number in dict.fromkeys(NUMBER.findall(text)) if number in known]
    return "\n".join(f"- {escaped(one.authors)}, [{escaped(one.title)}]({one.address})" for one in found)


def docstring_classes(part: type[PartConfig]) -> list[type]:
    """Returns the classes whose docstrings describe a part: the module that its config builds, and the config."""
    module = getattr(sys.modules[part.__module__], part.__name__.removesuffix("Config"), None)
    return [one for one in (module, part) if isinstance(one, type) and vars(one).get("__doc__")]


def source_of(part: type) -> str:
    """Returns the path of the file that defines a class."""
    return f"src/{part.__module__.replace('.', '/')}.py"


def fields_of(part: type[PartConfig]) -> list[tuple[str, str, str]]:
    """Returns name, default and meaning of each field of a config."""
    meanings: dict[str, str] = {}
    for base in reversed(part.__mro__):
        if issubclass(base, PartConfig) and base is not PartConfig:
            meanings |= _meanings(base)
    found = []
    for name, field in part.model_fields.items():
        default = "required" if field.is_required() else _plain(field.get_default(call_default_factory=True))
        found.append((name, default, meanings.get(name, "")))
    return found


def _plain(value: object) -> str:
    return f"`{value.kind}`" if isinstance(value, PartConfig) else f"`{value}`"


@cache
def _meanings(part: type) -> dict[str, str]:
    """Returns the docstring below each field in the source of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value).replace("\n", " ")
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }  # fmt: skip
