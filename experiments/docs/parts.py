"""The pages of docs/parts: one for each way to mix tokens, made of docstrings, costs from configs, and parts.md.

>>> python -m experiments.docs parts               # all of them, and docs/mixers.md

The tokens that a token attends to are measured: |d out_i / d x_j| of one mixer of a small model with newly initialised
weights; for a mixer that reads another sequence, x is that sequence. Costs come from the config; tests compare them
with the built module, and the pages with them.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import glassformer as gf
from experiments.docs import DOCS, GENERATED, HERE, markdown_of
from experiments.docs.sections import (
    listed,
    measured_claims,
    papers_in,
    presets_by_part,
    sentences,
)
from glassformer.config import ModelConfig
from glassformer.laboratory.explaining import presets_with
from glassformer.lens import style
from glassformer.lens.reading import blank
from glassformer.names.explained import texts
from glassformer.names.known import SHORT_NAMES
from glassformer.parts.core.cost import Shape
from glassformer.parts.forward_pass import Memory, Pass

BASE = "10m"
"""Size of the model whose mixer is counted: for llama six layers, width 384."""
SMALL = "1m"
"""Size of the model whose mixer is drawn."""
SHOWN = 48
"""Tokens of the picture."""
LENGTHS = (512, 2048, 8192, 32768, 131072)
FAINT = 1e-4
"""The least share of the largest influence that is drawn."""
PASSES = 4
"""Random directions of the output that a picture averages over."""


@dataclass(frozen=True)
class PartPage:
    """One heading of parts.md."""

    name: str
    word: str
    """Short name that adds the part to an expression, with a usual value."""
    drawn: str
    """`word` with a value that a picture of SHOWN tokens can show."""
    what: str
    loses: str
    at: str = "layers.0.mixer"
    """Path of the part in the model."""
    model: str = "llama"
    """Preset that has the part, or gets it by `word`."""
    explain: str = ""
    """Words of `glassformer explain` about the part, separated by ", "; if empty, the part's name."""
    usual: str = ""
    """Path of the part of the plain preset whose costs are compared; if empty, `at`."""

    @property
    def base(self) -> str:
        """The preset whose part is counted."""
        return f"{self.model}@{BASE}"

    @property
    def small(self) -> str:
        """The preset whose part is drawn."""
        return f"{self.model}@{SMALL}"

    @property
    def plain(self) -> str:
        """Name of the part whose costs are compared."""
        return "full attention" if self.at.endswith("mixer") else "a dense network"

    @property
    def reads_memory(self) -> bool:
        """True if the mixer attends to another sequence."""
        layer, kind = self.at.removeprefix("layers.").split(".")
        return kind == "mixer" and list(with_word(self.small, self.drawn).layers())[int(layer)].mixer.reads_memory

    @property
    def explained(self) -> list[str]:
        """Words of `glassformer explain` about the part."""
        return [word for word in (self.explain or self.name).split(", ") if word in texts()]

    @property
    def path(self) -> Path:
        return DOCS / "parts" / f"{self.name}.md"

    @property
    def figure(self) -> Path:
        return DOCS / "figures" / "parts" / f"{self.name}.png"


FIELDS = "word|drawn|what|at|model|explain|usual"
"""Fields of `PartPage` that a section of parts.md gives before its text."""


@cache
def part_pages() -> dict[str, PartPage]:
    """Returns {name: page}, in the order of parts.md."""
    found = {}
    for section in re.split(r"^## ", (HERE / "parts.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        fields: dict[str, str] = dict(re.findall(rf"^({FIELDS}):[ ]?(.*)$", body, flags=re.MULTILINE))
        loses = re.sub(rf"^({FIELDS}):.*\n", "", body, flags=re.MULTILINE).strip()
        found[name] = PartPage(name=name, loses=loses, **{"drawn": fields["word"], **fields})
    return found


def with_word(base: str, word: str) -> ModelConfig:
    return gf.preset(f"{base}+{word}" if word else base)


def part_of(config: ModelConfig, at: str) -> Any:
    """Returns the module at path `at` of the built model."""
    return config.build(seed=0).get_submodule(at)


def told_by(page: PartPage) -> list[type]:
    """Returns the classes whose docstrings describe the part: the mixer's, or its visibility's."""
    mixer = part_of(with_word(page.small, page.word), page.at)
    visibility = getattr(mixer, "visibility", None)
    usual = part_of(with_word(page.small, ""), page.at)
    if visibility is not None and type(mixer) is type(usual) and type(visibility) is not type(usual.visibility):
        return [type(visibility)]
    return [type(mixer)]


def users(page: PartPage) -> tuple[str, ...]:
    """Returns the presets that have the part."""
    if page.name in SHORT_NAMES:
        return presets_with(page.name)
    layer, kind = page.at.removeprefix("layers.").split(".")
    part = getattr(list(with_word(page.small, page.word).layers())[int(layer)], kind)
    return presets_by_part().get(type(part), ())


def influence(page: PartPage) -> Tensor:
    """Returns |d out_i / d x_j| (s, s) of a newly initialised part on noise, on a logarithmic scale for each row: 1 for
    the largest value of the row, 0 for its share FAINT or less."""
    config = with_word(page.small, page.drawn)
    model = config.build(seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, SHOWN, config.d_model, generator=generator).requires_grad_()
    if page.reads_memory:
        out = made(model, page.at, torch.randn(1, SHOWN, config.d_model, generator=generator), Memory(x))
    else:
        out = made(model, page.at, x)
    total = torch.zeros(SHOWN, SHOWN)
    for _ in range(PASSES):
        direction = torch.randn(config.d_model, generator=generator)
        for i in range(SHOWN):
            (slope,) = torch.autograd.grad(out[0, i] @ direction, x, retain_graph=True)
            total[i] += slope[0].norm(dim=-1)
    share = total / total.amax(1, keepdim=True).clamp(min=1e-30)
    return 1 - share.clamp(min=FAINT).log10() / math.log10(FAINT)


def made(model: Any, at: str, x: Tensor, memory: Memory | None = None) -> Tensor:
    """Returns the part's output for x (1, s, d) and a memory; the mixers of lower layers read x too, so that a KV
    reuser finds shared keys and values."""
    layer, kind = at.removeprefix("layers.").split(".")
    if kind == "ffn":
        return model.get_submodule(at)(x)
    pass_ = Pass(0, x.shape[1], memory=memory)
    outs = [model.layers[i].mixer(x, pass_) for i in range(int(layer) + 1)]
    return outs[-1]


def own_and_usual(page: PartPage) -> tuple[dict[int, tuple[int, float, int]], dict[int, tuple[int, float, int]]]:
    """Returns the costs of the part, and those of the plain preset's part."""
    return costs(page.base, page.word, page.at), costs(page.base, "", page.usual or page.at)


@cache
def costs(base: str, word: str, at: str) -> dict[int, tuple[int, float, int]]:
    """Returns {length: (parameters, FLOPs per prompt token, bytes of state after the prompt)} of one part in bf16. A
    memory has the length of the prompt."""
    config = with_word(base, word)
    found = {}
    for s in LENGTHS:
        cost = config.costs(Shape(1, s, s, "prefill", torch.bfloat16, every_key=False))[at]
        found[s] = (cost.parameters, cost.flops / s, cost.state_bytes)
    return found


def draw(page: PartPage) -> Figure:
    figure = blank(10.4, 3.5)
    left, middle, right = style.axes(figure, 1, 3, width_ratios=(1, 1, 1)).flat
    style.heat(left, influence(page), label="0: a ten-thousandth of the largest", bar=True)
    left.set(xlabel="token of the source" if page.reads_memory else "attended token", ylabel="attending token")
    shown_of = f"{page.small}+{page.drawn}" if page.drawn else page.small
    left.set_title(f"what a token sees: {shown_of}", loc="left", fontsize=9, color=style.INK)
    own, full = own_and_usual(page)
    held = (right, 2, "state [kB]", 1e3) if page.at.endswith("mixer") else (right, 0, "parameters held [M]", 1e6)
    for ax, which, unit, size in ((middle, 1, "MFLOPs per token of a prompt", 1e6), held):
        shown = []
        for colour, (label, cost, line) in enumerate(((page.plain, full, (0, (4, 2))), (page.name, own, "-"))):
            values = [cost[s][which] / size for s in LENGTHS]
            shown += values
            ax.plot(LENGTHS, values, label=label, color=style.COLOURS[colour], marker="o", markersize=3, linewidth=1.6,
                    linestyle=line)  # fmt: skip
        if min(shown) > 0 and page.at.endswith("mixer"):
            ax.set(yscale="log")
        else:
            ax.set_ylim(0, 1.1 * max(shown))
        ax.set(xlabel="tokens", xscale="log")
        ax.set_title(unit, loc="left", fontsize=9, color=style.INK)
    style.legend(middle)
    return figure


def table(page: PartPage) -> str:
    """Returns a table of the part's costs against those of the usual part."""
    rows = [f"| tokens | FLOPs per token | of {page.plain} | state | of {page.plain} |\n|--:|--:|--:|--:|--:|"]
    own, full = own_and_usual(page)
    for s in LENGTHS:
        (_, work, state), (_, its_work, its_state) = own[s], full[s]
        rows.append(f"| {s:,} | {work / 1e6:,.2f} M | {work / its_work:.1%} | {state / 1e3:,.1f} kB | "
                    f"{state / its_state if its_state else 0:.1%} |")  # fmt: skip
    params = own[LENGTHS[0]][0]
    said = f"{params:,} parameters ({params / full[LENGTHS[0]][0] - 1:+.1%} against {page.plain})"
    model = f"{page.base}+{page.word}" if page.word else page.base
    of = page.at.rpartition(".")[2]
    source = ", with a source as long as the text" if page.reads_memory else ""
    return f"One {of} of `{model}` in bf16{source}: {said}.\n\n" + "\n".join(rows)


def written_part(page: PartPage) -> str:
    """Returns the whole page."""
    classes = told_by(page)
    files = [f"src/{one.__module__.replace('.', '/')}.py" for one in classes]
    example = f"{page.small}+{page.word}" if page.word else page.small
    shown = with_word(page.small, page.word)
    command = f"inspect {example}"
    if page.word and all(
        block.mixer.causal(shown.ctx) and (block.ffn is None or block.ffn.causal) for block in shown.layers()
    ):
        command = f"compare {page.small} {example} --data python-docs --minutes 1"
    told = [block for one in classes for block in markdown_of(one)]
    papers, used = papers_in("\n".join([*told, page.loses])), listed(users(page))
    pieces = [
        GENERATED.replace("pages.md", "parts.md"),
        f"# {page.name}",
        sentences(page.explained),
        f"*{page.what[0].upper()}{page.what[1:]}.*",
        f"![{page.name}](../figures/parts/{page.name}.png)",
        "The map shows the influence of each token on each output, with newly initialised weights; training decides "
        "how far a recurrence remembers.",
        f"```\nglassformer {command}\n```",
        *told,
        "## What it costs",
        table(page),
        "## When it loses",
        page.loses,
        f"## Who uses it\n\n{used[0].upper()}{used[1:]}.",
        f"## Measured\n\n{measured_claims(page.explained, '../')}",
        f"## Papers\n\n{papers}" if papers else "",
        "[All mixers](../mixers.md) · " + " · ".join(f"[{file}](../../{file})" for file in files),
    ]
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def index_of_parts() -> str:
    """Returns the text of docs/mixers.md."""
    at = LENGTHS[3]
    rows = []
    for page in part_pages().values():
        _, work, state = own_and_usual(page)[0][at]
        own = "(the usual)" if page.model == PartPage.model else f"(of `{page.model}`)"
        word = f"`+{page.word}`" if page.word else own
        rows.append(f"| [{page.name}](parts/{page.name}.md) | {word} | {page.what} | {work / 1e6:,.2f} M | "
                    f"{state / 1e3:,.1f} kB |")  # fmt: skip
    return "\n\n".join([
        GENERATED.replace("pages.md", "parts.md"),
        "# Mixers: ways to mix tokens",
        "A mixer moves information between tokens. Each is one part, for any layer of any model: `+word` after a "
        "model's name puts it into every layer, `+stack:mamba2*3,attention` alternates them in a pattern. All mixers "
        "are observed, edited and counted by the same code, and all causal ones train on the next token and generate "
        f"from a state. Costs are those of one mixer of `{PartPage.model}@{BASE}` in bf16, for a prompt of {at:,} "
        "tokens; for experts those of one FFN, for cross_attention those of one mixer of `transformer`, with a source "
        "of the same length.",
        "| | in an expression | what it does | FLOPs per token | state |\n|---|---|---|--:|--:|\n" + "\n".join(rows),
        (HERE / "kernels.md").read_text(encoding="utf-8").strip(),
    ]) + "\n"  # fmt: skip


def write(names: list[str], keep: Any, words: bool = False) -> None:
    """Writes the pages of these names, or all, and the index; `keep` saves a figure."""
    for page in part_pages().values():
        if names and page.name not in names:
            continue
        page.path.parent.mkdir(parents=True, exist_ok=True)
        if not words:
            keep(draw(page), page.figure)
        page.path.write_text(written_part(page), encoding="utf-8")
        print(page.path.relative_to(DOCS.parent), file=sys.stderr, flush=True)
    (DOCS / "mixers.md").write_text(index_of_parts(), encoding="utf-8")
