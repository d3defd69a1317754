"""Visibility (attention mask): a predicate on index tensors, with facts about its shape for kernels."""

from glassformer.parts.visibility.base import Borders, Needed, SameDocument, Spans, Visibility, VisibilityConfig
from glassformer.parts.visibility.bidirectional import Bidirectional, BidirectionalConfig
from glassformer.parts.visibility.bigbird import BigBird, BigBirdConfig
from glassformer.parts.visibility.causal import Causal, CausalConfig
from glassformer.parts.visibility.chunked import Chunked, ChunkedConfig
from glassformer.parts.visibility.dilated import Dilated, DilatedConfig
from glassformer.parts.visibility.longformer import Longformer, LongformerConfig
from glassformer.parts.visibility.memory import ChunksOfMemory, OfMemory
from glassformer.parts.visibility.prefix import Prefix, PrefixConfig
from glassformer.parts.visibility.sliding_window import SlidingWindow, SlidingWindowConfig

__all__ = [
    "Bidirectional",
    "BidirectionalConfig",
    "BigBird",
    "BigBirdConfig",
    "Borders",
    "Causal",
    "CausalConfig",
    "Chunked",
    "ChunkedConfig",
    "ChunksOfMemory",
    "Dilated",
    "DilatedConfig",
    "Longformer",
    "LongformerConfig",
    "Needed",
    "OfMemory",
    "Prefix",
    "PrefixConfig",
    "SameDocument",
    "SlidingWindow",
    "SlidingWindowConfig",
    "Spans",
    "Visibility",
    "VisibilityConfig",
]
