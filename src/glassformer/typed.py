"""Checks of the arguments of public functions against their annotations."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from glassformer.errors import RequestError, did_you_mean, shown

F = TypeVar("F", bound=Callable[..., Any])
NUMBERS = {int: Integral, float: Real}
UNION = (Union, UnionType)
IN_WORDS: dict[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "True or False", Path: "a path",
    Callable: "a function", Sequence: "a list", Iterable: "a list", Mapping: "a mapping",
}  # fmt: skip
"""Type -> its name in messages; other types go by their Python names"""


def typed(function: F) -> F:
    """Checks arguments before each call of the function: unknown ones, and values of another type than the annotation,
    raise RequestError. Items of containers, words of a choice, and annotations of tensors are left to the function."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        signature, hints = _declared(function)
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise _misfit(signature, options, error) from None
        for name, value in [*given.items(), *options.items()]:
            if name in hints and not _fits(value, hints[name]):
                expected = " or ".join(dict.fromkeys(_names(hints[name])))
                message = f"{name}={shown(value, 40)} must be {expected}, not {type(value).__name__}"
                raise RequestError(message, code="type", field=name, value=shown(value), expected=expected)
        return function(*args, **options)

    return call  # type: ignore[return-value]


@cache
def _declared(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Returns the signature, and {parameter: annotation}. Annotations with names that only type checkers import are
    omitted; the keywords of a TypedDict count as parameters."""
    signature = inspect.signature(function)
    space = vars(sys.modules[function.__module__])
    hints: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        try:
            hint = get_type_hints(SimpleNamespace(__annotations__={name: parameter.annotation}), space)[name]
        except NameError:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            hints |= get_type_hints(get_args(hint)[0]) if is_typeddict(next(iter(get_args(hint)), None)) else {}
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            hints[name] = hint
    return signature, hints


def _misfit(signature: inspect.Signature, options: Mapping[str, Any], error: TypeError) -> RequestError:
    """Returns the error for a call that does not fit the signature: an unknown keyword with similar known ones, or
    Python's message about a missing or repeated argument."""
    known = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_POSITIONAL]
    unknown = next((name for name in options if name not in known), None)
    if unknown is None:
        return RequestError(str(error), code="missing" if "missing" in str(error) else "conflict", field="arguments")
    message = f"unknown argument {shown(unknown)}{did_you_mean(unknown, known) or '; known here: ' + ', '.join(known)}"
    return RequestError(message, code="unknown", field=unknown, expected=", ".join(known))


def _fits(value: Any, hint: Any) -> bool:
    """Returns False only if the value certainly does not have the annotated type."""
    kind = get_origin(hint)
    if kind in UNION:
        return any(_fits(value, one) for one in get_args(hint))
    if kind is Annotated:
        return _fits(value, get_args(hint)[0])
    if kind is Literal:
        return True  # left to the function, which suggests similar names
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if hint is None:
        return value is None
    kind = kind or hint
    if kind is Any or not isinstance(kind, type) or kind.__module__.startswith("jaxtyping"):
        return True
    if getattr(kind, "_is_protocol", False):
        asked = [*vars(kind), *vars(kind).get("__annotations__", ())]
        return all(hasattr(value, name) for name in asked if not name.startswith("_"))
    if kind.__module__ == "collections.abc" and not issubclass(kind, (Mapping, Callable)):  # type: ignore[arg-type]
        return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    inner = getattr(value, "_orig_mod", value)  # a compiled model's module, under torch's name for it
    return isinstance(value, kind) or isinstance(inner, kind)


def _names(hint: Any) -> Iterator[str]:
    """Yields the names of the types that the annotation allows, for a message."""
    kind = get_origin(hint)
    if kind in UNION:
        for one in get_args(hint):
            yield from _names(one)
    elif kind is Annotated:
        yield from _names(get_args(hint)[0])
    elif kind is Literal:
        yield from map(str, get_args(hint))
    elif hint in (None, NoneType):
        yield "None"
    else:
        yield IN_WORDS.get(kind or hint, getattr(kind or hint, "__name__", str(hint)))
