"""Words explained: texts, presets that have the part, its costs, its claims, and a worked example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.text import Text

from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures.plain import plain
from glassformer.figures.terminal import Printed, ruled, size
from glassformer.laboratory.evidence import overview
from glassformer.laboratory.evidence.stored import MEASURED
from glassformer.laboratory.guide_table import guides
from glassformer.laboratory.worked import EXAMPLES, WorkedStep
from glassformer.names.explained import check_explained, terms, texts, unknown
from glassformer.naming.changes import change_of, has_word, words
from glassformer.naming.models import preset, trial
from glassformer.parts.core.base import WORDS, PartConfig
from glassformer.parts.core.cost import Shape
from glassformer.typed import typed

BASES = ("llama@1m", "gpt2@1m", "bert@1m", "transformer@1m")
"""Models on which a change is counted, in order: the first that it changes."""
TOKENS = 256
"""Length of the text in these counts, in tokens."""


@dataclass(frozen=True)
class ChangeCosts:
    """Parameters, forward FLOPs per token, and decode state of 256 tokens, before and after a change.

    Attributes
    ----------
    base, changed : str
        Expressions of the model before and after.
    parameters, parameters_in_layers, flops, state_bytes : tuple of float
        Values before and after.
    """

    base: str
    changed: str
    parameters: tuple[float, float]
    parameters_in_layers: tuple[float, float]
    flops: tuple[float, float]
    state_bytes: tuple[float, float]


@dataclass(frozen=True)
class Explanation(Printed):
    """A word of the grammar, a topic or a term, explained.

    Attributes
    ----------
    word : str
        The word.
    what : str
        Meaning and purpose.
    formula : str
        Its formula; empty without one.
    used_by : tuple of str
        Presets that have the part, computed from their configs.
    costs : ChangeCosts or None
        Costs of the change on a small model; None if the word is not a change.
    claims : dict of str to str
        Claims that measured it, with their verdicts.
    page : str
        Page of the documentation.
    source : str
        File of the part; empty without one.
    steps : tuple of WorkedStep
        The worked example.
    guide : dict of str to str
        Values that guides print, by the item of a step; empty if not requested.

    Examples
    --------
    >>> found = gf.explain("rope")
    >>> found.formula
    'angle of pair i at position p = p base^(-2 i / r)'
    """

    word: str
    what: str
    formula: str
    used_by: tuple[str, ...]
    costs: ChangeCosts | None
    claims: dict[str, str]
    page: str
    source: str
    steps: tuple[WorkedStep, ...]
    guide: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain values."""
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> Iterator[Any]:
        """Yields the printed text of the explanation, from its title to the worked example."""
        yield Text(self.word, style="bold")
        yield self.what
        if self.formula:
            yield f"formula: {self.formula}"
        if self.costs is not None or self.used_by:
            yield f"used by: {', '.join(self.used_by) or 'no preset'}"
        if self.costs is not None:
            one = self.costs
            table = ruled()
            for heading in ("", one.base, one.changed):
                table.add_column(heading, justify="right" if heading else "left")
            table.add_row("parameters", *(f"{value:,.0f}" for value in one.parameters))
            table.add_row("  in the layers", *(f"{value:,.0f}" for value in one.parameters_in_layers))
            table.add_row("FLOPs of a token", *(f"{value:,.0f}" for value in one.flops))
            table.add_row(f"state of {TOKENS} tokens", *(size(value) for value in one.state_bytes))
            yield table
        for name, verdict in self.claims.items():
            yield f"claim {name}: {verdict}"
        if self.steps:
            yield from self._example()
        yield f"page: {self.page}" + (f"; source: {self.source}" if self.source else "")

    def _example(self) -> Iterator[Any]:
        table = ruled("worked example")
        for heading in ("step", "values", *(["a guide prints"] if self.guide else [])):
            table.add_column(heading)
        for step in self.steps:
            rows = "\n".join("  ".join(_number(value) for value in row) for row in step.values)
            table.add_row(step.name, rows, *([self.guide.get(step.item, "")] if self.guide else []))
        yield table


def _number(value: float) -> str:
    if value == float("-inf"):
        return "-inf"
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.4f}"


@typed
def explain(word: str, *, guide: bool = False) -> Explanation:
    """Explains a word of the grammar, a topic, or a term of the glossary.

    Parameters
    ----------
    word
        The word, such as "rope", "gqa", "attention" or "decode state".
    guide
        Show the values that guides to the transformer print next to those of a worked example.

    Returns
    -------
    Explanation
        Meaning, formula, presets that have it, costs on a small model, claims, page, and worked example.

    Raises
    ------
    RequestError
        For an unknown word, with the nearest ones.

    Examples
    --------
    >>> "llama-7b" in gf.explain("rope").used_by
    True
    >>> gf.explain("softmax").steps[0].values[0][0]
    0.6590...
    """
    name = check_explained(word)
    known = {one.name: one for some in words().values() for one in some}
    about: dict[str, Any] = texts().get(name, {})
    if name not in known and not about and name not in terms():
        raise unknown(word)
    of = about.get("word", name)
    part = WORDS[of][1] if of in WORDS else None
    steps = tuple(EXAMPLES[name]()) if name in EXAMPLES else ()
    printed = guides().corrections if guide else {}
    own_page = "glossary.md" if part is None else page_of(part)
    rows = {row.name: row for row in overview(MEASURED)} if about.get("claims") else {}
    return Explanation(
        word=name,
        what=_meaning(name) or inspect.cleandoc(part.__doc__ or "" if part else ""),
        formula=about.get("formula", ""),
        used_by=presets_with(of) if name in known else (),
        costs=_costs(str(known[name]).partition("[")[0]) if name in known else None,
        claims={one: rows[one].verdict or "not measured" for one in about.get("claims", ())},
        page=f"docs/{about.get('page', own_page)}",
        source="" if part is None else f"src/{part.__module__.replace('.', '/')}.py",
        steps=steps,
        guide={step.item: printed[step.item].guide for step in steps if step.item in printed},
    )


def _meaning(name: str) -> str:
    """Returns the text that explains a short name; if the glossary has another meaning of the word, that one first."""
    text, term = texts().get(name, {}).get("what", ""), terms().get(name, "")
    return f"{term}\nAlso a part of a model: {text}" if text and term and term not in text else text or term


def page_of(part: type[PartConfig]) -> str:
    """Returns the path of a part's documentation page; for the base class of an axis, that of the axis."""
    return "mixers.md" if part.axis == "mixer" else f"parts/{part.axis}/{part.kind or 'index'}.md"


def presets_with(word: str) -> tuple[str, ...]:
    """Returns the names of the presets that have the part which a short name denotes."""
    return tuple(preset for preset in PRESETS if has_word(_published(preset), word))


@cache
def _published(name: str) -> ModelConfig:
    return PRESETS[name]()


def _costs(change: str) -> ChangeCosts | None:
    """Returns the costs of a change of an expression, on the first base model that it changes; None if it changes none
    of them."""
    for base in BASES:
        before = preset(base)
        try:
            with trial():
                after = change_of(change)(before)
                found = zip(_counted(before), _counted(after), strict=True)
        except RequestError:
            continue
        if after != before:
            return ChangeCosts(base, f"{base}+{change}", *found)
    return None


def _counted(config: ModelConfig) -> tuple[float, float, float, float]:
    cost = config.costs(Shape(s=TOKENS, t=TOKENS, phase="prefill"))
    state = config.costs(Shape(s=1, t=TOKENS, phase="decode")).state_bytes if config.writes else 0
    return float(cost.parameters), float(config.num_params(embeddings=False)), cost.flops / TOKENS, float(state)
