"""Normalisation of the residual stream, one token at a time."""

from glassformer.parts.norm.base import Norm, NormConfig
from glassformer.parts.norm.batchnorm import BatchNorm, BatchNormConfig
from glassformer.parts.norm.identity import Identity, IdentityConfig
from glassformer.parts.norm.layernorm import LayerNorm, LayerNormConfig
from glassformer.parts.norm.rmsnorm import RMSNorm, RMSNormConfig

__all__ = [
    "BatchNorm",
    "BatchNormConfig",
    "Identity",
    "IdentityConfig",
    "LayerNorm",
    "LayerNormConfig",
    "Norm",
    "NormConfig",
    "RMSNorm",
    "RMSNormConfig",
]
