"""Mixers move information between tokens."""

from glassformer.parts.mixer.attention import Attention, AttentionConfig, QKNormConfig
from glassformer.parts.mixer.base import DotProduct, EffectiveMaps, Heads, Mixer, MixerChange, MixerConfig, keys_before
from glassformer.parts.mixer.cross_attention import CrossAttention, CrossAttentionConfig
from glassformer.parts.mixer.linear_attention import LinearAttention, LinearAttentionConfig
from glassformer.parts.mixer.mamba import Mamba, MambaConfig
from glassformer.parts.mixer.recurrent import RecurrentState

__all__ = [
    "Attention",
    "AttentionConfig",
    "CrossAttention",
    "CrossAttentionConfig",
    "DotProduct",
    "EffectiveMaps",
    "Heads",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba",
    "MambaConfig",
    "Mixer",
    "MixerChange",
    "MixerConfig",
    "QKNormConfig",
    "RecurrentState",
    "keys_before",
]
