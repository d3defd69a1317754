"""Projections to queries, keys and values: one fused layer, separate layers, or keys and values from another
sequence."""

from glassformer.parts.projection.base import (
    MakeProjection,
    MapShape,
    MemoryProjectionConfig,
    Projection,
    ProjectionConfig,
    SelfProjectionConfig,
)
from glassformer.parts.projection.cross import CrossQKV, CrossQKVConfig, MakeCrossProjection
from glassformer.parts.projection.fused import FusedQKV, FusedQKVConfig
from glassformer.parts.projection.separate import SeparateQKV, SeparateQKVConfig

__all__ = [
    "CrossQKV",
    "CrossQKVConfig",
    "FusedQKV",
    "FusedQKVConfig",
    "MakeCrossProjection",
    "MakeProjection",
    "MapShape",
    "MemoryProjectionConfig",
    "Projection",
    "ProjectionConfig",
    "SelfProjectionConfig",
    "SeparateQKV",
    "SeparateQKVConfig",
]
