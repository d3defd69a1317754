"""Kernels of attention, which compute softmax(q k^T) v. `naive` is the definition; every other kernel equals it."""

from glassformer.parts.kernel.auto import Auto, AutoConfig
from glassformer.parts.kernel.banded import Banded, BandedConfig
from glassformer.parts.kernel.base import (
    AttentionCall,
    CallFacts,
    HeadLayout,
    Index,
    KeptTensors,
    Kernel,
    KernelConfig,
    ScoreBias,
    softcap,
)
from glassformer.parts.kernel.direct import Direct, DirectConfig
from glassformer.parts.kernel.flex import Flex, FlexConfig
from glassformer.parts.kernel.naive import Naive, NaiveConfig, attention_pattern, attention_rows, naive_attention
from glassformer.parts.kernel.sdpa import Sdpa, SdpaConfig

__all__ = [
    "AttentionCall",
    "Auto",
    "AutoConfig",
    "Banded",
    "BandedConfig",
    "CallFacts",
    "Direct",
    "DirectConfig",
    "Flex",
    "FlexConfig",
    "Index",
    "HeadLayout",
    "KeptTensors",
    "Kernel",
    "KernelConfig",
    "Naive",
    "NaiveConfig",
    "ScoreBias",
    "Sdpa",
    "SdpaConfig",
    "attention_pattern",
    "attention_rows",
    "naive_attention",
    "softcap",
]
