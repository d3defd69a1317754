"""Parts of models: everything that a part of your own is made of can be imported from here.

>>> from glassformer.parts import FFN, FFNConfig, Linear, linear_cost

Names are imported when first used, so that importing one part does not import all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.parts.core.base import BuildContext as BuildContext
    from glassformer.parts.core.cost import Cost as Cost
    from glassformer.parts.core.cost import Shape as Shape
    from glassformer.parts.core.init import Init as Init
    from glassformer.parts.core.site import Site as Site
    from glassformer.parts.core.words import Word as Word
    from glassformer.parts.core.words import whole as whole
    from glassformer.parts.ffn import FFN as FFN
    from glassformer.parts.ffn import FFNConfig as FFNConfig
    from glassformer.parts.forward_pass import Pass as Pass
    from glassformer.parts.linear import Linear as Linear
    from glassformer.parts.linear import Matrix as Matrix
    from glassformer.parts.linear import linear_cost as linear_cost
    from glassformer.parts.mixer import Mixer as Mixer
    from glassformer.parts.mixer import MixerConfig as MixerConfig
    from glassformer.parts.mixer import RecurrentState as RecurrentState
    from glassformer.parts.mixer import keys_before as keys_before
    from glassformer.parts.norm import Norm as Norm
    from glassformer.parts.norm import NormConfig as NormConfig
    from glassformer.parts.norm.base import norm_cost as norm_cost
    from glassformer.parts.precision import wide as wide

_HOMES = {
    "BuildContext": "core.base",
    "Cost": "core.cost",
    "FFN": "ffn",
    "FFNConfig": "ffn",
    "Init": "core.init",
    "Linear": "linear",
    "Matrix": "linear",
    "Mixer": "mixer",
    "MixerConfig": "mixer",
    "Norm": "norm",
    "NormConfig": "norm",
    "Pass": "forward_pass",
    "RecurrentState": "mixer",
    "Shape": "core.cost",
    "Site": "core.site",
    "Word": "core.words",
    "keys_before": "mixer",
    "linear_cost": "linear",
    "norm_cost": "norm.base",
    "whole": "core.words",
    "wide": "precision",
}
"""Module in which each name is defined."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
