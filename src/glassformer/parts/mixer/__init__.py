"""Mixers move information between tokens."""

from glassformer.parts.mixer.attention import Attention, AttentionConfig, QKNormConfig
from glassformer.parts.mixer.base import Mixer, MixerConfig

__all__ = ["Attention", "AttentionConfig", "Mixer", "MixerConfig", "QKNormConfig"]
