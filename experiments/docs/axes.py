"""The pages of docs/parts/AXIS: one for each kind of an axis, and an overview, from the registry and axes/AXIS.md.

>>> python -m experiments.docs norm                # docs/parts/norm
>>> python -m experiments.docs --words norm        # the same without its pictures

Sentences come from `glassformer explain`, the code's passage from docstrings, presets from their configs, costs from a
config, figures from stored claims. A file of axes/ has the rest: title, formula, and the downside of each kind.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import glassformer as gf
from experiments.docs import DOCS, HERE, kind_pictures, markdown_of
from experiments.docs.sections import (
    docstring_classes,
    fields_of,
    first_sentence,
    measured_claims,
    papers_in,
    presets_by_part,
    registered,
    rows_of,
    sentences,
    source_of,
    verdicts,
    who_uses_it,
)
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.core.base import PartConfig
from glassformer.parts.core.cost import Shape
from glassformer.parts.kernel import AutoConfig

TOKENS = 2048
"""Length of the text whose costs a page has."""
FIELDS = "title|base|path|page|command|change|against|explain"
"""Lines below a heading, before its text."""
LOSES = "### When it loses\n"
INDEX = DOCS / "parts" / "index.md"


@dataclass(frozen=True)
class AxisPage:
    """The overview of an axis."""

    axis: str
    title: str
    base: str
    """Expression of the model on which its kinds are counted; empty if models do not hold them."""
    path: str
    """The place of its fields in an expression."""
    intro: str
    kinds: tuple[KindPage, ...]

    @property
    def path_of_page(self) -> Path:
        return DOCS / "parts" / self.axis / "index.md"


@dataclass(frozen=True)
class KindPage:
    """The page of one kind of an axis."""

    axis: str
    kind: str
    title: str
    base: str
    path: str
    change: str
    """The change of an expression that puts the part in; empty if the base has it."""
    against: str
    """The change whose costs are printed next to those of the part."""
    explain: tuple[str, ...]
    """Words of `glassformer explain` about the part; the page opens with the first."""
    formula: str
    loses: str
    page: str = ""
    """The page that another generator writes for it, from the folder of the axis; empty if it is written here."""

    own_command: str = ""
    """A command that tries it; empty if it follows from the expression."""

    @property
    def link(self) -> str:
        """Way to its page from the folder of the axis."""
        return self.page or f"{self.kind}.md"

    @property
    def part(self) -> type[PartConfig]:
        """Class of its config."""
        return registered()[self.axis][self.kind]

    @property
    def path_of_page(self) -> Path:
        return DOCS / "parts" / self.axis / f"{self.kind}.md"

    @property
    def figure(self) -> Path | None:
        """File of its picture; None without one."""
        suffix = kind_pictures.SUFFIXES.get(self.axis)
        return None if suffix is None or self.page else DOCS / "figures" / "parts" / self.axis / f"{self.kind}{suffix}"

    def expression(self, change: str, size: str = "") -> str:
        """Returns the base with a change, in another size if one is given; words if no expression can hold the part."""
        base = re.sub("@.*", f"@{size}", self.base) if size else self.base
        between = " with " if (self.axis, change) in MADE else "+"
        return f"{base}{between}{change}" if change else base

    def config(self, change: str | None = None, size: str = "") -> ModelConfig:
        """Returns the config of the base with the part, or with another change."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change = self.change if change is None else change
            made = MADE.get((self.axis, change))
            return made(self.expression("", size)) if made else gf.preset(self.expression(change, size))


def longrope(base: str) -> ModelConfig:
    """Returns a model with a list of factors for its rotary pairs: 1 for the fastest, 4 for the slowest."""
    tree = gf.preset(base).to_dict()
    for stage in tree["stack"]:
        for block in stage["blocks"]:
            mixer = block["mixer"]
            pairs = (mixer["head_dim"] or tree["d_model"] // mixer["n_heads"]) // 2
            long = [1.0 + 3.0 * i / (pairs - 1) for i in range(pairs)]
            mixer["position"]["scaling"] = {
                "kind": "longrope", "factor": 4.0, "original_context": tree["context"] // 4, "short": [1.0] * pairs,
                "long": long,
            }  # fmt: skip
    return ModelConfig.from_dict(tree)


MADE = {("rotary_scaling", "longrope"): longrope}
"""Kinds that an expression cannot hold, as lists are among their fields -> what puts them into a model."""


def with_fields(text: str) -> tuple[dict[str, str], str]:
    """Returns the fields at the start of a section and the text below them."""
    fields = {}
    while (match := re.match(rf"({FIELDS}):[ ]?(.*)\n", text)) is not None:
        fields[match[1]], text = match[2], text[match.end() :]
    return fields, text.strip()


@cache
def axis_pages() -> dict[str, AxisPage]:
    """Returns the pages of all axes by name."""
    return {path.stem: _axis(path.stem, path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("axes/*.md"))}


def _axis(axis: str, text: str) -> AxisPage:
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, rest = head.removeprefix("# ").partition("\n")
    own, intro = with_fields(rest)
    kinds = []
    for section in sections:
        kind, _, body = section.partition("\n")
        fields, words = with_fields(body)
        formula, _, loses = words.partition(LOSES)
        base, path = fields.get("base", own.get("base", "")), fields.get("path", own.get("path", ""))
        explain = tuple(filter(None, fields.get("explain", "").split(", ")))
        kinds.append(KindPage(axis, kind, fields["title"], base, path, fields.get("change", ""),
                              fields.get("against", ""), explain, formula.strip(), loses.strip(),
                              fields.get("page", ""), fields.get("command", "")))  # fmt: skip
    return AxisPage(axis, title, own.get("base", ""), own.get("path", ""), intro, tuple(kinds))


# Costs


@cache
def counted(config: ModelConfig) -> dict[str, float]:
    """Returns parameters, FLOPs of a token, bytes of state, and bytes kept for the backward pass, of a whole model in
    bf16 that reads a text of TOKENS tokens."""
    length = min(TOKENS, config.context)
    prompt, step = (
        config.costs(Shape(1, length, length, phase, torch.bfloat16, every_key=False)) for phase in ("prefill", "train")
    )
    return {
        "parameters": prompt.parameters, "flops": prompt.flops / length,
        "state": prompt.state_bytes if config.writes else 0, "kept": step.kept,
    }  # fmt: skip


def _values(config: ModelConfig) -> list[str]:
    """Returns the costs of a model as words: parameters, FLOPs, state, memory of training."""
    cost = counted(config)
    return [f"{cost['parameters']:,}", f"{cost['flops'] / 1e6:,.2f} M", f"{cost['state'] / 1e6:,.2f} MB",
            f"{cost['kept'] / 1e6:,.1f} MB"]  # fmt: skip


QUANTITIES = ("parameters", "FLOPs of a token", "decode state", "kept for the backward pass")


def model_costs(page: KindPage) -> str:
    """Returns a table of the costs of a model with the part and with what it is set against."""
    changes = (page.against, page.change)
    expressions, columns = map(page.expression, changes), [_values(page.config(change)) for change in changes]
    rows = [[name, *(column[i] for column in columns)] for i, name in enumerate(QUANTITIES)]
    table = rows_of(("", *(f"`{one}`:" for one in expressions)), rows)
    return (
        f"Counts of the whole model in bf16, for one text of {TOKENS:,} tokens, from the config "
        f"(`config.costs`); tests compare such counts with built models.\n\n{table}"
    )


def optimizer_costs(page: KindPage) -> str:
    """Returns the values of state that an optimizer keeps."""
    model = _meta("llama@10m")
    every = sum(weight.numel() for weight in model.parameters())
    rows = []
    for kind, part in registered()["optimizer"].items():
        held = sum(part().state_values(model).values())  # type: ignore[attr-defined]
        name = f"**{kind}**" if kind == page.kind else f"[{kind}]({kind}.md)"
        rows.append([name, f"{held / every:.3f}", f"{4 * held / 1e6:,.1f} MB", f"{part.rate:g}"])  # type: ignore[attr-defined]
    heads = ("optimizer", "state of a parameter:", "in fp32:", "learning rate, of AdamW's:")
    return f"State next to the {every:,} weights of `llama@10m`, from the config.\n\n{rows_of(heads, rows)}"


@cache
def _meta(expression: str) -> Any:
    with torch.device("meta"):
        return gf.preset(expression).build()


def no_costs(page: KindPage) -> str:
    """Returns nothing: the part changes no count."""
    return ""


COSTS: dict[str, Callable[[KindPage], str]] = {
    "optimizer": optimizer_costs, "schedule": no_costs, "objective": no_costs, "init": no_costs, "projection": no_costs,
}  # fmt: skip
"""Axis -> section about the costs of a kind; others have the costs of a model."""
FLAGS = {"optimizer": "--optimizer", "schedule": "--schedule", "objective": "--objective"}
"""Axes of training -> option of `glassformer train` that sets them."""


# Pages


def generated(axis: str) -> str:
    """Returns the comment that opens a page."""
    return (
        "<!-- `make docs` writes this page from docstrings, configs, measured claims, "
        f"src/glassformer/names/explained.yaml and experiments/docs/axes/{axis}.md. -->"
    )


def written_kind(page: KindPage) -> str:
    """Returns the page of a kind."""
    part, classes = page.part, docstring_classes(page.part)
    told = [block for one in classes for block in markdown_of(one)]
    own_words = tuple(word.name for word in part.words)
    figure = page.figure
    sources = dict.fromkeys(source_of(one) for one in (*classes, part))
    papers = papers_in("\n".join([page.formula, page.loses, *told]))
    costs = COSTS.get(page.axis, model_costs)(page)
    pieces = [
        generated(page.axis),
        f"# {page.title}",
        sentences(page.explain),
        f"![{kind_pictures.CAPTIONS[page.axis]}: {page.kind}](../../figures/parts/{page.axis}/{figure.name})"
        if figure is not None
        else "",
        f"## Formula\n\n{page.formula}" if page.formula else "",
        f"## Who uses it\n\n{who_uses_it(part, own_words)}" if page.base else "",
        f"## In an expression\n\n{in_expressions(page)}",
        "## The code\n\n" + "\n\n".join([" · ".join(f"[{one}](../../../{one})" for one in sources), *told]),
        f"## What it costs\n\n{costs}" if costs else "",
        f"## When it loses\n\n{page.loses}",
        f"## Measured\n\n{measured_claims(page.explain, '../../')}",
        f"## Papers\n\n{papers}" if papers else "",
        f"[{axis_pages()[page.axis].title}](index.md) · [All parts](../index.md)",
    ]
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def in_expressions(page: KindPage) -> str:
    """Returns the words of the grammar and the fields of a kind, and a command."""
    part, pieces = page.part, []
    if len(part.words) > 1:
        rows = [(f"`+{word}`", sentences([word.name])) for word in part.words]
        pieces.append(rows_of(("word", "what it is"), rows))
    if (page.axis, page.change) in MADE:
        pieces.append(
            "An expression cannot hold lists of factors; a config file, or a config made in Python, has them."
        )
    else:
        pieces.append(f"```bash\nglassformer {command(page)}\n```")
    if fields := fields_of(part):
        values = [(f"`{name}`", default, _cell(meaning)) for name, default, meaning in fields]
        if flag := FLAGS.get(page.axis):
            how = f"`{flag} {page.kind}` chooses it, and `+recipe.{page.axis}.FIELD=VALUE` sets a field:"
        else:
            how = f"`+{page.path}.FIELD=VALUE` sets a field:"
        pieces += [how, rows_of(("field", "default", "meaning"), values)]
    return "\n\n".join(pieces)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def command(page: KindPage) -> str:
    """Returns a command that tries the part."""
    if page.own_command:
        return page.own_command
    if page.axis in FLAGS:
        flag = FLAGS[page.axis]
        return f"train llama@1m --data python-docs --minutes 1 {flag} {page.kind} --out run"
    with_it, other = (page.expression(change, "1m") for change in (page.change, page.against))
    trained = all(trains(page.config(change, "1m")) for change in (page.change, page.against))
    if not trained or with_it == other:
        return f"inspect {with_it}"
    return f"compare {other} {with_it} --data python-docs --minutes 1"


def trains(config: ModelConfig) -> bool:
    """Returns True if a model can be trained on the next token on a CPU."""
    for block in config.layers():
        try:
            getattr(block.mixer, "kernel", AutoConfig()).build(config.ctx).check_training("cpu")
        except RequestError:
            return False
        if not block.mixer.causal(config.ctx) or (block.ffn is not None and not block.ffn.causal):
            return False
    return config.encoder is None and config.head.predicts_tokens


def written_axis(axis: AxisPage) -> str:
    """Returns the overview of an axis."""
    heads = ["", "in an expression", "what it does"]
    has_costs = COSTS.get(axis.axis) is None
    if has_costs:
        heads += [f"{name}:" for name in QUANTITIES]
    if axis.base:
        heads.append("presets:")
    heads.append("claims")
    rows = []
    for page in axis.kinds:
        row = [f"[{page.title}]({page.link})", how(page), first_sentence(sentences(page.explain))]
        if has_costs:
            row += _values(page.config())
        if axis.base:
            row.append(str(len(presets_by_part().get(page.part, ()))))
        rows.append([*map(_cell, row), verdicts(page.explain)])
    counts = (
        f"Counts of a whole model, `{axis.base}` with each part, in bf16 for one text of {TOKENS:,} tokens; presets "
        "are the published models that have it, and claims those measured here." if has_costs else ""
    )  # fmt: skip
    pieces = [generated(axis.axis), f"# {axis.title}", axis.intro, counts, rows_of(heads, rows),
              "[All parts](../index.md)"]  # fmt: skip
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def written_index() -> str:
    """Returns docs/parts/index.md, the overview of all axes."""
    mixers = "how tokens exchange information: attention, recurrences, convolutions"
    rows: list[Sequence[str]] = [("[Mixers](../mixers.md)", mixers, str(len(registered()["mixer"])))]
    rows += [
        (f"[{axis.title}]({axis.axis}/index.md)", first_sentence(unlinked(axis.intro)), str(len(axis.kinds)))
        for axis in axis_pages().values()
    ]
    words = (
        "A model is a tree of parts, one choice on each axis; an expression such as `llama@10m+alibi+geglu` names "
        "them. A page of a part has its purpose, formula, picture, code, costs, downside, and what was measured here."
    )
    pieces = [generated("*"), "# Parts", words, rows_of(("axis", "what it decides", "kinds:"), rows)]
    return "\n\n".join(pieces) + "\n"


def unlinked(text: str) -> str:
    """Returns a text in one line, with the words of links only."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text.replace("\n", " "))


def how(page: KindPage) -> str:
    """Returns the words that put a kind into an expression."""
    if page.axis in FLAGS:
        return f"`{FLAGS[page.axis]} {page.kind}`"
    if (page.axis, page.change) in MADE:
        return "(in a config)"
    if page.part.words:
        return ", ".join(f"`+{word}`" for word in page.part.words)
    return f"`+{page.change}`" if page.change else "(usual)"


def write(axes: list[str], keep: Callable[[Figure, Path], int], words: bool = False) -> None:
    """Writes the pages of these axes, or of all; `keep` saves a figure."""
    for axis in axis_pages().values():
        if axes and axis.axis not in axes:
            continue
        axis.path_of_page.parent.mkdir(parents=True, exist_ok=True)
        for page in axis.kinds:
            if page.page:
                continue
            if page.figure is not None and not words:
                config = page.config(size="1m") if page.base else None
                drawn = kind_pictures.DRAW[page.axis](page.part, config)
                page.figure.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(drawn, str):
                    page.figure.write_text(drawn, encoding="utf-8")
                else:
                    keep(drawn, page.figure)
            page.path_of_page.write_text(written_kind(page), encoding="utf-8")
        axis.path_of_page.write_text(written_axis(axis), encoding="utf-8")
        print(axis.path_of_page.relative_to(DOCS.parent), file=sys.stderr, flush=True)
    INDEX.write_text(written_index(), encoding="utf-8")
