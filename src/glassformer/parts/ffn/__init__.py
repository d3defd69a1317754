"""Feed-forward networks, which transform each token separately."""

from glassformer.parts.ffn.base import FFN, FFNConfig
from glassformer.parts.ffn.expert_choice import ExpertChoice, ExpertChoiceConfig
from glassformer.parts.ffn.experts import Experts, ExpertsConfig, Router
from glassformer.parts.ffn.glu import Clamp, Glu, GluConfig
from glassformer.parts.ffn.mlp import Mlp, MlpConfig

__all__ = [
    "FFN",
    "Clamp",
    "ExpertChoice",
    "ExpertChoiceConfig",
    "Experts",
    "ExpertsConfig",
    "FFNConfig",
    "Glu",
    "GluConfig",
    "Mlp",
    "MlpConfig",
    "Router",
]
