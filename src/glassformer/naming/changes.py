"""Changes of a config, as an expression writes them: +word, +word:value and +path=value.

Words are declared by parts. This module defines, for each axis, how a choice enters a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig, stack_of
from glassformer.errors import RequestError
from glassformer.names.places import unknown_change
from glassformer.naming.assign import ALIASES, OF_MIXER, assign
from glassformer.parts.core.base import WORDS, BuildContext, Value
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.core.outside import load_installed
from glassformer.parts.core.words import Word, number, whole, whole_number
from glassformer.parts.mup import Mup
from glassformer.parts.residual import ResidualConfig
from glassformer.parts.vectors import VectorsConfig


class Undone(UserWarning):
    """Warning that a change of an expression undoes a choice made before."""


Change = Callable[[ModelConfig], ModelConfig]
Fields = Mapping[str, Any]


def each_block(config: ModelConfig, change: Callable[[BlockConfig], BlockConfig], encoder: bool = True) -> ModelConfig:
    """Returns the config with `change` applied to every block, those of an encoder too unless `encoder` is False."""

    def changed(tower: TowerConfig) -> tuple[Stage, ...]:
        return tuple(stage.replace(blocks=tuple(change(block) for block in stage.blocks)) for stage in tower.stack)

    other = config.encoder
    if other is not None and encoder:
        other = other.replace(stack=changed(other))
    return config.replace(stack=changed(config), encoder=other)


def each_end(config: ModelConfig, change: Callable[[TowerConfig], dict[str, Any]]) -> ModelConfig:
    """Returns the config with the fields around the blocks (embedding, final norm) that `change(tower)` returns, in
    both towers."""
    encoder = config.encoder and config.encoder.replace(**change(config.encoder))
    return config.replace(**change(config), encoder=encoder)


def each_mixer(config: ModelConfig, change: str, value: Any, required: bool = True) -> ModelConfig:
    """Returns the config with the mixers' property `change` set to `value` wherever a mixer has it; a function `value`
    is called with (old value, norm of the block). Raises RequestError if no mixer has it and the change is
    `required`."""
    found = []

    def fit(block: BlockConfig) -> BlockConfig:
        new = (lambda old: value(old, block.norm)) if callable(value) else lambda old: value
        mixer = block.mixer.changed(change, new)  # type: ignore[arg-type]
        found.append(mixer is not None)
        return block if mixer is None else block.replace(mixer=mixer)

    changed = each_block(config, fit, encoder=change != "visibility")
    if required and not any(found):
        kinds = sorted({block.mixer.kind for block in config.layers()})
        raise RequestError(
            f"no mixer of this model has {change}: its mixers are {', '.join(kinds)}",
            code="unsupported", field=f"mixer.{change}", value=kinds,
        )  # fmt: skip
    return changed


# Functions of (config, the choice or the axis itself, fields of the word) that put a choice of an axis into a model


def _norm(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    def swap(norm: Any) -> Any:
        return None if norm is None else choice.replacing(norm, **fields)

    config = each_block(config, lambda block: block.replace(norm=swap(block.norm)))
    return each_end(
        config,
        lambda tower: {
            "final_norm": swap(tower.final_norm),
            "embedding": tower.embedding.replace(norm=swap(tower.embedding.norm)),
        },
    )


def _residual(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    """Returns the config with another residual wiring. A wiring whose blocks end in a norm removes the final norm,
    others restore it. An init that belongs to a wiring is set and removed with it."""
    if not choice.kind:
        return each_block(config, lambda block: block.replace(residual=block.residual.replace(**fields)))
    norm = next(config.layers()).norm
    config = each_block(config, lambda block: block.replace(residual=choice.replacing(block.residual, **fields)))
    wirings: list[Any] = list(ResidualConfig.choices().values())
    brought = {type(known.brings) for known in wirings if known.brings is not None}
    own = Gpt2InitConfig() if type(config.init) in brought else config.init
    if choice.brings is not None:
        own = type(choice.brings).replacing(config.init)
    config = each_end(config, lambda tower: {"final_norm": None if choice.ends_in_norm else tower.final_norm or norm})
    return config.replace(init=own)


def _ffn(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    halves = config.encoder is not None  # a half layer without an FFN stays without one

    def swap(block: BlockConfig) -> BlockConfig:
        return block if block.ffn is None and halves else block.replace(ffn=choice.replacing(block.ffn, **fields))

    changed = each_block(config, swap)
    if not any(block.ffn for block in changed.layers()):
        raise RequestError(
            f"ffn={choice.kind}: this model has no ffn that it could be made of; add one first",
            code="missing", field="ffn", value=choice.kind,
        )  # fmt: skip
    return changed


def _mixer(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    if choice.knows_order:
        config = config.replace(embedding=config.embedding.replace(position=None))

    def swap(block: BlockConfig) -> BlockConfig:
        reads = config.encoder is not None and block.mixer.reads_memory
        return block if reads else block.replace(mixer=choice.replacing(block.mixer, **fields))

    return each_block(config, swap, encoder=False)


def _position(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    """Returns the config with the position at the embedding or in the mixers, and none in the other place; +nope
    removes both."""

    def at(place: str, old: Any) -> Any:
        return choice.replacing(old, **fields) if choice.place == place else None

    config = each_end(
        config, lambda tower: {"embedding": tower.embedding.replace(position=at("embedding", tower.embedding.position))}
    )
    return each_mixer(config, "position", lambda old, norm: at("mixer", old))


def _rotary_scaling(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    """Returns the config with scaled rotary frequencies, and the context extended by their factor. If some rotary
    layers attend beyond the context and others have shorter windows, the latter do not change. Raises RequestError
    without rotary positions."""

    def stretched(tower: TowerConfig, ctx: BuildContext, near: bool) -> tuple[tuple[Stage, ...], int | None]:
        longest: list[int] = []

        def stretch(old: Any) -> Any:
            new = old and old.stretched(choice, ctx.context, **fields)
            longest.extend([new.longest] if new else ())
            return new or old

        def fit(block: BlockConfig) -> BlockConfig:
            reach = block.mixer.reach(ctx)
            if not near and reach is not None and reach < ctx.context:
                return block
            return block.replace(mixer=block.mixer.changed("position", stretch) or block.mixer)

        stack = tuple(stage.replace(blocks=tuple(map(fit, stage.blocks))) for stage in tower.stack)
        return stack, max(longest, default=None)

    def fitted(tower: TowerConfig, ctx: BuildContext) -> tuple[dict[str, Any], int | None]:
        stack, longest = stretched(tower, ctx, near=False)
        if longest is None:
            stack, longest = stretched(tower, ctx, near=True)
        return {"stack": stack, "context": tower.context and (longest or tower.context)}, longest

    own, longest = fitted(config, config.ctx)
    encoder, of_encoder = config.encoder, None
    if encoder is not None:
        fields_of_encoder, of_encoder = fitted(encoder, config.encoder_ctx)
        encoder = encoder.replace(**fields_of_encoder)
    if longest is None and of_encoder is None:
        has = " and ".join(_positions(config)) or "no"
        raise RequestError(
            f"{choice.kind} scales rotary positions, and this model has {has} positions; +rope puts them in",
            code="unsupported", field="position", value=has, expected="rotary positions",
        )  # fmt: skip
    return config.replace(**own, encoder=encoder)


def _positions(config: ModelConfig) -> list[str]:
    """Returns the kinds of positions that a model has, sorted."""
    found = [config.embedding.position]
    each_mixer(config, "position", lambda old, norm: found.append(old), required=False)
    return sorted({one.kind for one in found if one is not None})


def _visibility(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    return each_mixer(config, "visibility", lambda old, norm: choice.replacing(old, **fields))


def _reparam(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    return config.replace(reparam=choice(**fields))


def _head(config: ModelConfig, choice: Any, fields: Fields) -> ModelConfig:
    return config.replace(head=config.head.replace(**fields))


JOIN: dict[str, Callable[[ModelConfig, Any, Fields], ModelConfig]] = {
    "norm": _norm,
    "residual": _residual,
    "ffn": _ffn,
    "mixer": _mixer,
    "position": _position,
    "rotary_scaling": _rotary_scaling,
    "visibility": _visibility,
    "reparam": _reparam,
    "head": _head,
}


# Words of the model as a whole, which no part declares


def _bias(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config with or without biases on the matrices of mixers and FFNs."""
    config = each_mixer(config, "bias", fields["bias"], required=False)
    return each_block(
        config, lambda block: block.replace(ffn=block.ffn.with_bias(fields["bias"]) if block.ffn else None)
    )


def _dropout(config: ModelConfig, fields: Fields) -> ModelConfig:
    config = each_block(config, lambda block: block.replace(residual=block.residual.replace(**fields)))
    config = each_mixer(config, "dropout", fields["dropout"], required=False)
    return each_end(config, lambda tower: {"embedding": tower.embedding.replace(**fields)})


def _probability(word: str, text: str) -> dict[str, Any]:
    p = number(word, text)
    if not 0 <= p < 1:
        raise RequestError(
            f"{word}:{text}: expected a probability from 0 up to, not including, 1",
            code="range", field=word, value=text,
        )  # fmt: skip
    return {"dropout": p}


def _embedding_norm(config: ModelConfig, fields: Fields) -> ModelConfig:
    norm = config.embedding.norm or next(config.layers()).norm
    return each_end(config, lambda tower: {"embedding": tower.embedding.replace(norm=norm if fields["on"] else None)})


def _vectors(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config with vectors of real numbers as input, and one real number per vector as output."""
    head = config.head.replace(tied=False, pool=None, classes=1, vector=False, normalize=False, labels=None)
    old = config.embedding.vectors
    reads = old.replace(**fields) if old else VectorsConfig(**fields)
    return config.replace(embedding=config.embedding.replace(vectors=reads), head=head)


def _mup(config: ModelConfig, fields: Fields) -> ModelConfig:
    return config.replace(mup=(config.mup or Mup()).replace(**fields) if fields else Mup())


ITEM = re.compile(r"([^*]+)(?:\*(\d*))?")
REST = 0
"""Count of a pattern's item that fills all remaining layers."""


def _read_pattern(word: str, text: str) -> dict[str, Any]:
    """Parses a pattern of layers: WORD, WORD*N, WORD* (all remaining layers), separated by commas; returns {"pattern":
    ((word, count), ...)}. Raises RequestError."""

    def refuse(item: str) -> RequestError:
        return RequestError(
            f"{word}:{text}: {item!r} is not a layer of a pattern; use WORD, WORD*N or, last, WORD* for the layers "
            "that are left, separated by commas, such as mamba2*3,attention",
            code="range", field=word, value=text, expected="WORD[*N], ...",
        )  # fmt: skip

    items: list[tuple[str, int]] = []
    for item in text.split(","):
        found = ITEM.fullmatch(item.strip())
        if found is None or found[2] == "0" or (items and items[-1][1] == REST):
            raise refuse(item)
        items.append((found[1].strip(), 1 if found[2] is None else int(found[2] or REST)))
    return {"pattern": tuple(items)}


def _stack(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config with each layer changed by its item of a pattern, which is repeated over all layers. An item
    is the short name of a change of one layer, or the kind of the layer's mixer, which leaves it unchanged."""
    items: Sequence[tuple[str, int]] = fields["pattern"]
    period = [name for name, count in items for _ in range(count)]
    each = period if items[-1][1] == REST else cycle(period)
    names = [name for name, _ in zip(each, range(config.n_layers), strict=False)]
    names += [items[-1][0]] * (config.n_layers - len(names))
    if missing := [name for name, _ in items if name not in names]:
        raise RequestError(
            f"+stack: the {config.n_layers} layers of this model end before {missing[0]} of the pattern; use fewer of "
            "the others, or more layers",
            code="range", field="stack", value=missing[0], expected=f"a pattern of at most {config.n_layers} layers",
        )  # fmt: skip
    made: dict[tuple[str, int], ModelConfig] = {}
    for name, block in zip(names, config.layers(), strict=True):
        if (name, id(block)) not in made:
            made[name, id(block)] = _layer(config, name, block)
    blocks = [made[name, id(block)].stack[0].blocks[0] for name, block in zip(names, config.layers(), strict=True)]
    placed = any(one.embedding.position is not None for one in made.values())  # some layer still depends on it
    embedding = config.embedding if placed else config.embedding.replace(position=None)
    return config.replace(stack=stack_of(blocks), embedding=embedding)


def _layer(config: ModelConfig, name: str, block: BlockConfig) -> ModelConfig:
    """Returns the config of a model with only this block, after the change `name`. Raises RequestError if the change
    affects more than one layer."""
    alone = config.replace(stack=(Stage(blocks=(block,)),))
    if name == block.mixer.kind:
        return alone
    changed = change_of(name)(alone)
    same = (
        changed.replace(stack=alone.stack, embedding=changed.embedding.replace(position=alone.embedding.position))
        == alone
    )
    if not same or changed.n_layers != 1:
        raise RequestError(
            f"+stack: {name} does not change one layer only; name it outside of the pattern, as +{name}",
            code="conflict", field="stack", value=name, expected="a change of mixer, ffn, position or visibility",
        )  # fmt: skip
    return changed


def _read_group(word: str, text: str) -> dict[str, Any]:
    if (layers := whole_number(word, text)) < 2:
        raise RequestError(
            f"{word}:{text}: one layer shares with none; use 2 or more",
            code="range", field=word, value=text, expected="an integer >= 2",
        )  # fmt: skip
    return {"layers": layers}


def _share(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config in which, of each group of layers that mix their own text, the first is a KV source and the
    others reuse its keys and values. Raises RequestError."""
    blocks = list(config.layers())
    own = [at for at, block in enumerate(blocks) if not block.mixer.reads_memory]
    if len(own) < 2:
        raise RequestError(
            "+share: a single layer has no other to share keys and values with; use it with two or more",
            code="range", field="share", value=len(own), expected="a model of two or more layers",
        )  # fmt: skip
    for place, at in enumerate(own):
        mixer = blocks[at].mixer
        made = mixer.taking(SHARED) if place % fields["layers"] else mixer.sharing(SHARED)
        if made is None:
            raise RequestError(
                f"+share: layer {at} has no own keys and values to share (its mixer is {mixer.kind})",
                code="unsupported", field=f"layers.{at}.mixer", value=mixer.kind, expected="attention",
            )  # fmt: skip
        blocks[at] = blocks[at].replace(mixer=made)
    return config.replace(stack=stack_of(blocks))


SHARED = "kv"
"""Name of the keys and values that the layers of a group share."""

OF_MODEL: dict[str, tuple[Word, Callable[[ModelConfig, Fields], ModelConfig]]] = {
    word.name: (word, change)
    for word, change in (
        (Word("bias", fields={"bias": True}), _bias),
        (Word("nobias", fields={"bias": False}), _bias),
        (Word("dropout", _probability, "0.1"), _dropout),
        (Word("embednorm", fields={"on": True}), _embedding_norm),
        (Word("noembednorm", fields={"on": False}), _embedding_norm),
        (Word("vectors", whole("size"), "5"), _vectors),
        (Word("share", _read_group, "2"), _share),
        (Word("stack", _read_pattern, "mamba*2,attention"), _stack),
        (Word("mup", whole("base_width"), "128", optional=True), _mup),
    )
}


def words() -> dict[str, list[Word]]:
    """Returns {axis: its short names}, installed parts included; `model` has those that change the model as a whole."""
    load_installed()
    found: dict[str, list[Word]] = {axis: [] for axis in JOIN}
    for word, part in WORDS.values():
        found[part.axis].append(word)
    return {**found, "model": [word for word, _ in OF_MODEL.values()]}


def word_of(axis: str, part: Mapping[str, Any]) -> str | None:
    """Returns the change that adds a part, such as "window:64"; None if no short name does. `part` is the part's config
    as plain values; `axis` is its axis (mixer, ffn, norm, ...), or a property of mixers, such as position.

    If several changes do, the one that sets most of the part's fields."""
    load_installed()
    found: dict[str, int] = {}
    for word, made in WORDS.values():
        if word.change == axis and (word.read is None or word.optional):
            found[word.name] = 0
        if made.axis != axis or made.kind != part.get("kind") or word.change:
            continue
        values = [None] if word.read is None or word.optional else [str(value) for value in part.values()]
        for value in values:
            try:
                fields = word.given(value)
            except (RequestError, ValueError):
                continue
            if all(part.get(name) == wanted for name, wanted in fields.items()):
                found[word.name if value is None else f"{word.name}:{value}"] = len(fields)
    return max(found, key=found.__getitem__, default=None)


def changes() -> list[str]:
    """Returns the short names of all changes."""
    return [word.name for some in words().values() for word in some]


def of_mixers(text: str) -> bool:
    """Returns True if a change is about a property that only some mixers have. The kernel is not counted, because it
    does not change the model's function."""
    path, equals, _ = text.partition("=")
    if equals:
        first, *rest = ALIASES.get(path.strip(), path.strip()).split(".")
        known = {word.change for word, _ in WORDS.values() if word.change}
        return (first in OF_MIXER and first != "kernel") or (first == "mixer" and rest[:1] != [] and rest[0] in known)
    name = text.partition(":")[0]
    if name in OF_MODEL:
        return OF_MODEL[name][1] is _share
    word, part = WORDS.get(name, (None, None))
    return word is not None and part is not None and (bool(word.change) or part.axis in (*OF_MIXER, "rotary_scaling"))


def extends_context(text: str) -> bool:
    """Returns True if a change extends the context by a factor of the present one."""
    part = WORDS.get(text.partition(":")[0], (None, None))[1]
    return part is not None and part.axis == "rotary_scaling"


def changes_mixers(text: str) -> bool:
    """Returns True if a change replaces mixers by others."""
    path, equals, _ = text.partition("=")
    if equals:
        return path.strip() == "mixer.kind"
    name = text.partition(":")[0]
    if name in OF_MODEL:
        return OF_MODEL[name][1] is _stack
    word, part = WORDS.get(name, (None, None))
    return word is not None and part is not None and part.axis == "mixer" and not word.change


def caution(change: str) -> str:
    """Returns the warning that the part of a change declares, "" without one."""
    part = WORDS.get(change.partition(":")[0], (None, None))[1]
    return part.caution if part is not None else ""


def undone(before: ModelConfig, after: ModelConfig, change: str, earlier: Sequence[str]) -> list[str]:
    """Returns a sentence for each of the `earlier` changes that `change` undoes, and for the properties of a mixer that
    its replacement lacks; `before` and `after` are the configs around it."""
    sentences = [
        f"+{change} undoes +{one}"
        for one in dict.fromkeys(earlier)
        if not _refines(change, one) and holds(one, before) and not holds(one, after) and not _remains(one, after)
    ]
    if extends_context(change) and not sentences and after.context < before.context:
        sentences.append(
            f"+{change} counts from the context before the scaling that the model had: {after.context:,} tokens in "
            f"place of {before.context:,}"
        )
    if not changes_mixers(change) or change.partition(":")[0] in OF_MODEL:
        return sentences
    lost: dict[str, None] = {}
    for old, new in zip(before.layers(), after.layers(), strict=True):
        if any(part == old.mixer for _, held in new.mixer for part in (held if isinstance(held, tuple) else (held,))):
            continue
        gone = [
            f"{name}={_told(value)}"
            for name, value in old.mixer.choices_made().items()
            if name not in type(new.mixer).model_fields and name not in UNSAID
        ]
        if gone:
            lost[f"{', '.join(gone)} of {old.mixer.kind}, which {new.mixer.kind} does not have"] = None
    place, now = before.embedding.position, after.embedding.position
    if place is not None and now is None:
        lost[f"the {place.kind} positions at the embedding, since its mixer tells the order of tokens"] = None
    return [*sentences, *(f"+{change} leaves out {one}" for one in lost)]


UNSAID = ("n_heads", "head_dim", "kernel", "projection")
"""Fields of a mixer whose loss is not reported: sizes of its kind, and matters of computation."""


def _told(value: Any) -> str:
    return str(getattr(value, "kind", "") or (f"({value})" if isinstance(value, Value) else value))


def _refines(change: str, earlier: str) -> bool:
    """Returns True if a change sets a field inside a part, such as +norm.eps=1e-6, and the earlier one does not set
    this field; or if it extends the context that the earlier one set."""
    path, equals, _ = change.partition("=")
    first = earlier.partition("=")[0]
    if extends_context(change):
        return first == "context"
    return "." in path and bool(equals) and not path.endswith(".kind") and first != path


def _remains(change: str, config: ModelConfig) -> bool:
    """Returns True if every layer still has the FFN of a change, with the fields that the change sets:
    +moe:4:2+swiglu:64 sets the width of the experts, and they remain."""
    name, colon, value = change.partition(":")
    word, part = WORDS.get(name, (None, None))
    if word is None or part is None or part.axis != "ffn":
        return False
    fields = {key: one for key, one in word.given(value if colon else None).items() if one is not None}
    networks = [block.ffn for block in config.layers()]
    return all(ffn is not None and ffn.kind == part.kind and ffn.replace(**fields) == ffn for ffn in networks)


def holds(change: str, config: ModelConfig) -> bool:
    """Returns True if a config already has what a change would set, so that the change has no effect."""
    try:
        return change_of(change)(config) == config
    except RequestError:
        return False


def has_word(config: ModelConfig, name: str) -> bool:
    """Returns True if a model has the part that the short name `name` denotes, whatever its value."""
    word, part = WORDS.get(name, (None, None))
    if word is None or word.read is None or word.optional:
        return holds(name, config)
    if word.change:
        values = {dict(block.mixer).get(word.change) for block in config.layers()} - {None, 1}
        return any(holds(f"{name}:{value}", config) for value in values if isinstance(value, int | float))
    return part is not None and _within(config, part)


def _within(value: Any, part: type) -> bool:
    if isinstance(value, part):
        return True
    if isinstance(value, tuple):
        return any(_within(one, part) for one in value)
    return isinstance(value, Value) and any(_within(held, part) for _, held in value)


def change_of(text: str) -> Change:
    """Returns the function from config to config that one change of an expression means. Raises RequestError."""
    path, equals, value = text.partition("=")
    if equals:
        return partial(assign, path=path.strip(), value=value.strip())
    name, colon, value = text.partition(":")
    given = value if colon else None
    if name in OF_MODEL:
        word, of_model = OF_MODEL[name]
        own = word.given(given)
        return lambda config: of_model(config, own)
    if name not in WORDS:
        load_installed()
    if name in WORDS:
        word, part = WORDS[name]
        fields = word.given(given)
        if word.change:
            return partial(each_mixer, change=word.change, value=fields[word.change])
        return lambda config: JOIN[part.axis](config, part, fields)
    raise unknown_change(name, changes())
