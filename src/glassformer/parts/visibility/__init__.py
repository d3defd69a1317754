"""Who may look at whom: a predicate on index tensors, with what a kernel may know of its shape."""

from glassformer.parts.visibility.base import SameDocument, Visibility, VisibilityConfig
from glassformer.parts.visibility.bidirectional import Bidirectional, BidirectionalConfig
from glassformer.parts.visibility.causal import Causal, CausalConfig
from glassformer.parts.visibility.memory import OfMemory
from glassformer.parts.visibility.sliding_window import SlidingWindow, SlidingWindowConfig

__all__ = [
    "Bidirectional",
    "BidirectionalConfig",
    "Causal",
    "CausalConfig",
    "OfMemory",
    "SameDocument",
    "SlidingWindow",
    "SlidingWindowConfig",
    "Visibility",
    "VisibilityConfig",
]
