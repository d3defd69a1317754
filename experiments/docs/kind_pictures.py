"""Pictures of the kinds of an axis: DRAW[axis](class of the config, a small model that has it)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor

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

WIDTH, HEIGHT = 560, 330
"""Size of one chart of a drawing."""
SHOWN = 48
"""Tokens of pictures of masks."""
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


DRAW: dict[str, Callable[[type[PartConfig], ModelConfig | None], Figure | str]] = {
    "position": position, "rotary_scaling": position, "norm": norm,
    "ffn": activation, "residual": residual,
    "visibility": mask, "embedding": embedding, "head": head, "init": init,
}  # fmt: skip
SUFFIXES = {"position": ".png", "rotary_scaling": ".png", "norm": ".svg", "ffn": ".svg", "residual": ".svg",
            "visibility": ".png", "embedding": ".svg", "head": ".svg", "init": ".svg"}  # fmt: skip
"""Axis -> kind of file of its pictures: SVG for lines, PNG for maps."""
CAPTIONS = {
    "position": "what the position encoding looks like over a text",
    "rotary_scaling": "wavelengths and rotations before and after",
    "norm": "three tokens before and after the norm",
    "ffn": "activations and their derivatives",
    "residual": "the drawing of a model with the wiring",
    "visibility": "the keys that each query attends to",
    "embedding": "the share of embedding and head in published models",
    "head": "the share of the head in the work of published models",
    "init": "standard deviations of initial weights by depth",
}
"""Axis -> what its pictures show."""
