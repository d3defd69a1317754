"""Conversion of a config to the text and boxes that `figures.wiring_drawing` draws."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..figures import BlockSketch, Box, ModelSketch, StageSketch, count, finite
from ..figures.wiring import Place
from ..runs.diff import leaf

SHOWN_BLOCKS = 3
SHOWN_STAGES = 4
_ACTS = {"rotary": "q, k", "rope": "q, k", "alibi": "scores", "relative": "scores", "t5": "scores"}
_TIES = {"True": "tied to the embedding", "False": "untied"}
_POOLED = {"cls": "the first token", "mean": "the mean", "last": "the last token"}
_ORDINARY = ("causal", "full", "none", None)


def mapping(value: object) -> dict[str, Any]:
    """Returns the value if it is a mapping, else {}, because the configs in results.json are not checked."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[Any]:
    """Returns the value as a list if it is a list or tuple, else [], because the configs in results.json are not
    checked."""
    return list(value) if isinstance(value, list | tuple) else []


def sketch(config: dict) -> ModelSketch:
    """Returns the content of the wiring drawing of a config; fields that it lacks are omitted."""
    head, encoder = mapping(config.get("head")), mapping(config.get("encoder"))
    sizes = {name: config.get(name) for name in ("vocab_size", "d_model")}
    source = {name: config.get(name) if encoder.get(name) is None else encoder.get(name) for name in sizes}
    below = replace(_tower(encoder, source), reads="source", gives="memory") if encoder else None
    return replace(_tower(config, sizes), head=_head_box(head), gives=_gives(head), encoder=below)


def _tower(tower: dict, sizes: dict) -> ModelSketch:
    """Returns the part of the drawing for a decoder or an encoder: embedding, layers and final norm, without the
    head."""
    embedding = mapping(tower.get("embedding"))
    patches, vectors = mapping(embedding.get("patches")), mapping(embedding.get("vectors"))
    stages = [_stage(mapping(stage)) for stage in sequence(tower.get("stack"))[:SHOWN_STAGES]]
    if patches:
        words = _sizes({**patches, **sizes}, ("patch", "d_model"), ("squares of {} pixels", "width {}"))
        box = Box("patches", words)
    elif vectors:
        box = Box("vectors", _sizes({**vectors, **sizes}, ("size", "d_model"), ("of {} numbers", "width {}")))
    else:
        shared = ", ".join(filter(None, [_sizes(sizes, ("d_model",), ("width {}",)), "the decoder's table"]))
        own = _sizes(sizes, ("vocab_size", "d_model"), ("{} tokens", "width {}"))
        box = Box(_kind(embedding) or "embedding", shared if embedding.get("tied") is True else own)
    return ModelSketch(
        box,
        _added(embedding.get("position")),
        tuple(stages),
        _kind(tower.get("final_norm")),
        None,
        _kind(embedding.get("norm")),
        reads="images" if patches else "vectors" if vectors else "tokens",
    )


def _head_box(head: dict) -> Box:
    pool = _POOLED.get(str(head.get("pool")), "")
    if head.get("vector") is True:
        words = ", ".join(filter(None, [pool, "length 1" if head.get("normalize") is True else ""]))
    elif finite(head.get("classes")) is not None:
        words = " ".join(filter(None, [_sizes(head, ("classes",), ("{} classes",)), pool and f"of {pool}"]))
    else:
        words = _TIES.get(str(head.get("tied")), "")
    return Box(_kind(head) or "head", words)


def _gives(head: dict) -> str:
    if head.get("vector") is not True:
        return "logits"
    return "a vector" if head.get("pool") else "vectors"


def marked(models: Sequence[ModelSketch]) -> list[ModelSketch]:
    """Returns the wiring drawings with marks at the boxes that differ between arms.

    If more than half of the arms have equal content in a box, the box is marked in the other arms, otherwise in all."""
    places = [_places(model) for model in models]
    keys = dict.fromkeys(key for place in places for key in place)
    differs: list[set[Place]] = [set() for _ in models]
    for key in keys:
        there = [place.get(key) for place in places]
        usual, times = Counter(there).most_common(1)[0]
        for mine, value in zip(differs, there, strict=True):
            if value is not None and times < len(there) and (value != usual or 2 * times <= len(there)):
                mine.add(key)
    return [replace(model, differs=frozenset(mine)) for model, mine in zip(models, differs, strict=True)]


def _places(model: ModelSketch) -> dict[Place, object]:
    """Returns {place: content} for each box of a wiring drawing; an encoder's places start with "encoder"."""
    inner = {("encoder", *place): value for place, value in _places(model.encoder).items()} if model.encoder else {}
    found: dict[Place, object] = {
        ("embedding",): model.embedding, ("position",): model.position, ("embedding_norm",): model.embedding_norm,
        ("final_norm",): model.final_norm, ("head",): model.head,
    }  # fmt: skip
    for i, stage in enumerate(model.stages):
        found[i, "repeat"] = stage.repeat
        for j, block in enumerate(stage.blocks):
            found |= {(i, j, "mixer"): _whole(block.mixer), (i, j, "ffn"): _whole(block.ffn),
                      (i, j, "norm"): block.norm,
                      (i, j, "wiring"): (block.wiring, block.shared_norm, block.mixer_normed)}  # fmt: skip
    return {**{key: value for key, value in found.items() if value}, **inner}


def _whole(box: Box | None) -> object:
    """Returns the full content of a box of a wiring drawing, which is compared between arms, because a box in a narrow
    drawing shows only a part of it."""
    return box and (box.name, box.whole)


def describe(name: str, model: ModelSketch) -> str:
    """Returns a wiring drawing as text, for a screen reader."""
    reads = describe("its encoder", replace(model.encoder, differs=frozenset())) if model.encoder else ""
    stages = []
    for stage in model.stages:
        blocks = [
            ", ".join(filter(None, [f"{b.wiring} wiring", b.norm, *(_spoken(box) for box in (b.mixer, b.ffn) if box)]))
            for b in stage.blocks
        ]
        stages.append(f"{stage.repeat} times [{' | '.join(blocks)}]")
    pieces = [model.position and f"{model.position} at the embedding", *stages,
              model.final_norm and f"final {model.final_norm}", reads]  # fmt: skip
    differs = dict.fromkeys(str(place[-1]).replace("_", " ") for place in sorted(model.differs, key=str))
    pieces.append(f"differs in: {', '.join(differs)}" if differs else "")
    return f"Wiring of {name}: " + "; ".join(piece for piece in pieces if piece)


def _spoken(box: Box) -> str:
    return " ".join(filter(None, [box.name, box.detail, box.inside]))


def _kind(part: object) -> str:
    kind = mapping(part).get("kind")
    return str(kind) if kind is not None else ""


def _stage(stage: dict) -> StageSketch:
    """Returns the drawing of one stage of a config's layer stack (`blocks`, and `repeat`, how often they are repeated).
    Adjacent equal blocks are drawn as one with their number."""
    blocks: list[tuple[str, dict, int]] = []
    for raw in map(mapping, sequence(stage.get("blocks"))):
        key = json.dumps(raw, sort_keys=True, default=str)
        if blocks and blocks[-1][0] == key:
            blocks[-1] = (key, raw, blocks[-1][2] + 1)
        else:
            blocks.append((key, raw, 1))
    repeat = finite(stage.get("repeat"))
    times = int(repeat) if repeat is not None and abs(repeat) < 1e9 else 1
    if len(blocks) == 1:
        times, blocks = times * blocks[0][2], [(blocks[0][0], blocks[0][1], 1)]
    shown = tuple(_block(raw, count) for _, raw, count in blocks[:SHOWN_BLOCKS])
    return StageSketch(times, shown, sum(count for _, _, count in blocks[SHOWN_BLOCKS:]))


def _block(block: dict, times: int) -> BlockSketch:
    wiring = _kind(block.get("residual")) or "pre"
    narrow = wiring == "parallel"
    mixer, ffn = mapping(block.get("mixer")), mapping(block.get("ffn"))
    return BlockSketch(
        wiring,
        _kind(block.get("norm")),
        _mixer_box(mixer, narrow) if mixer else None,
        Box(_kind(ffn) or "ffn", _ffn_detail(ffn, narrow), whole=_ffn_detail(ffn, narrow=False)) if ffn else None,
        times,
        mapping(block.get("residual")).get("shared_norm") is not False,
        mapping(block.get("residual")).get("mixer_normed") is not False,
    )


def _added(position: object) -> str:
    """Returns the text for the position encoding that is added to the embedding; empty without one."""
    kind = _kind(position)
    return f"{kind} position" if kind else ""


def _acting(position: object, narrow: bool) -> str:
    """Returns the text for the position encoding inside a mixer, and unless `narrow` the tensor that the encoding
    changes: `rope → q, k`."""
    kind = _kind(position)
    if not kind or narrow:
        return kind
    acts = next((on for word, on in _ACTS.items() if word in kind.lower()), None)
    return f"{kind} → {acts}" if acts else kind


def _sizes(part: dict, keys: tuple[str, ...], forms: tuple[str, ...]) -> str:
    """Returns sizes as text, `4.1k tokens, width 384`: each number under `keys` of a part's config, in the form at the
    same index of `forms`; keys without a number are omitted."""
    found = [(form, finite(part.get(key))) for key, form in zip(keys, forms, strict=True)]
    return ", ".join(form.format(count(value)) for form, value in found if value is not None)


def _mixer_box(mixer: dict, narrow: bool) -> Box:
    position = mixer.get("position")
    whole = f"{_mixer_detail(mixer, narrow=False)}; {_kind(position)}"
    reads = _kind(mixer) == "cross_attention"
    return Box(_kind(mixer) or "mixer", _mixer_detail(mixer, narrow), _acting(position, narrow), whole, reads)


def _mixer_detail(mixer: dict, narrow: bool) -> str:
    words = _sizes(mixer, ("n_heads", "d_state", "n_features"), ("{} heads", "state {}", "{} features"))
    groups = finite(mixer.get("n_kv_heads"))
    if groups is not None and groups != finite(mixer.get("n_heads")) and not narrow:
        words += f", {count(groups)} kv"
    visibility = mapping(mixer.get("visibility"))
    if _kind(visibility) not in (*_ORDINARY, "") and not narrow:
        sizes = map(finite, map(visibility.get, ("window", "chunk", "block", "length")))
        reach = next((size for size in sizes if size is not None), None)
        seen = _kind(visibility).replace("_", " ").replace("sliding window", "window")
        words = ", ".join(filter(None, [words, f"{seen} {count(reach)}" if reach is not None else seen]))
    if mixer.get("qk_norm") and not narrow:
        words = ", ".join(filter(None, [words, "qk norm"]))
    return words


def _ffn_detail(ffn: dict, narrow: bool) -> str:
    words = _sizes(ffn, ("n_experts", "top_k", "hidden"), ("{} experts", "top {}", "hidden {}"))
    activation: Any = ffn.get("activation")
    act = _kind(activation) or (leaf(activation) if isinstance(activation, str) else "")
    return words if narrow else ", ".join(filter(None, [words, act]))
