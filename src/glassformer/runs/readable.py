"""Results from a file that may be partial or damaged, as far as they can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, RootModel

Model = TypeVar("Model", bound=BaseModel)


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, otherwise an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[Any]:
    """The value as a list if it is one, otherwise an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def readable(cls: type[Model], tree: object) -> Model:
    """`cls` from any tree, without validation: for pages about files that nobody has checked.

    Mappings and lists are as the type says, empty where the tree has something else; items of a list of mappings that
    are none are left out. Numbers and words are taken as they are, of whatever type, and None where they are missing:
    the reader guards them.
    """
    if issubclass(cls, RootModel):
        return cls.model_construct(mapping(tree))  # type: ignore[return-value]
    given = mapping(tree)
    names = {field.alias or name: name for name, field in cls.model_fields.items()}
    values = {name: _read(cls.model_fields[name].annotation, given.get(key)) for key, name in names.items()}
    others = {key: value for key, value in given.items() if key not in names}
    present = {names.get(key, key) for key in given}
    return cls.model_construct(_fields_set=present, **values, **others)


def _read(kind: Any, value: Any) -> Any:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        items = sequence(value)
        models = isinstance(inner[0], type) and issubclass(inner[0], BaseModel)
        return [_read(inner[0], item) for item in items if not models or isinstance(item, Mapping)]
    if origin is tuple:
        return tuple(sequence(value))
    if origin is dict:
        return {key: _read(inner[1], item) for key, item in mapping(value).items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return readable(kind, value)
    optional = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
    if optional is not None:
        return readable(optional, value) if isinstance(value, Mapping) else None
    return value
