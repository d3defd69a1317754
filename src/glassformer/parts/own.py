"""Names that a file with a new part needs, in one module to import from.

>>> from glassformer.parts.own import FFN, FFNConfig, Linear, linear_cost
"""

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole
from glassformer.parts.ffn import FFN, FFNConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear, Matrix, linear_cost
from glassformer.parts.mixer import Mixer, MixerConfig, RecurrentState, keys_before
from glassformer.parts.norm import Norm, NormConfig
from glassformer.parts.norm.base import norm_cost
from glassformer.parts.precision import wide

__all__ = [
    "BuildContext", "Cost", "FFN", "FFNConfig", "Init", "Linear", "Matrix", "Mixer", "MixerConfig", "Norm",
    "NormConfig", "Pass", "RecurrentState", "Shape", "Site", "Word", "keys_before", "linear_cost", "norm_cost",
    "whole", "wide",
]  # fmt: skip
