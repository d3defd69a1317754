"""Mixers move information between tokens."""

from glassformer.parts.mixer.attention import Attention, AttentionConfig, QKNormConfig
from glassformer.parts.mixer.base import Mixer, MixerConfig
from glassformer.parts.mixer.mamba import Mamba, MambaConfig

__all__ = ["Attention", "AttentionConfig", "Mamba", "MambaConfig", "Mixer", "MixerConfig", "QKNormConfig"]
