"""Residual wirings: the places of branches and norms in the residual stream."""

from glassformer.parts.residual.base import Residual, ResidualConfig
from glassformer.parts.residual.deepnorm import DeepNorm, DeepNormConfig
from glassformer.parts.residual.no_residual import NoResidual, NoResidualConfig
from glassformer.parts.residual.normed import Normed, NormedConfig
from glassformer.parts.residual.parallel import Parallel, ParallelConfig
from glassformer.parts.residual.post import Post, PostConfig
from glassformer.parts.residual.pre import Pre, PreConfig
from glassformer.parts.residual.res_post import ResPost, ResPostConfig
from glassformer.parts.residual.sandwich import Sandwich, SandwichConfig

__all__ = [
    "DeepNorm",
    "DeepNormConfig",
    "NoResidual",
    "NoResidualConfig",
    "Normed",
    "NormedConfig",
    "Parallel",
    "ParallelConfig",
    "Post",
    "PostConfig",
    "Pre",
    "PreConfig",
    "ResPost",
    "ResPostConfig",
    "Residual",
    "ResidualConfig",
    "Sandwich",
    "SandwichConfig",
]
