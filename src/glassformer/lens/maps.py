"""Attention maps: softmax(q k^T / sqrt(h)), the weight that each query gives to each key; every row sums to one.

>>> loaded = gf.load("smollm2")
>>> tokens = torch.tensor(loaded.tokenizer.encode("When Mary and John went to the store"))
>>> attention_map(loaded.model, tokens, layer=5, head=3, tokenizer=loaded.tokenizer).save("map.png")

A long text's map is pooled during the pass, block of queries by block of queries, and never stored whole; a cell is
then the largest weight of its tile, since a mean would hide a single key with a large weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from glassformer.config import BlockConfig
from glassformer.errors import RequestError
from glassformer.introspection import OfHeads, Tiles, at_rest, capture, eager, looking, rows_of, sites, within
from glassformer.lens import style
from glassformer.lens.reading import Reading
from glassformer.model import Model
from glassformer.parts.core.site import edit_at
from glassformer.parts.kernel import AutoConfig
from glassformer.parts.visibility import BidirectionalConfig, CausalConfig, VisibilityConfig

# Common inputs of readings of one text: its checked tokens, their words, and one run of the model


def one_row(model: Model, tokens: Any) -> Tensor:
    """Returns the token ids `tokens`, (1, s) or (s,), as (1, s). Raises RequestError for tokens that the model cannot
    read, or more than one row."""
    rows = rows_of(model, tokens)
    if len(rows) > 1:
        raise RequestError(
            f"tokens has {len(rows)} rows; a reading is of one text, so give one of them",
            code="range", field="tokens", value=len(rows),
        )  # fmt: skip
    return rows


def spelled(tokens: Tensor, tokenizer: Any = None, words: Sequence[str] | None = None) -> list[str]:
    """Returns a label for each token of `tokens` (1, s): the given `words`, or the text that the tokenizer gives it, or
    without a tokenizer its id."""
    ids = tokens.flatten().tolist()
    if words is None:
        return [spell(i, tokenizer) for i in ids]
    if len(words) != len(ids):
        raise RequestError(
            f"words has {len(words)} labels, and the text has {len(ids)} tokens",
            code="conflict", field="words", value=len(words),
        )  # fmt: skip
    return list(words)


def spell(token: int, tokenizer: Any = None) -> str:
    """Returns the text of one token; its id as text without a tokenizer, or for a token without text."""
    if tokenizer is None:
        return str(token)
    # A model may have more rows than its tokenizer has tokens.
    return (tokenizer.decode([token]) if token < getattr(tokenizer, "vocab_size", token + 1) else "") or f"<{token}>"


# Maps


def pattern_of(model: Model, layer: int) -> str:
    """Returns the name of the site of a layer's attention pattern. Raises RequestError for a missing layer, or one
    without a pattern."""
    name = f"layers.{within(layer, len(eager(model).layers), 'layer')[0]}.mixer.pattern"
    if name not in sites(model):
        raise RequestError(
            f"layer {layer} has no attention pattern: its mixer is not softmax attention",
            code="unsupported", field="layer", value=layer,
        )  # fmt: skip
    return name


def patterns(
    model: Model, tokens: Tensor, layers: Sequence[int], heads: int | None, pool: int
) -> tuple[list[Tensor], int]:
    """Returns (maps, tile): an attention map (n, S, T) for each of the layers, and the number of tokens on each side of
    a map's cell."""
    names = [pattern_of(model, layer) for layer in layers]
    with at_rest(model):
        seen = capture(model, tokens, names, heads=heads, pool=pool)
    return [seen[name][0].cpu() for name in names], -(-tokens.shape[1] // pool)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap(Reading):
    """Attention map of one head. `weights` (S, T), queries by keys; with `tile` > 1 a cell is the largest weight of
    tile x tile tokens. `words`: text of each token."""

    title: ClassVar[str] = "Attention map"

    layer: int
    head: int
    weights: Tensor
    words: list[str]
    tile: int = 1

    @property
    def what(self) -> str:
        return f"layer {self.layer}, head {self.head}"

    def __str__(self) -> str:
        about = f"{self.what}: {self.title.lower().removesuffix(' map')} of {len(self.words)} tokens{pooled(self.tile)}"
        last = span(self.words, len(self.weights) - 1, self.tile)
        return f"{about}\n{last} attends to {heaviest(self.weights[-1], self.words, self.tile)}"

    def figure(self, width: float = 6.4, height: float = 5.6) -> Any:
        return super().figure(width, height)

    def draw(self, figure: Any) -> None:
        ax = style.axes(figure, title=f"{self.what}{pooled(self.tile)}")
        image = shade(ax, self.weights, self.tile)
        label(ax, self.words, self.tile)
        weight_bar(figure, image, ax)


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveAttentionMap(AttentionMap):
    """Effective attention map of a mixer without softmax, for the head or channel (`of`) number `head`: the influence
    of each token on each other, |weight| divided by the largest of them, `largest`. Rows need not sum to one."""

    title: ClassVar[str] = "Effective attention map"

    largest: float = 1.0
    of: str = "channel"

    @property
    def what(self) -> str:
        return f"layer {self.layer}, {self.of} {self.head}, over {self.largest:.3g}"


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps(Reading):
    """Attention maps of all heads of some layers: `weights[i]` (n, S, T) of layer `layers[i]`, cells as in
    `AttentionMap`."""

    title: ClassVar[str] = "Attention maps"

    layers: list[int]
    weights: list[Tensor]
    words: list[str]
    tile: int = 1

    def __str__(self) -> str:
        where = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        heads = sum(len(maps) for maps in self.weights)
        return f"{where}, {heads} heads: attention of {len(self.words)} tokens{pooled(self.tile)}"

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default sized to the number of maps."""
        if len(self.layers) == 1:
            columns = _columns(len(self.weights[0]))
            side = min(2.6, 12 / columns)
            rows = -(-len(self.weights[0]) // columns)
            return super().figure(width or columns * side + 1.6, height or rows * side + 1.0)
        widest = max(len(maps) for maps in self.weights)
        side = min(0.8, 15 / widest, 15 / len(self.layers))
        return super().figure(width or max(4.5, widest * side + 1.4), height or max(3.5, len(self.layers) * side + 0.9))

    def draw(self, figure: Any) -> None:
        if len(self.layers) == 1:
            self._draw_layer(figure)
        else:
            self._draw_all(figure)

    def _draw_layer(self, figure: Any) -> None:
        figure.set_layout_engine("compressed")
        (layer,), (maps,) = self.layers, self.weights
        columns = _columns(len(maps))
        axes = style.axes(figure, -(-len(maps) // columns), columns, sharex=True, sharey=True)
        figure.suptitle(f"layer {layer}{pooled(self.tile)}", x=0.01, ha="left", color=style.INK, fontsize=10)
        cells = [axes] if len(maps) == 1 else list(axes.flat)
        for head, ax in enumerate(cells):
            if head >= len(maps):
                ax.set_visible(False)
                continue
            image = shade(ax, maps[head], self.tile)
            ax.set_title(f"head {head}", loc="left", color=style.INK, fontsize=9)
            label(ax, self.words, self.tile, size=6)
            if head % columns:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
            if head + columns < len(maps):
                ax.set_xlabel("")
            else:
                ax.tick_params(labelbottom=True)
        weight_bar(figure, image, cells)

    def _draw_all(self, figure: Any) -> None:
        """Draws all maps in one image, layers downwards, heads to the right, with an empty cell between two."""
        ax = style.axes(figure, title=f"attention by layer and head{pooled(self.tile)}", x="head", y="layer")
        side, widest = self.weights[0].shape[-1], max(len(maps) for maps in self.weights)
        gap = max(1, round(side / 16))
        step = side + gap
        whole = torch.full((len(self.layers) * step - gap, widest * step - gap), math.nan)
        for row, maps in enumerate(self.weights):
            for head, weights in enumerate(maps):
                whole[row * step : row * step + side, head * step : head * step + side] = weights
        image = shade(ax, whole)
        ax.spines[:].set_visible(False)
        ax.set_xticks([head * step + (side - 1) / 2 for head in range(widest)], range(widest))
        ax.set_yticks([row * step + (side - 1) / 2 for row in range(len(self.layers))], self.layers)
        ax.tick_params(length=0)
        weight_bar(figure, image, ax)


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide(Reading):
    """Attention map of one head under a causal mask, and of the same head without a mask, with equal weights. Fields as
    in `AttentionMap`.

    The model was trained with one of the two: the other shows the attention of its weights, not a learned behaviour."""

    title: ClassVar[str] = "Causal and bidirectional"

    layer: int
    head: int
    causal: Tensor
    bidirectional: Tensor
    words: list[str]
    tile: int = 1

    def __str__(self) -> str:
        said = f"layer {self.layer}, head {self.head}: causal and bidirectional{pooled(self.tile)}"
        if self.tile > 1:
            return said
        later = float(self.bidirectional.triu(1).sum() / self.bidirectional.sum())
        return f"{said}\nwithout the mask, {later:.0%} of the attention goes to later tokens"

    def figure(self, width: float = 10.5, height: float = 5.8) -> Any:
        return super().figure(width, height)

    def draw(self, figure: Any) -> None:
        figure.set_layout_engine("compressed")  # squares next to each other
        axes = style.axes(figure, 1, 2, title=f"layer {self.layer}, head {self.head}{pooled(self.tile)}")
        for ax, name in zip(axes.flat, ("causal", "bidirectional"), strict=True):
            image = shade(ax, getattr(self, name), self.tile)
            label(ax, self.words, self.tile)
            ax.set_title(name, loc="left", color=style.INK, fontsize=9)
        axes.flat[1].set_ylabel("")
        weight_bar(figure, image, list(axes.flat))


def attention_map(
    model: Model,
    tokens: Tensor,
    layer: int,
    head: int,
    tokenizer: Any = None,
    pool: int = 512,
    words: Sequence[str] | None = None,
) -> AttentionMap:
    """Returns the attention map of one head for tokens (1, s); pooled to at most pool x pool cells.

    For a mixer without softmax (linear attention, a recurrence), its effective attention, |weight| over the largest; of
    channel `head` if it has channels (mamba). Labels are `words`, or the text of each token by `tokenizer`. Raises
    RequestError for a layer, head or token out of range, and more than one row."""
    tokens = one_row(model, tokens)
    labels = spelled(tokens, tokenizer, words)
    (layer,) = within(layer, len(eager(model).layers), "layer")
    maps = eager(model).layers[layer].mixer.effective_maps
    if maps is not None:
        site = f"layers.{layer}.mixer.effective_attention"
        (head,) = within(head, maps.count, "head", site)
        return EffectiveAttentionMap(layer, head, *_effective(model, tokens, site, head, pool, labels), maps.of)
    (weights,), tile = patterns(model, tokens, [layer], head, pool)
    return AttentionMap(layer, _head(model, layer, head), weights[0], labels, tile)


def _effective(
    model: Model, tokens: Tensor, site: str, channel: int, pool: int, labels: list[str]
) -> tuple[Tensor, list[str], int, float]:
    """Returns (weights, words, tile, largest) of an effective attention map: |weights| divided by the largest of them,
    labels of the tokens, tokens on each side of a cell, and that largest weight."""
    size = tokens.shape[1]
    tiles = Tiles(torch.empty(1, 1, 1, size), size, min(pool, size))

    def look(x: Tensor, first: int, total: int) -> None:
        tiles.add(x.abs().float().cpu(), list(range(first, first + x.shape[2])))

    with at_rest(model), looking(model, {site: OfHeads(look, [channel])}), torch.no_grad():
        eager(model).hidden_states(tokens)
    largest = float(tiles.values.max())
    return tiles.values[0, 0] / (largest or 1.0), labels, tiles.height, largest


def attention_maps(
    model: Model,
    tokens: Tensor,
    layer: int | None = None,
    tokenizer: Any = None,
    pool: int | None = None,
    words: Sequence[str] | None = None,
) -> AttentionMaps:
    """Returns the attention maps of all heads of one layer, or for None of every layer that has attention, for tokens
    (1, s).

    `pool` defaults to 256 for one layer and 64 for all. Raises RequestError as `attention_map` does."""
    tokens = one_row(model, tokens)
    labels = spelled(tokens, tokenizer, words)
    if layer is None:
        known, count = sites(model), len(eager(model).layers)
        layers = [at for at in range(count) if f"layers.{at}.mixer.pattern" in known]
        if not layers:
            raise RequestError(
                "no layer of this model has an attention pattern: its mixers are not softmax attention",
                code="unsupported", field="model",
            )  # fmt: skip
    else:
        layers = within(layer, len(eager(model).layers), "layer")
    if pool is None:
        pool = 64 if layer is None else 256
    weights, tile = patterns(model, tokens, layers, None, pool)
    return AttentionMaps(layers, weights, labels, tile)


def side_by_side(
    model: Model,
    tokens: Tensor,
    layer: int,
    head: int,
    tokenizer: Any = None,
    pool: int = 512,
    words: Sequence[str] | None = None,
) -> SideBySide:
    """Returns one head's attention map with every layer causal, and with every layer bidirectional, for tokens (1, s).

        A = softmax(q k^T / sqrt(h) + M)        M_ij = -inf for j > i, and 0 everywhere

    Vig 2019, 1906.05714, draws the maps of GPT-2 and BERT, one of each kind; here both are of one model's weights,
    whose mask is removed without training as in the first step of LLM2Vec (BehnamGhader et al. 2024, 2404.05961).

    Raises RequestError as `attention_map` does, for a layer without a mask, and if the model cannot be rebuilt from its
    config."""
    pattern_of(model, layer)
    causal, bidirectional = (
        _map_of(model, seeing(model, visibility), tokens, layer, head, tokenizer, pool, words)
        for visibility in (CausalConfig(), BidirectionalConfig())
    )
    return SideBySide(causal.layer, causal.head, causal.weights, bidirectional.weights, causal.words, causal.tile)


def _map_of(model: Model, other: Model, tokens: Tensor, *given: Any) -> AttentionMap:
    """Returns the attention map that the model `other` has for these tokens, with the present edits of `model` applied
    to it."""
    there = sites(other)
    edits = [(there[name], edit) for name, site in sites(model).items() for edit in site.edits]
    with edit_at(edits):
        return attention_map(other, tokens, *given)


def seeing(model: Model, visibility: VisibilityConfig) -> Model:
    """Returns a model with the weights of `model` (shared, not copied) whose attention has another visibility."""
    module = eager(model)
    if module.config is None:
        raise RequestError(
            "this model has no config to change the visibility in; build it from a ModelConfig",
            code="missing", field="config",
        )  # fmt: skip
    if module.head.packed is not None:
        raise RequestError(
            "packed weights cannot be put into another model; load this one without quantize",
            code="unsupported", field="quantize",
        )  # fmt: skip

    def change(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer.changed("visibility", lambda old: visibility)
        return (
            block if mixer is None else block.replace(mixer=mixer.changed("kernel", lambda old: AutoConfig()) or mixer)
        )

    stack = [stage.replace(blocks=tuple(change(block) for block in stage.blocks)) for stage in module.config.stack]
    other = module.config.replace(stack=tuple(stack)).outline()
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def _head(model: Model, layer: int, head: int) -> int:
    return within(head, eager(model).layers[layer].mixer.heads.n_heads, "head")[0]


# Drawing


def shade(ax: Any, weights: Tensor, tile: int = 1) -> Any:
    """Draws a map with weights 0 to 1 in blue, with axes in tokens. The colour scale is a square root: a sink of 0.9
    must not hide 0.05."""
    from matplotlib.colors import PowerNorm

    rows, columns = weights.shape
    extent = (-0.5, columns * tile - 0.5, rows * tile - 0.5, -0.5)
    scale = PowerNorm(0.5, 0, 1)
    image = ax.imshow(weights.float().numpy(), cmap=style.colour_map(), norm=scale, extent=extent, aspect="equal")
    ax.grid(False)
    ax.spines[:].set(visible=True, color=style.LINE, linewidth=0.8)
    return image


def weight_bar(figure: Any, image: Any, axes: Any, what: str = "attention weight") -> None:
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1]
    shrink = min(0.9, 4 / figure.get_figheight())
    bar = figure.colorbar(
        image, ax=axes, ticks=ticks, fraction=0.046, pad=0.02, shrink=shrink, aspect=25, anchor=(0, 1)
    )
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.set_label(f"{what} (square-root scale)", color=style.INK, fontsize=9)
    bar.ax.tick_params(colors=style.MUTED, labelsize=8, length=2)
    bar.outline.set_visible(False)


def label(ax: Any, words: Sequence[str], tile: int = 1, which: str = "both", size: float | None = None) -> None:
    """Labels the axis of queries (down), of keys (across), or of both, as `which` says: with the tokens' words if they
    fit legibly, otherwise with positions."""
    named = tile == 1 and len(words) <= style.MOST_WORDS
    if named:
        style.words(ax, words, which)
        ax.tick_params(axis=which, length=0)
    if size is not None:
        ax.tick_params(labelsize=size)
    ax.set_xlabel("key" if named else "position of the key", color=style.INK, fontsize=9)
    ax.set_ylabel("query" if named else "position of the query", color=style.INK, fontsize=9)


def _columns(heads: int) -> int:
    """Returns the number of columns for a grid of `heads` pictures that is a little wider than high, with a full last
    row if possible."""
    least = math.isqrt(heads - 1) + 1
    return next((columns for columns in range(least, 2 * least) if heads % columns == 0), least)


def pooled(tile: int) -> str:
    """Returns the end of a picture's title that says that a map's cells have tile x tile tokens; empty for tile 1."""
    return "" if tile == 1 else f", pooled: a cell is the largest of {tile} x {tile} tokens"


def span(words: Sequence[str], cell: int, tile: int = 1) -> str:
    """Returns the text that names a map's cell on one axis: the token, or the range of positions that the cell
    covers."""
    if tile == 1:
        return f"{words[cell]!r} ({cell})"
    return f"tokens {cell * tile} to {min(len(words), (cell + 1) * tile) - 1}"


def heaviest(row: Tensor, words: Sequence[str], tile: int = 1) -> str:
    """Returns the keys with the largest weights in a map's row, as text with the weights."""
    return ", ".join(f"{span(words, int(i), tile)} {row[i]:.2f}" for i in row.topk(min(4, len(row))).indices)
