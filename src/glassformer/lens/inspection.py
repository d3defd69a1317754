"""Inspection of one pass over a text: attention maps, predictions of each depth, surprisal."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from torch import Tensor

from glassformer.dynamics import max_attention_logit, token_cosine
from glassformer.errors import RequestError
from glassformer.figures.terminal import Reported, size, unbroken
from glassformer.introspection import OfHeads, Tiles, at_rest, eager, looking, sites
from glassformer.lens.inspected import Crossing, Effective, HeadMap, Inspected, LayerMaps
from glassformer.lens.maps import one_row
from glassformer.lens.page import render
from glassformer.lens.page.words import spelled_text, speller
from glassformer.lens.reading import Reading
from glassformer.lens.terminal import inspection_lines, reading_lines
from glassformer.parts.precision import wide
from glassformer.progress import OnProgress, silent

if TYPE_CHECKING:
    from glassformer.model import Model
    from glassformer.parts.core.heads import Heads
    from glassformer.parts.core.running import Look
    from glassformer.parts.core.site import Site
    from glassformer.parts.mixer.base import EffectiveMaps
    from glassformer.text import Tokenizer

LONGEST = 16_384
"""Largest number of tokens of an inspected text."""
FINE = 128
"""Largest number of rows of a map: up to this number of tokens a map is exact, beyond it tokens share tiles."""
EXACT_WEIGHTS, POOLED_WEIGHTS = 1 << 24, 1 << 23
"""Largest number of weights kept over all heads of the model: of exact maps, and of pooled ones."""
MOST_STRONGEST, STRONGEST = 8, 1 << 21
"""Largest number of keys that are listed: for one query, and for all queries and heads together."""
CROSSED = 96
"""Number of tokens of a text, and of its source, whose cross-attention is kept without pooling."""
FINE_EFFECTIVE, MOST_EFFECTIVE = 64, 4
"""Limits for maps of a mixer without softmax: cells on each side of a map, and maps of a layer."""
NEGLIGIBLE = 0.001
"""Weight below which a key is not listed."""
PREDICTIONS = 5
LOGITS_AT_ONCE = 1 << 23


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Inspected, Reported):
    """Result of one pass over a text: the data of `Inspected`, its readings, and its page, also in a notebook."""

    readings: Mapping[str, Reading] = field(default_factory=dict)
    """Name of a requested reading -> its result on this text."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Name of a requested reading -> reason why this model or text cannot have it."""
    saved: Path | None = None
    """File of the page; None if it was not written."""
    figures: Mapping[str, Path] = field(default_factory=dict)
    """Name of a reading -> file of its figure."""

    def to_dict(self) -> dict[str, Any]:
        """Returns heads, losses, depths and the last position's predictions as plain values, with the readings that
        were asked for; without the maps."""
        told = {name: one.to_dict() for name, one in self.readings.items()}
        told |= {name: {"error": reason} for name, reason in self.refused.items()}
        page = None if self.saved is None else str(self.saved)
        return {**super().to_dict(), "page": page, **({"readings": told} if told else {})}

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the parts of the terminal's output: the text with its surprisal, tables, the readings, and the files
        that were written."""
        yield from inspection_lines(self)
        for name, one in self.readings.items():
            yield from reading_lines(name, one, self.figures.get(name))
        for name, reason in self.refused.items():
            yield from reading_lines(name, reason)
        if self.saved is not None:
            yield unbroken(f"page: {self.saved} ({size(self.saved.stat().st_size)})")

    def html(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        cost = f", {self.mean_loss:.3f} nats each" if math.isfinite(self.mean_loss) else ""
        return f"Inspection({self.name!r}: {len(self.ids):,} tokens{cost}; {self.layers} layers)"

    def _repr_html_(self) -> str:
        frame = 'sandbox="allow-scripts" style="width:100%;height:900px;border:0;border-radius:8px"'
        return f'<iframe title="Inspection" {frame} srcdoc="{html.escape(self.html(), quote=True)}"></iframe>'


def inspect(
    model: Model,
    tokens: Tensor | Sequence[int],
    tokenizer: Tokenizer | None = None,
    *,
    source: Tensor | Sequence[int] | None = None,
    name: str = "",
    trained: bool = True,
    command: str = "",
    progress: OnProgress = silent,
) -> Inspection:
    """Returns the inspection of one pass of the model over `tokens`, (s,) or (1, s), with all data of its page.

    A model with an encoder reads a `source`, and cross-attention is included for the first 96 tokens of both. Memory is
    bounded: maps come by blocks of queries and are kept pooled, logits by blocks of positions. Without a tokenizer,
    words are ids. `command` is shown on the page. Raises RequestError for tokens that the model cannot read, and too
    many."""
    inner: Any = eager(model)
    if inner.config is not None and not inner.config.head.predicts_tokens:
        raise RequestError(
            "this model's head predicts no tokens, which is what an inspection shows of each layer; give one that does",
            code="conflict", field="model", value=name, expected="a head of tokens",
        )  # fmt: skip
    tokens = one_row(model, tokens)
    if tokens.shape[1] > LONGEST:
        raise RequestError(
            f"tokens has {tokens.shape[1]:,} of them; at most {LONGEST:,} can be inspected at once",
            code="range", field="tokens", value=tokens.shape[1],
        )  # fmt: skip
    given = None if source is None else one_row(model, source)
    if given is not None or inner.encoder is not None:
        inner.check_source(1, source=given)
    causal, crossed = inner.writes, reads_source(inner)
    known = sites(inner)
    maps_of = [{f"layers.{layer}.mixer.{name}" for name in ("scores", "pattern")} for layer in range(len(inner.layers))]
    mapped = [layer for layer, names in enumerate(maps_of) if names <= known.keys() and layer not in crossed]
    crossings = {layer: Crossed(layer) for layer in crossed}
    maps = {layer: Maps(layer, len(mapped)) for layer in mapped}
    lens = Lens(inner, tokens[0], causal, progress)
    looks: dict[str, Look] = {f"layers.{layer}.mixer.scores": maps[layer].scores for layer in mapped}
    looks |= {f"layers.{layer}.mixer.pattern": maps[layer].pattern for layer in mapped}
    looks |= {f"layers.{layer}.mixer.pattern": one.pattern for layer, one in crossings.items()}
    effective = {layer: MapSamples(maps, tokens.shape[1]) for layer, maps in effective_maps(inner, known)}
    looks |= {f"layers.{layer}.mixer.effective_attention": one.look for layer, one in effective.items()}
    looks |= {site: lens.at(depth) for depth, site in enumerate(streams(inner))}
    with at_rest(model), looking(model, looks), torch.no_grad():
        x = inner.hidden_states(tokens, source=given)
        seen_next = torch.stack([one.seen_next() for one in maps.values()]).any(0) if inner.takes_prefix else None
        lens.end(x, seen_next)
    ids = tokens[0].cpu()
    spell = speller(tokenizer)
    top_ids = lens.ids.cpu()
    return Inspection(
        name=name,
        trained=trained,
        parameters=inner.config.num_params() if inner.config else sum(p.numel() for p in inner.parameters()),
        vocab_size=lens.vocab_size,
        ids=ids,
        words=tuple(spelled_text(ids.tolist(), tokenizer)),
        spelled={i: spell(i) for i in top_ids.unique().tolist()},
        causal=causal,
        prefix=0 if seen_next is None or not seen_next.any() else int(seen_next.sum()) + 1,
        layers=len(inner.layers),
        heads=tuple(head for layer in mapped for head in maps[layer].heads()),
        attention={layer: maps[layer].attention(inner.layers[layer].mixer.heads) for layer in mapped},
        top_ids=top_ids,
        top_probabilities=lens.shares.cpu(),
        depth_loss=lens.loss.cpu(),
        residual_rms=lens.rms.cpu(),
        token_cosine=lens.cosines.cpu(),
        mixers=tuple(mixers(inner)),
        effective={layer: one.maps() for layer, one in effective.items()},
        command=command,
        source=() if given is None else tuple(spelled_text(given[0].tolist(), tokenizer)),
        crossings=tuple(one.crossing(inner.layers[layer].mixer.heads) for layer, one in crossings.items()),
    )


def reads_source(model: Any) -> list[int]:
    """Returns the indices of the layers with cross-attention, which attend to the source's tokens."""
    blocks = model.config.layers() if model.config else ()
    return [layer for layer, block in enumerate(blocks) if block.mixer.reads_memory]


def mixers(model: Any) -> Iterator[str]:
    """Yields a description of each layer's mixer in words: its kind and reach."""
    kinds = [block.mixer.kind for block in model.config.layers()] if model.config else ["mixer"] * len(model.layers)
    crossed = reads_source(model)
    for number, (kind, layer) in enumerate(zip(kinds, model.layers, strict=True)):
        reach = None if number in crossed else layer.mixer.reach
        yield kind.replace("_", " ") + ("" if reach is None else f", window of {reach:,}")


def streams(model: Any) -> list[str]:
    """Returns the names of the residual stream's sites, by depth: the embedding's, then one after each layer."""
    return ["embed", *(f"layers.{layer}.resid_post" for layer in range(len(model.layers)))]


def largest(x: Tensor, k: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """Returns the k largest values along the last axis and their indices, as `topk`, which is slow on long rows: they
    are in the k tiles with the largest maxima, or beyond the last whole tile."""
    k, tiles = min(k, x.shape[-1]), x.shape[-1] // width
    if tiles <= k:
        best = x.topk(k)
        return best.values, best.indices
    rest = torch.arange(tiles * width, x.shape[-1], device=x.device)
    tile = x[..., : tiles * width].unflatten(-1, (tiles, width)).amax(-1).topk(k).indices
    inside = (tile[..., None] * width + torch.arange(width, device=x.device)).flatten(-2)
    candidates = torch.cat([inside, rest.expand(*inside.shape[:-1], len(rest))], dim=-1)
    best = x.gather(-1, candidates).topk(k)
    return best.values, candidates.gather(-1, best.indices)


class Maps:
    """Observer that builds one layer's attention maps from blocks of queries: it receives each block's scores, then its
    pattern.

    All kept tensors are allocated before the first block: small tensors made between large ones would prevent the reuse
    of their memory."""

    def __init__(self, layer: int, mapped: int):
        """`layer`: the observed layer; `mapped`: number of layers that share the memory for maps."""
        self.layer, self.mapped = layer, mapped

    def _begin(self, x: Tensor, total: int) -> None:
        """Allocates the map and the lists of strongest keys. The map is pooled, and the lists are shortened, so that
        all heads of the model together keep at most `POOLED_WEIGHTS` weights and `STRONGEST` keys."""
        n, t = x.shape[1], x.shape[-1]
        self.tile, self.total = 1, total
        if max(total, t) > FINE or n * self.mapped * total * t > EXACT_WEIGHTS:
            self.tile = -(-max(total, t) // min(FINE, math.isqrt(POOLED_WEIGHTS // (n * self.mapped)) or 1))
        self.keep = min(MOST_STRONGEST, t, STRONGEST // ((n + 1) * self.mapped * total))
        self.map = x.new_zeros(n, -(-total // self.tile), -(-t // self.tile))
        self.weights = x.new_zeros(n + 1, total, self.keep)  # the last row: mean of the heads
        self.keys = torch.zeros_like(self.weights, dtype=torch.int64)
        self.visible = x.new_zeros(n, total)
        self.entropy, self.counted, self.previous, self.itself, self.largest, self.far = x.new_zeros(6, n)
        self.received, self.seen_by = x.new_zeros(2, n, t)

    def scores(self, x: Tensor, first: int, total: int) -> None:
        if first == 0:
            self._begin(x, total)
        visible = (x[0] > -math.inf).to(x.dtype)
        self.visible[:, first : first + x.shape[2]] = visible.sum(-1)
        self.seen_by += visible.sum(1)
        self.largest.copy_(torch.maximum(self.largest, max_attention_logit(x)))

    def pattern(self, x: Tensor, first: int, total: int) -> None:
        p, rows = x[0], slice(first, first + x.shape[2])  # (n, rows, t)
        visible = self.visible[:, rows]
        entropy = torch.special.entr(p).sum(-1) / visible.log()
        self.entropy += entropy.where(visible > 1, 0).sum(1)
        self.counted += (visible > 1).sum(1)
        self.itself += p.diagonal(first, 1, 2).sum(-1)
        self.previous += p.diagonal(first - 1, 1, 2).sum(-1)
        self.received += p.sum(1)
        places = torch.arange(max(total, p.shape[2]), device=p.device)
        self.far += torch.einsum("nst,st->n", p, (places[rows, None] - places[: p.shape[2]]).abs().to(p.dtype))
        tiles = torch.nn.functional.pad(p, (0, -p.shape[2] % self.tile)).unflatten(-1, (-1, self.tile)).sum(-1)
        self.map.index_add_(1, torch.arange(total, device=p.device)[rows] // self.tile, tiles)
        if self.keep:
            self.weights[:-1, rows], self.keys[:-1, rows] = largest(p, self.keep)
            self.weights[-1, rows], self.keys[-1, rows] = largest(p.mean(0), self.keep)

    def seen_next(self) -> Tensor:
        """Returns a mask (s,) of positions, True if some head's query attends to tokens later than its position."""
        up_to = torch.arange(1, self.total + 1, device=self.visible.device)
        return (self.visible > up_to).any(0)

    def attention(self, heads: Heads | None) -> LayerMaps:
        """Returns the maps of the layer, as means over the queries of a tile, with the exact statistics. `heads`: the
        mixer's heads; None for one KV head per map."""
        key_heads = len(self.map) if heads is None else heads.n_kv_heads
        queries = torch.arange(self.total, device=self.map.device) // self.tile
        maps = (self.map / queries.bincount()[:, None]).float().cpu()
        weights = self.weights.where(self.weights >= NEGLIGIBLE, 0.0).float().cpu()
        received = torch.cat([self.received, self.received.mean(0, keepdim=True)]).float().cpu()
        seen_by = torch.cat([self.seen_by, self.seen_by.amax(0, keepdim=True)]).float().cpu()
        return LayerMaps(maps, self.tile, self.keys.cpu(), weights, received, seen_by, key_heads)

    def heads(self) -> list[HeadMap]:
        received = self.received / self.total
        columns = [
            torch.where(self.counted > 0, self.entropy / self.counted, 1.0),
            received[:, 0],
            self.previous / (self.total - 1),
            self.itself / self.total,
            received[:, 1:].amax(1) if self.total > 1 else torch.zeros_like(self.itself),
            self.largest,
            self.far / self.total,
        ]
        return [HeadMap(self.layer, head, *row) for head, row in enumerate(torch.stack(columns, dim=1).tolist())]


class Crossed:
    """Observer that builds one layer's cross-attention maps (text by source) from blocks of queries."""

    def __init__(self, layer: int):
        self.layer = layer

    def pattern(self, x: Tensor, first: int, total: int) -> None:
        if first == 0:
            n, t = x.shape[1], x.shape[-1]
            self.maps = x.new_zeros(n, min(total, CROSSED), min(t, CROSSED))
        part = self.maps[:, first : first + x.shape[2]]
        part.copy_(x[0, :, : part.shape[1], : part.shape[2]])

    def crossing(self, heads: Heads | None) -> Crossing:
        key_heads = len(self.maps) if heads is None else heads.n_kv_heads
        return Crossing(self.layer, self.maps.float().cpu(), key_heads)


def effective_maps(model: Any, known: Mapping[str, Site]) -> Iterator[tuple[int, EffectiveMaps]]:
    """Yields (layer, effective attention maps) of the layers whose mixers have maps without a softmax."""
    for layer, block in enumerate(model.layers):
        maps = block.mixer.effective_maps
        if maps is not None and f"layers.{layer}.mixer.effective_attention" in known:
            yield layer, maps


class MapSamples:
    """Observer that keeps some effective maps of one layer, of heads or channels evenly spread over all."""

    def __init__(self, maps: EffectiveMaps, size: int):
        self.of, self.count, self.size = maps.of, maps.count, size
        most = min(MOST_EFFECTIVE, maps.count)
        self.which = [i * maps.count // most for i in range(most)]
        self.tiles: Tiles | None = None

    @property
    def look(self) -> OfHeads:
        return OfHeads(self.add, self.which)

    def add(self, x: Tensor, first: int, total: int) -> None:
        x = x.abs().float()
        if self.tiles is None:
            self.tiles = Tiles(x, total, min(FINE_EFFECTIVE, self.size))
        self.tiles.add(x, list(range(first, first + x.shape[2])))

    def maps(self) -> Effective:
        if self.tiles is None:
            raise RuntimeError("the mixer showed no effective attention")
        values = self.tiles.values[0].cpu()
        largest = values.amax((1, 2))
        shares = values / largest.clamp_min(torch.finfo(values.dtype).tiny)[:, None, None]
        return Effective(shares, self.tiles.height, tuple(self.which), tuple(largest.tolist()), self.of, self.count)


class Lens:
    """Observer of the residual stream that collects, at each depth, the predictions by the model's final norm and head,
    and statistics of the stream."""

    def __init__(self, model: Any, tokens: Tensor, causal: bool, progress: OnProgress):
        self.model, self.causal, self.progress = model, causal, progress
        self.targets = tokens.roll(-1) if causal else tokens
        self.vocab_size = model.vocab_size
        self.depths, count = len(model.layers) + 1, len(tokens)
        k = min(PREDICTIONS, self.vocab_size)
        self.ids = tokens.new_zeros(self.depths, count, k)
        self.shares = torch.zeros(self.depths, count, k, device=tokens.device)
        self.loss, self.rms = torch.zeros(2, self.depths, count, device=tokens.device)
        self.cosines = torch.zeros(self.depths, device=tokens.device)

    def at(self, depth: int) -> Look:
        """Returns the observer function for the stream at one depth. The predictions of the last depth come from the
        model's own output, in `end`."""

        def look(x: Tensor, first: int, total: int) -> None:
            self.rms[depth] = wide(x[0]).square().mean(-1).sqrt()
            self.cosines[depth] = token_cosine(x[0])
            if depth < self.depths - 1:
                norm = self.model.final_norm
                self.predict(depth, x if norm is None else norm(x), lambda logits: logits)
            self.progress("reading", depth, self.depths)

        return look

    def end(self, x: Tensor, seen_next: Tensor | None) -> None:
        """Stores the predictions of the last stream x. The loss is NaN for positions without a target and for those in
        `seen_next` (s,), which attend to the token that they would predict."""
        self.predict(self.depths - 1, x, self.model.logits)
        if self.causal:
            self.loss[:, -1] = math.nan  # the next token is unknown
        if seen_next is not None:
            self.loss[:, seen_next] = math.nan
        self.progress("reading", self.depths, self.depths)

    def predict(self, depth: int, x: Tensor, seen: Callable[[Tensor], Tensor]) -> None:
        """Computes and stores the predictions and losses at one depth, from its normalised stream x (1, s, d). `seen`
        is called with the logits, and returns them, changed if an edit of the logits is active."""
        rows = max(1, LOGITS_AT_ONCE // self.vocab_size)
        if self.model.logits.watched:  # an edit or observer there needs the logits of the whole text
            rows = x.shape[1]
        for first in range(0, x.shape[1], rows):
            part = slice(first, first + rows)
            logits = seen(self.model.unembed(x[:, part]))
            log_shares = wide(logits)[0].log_softmax(-1)  # (rows, v)
            best, self.ids[depth, part] = largest(log_shares, PREDICTIONS)
            self.shares[depth, part] = best.exp()
            self.loss[depth, part] = -log_shares.gather(-1, self.targets[part, None])[:, 0]
