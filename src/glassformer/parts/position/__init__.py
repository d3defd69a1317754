"""Position encodings: added to the embedding, rotating queries and keys, or biasing scores."""

from glassformer.parts.position.alibi import Alibi, AlibiConfig
from glassformer.parts.position.base import (
    AttentionPosition,
    AttentionPositionConfig,
    EmbeddingPosition,
    EmbeddingPositionConfig,
    PositionConfig,
)
from glassformer.parts.position.learned import Learned, LearnedConfig
from glassformer.parts.position.picture import Plot
from glassformer.parts.position.relative import RelativeBias, RelativeBiasConfig
from glassformer.parts.position.rotary import Rotary, RotaryConfig
from glassformer.parts.position.scaling import RotaryScalingConfig
from glassformer.parts.position.sinusoidal import Sinusoidal, SinusoidalConfig
from glassformer.parts.position.temperature import Temperature, TemperatureConfig

__all__ = [
    "Alibi",
    "AlibiConfig",
    "AttentionPosition",
    "AttentionPositionConfig",
    "EmbeddingPosition",
    "EmbeddingPositionConfig",
    "Learned",
    "LearnedConfig",
    "Plot",
    "PositionConfig",
    "RelativeBias",
    "RelativeBiasConfig",
    "Rotary",
    "RotaryConfig",
    "RotaryScalingConfig",
    "Sinusoidal",
    "SinusoidalConfig",
    "Temperature",
    "TemperatureConfig",
]
