"""Base of the configs of all parts: frozen values, whose class selects a part, builds it and counts its costs.

A part is an `nn.Module` and, in the same file, a frozen config that builds it. `kind` names the config's class in files
and nowhere else. A class outside this package that subclasses an axis (such as `NormConfig`) and sets `kind` can be
written to and read from files as soon as it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from torch import nn

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.outside import GROUP, keep_source, load_installed
from glassformer.parts.core.refused import request_error
from glassformer.parts.core.words import Word, Words, as_words


class Reference:
    """Reference to a module of another part, outside the module tree of the part that holds it: parameters, state_dict
    and sites list the module once, under the part that owns it."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@dataclass(frozen=True)
class BuildContext:
    """Facts about the model and the enclosing part, passed to the methods of a config that build a part or count its
    costs."""

    d_model: int
    vocab_size: int
    context: int
    """Number of tokens of a training sequence."""
    n_layers: int
    reparam: Any = None
    """Config of the reparametrisation of linear layers (`parts/reparam.py`); None for plain weights."""
    mup: Any = None
    """Config of muP, the scaling with the width (`parts/mup.py`); None for the standard parametrisation."""
    branches: int | None = None
    """Number of residual additions in the whole stack; None for two per layer."""
    memory_width: int | None = None
    """Width of the other sequence that cross-attention reads, such as the encoder's output; None for d_model."""
    tower: str = ""
    """Name of the stack of layers that is built: "" for the model's main one, or "encoder"."""

    # Fields that an enclosing part sets by `within`

    width: int | None = None
    """Width of the vectors that a norm or a reparametrised linear layer processes; None for d_model."""
    sets: int | None = None
    """Number of vectors per token that a norm scales by separate weights, such as one per head, for an input (...,
    sets, width); None for one vector per token."""
    outs: tuple[int, ...] = ()
    """Output widths of the linear layers stacked in one matrix, for the reparametrisation of that matrix."""
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int | None = None
    """Width per head of the values v and of the attention output z; None for head_dim."""
    bias: bool = False
    """True if the linear layers of the enclosing part, such as a mixer, have a bias."""
    sees_later: bool = False
    """True if a token may attend to later tokens (bidirectional attention)."""
    norm: PartConfig | None = None
    """Config of the norm that the residual wiring of a block builds; None outside a block."""
    feeds_products: bool = False
    """True if only matmuls read the output of the norm that is built, which may then have their dtype."""
    has_ffn: bool = True

    _layer: int = 0
    _asked: list[int] = field(default_factory=list, compare=False, repr=False)
    _shared: dict[Hashable, nn.Module] = field(default_factory=dict, compare=False, repr=False)
    _offered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n_branches(self) -> int:
        """Number of residual additions of the whole stack, by default two per layer: the depth for scaling initial
        weights and residual wirings."""
        return 2 * self.n_layers if self.branches is None else self.branches

    @property
    def layer(self) -> int:
        """Index of the layer that is built. A part that reads this property is built separately for each layer; other
        parts are equal in layers with equal configs."""
        self._asked.append(self._layer)
        return self._layer

    @property
    def asked(self) -> bool:
        """True if a part has read the index of the layer, or shared something with other layers, so that layers may
        differ."""
        return bool(self._asked)

    def shared(self, key: Hashable, make: Callable[[], nn.Module]) -> nn.Module | Reference:
        """Returns a module that several parts of a model share, as T5's layers share a table of relative biases:
        `make()` for the first part with this `key`, which owns it, and a `Reference` to it for the others. Both are
        called alike.

        The key names everything that `make` depends on. A part that shares a module is built separately for each layer.
        Share a module that holds a `Linear` rather than the `Linear`, which quantisation replaces."""
        self._asked.append(self._layer)
        if key in self._shared:
            return Reference(self._shared[key])
        self._shared[key] = made = make()
        return made

    def offer(self, key: Hashable, value: Any) -> None:
        """Announces, while the model is built, that this layer will share a value, such as its keys and values, under
        `key` in each pass (`Pass.share`). `value` describes it to later layers (`offered`); a later offer under the
        same key replaces an earlier one."""
        self._asked.append(self._layer)
        self._offered[key] = value

    def offered(self, key: Hashable) -> Any:
        """Returns the description of a shared value that the nearest earlier layer has announced under `key` by
        `offer`. Raises RequestError without such a layer."""
        self._asked.append(self._layer)
        if key not in self._offered:
            given = ", ".join(map(repr, self._offered)) or "nothing"
            raise RequestError(
                f"layer {self._layer} takes {key!r} of a layer below, and none offers it; offered are {given}",
                code="missing", field=f"layers.{self._layer}.mixer", value=key, expected=given,
            )  # fmt: skip
        return self._offered[key]

    def within(self, **changes: Any) -> BuildContext:
        """Returns the context of a part inside this one: the same model, with some fields changed."""
        return replace(self, **changes)

    @property
    def make_reparam(self) -> Callable[[int, tuple[int, ...]], Any] | None:
        """Function of (in_features, outs) that builds the reparametrisation of a linear layer (its effective matrix
        computed from the trained one); None for plain weights."""
        config = self.reparam
        return None if config is None else lambda i, outs: config.build(self.within(width=i, outs=outs))

    def at(self, layer: int) -> BuildContext:
        return replace(self, _layer=layer, _asked=[])


def refuse_truth(value: Any) -> Any:
    """Returns `value` unchanged, as a validator of number fields; raises ValueError for True and False, because Python
    counts True as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


class Value(BaseModel):
    """Base of configs: a frozen tree of plain values, validated by pydantic, that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise request_error(error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # fields of other values need no call of it

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                near = did_you_mean(str(name), cls.model_fields)
                raise PydanticCustomError("unknown_field", "unknown field {name}{near}",
                    {"name": shown(name), "near": near or f"; known here: {', '.join(cls.model_fields)}"})  # fmt: skip
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        kinds = [annotation, *get_args(annotation)]
        return refuse_truth(value) if bool not in kinds and (int in kinds or float in kinds) else value

    def replace(self, **changes: Any) -> Any:
        """Returns a validated copy of this value with some fields changed."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


def to_plain(value: Any) -> Any:
    """Returns a config as dicts, lists and scalars, with `kind` as the first key of each part's dict; validating the
    result gives the config back."""
    if isinstance(value, PartConfig):
        fields = {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
        return {"kind": value.kind, **fields}
    if isinstance(value, BaseModel):
        return {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


_CLASSES: list[type[PartConfig]] = []
WORDS: dict[str, tuple[Word, type[PartConfig]]] = {}
"""Mapping from each short name, of every part imported so far, to (its declaration, the config class that it
selects)."""


def of_kind(part: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns `part`, a config as a dict from `to_plain`, converted to another kind of its axis, such as from layernorm
    to rmsnorm: only fields that both kinds have, with one meaning, are kept. An unknown kind is inserted unchanged, and
    refused later by validation."""
    fields = part.keys() - {"kind"}
    was = [known for known in _CLASSES if known.kind == part["kind"] and known.model_fields.keys() == fields]
    chosen = next((one for one in _CLASSES if one.kind == kind and one.axis in {known.axis for known in was}), None)
    if chosen is None:
        return {**part, "kind": kind}
    apart = chosen.homonyms.union(*(known.homonyms for known in was)) if chosen not in was else set()
    kept = {name: part[name] for name in chosen.model_fields if name in part and name not in apart}
    return {**kept, "kind": kind}


class PartConfig(Value):
    """Base of the configs of parts.

    An axis, which is a place that a part fills, is a subclass with `axis="norm"`; a choice, one of the parts for that
    place, is a subclass of the axis with `kind="rmsnorm"`. A field of the type of an axis accepts an instance, or a
    mapping with the `kind` of any registered choice.
    """

    axis: ClassVar[str] = "part"
    kind: ClassVar[str] = ""

    words: ClassVar[tuple[Word, ...]] = ()
    """Short names of the part in expressions (`parts/core/words.py`)."""
    caution: ClassVar[str] = ""
    """Warning, one sentence, that is shown when a model is changed to use this part; empty for none."""
    homonyms: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that mean something else than equally named fields of other choices of the axis, and so are never
    copied between configs of the two."""

    def __init_subclass__(cls, *, axis: str = "", kind: str = "", words: Words = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if axis:
            cls.axis = axis
        cls.kind, cls.words = kind, as_words(words)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Registers a config class after its definition; a class replaces an earlier one of the same axis and kind.
        Raises TypeError for a choice that lacks a method its axis requires, and ValueError for a short name that
        another part has."""
        if cls.kind and (missing := sorted(cls.__abstractmethods__)):
            raise TypeError(f"{cls.axis} kind={cls.kind!r}: {cls.__name__} must define {', '.join(missing)}")
        me = (cls.axis, cls.kind)
        others = {name: known for name, (_, known) in WORDS.items() if (known.axis, known.kind) != me}
        for word in cls.words:
            if word.name in others:
                raise ValueError(f"the short name {word.name!r} of {cls.__name__} is {others[word.name].__name__}'s")
        keep_source(cls)
        if cls.kind:
            _CLASSES[:] = [*(known for known in _CLASSES if (known.axis, known.kind) != me), cls]
        WORDS.update({word.name: (word, cls) for word in cls.words})

    @classmethod
    def choices(cls) -> dict[str, type[PartConfig]]:
        """Returns {kind: class} for every registered choice of this axis."""
        return {known.kind: known for known in _CLASSES if issubclass(known, cls)}

    @classmethod
    def replacing(cls, old: Any, **fields: Any) -> Any:
        """Returns a config of this class to replace `old`, a config of the same axis or None for an absent part: with
        the given `fields`, and the fields that `kept_of` takes from `old`. If `old` is of this class, all its other
        fields are kept."""
        return old.replace(**fields) if type(old) is cls else cls(**{**cls.kept_of(old), **fields})

    @classmethod
    def kept_of(cls, old: PartConfig | None) -> dict[str, Any]:
        """Returns {name: value} of the fields of `old`, another choice of the axis, that a config of this class keeps
        when it replaces `old`: fields that the axis declares, and fields of both classes whose value in `old` is not
        the default. Empty for None."""
        if old is None:
            return {}
        axis = next(known for known in cls.__mro__ if "axis" in vars(known))
        shared = {name for name in cls.model_fields if name in axis.model_fields}  # type: ignore[attr-defined]
        chosen = {name for name in old.choices_made() if name in cls.model_fields and same_type(cls, type(old), name)}
        return {name: getattr(old, name) for name in shared | (chosen - cls.homonyms - old.homonyms)}

    def choices_made(self) -> dict[str, Any]:
        """Returns {name: value} of the fields of this config whose value is not the default, or that have no
        default."""
        fields = {name: (getattr(self, name), one) for name, one in type(self).model_fields.items()}
        return {
            name: value
            for name, (value, one) in fields.items()
            if one.is_required() or value != one.get_default(call_default_factory=True)
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.kind:  # a concrete choice: its fields, with `kind` allowed and checked
            return core_schema.no_info_before_validator_function(cls._without_kind, handler(source))
        return core_schema.no_info_plain_validator_function(
            cls._choose, serialization=core_schema.plain_serializer_function_ser_schema(to_plain)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if cls.kind:
            body = handler.resolve_ref_schema(written := handler(schema))
            body["properties"] = {"kind": {"const": cls.kind}, **body.get("properties", {})}
            return written
        return {"x-axis": cls.__name__}  # config.py replaces this by the choices known at that moment

    @classmethod
    def _without_kind(cls, value: Any) -> Any:
        if isinstance(value, dict) and "kind" in value:
            if value["kind"] != cls.kind:
                raise PydanticCustomError("kind", "kind is {given} where {kind} is meant",
                                          {"given": shown(value["kind"]), "kind": cls.kind})  # fmt: skip
            value = {name: field for name, field in value.items() if name != "kind"}
        return value

    @classmethod
    def _choose(cls, value: Any) -> PartConfig:
        if isinstance(value, str):
            value = {"kind": value}
        choices = cls.choices()
        if isinstance(value, PartConfig):
            kind, found = value.kind, value if isinstance(value, cls) else None
        elif isinstance(value, dict) and isinstance(value.get("kind"), str):
            kind = value["kind"]
            if kind not in choices and load_installed():
                choices = cls.choices()
            found = choices[kind].model_validate(value) if kind in choices else None
        else:
            raise PydanticCustomError("part", "a {axis} is a mapping with a kind, one of {known}",
                                      {"axis": cls.axis, "known": ", ".join(sorted(choices))})  # fmt: skip
        if found is None:
            outside = " (for your part, import its module first, with --import FILE.py on the command line, or "
            outside += "install it as an entry point of "
            raise PydanticCustomError(
                "part", "unknown {axis} kind {kind}; known: {known}{hint}",
                {"kind": shown(kind), "axis": cls.axis, "known": ", ".join(sorted(choices)),
                 "hint": did_you_mean(kind, choices) or f"{outside}{GROUP})"},
            )  # fmt: skip
        return found

    # Answers of a part about itself. Block and Model only add the costs.

    def build(self, ctx: BuildContext) -> Any:
        """Returns the module that this config describes, or a plain object for an axis without weights; each axis names
        the type. A part builds its inner parts by `self.part.build(ctx)`, or with `ctx.within(...)` if they need
        further facts."""
        raise NotImplementedError(f"{type(self).__name__} builds nothing")

    def resolved(self, ctx: BuildContext) -> Any:
        """Returns this config with all defaults that depend on the model filled in, and without fields that matter only
        for training and speed (dropout, kernel): equal for parts that compute the same function of equal weights."""
        return self

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns parameters, FLOPs and bytes of the built part for the workload `shape` (`parts/core/cost.py`). Axes
        whose parts have weights must define this method."""
        return Cost()

    def num_params(self, ctx: BuildContext) -> int:
        """Returns the exact number of trainable values of the module that this config builds."""
        return self.costs(ctx, Shape()).parameters


def same_type(one: type[BaseModel], other: type[BaseModel], name: str) -> bool:
    """Returns True if the field `name` has, in the two config classes, annotations with a common type other than
    None."""
    mine, theirs = (
        {*(get_args(annotation) or (annotation,))} - {type(None)}
        for annotation in (cls.model_fields[name].annotation for cls in (one, other))
    )
    return not mine.isdisjoint(theirs)


def part_classes(value: Any) -> Iterator[type[PartConfig]]:
    """Yields the class of every part config in a tree of configs."""
    if isinstance(value, PartConfig):
        yield type(value)
    inner = [part for _, part in value] if isinstance(value, BaseModel) else value
    for part in inner if isinstance(inner, (list, tuple)) else ():
        yield from part_classes(part)


def moves_of(model: nn.Module) -> list[Callable[[], None]]:
    """Returns the method `after_step` of every module of the model that has one."""
    # of the class: an instance is slow to ask
    found = [module for module in model.modules() if hasattr(type(module), "after_step")]
    return [cast(Callable[[], None], module.after_step) for module in found]


def after_step(model: nn.Module) -> None:
    """Calls the method `after_step()` of every module of the model that has one, for updates without a gradient; to be
    called after each optimizer step."""
    for move in moves_of(model):
        move()
