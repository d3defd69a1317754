"""Pictures of the kinds of an axis: DRAW[axis](class of the config, a small model that has it)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor

import glassformer as gf
from experiments.docs.kinds import wiring
from experiments.docs.sections import published
from experiments.svg import panels
from glassformer.config import ModelConfig
from glassformer.figures import Axis, Dot, Markup, Series, line_chart, scatter_chart
from glassformer.lens import style
from glassformer.lens.positions import draw_plot
from glassformer.lens.reading import blank
from glassformer.parts.core.base import BuildContext, PartConfig
from glassformer.parts.core.cost import Shape
from glassformer.parts.ffn.base import ACTIVATIONS
from glassformer.parts.kernel import Banded, CallFacts, Direct, Flex, Kernel, Naive
from glassformer.parts.kernel.table import ranking
from glassformer.parts.visibility import Causal, SlidingWindow, Visibility

WIDTH, HEIGHT = 560, 330
"""Size of one chart of a drawing."""
SHOWN = 48
"""Tokens of pictures of masks."""
SIDE, TILE = 64, 16
"""Queries and keys, and a side of a tile, in pictures of kernels."""
STEPS = 10
"""Steps of an optimizer in its picture."""
RUN = 20_000
"""Steps of the run in pictures of schedules."""
COMPARED = ("gpt2", "gpt2-xl", "bert-base-mlm", "smollm2-135m", "smollm2-1.7b", "qwen2.5-0.5b", "qwen3-8b",
            "gemma-3-270m", "gemma-2-2b", "llama-3.2-1b", "llama-7b", "llama-3-8b")  # fmt: skip
"""Presets in charts of shares."""
CHANNELS = 16
"""Width of the vectors in pictures of norms."""


def sheet(charts: Sequence[Markup], label: str) -> str:
    """Returns charts next to each other as the text of an SVG file."""
    return panels(charts, label, WIDTH, HEIGHT)


def curves(series: Iterable[tuple[str, Tensor, Tensor]], x: str, y: str, dots: bool = False) -> Markup:
    """Returns a chart of named lines (name, x, y)."""
    made = [
        Series(name, list(zip(at.tolist(), values.tolist(), strict=True)), style=index, dots=dots)
        for index, (name, at, values) in enumerate(series)
    ]
    return line_chart(made, Axis(x), Axis(y), f"{y} by {x}", WIDTH, HEIGHT)


# Positions


def position(part: type[PartConfig], config: ModelConfig | None) -> Figure:
    """Returns the plots that a position has of itself; of rotary positions also three pairs that turn."""
    assert config is not None
    model: Any = config.build(seed=0)
    made = model.embedding.position or model.layers[0].mixer.attention_position
    plots = made.picture(max(config.context, 16 * getattr(made, "every", 0)))
    turns = hasattr(made, "frequencies") and made.scaling.key == ()
    figure = blank(3.6 * (len(plots) + turns), 3.3)
    places = style.axes(figure, 1, len(plots) + turns).flat if len(plots) + turns > 1 else [style.axes(figure)]
    for ax, (title, plot) in zip(places[turns:] if turns else places, plots.items(), strict=True):
        draw_plot(ax, plot)
        ax.set_title(title, loc="left", fontsize=9, color=style.INK)
    if turns:
        _turning(places[0], made.frequencies(config.context))
    return figure


def _turning(ax: Any, theta: Tensor) -> None:
    """Draws where three pairs point at positions 0 to 7, on three circles."""
    for ring, pair in enumerate((0, len(theta) // 4, len(theta) // 2)):
        angle = torch.arange(8) * theta[pair]
        radius = 1.0 + 0.7 * ring
        ax.plot(radius * angle.cos(), radius * angle.sin(), "o-", markersize=4, linewidth=1, color=style.COLOURS[ring],
                label=f"pair {pair}: {float(theta[pair]):.2g} radians a token")  # fmt: skip
        for at, one in enumerate(angle.tolist()):
            if ring == 0 or at in (0, 7):
                place = torch.tensor([one]).cos().item(), torch.tensor([one]).sin().item()
                ax.annotate(str(at), ((radius + 0.18) * place[0], (radius + 0.18) * place[1]), fontsize=7,
                            ha="center", va="center", color=style.MUTED)  # fmt: skip
    ax.set(xlim=(-2.9, 2.9), ylim=(-2.9, 2.9), aspect="equal", xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title("the same pair at positions 0 to 7", loc="left", fontsize=9, color=style.INK)
    style.legend(ax, loc="lower left", fontsize=7)


# Norms


def norm(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the values of three tokens before and after a norm: small, ten times as large, and shifted."""
    base = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(3))
    tokens = torch.stack([base, 3 * base, base + 2])
    names = ("x", "3 x", "x + 2")
    ctx = BuildContext(d_model=CHANNELS, vocab_size=1, context=8, n_layers=1)
    with torch.no_grad():
        normed = part().build(ctx).train()(tokens)
    at = torch.arange(CHANNELS)
    charts = [
        curves(((name, at, row) for name, row in zip(names, rows, strict=True)), "channel", title, dots=True)
        for title, rows in (("before", tokens), ("after", normed))
    ]
    return sheet(charts, f"values of three tokens before and after {part.kind}")


# Networks and wirings


def activation(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the activations that a network can have, and their derivatives."""
    x = torch.linspace(-4, 2, 121, dtype=torch.float64)
    names = get_args(part.model_fields["activation"].annotation)
    values, slopes = [], []
    for name in names:
        at = x.clone().requires_grad_()
        y = ACTIVATIONS[name](at)
        values.append((name, x, y.detach()))
        slopes.append((name, x, torch.autograd.grad(y.sum(), at)[0]))
    charts = [curves(values, "u", "activation"), curves(slopes, "u", "its derivative")]
    return sheet(charts, f"activations of {part.kind} and their derivatives")


def residual(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the drawing of a model with the wiring."""
    assert config is not None
    return wiring(config, part.kind)


# Masks, tables, initial weights


def mask(part: type[PartConfig], config: ModelConfig | None) -> Figure:
    """Returns which of SHOWN keys each query attends to."""
    assert config is not None
    model: Any = config.build(seed=0)
    at = torch.arange(SHOWN)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    seen = model.layers[0].mixer.visibility.visible(none, none, at[:, None], at[None])
    figure = blank(3.6, 3.3)
    ax = style.axes(figure, title=f"keys of each query: {part.kind}", x="key", y="query")
    style.heat(ax, seen.expand(SHOWN, SHOWN).float(), bar=False, aspect="equal")
    return figure


def shares(share: Callable[[ModelConfig], float], y: str) -> str:
    """Returns a chart of a share of published models by their number of parameters."""
    dots = [Dot(name, math.log10(made.num_params()), 100 * share(made), style=0)
            for name, made in ((name, published()[name]) for name in COMPARED)]  # fmt: skip
    ticks = [(power, words) for power, words in ((8, "100M"), (8.5, "316M"), (9, "1B"), (9.5, "3B"), (10, "10B"))]
    return panels([scatter_chart(dots, Axis("parameters", ticks=ticks), Axis(y, low=0), y, 760, 400)], y, 760, 400)


def embedding(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the share of parameters outside the layers."""
    return shares(lambda one: 1 - one.num_params(embeddings=False) / one.num_params(),
                  "% of the parameters in embedding and head")  # fmt: skip


def head(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the share of the head in the FLOPs of a forward pass."""

    def share(one: ModelConfig) -> float:
        cost = one.costs(Shape(1, 1, 1, "prefill"))
        return cost["head"].flops / cost.flops

    return shares(share, "% of the FLOPs of a token in the head")


def init(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the standard deviation of initial weights by depth."""
    depths = torch.tensor([2, 4, 8, 16, 32, 64, 96])
    series = []
    for name, role, shape in (("scores", "score", (768, 768)), ("output", "output", (3072, 768)),
                              ("embedding", "embedding", (768, 32000))):  # fmt: skip
        rules: list[Any] = [part().build(BuildContext(d_model=768, vocab_size=32000, context=8, n_layers=int(n)))
                            for n in depths]  # fmt: skip
        values = torch.tensor([1000 * rule.std(role, *map(float, shape)) for rule in rules], dtype=torch.float64)
        series.append((name, depths, values))
    return sheet(
        [curves(series, "layers", "standard deviation, thousandths", dots=True)], f"initial weights of {part.kind}"
    )


# Kernels


def kernel(part: type[PartConfig], config: ModelConfig | None) -> Figure:
    """Returns the order in which scores are computed, under a causal mask and under a window; of the choice by
    measurement, the kernel for each length."""
    made = part().build(BuildContext(d_model=64, vocab_size=1, context=64, n_layers=1))
    if hasattr(made, "kernels"):
        return _choices()
    figure = blank(7.4, 3.4)
    masks = {"causal": Causal(), "a window of 24": SlidingWindow(24)}
    for ax, (name, seen) in zip(style.axes(figure, 1, 2).flat, masks.items(), strict=True):
        style.heat(ax, _order(made, seen), bar=False, low=0.0, aspect="equal")
        ax.set(xlabel="key", ylabel="query")
        ax.set_title(name, loc="left", fontsize=9, color=style.INK)
    return figure


def _order(made: Kernel, seen: Visibility) -> Tensor:
    """Returns the step in which each of SIDE x SIDE scores is computed; 0 for those that are not."""
    steps = torch.zeros(SIDE, SIDE)
    if isinstance(made, Banded):
        for step, (start, end, spans) in enumerate(Banded(TILE).blocks(seen, SIDE, SIDE), 1):
            for left, right in spans:
                steps[start:end, left:right] = step
    elif isinstance(made, Direct):
        for left, right in seen.spans(SIDE - 1, SIDE, SIDE):
            steps[-1, left:right] = 1
    elif isinstance(made, Naive):
        steps[:] = 1
    else:  # tiles, one after another
        at = torch.arange(SIDE)
        none = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        visible = seen.visible(none, none, at[:, None], at[None]).expand(SIDE, SIDE)
        skips = isinstance(made, Flex) or (seen.only_order and seen.reach is None)
        step = 0
        for i in range(0, SIDE, TILE):
            for j in range(0, SIDE, TILE):
                if visible[i : i + TILE, j : j + TILE].any() or not skips:
                    step += 1
                    steps[i : i + TILE, j : j + TILE] = step
    return steps


def _choices() -> Figure:
    """Returns the first kernel of the table for calls of several kinds on a CPU, by length."""
    lengths = [2**power for power in range(4, 15)]
    calls = {
        "training, fp32": {"dtype": torch.float32, "grad": True},
        "training, bf16": {"dtype": torch.bfloat16, "grad": True},
        "training, fp32, window 128": {"dtype": torch.float32, "grad": True, "width": 128, "masked": True},
        "a token after others": {"dtype": torch.float32, "s": 1},
    }
    names: list[str] = []
    rows = []
    for fields in calls.values():
        chosen = [ranking(CallFacts(**{"device": "cpu", "s": n, "t": n, **fields}))[0] for n in lengths]
        names += [name for name in chosen if name not in names]
        rows.append([names.index(name) + 1 for name in chosen])
    figure = blank(8.0, 2.6)
    ax = style.axes(figure, title="the kernel that auto takes on a CPU", x="tokens")
    style.heat(ax, torch.tensor(rows).float(), bar=False, low=0.0, high=len(names) + 1.5)
    ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7)
    ax.set_yticks(range(len(calls)), list(calls), fontsize=8)
    for i, row in enumerate(rows):
        for j, index in enumerate(row):
            ax.text(j, i, names[index - 1], ha="center", va="center", fontsize=7,
                    color=style.PAPER if index > 2 else style.INK)  # fmt: skip
    return figure


# Training


def optimizer(part: type[PartConfig], config: ModelConfig | None) -> Figure:
    """Returns a gradient, the change that ten steps with such gradients make, and the singular values of both."""
    model: Any = gf.preset("llama@1m+layers=1+d_model=32+heads=2+vocab_size=31+context=16").build(seed=0)
    weight: Tensor = model.layers[0].mixer.output.weight
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(32, 2, generator=generator))[0] for _ in range(2))
    gradient = 0.02 * (left * torch.tensor([8.0, 3.0])) @ right.T
    rate = 1e-3
    stepper: Any = part().create(model, rate, 0.0)  # type: ignore[attr-defined]
    before = weight.detach().clone()
    for _ in range(STEPS):
        weight.grad = gradient + 0.005 * torch.randn(32, 32, generator=generator)
        stepper.step()
    change = (before - weight.detach()) / rate
    figure = blank(10.4, 3.3)
    first, second, third = style.axes(figure, 1, 3).flat
    shown = (
        ("gradient without its noise", first, gradient),
        (f"change of {STEPS} steps over the rate", second, change),
    )
    for title, ax, values in shown:
        style.heat(ax, values, signed=True, aspect="equal")
        ax.set_title(title, loc="left", fontsize=9, color=style.INK)
    for name, values in (("gradient", gradient), ("change", change)):
        sizes = torch.linalg.svdvals(values)
        third.plot(range(1, 33), sizes / sizes[0], label=name, marker="o", markersize=3, linewidth=1.4)
    third.set(xlabel="singular value", ylim=(0, 1.05))
    third.set_title("size, of the largest", loc="left", fontsize=9, color=style.INK)
    style.legend(third)
    return figure


def schedule(part: type[PartConfig], config: ModelConfig | None) -> str:
    """Returns the factor on the learning rate over a run."""
    made: Any = part()
    at = torch.arange(0, RUN + 1, 100)
    factors = torch.tensor([made.factor(float(t), RUN) for t in at.tolist()], dtype=torch.float64)
    return sheet([curves([(part.kind, at, factors)], "step", "factor on the learning rate")], f"schedule {part.kind}")


DRAW: dict[str, Callable[[type[PartConfig], ModelConfig | None], Figure | str]] = {
    "position": position, "rotary_scaling": position, "norm": norm, "ffn": activation, "residual": residual,
    "kernel": kernel, "optimizer": optimizer, "schedule": schedule, "visibility": mask, "embedding": embedding,
    "head": head, "init": init,
}  # fmt: skip
MAPS = ("position", "rotary_scaling", "kernel", "optimizer", "visibility")
"""Axes with maps among their pictures, which are PNG files."""
SUFFIXES = {axis: ".png" if axis in MAPS else ".svg" for axis in DRAW}
"""Axis -> kind of file of its pictures."""
CAPTIONS = {
    "position": "what the position encoding looks like over a text",
    "rotary_scaling": "wavelengths and rotations before and after",
    "norm": "three tokens before and after the norm",
    "ffn": "activations and their derivatives",
    "residual": "the drawing of a model with the wiring",
    "kernel": "the order in which scores are computed",
    "optimizer": "a gradient and the change that it makes",
    "schedule": "the factor on the learning rate over a run",
    "visibility": "the keys that each query attends to",
    "embedding": "the share of embedding and head in published models",
    "head": "the share of the head in the work of published models",
    "init": "standard deviations of initial weights by depth",
}
"""Axis -> what its pictures show."""
