"""Rotary positions in config.json: `rope_theta`, `rope_scaling`, `partial_rotary_factor` (transformers 4), or all of
them inside `rope_parameters` (transformers 5). They are written in the older form, which both read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from glassformer.conversion.fields import Fields
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.rotary import Pairing
from glassformer.parts.position.scaling import (
    DynamicNtkScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RotaryScalingConfig,
    YarnScalingConfig,
)


def read_rotary(
    fields: Fields,
    context: int,
    theta: float = 1e4,
    fraction: float = 1.0,
    pairing: Pairing = "half",
    fraction_name: str = "partial_rotary_factor",
    theta_name: str = "rope_theta",
) -> RotaryConfig:
    """Reads rotary positions from config.json; `theta` and `fraction` are the family's defaults, `theta_name` and
    `fraction_name` their fields.

    If both mappings are given the older one counts, and a trained context outside them takes precedence over one
    inside, as in transformers 5.23."""
    theta = fields.number(theta_name, theta)
    fraction = fields.number(fraction_name, fraction)
    return rotary(rope_fields(fields), fields, context, theta, fraction, pairing)


def rope_fields(fields: Fields) -> Fields:
    """Returns the fields inside `rope_scaling`, or inside `rope_parameters` if that is empty."""
    inside, outside = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if not outside.values:
        return inside
    inside.ignore(*inside.values)
    return outside


def rotary(
    said: Fields, fields: Fields, context: int, theta: float, fraction: float = 1.0, pairing: Pairing = "half"
) -> RotaryConfig:
    """Reads rotary positions from one mapping of rope parameters, `said`; `theta` and `fraction` are defaults, `fields`
    are the config's, which may also have the trained context."""
    return RotaryConfig(
        base=said.number("rope_theta", theta),
        fraction=said.number("partial_rotary_factor", fraction),
        pairing=pairing,
        scaling=_read_scaling(said, fields, context),
    )


def rotary_by_kind(
    fields: Fields, context: int, bases: Mapping[str, tuple[str, float]], scaled: Collection[str]
) -> dict[str, RotaryConfig]:
    """Reads the rotary positions of each kind of layer, {kind: config}, from `rope_parameters`[kind] or from older
    fields.

    `bases`: kind -> (older field of its base, the family's default); an outer `rope_scaling` applies to the kinds in
    `scaled`."""
    nested, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    scaling.only("type", None)  # `transformers` ignores it here
    positions = {}
    for kind, (word, theta) in bases.items():
        said = nested.mapping(kind).changed(scaling.values if kind in scaled else {})
        said.only("partial_rotary_factor", 1.0)
        said.only("truncate", True)
        positions[kind] = rotary(said, Fields({}), context, fields.number(word, theta))
        if kind in scaled:
            scaling.ignore(*said.seen)
    if others := sorted(nested.values.keys() - bases.keys()):
        raise nested.refuse(others[0], nested.values[others[0]], f"known are {' and '.join(bases)}")
    return positions


def _read_scaling(said: Fields, fields: Fields, context: int) -> RotaryScalingConfig | None:
    kind = said.get("rope_type") or said.get("type") or "default"
    said.seen.update(("rope_type", "type"))
    trained = "original_max_position_embeddings"
    original = fields.whole(trained, said.whole(trained, context))
    factor = said.number("factor", None)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScalingConfig(factor=said.number("factor"))
    if kind == "dynamic":
        return DynamicNtkScalingConfig(factor=said.number("factor"))
    if kind == "yarn":
        factor = factor or context / original
        return YarnScalingConfig(
            factor=factor,
            original_context=original,
            beta_fast=said.number("beta_fast", 32.0),
            beta_slow=said.number("beta_slow", 1.0),
            attention_factor=_yarn_magnitude(said, factor),
            whole_pairs=said.flag("truncate", True),
        )
    if kind == "llama3":
        return Llama3ScalingConfig(
            factor=said.number("factor"),
            original_context=original,
            low_freq_factor=said.number("low_freq_factor"),
            high_freq_factor=said.number("high_freq_factor"),
        )
    if kind in ("longrope", "su"):
        if original == 1:
            raise said.refuse(
                trained, original, "the magnitude of longrope divides by its logarithm; expected 2 or more"
            )
        return LongRopeScalingConfig(
            factor=factor or context / original,
            original_context=original,
            short=said.get("short_factor", ()),
            long=said.get("long_factor", ()),
            attention_factor=said.number("attention_factor", None),
        )
    raise said.refuse("rope_type", kind, "known are default, linear, dynamic, yarn, llama3 and longrope")


def _yarn_magnitude(said: Fields, factor: float) -> float | None:
    """Returns YaRN's factor on cos and sin: `attention_factor`, or a ratio of DeepSeek's mscale and mscale_all_dim;
    None if the fields give neither."""
    given = said.number("attention_factor", None)
    one, all_ = said.number("mscale", None), said.number("mscale_all_dim", None)
    if given is not None or not (one and all_) or factor <= 1:
        return given
    return (0.1 * one * math.log(factor) + 1) / (0.1 * all_ * math.log(factor) + 1)


def write_rotary(position: Any, fraction_name: str | None = None, theta_name: str = "rope_theta") -> dict[str, Any]:
    """Returns the fields of config.json for a rotary position; {} for another kind, so that reading gives the
    default."""
    if not isinstance(position, RotaryConfig):
        return {}
    said: dict[str, Any] = {theta_name: position.base}
    if fraction_name is not None:
        said[fraction_name] = position.fraction
    if position.scaling is not None:
        said["rope_scaling"] = write_scaling(position.scaling)
    return said


def write_scaling(scaling: RotaryScalingConfig) -> dict[str, Any]:
    """Returns `rope_scaling` of config.json for a scaling; a kind without a published name keeps its own, which is
    refused when read."""
    said: dict[str, Any] = {"rope_type": _KINDS.get(scaling.kind, scaling.kind)}
    for name, value in scaling:
        if value is not None:
            said[_FIELDS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return said


_KINDS = {"dynamic_ntk": "dynamic"}
_FIELDS = {
    "original_context": "original_max_position_embeddings",
    "whole_pairs": "truncate",
    "short": "short_factor",
    "long": "long_factor",
}
