"""Mixers: the parts of a layer that move information between tokens."""

from glassformer.parts.mixer.attention import Attention, AttentionConfig
from glassformer.parts.mixer.base import DotProduct, EffectiveMaps, Heads, Mixer, MixerChange, MixerConfig, keys_before
from glassformer.parts.mixer.beside import Beside, BesideConfig
from glassformer.parts.mixer.conv import Conv, ConvConfig
from glassformer.parts.mixer.cross_attention import CrossAttention, CrossAttentionConfig
from glassformer.parts.mixer.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from glassformer.parts.mixer.global_attention import GlobalAttention, GlobalAttentionConfig
from glassformer.parts.mixer.latent_attention import LatentAttention, LatentAttentionConfig
from glassformer.parts.mixer.linear_attention import LinearAttention, LinearAttentionConfig
from glassformer.parts.mixer.linformer import Linformer, LinformerConfig
from glassformer.parts.mixer.lstm import GRU, LSTM, GRUConfig, LSTMConfig
from glassformer.parts.mixer.mamba import Mamba, MambaConfig
from glassformer.parts.mixer.mamba2 import Mamba2, Mamba2Config
from glassformer.parts.mixer.performer import Performer, PerformerConfig
from glassformer.parts.mixer.qk_norm import QKNormConfig
from glassformer.parts.mixer.recurrent import RecurrentState
from glassformer.parts.mixer.retention import Retention, RetentionConfig
from glassformer.parts.mixer.rglru import RGLRU, RGLRUConfig
from glassformer.parts.mixer.s4 import S4, S4Config
from glassformer.parts.mixer.shared_attention import SharedAttention, SharedAttentionConfig
from glassformer.parts.mixer.xl_memory import XLMemory, XLMemoryConfig

__all__ = [
    "Attention", "AttentionConfig", "Beside", "BesideConfig", "Conv", "ConvConfig", "CrossAttention",
    "CrossAttentionConfig", "DotProduct", "EffectiveMaps", "GatedDeltaNet", "GatedDeltaNetConfig", "GlobalAttention",
    "GlobalAttentionConfig", "Heads", "LinearAttention", "LinearAttentionConfig", "LatentAttention",
    "LatentAttentionConfig", "Mamba", "Mamba2", "Mamba2Config", "MambaConfig", "Mixer", "MixerChange",
    "MixerConfig", "QKNormConfig", "RGLRUConfig", "RecurrentState", "XLMemory", "XLMemoryConfig", "Linformer",
    "LinformerConfig", "Performer", "PerformerConfig", "Retention", "RetentionConfig", "RGLRU", "S4", "S4Config",
    "GRU", "GRUConfig", "LSTM", "LSTMConfig", "SharedAttention", "SharedAttentionConfig", "keys_before",
]  # fmt: skip
