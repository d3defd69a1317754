"""What every part's config shares: it is a frozen value, its class is the choice, and it knows what it costs.

A part is an `nn.Module` plus, beside it, a frozen config that builds it. `kind` names the config's class in
files and nowhere else. A class outside this package that subclasses an axis (say `NormConfig`) and gives
itself a `kind` can be written to and read from files as soon as it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

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
    """A module of another part, outside the module tree of the part that holds this: parameters, state_dict and sites
    have the module once, where its owner is."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@dataclass(frozen=True)
class BuildContext:
    """What a part may know of the model around it; passed down, never looked up."""

    d_model: int
    vocab_size: int
    context: int
    """Tokens the model is trained to read at once."""
    n_layers: int
    reparam: Any = None
    """Config of how linear maps hold their matrices (`parts/reparam.py`); None: as they are."""
    mup: Any = None
    """What scales with the width (`parts/mup.py`); None: the standard parametrisation."""
    branches: int | None = None
    """Residual additions in the whole stack; None: two for each layer."""
    memory_width: int | None = None
    """Width of the other sequence that layers read; None: d_model."""
    tower: str = ""
    """Which tower of the model this is: the model itself, or its "encoder"."""

    # What the part around it says, by `within`

    width: int | None = None
    """Values of the vectors that a norm or a reparametrised map works on; None: d_model."""
    sets: int | None = None
    """Vectors per token, each with weights of its own, (..., sets, width); None: one set of weights."""
    outs: tuple[int, ...] = ()
    """Outputs of each of the maps stacked in one matrix."""
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int | None = None
    """Values per head of v and z; by default head_dim."""
    bias: bool = False
    """Whether its linear maps have a bias."""
    sees_later: bool = False
    """Whether a token may attend to later ones."""
    norm: PartConfig | None = None
    """The norm that the wiring of a block places."""
    feeds_products: bool = False
    """True if only matrix products read what a norm makes."""
    has_ffn: bool = True

    _layer: int = 0
    _asked: list[int] = field(default_factory=list, compare=False, repr=False)
    _shared: dict[Hashable, nn.Module] = field(default_factory=dict, compare=False, repr=False)
    _offered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n_branches(self) -> int:
        """2 L: the residual additions of the whole stack, on which depth factors of weights and wirings depend."""
        return 2 * self.n_layers if self.branches is None else self.branches

    @property
    def layer(self) -> int:
        """Which layer of the stack is built; blocks whose parts do not ask are alike where their configs are."""
        self._asked.append(self._layer)
        return self._layer

    @property
    def asked(self) -> bool:
        """Whether somebody wanted to know which layer this is."""
        return bool(self._asked)

    def shared(self, key: Hashable, make: Callable[[], nn.Module]) -> nn.Module | Reference:
        """A module that several parts of a model share, as T5's layers share a table of relative biases: `make()` for
        the first part that asks for `key`, which owns it, and a `Reference` to it for the others. Both are called
        alike.

        The key names everything that `make` depends on. A part that asks is built for each layer by itself. Share a
        module that holds a `Linear` rather than the `Linear`, which quantisation replaces."""
        self._asked.append(self._layer)
        if key in self._shared:
            return Reference(self._shared[key])
        self._shared[key] = made = make()
        return made

    def offer(self, key: Hashable, value: Any) -> None:
        """Tells the layers above what this one will hand them in each pass (`Pass.share`), the latest for a key."""
        self._asked.append(self._layer)
        self._offered[key] = value

    def offered(self, key: Hashable) -> Any:
        """What the nearest layer below has offered. Raises RequestError where none has."""
        self._asked.append(self._layer)
        if key not in self._offered:
            given = ", ".join(map(repr, self._offered)) or "nothing"
            raise RequestError(
                f"layer {self._layer} takes {key!r} of a layer below, and none offers it; offered are {given}",
                code="missing", field=f"layers.{self._layer}.mixer", value=key, expected=given,
            )  # fmt: skip
        return self._offered[key]

    def within(self, **changes: Any) -> BuildContext:
        """The context of a part inside this one: the same model, with some of the fields above changed."""
        return replace(self, **changes)

    @property
    def make_reparam(self) -> Callable[[int, tuple[int, ...]], Any] | None:
        """(in_features, outs) -> the reparametrisation of such a map; None where maps are as they are."""
        config = self.reparam
        return None if config is None else lambda i, outs: config.build(self.within(width=i, outs=outs))

    def at(self, layer: int) -> BuildContext:
        return replace(self, _layer=layer, _asked=[])


def refuse_truth(value: Any) -> Any:
    """For a validator of numbers: to Python, True is 1."""
    if isinstance(value, bool):
        raise ValueError("a number is right here, not true or false")
    return value


class Value(BaseModel):
    """A frozen tree of plain values; unknown keys are refused."""

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
        """A validated copy with some fields changed."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


def to_plain(value: Any) -> Any:
    """A config as dicts, lists and scalars, `kind` first; the inverse of validation."""
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
"""Short name -> its declaration and the part that it names, for every part imported so far."""


def of_kind(part: dict[str, Any], kind: str) -> dict[str, Any]:
    """A part, as `to_plain` gives it, as another kind of its axis, with the fields that both have. One that its axis
    does not have is left for validation to refuse."""
    fields = part.keys() - {"kind"}
    was = [known for known in _CLASSES if known.kind == part["kind"] and known.model_fields.keys() == fields]
    chosen = next((one for one in _CLASSES if one.kind == kind and one.axis in {known.axis for known in was}), None)
    if chosen is None:
        return {**part, "kind": kind}
    apart = chosen.homonyms.union(*(known.homonyms for known in was)) if chosen not in was else set()
    kept = {name: part[name] for name in chosen.model_fields if name in part and name not in apart}
    return {**kept, "kind": kind}


class PartConfig(Value):
    """The config of one part.

    An axis subclasses this with `axis="norm"`; a choice subclasses the axis with `kind="rmsnorm"`. Fields of an
    axis' type accept an instance, or a mapping with the `kind` of any registered choice.
    """

    axis: ClassVar[str] = "part"
    kind: ClassVar[str] = ""

    words: ClassVar[tuple[Word, ...]] = ()
    """Its short names in expressions (`parts/core/words.py`)."""
    caution: ClassVar[str] = ""
    """A sentence that a change to this part warns of."""
    homonyms: ClassVar[frozenset[str]] = frozenset()
    """Fields that mean something else than the fields of that name of other choices."""

    def __init_subclass__(cls, *, axis: str = "", kind: str = "", words: Words = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if axis:
            cls.axis = axis
        cls.kind, cls.words = kind, as_words(words)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Registers a finished class; of two with one kind, the later. Raises TypeError for a choice that does not
        answer all that its axis asks, and ValueError for a short name that another part has."""
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
        """kind -> class, for every registered choice of this axis."""
        return {known.kind: known for known in _CLASSES if issubclass(known, cls)}

    @classmethod
    def replacing(cls, old: Any, **fields: Any) -> Any:
        """Returns this choice in place of `old`, another of its axis or None, with the fields that a word sets and
        those that `old` leaves. A choice of this class keeps all its fields."""
        return old.replace(**fields) if type(old) is cls else cls(**{**cls.kept_of(old), **fields})

    @classmethod
    def kept_of(cls, old: PartConfig | None) -> dict[str, Any]:
        """Returns the fields that another choice of the axis leaves to this one: what all choices of the axis have, and
        of what both have, the values that were chosen, which are those other than the default."""
        if old is None:
            return {}
        axis = next(known for known in cls.__mro__ if "axis" in vars(known))
        shared = {name for name in cls.model_fields if name in axis.model_fields}  # type: ignore[attr-defined]
        chosen = {name for name in old.choices_made() if name in cls.model_fields and same_type(cls, type(old), name)}
        return {name: getattr(old, name) for name in shared | (chosen - cls.homonyms - old.homonyms)}

    def choices_made(self) -> dict[str, Any]:
        """Returns the fields that have another value than the default, or no default."""
        fields = {name: (getattr(self, name), one) for name, one in type(self).model_fields.items()}
        return {
            name: value
            for name, (value, one) in fields.items()
            if one.is_required() or value != one.get_default(call_default_factory=True)
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.kind:  # a concrete choice: its own fields, with `kind` allowed and checked
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

    # What a part answers about itself. Block and Model only add the costs.

    def build(self, ctx: BuildContext) -> Any:
        """The module this config describes, or a plain object where the axis has no weights; each axis names the type.
        A part builds its own parts by `self.part.build(ctx)`, or `ctx.within(...)` where they need to know more."""
        raise NotImplementedError(f"{type(self).__name__} builds nothing")

    def resolved(self, ctx: BuildContext) -> Any:
        """The same part with the defaults that depend on the model written out, and without what only training and
        speed know (dropout, kernel): equal for parts that compute the same with the same weights."""
        return self

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Parameters, FLOPs and bytes of what `build` returns, for this shape (`parts/core/cost.py`). Axes whose parts
        have weights leave no default."""
        return Cost()

    def num_params(self, ctx: BuildContext) -> int:
        """Exact number of trainable values in what `build` returns."""
        return self.costs(ctx, Shape()).parameters


def same_type(one: type[BaseModel], other: type[BaseModel], name: str) -> bool:
    """Returns True if a field of two classes can have a common value other than None."""
    mine, theirs = (
        {*(get_args(annotation) or (annotation,))} - {type(None)}
        for annotation in (cls.model_fields[name].annotation for cls in (one, other))
    )
    return not mine.isdisjoint(theirs)


def part_classes(value: Any) -> Iterator[type[PartConfig]]:
    """The class of every part in a tree of configs."""
    if isinstance(value, PartConfig):
        yield type(value)
    inner = [part for _, part in value] if isinstance(value, BaseModel) else value
    for part in inner if isinstance(inner, (list, tuple)) else ():
        yield from part_classes(part)


def after_step(model: nn.Module) -> None:
    """To be called after every optimizer step: modules with an `after_step()` move what no gradient moves."""
    for module in model.modules():
        if (move := getattr(type(module), "after_step", None)) is not None:  # of a module itself torch searches longer
            move(module)
