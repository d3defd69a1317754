"""ModernBERT (Warner et al. 2024, 2412.13663, "Smarter, Better, Faster, Longer"): BERT with rotary positions, gated
FFNs, pre-norm and no biases; one layer in three attends to all tokens, the others to 64 on each side."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import GluConfig
from glassformer.parts.head import HeadConfig, TransformConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import BidirectionalConfig, LongformerConfig


def modernbert_base() -> ModelConfig:
    """Returns ModernBERT with the head of masked language models; its first layer has no norm before attention."""
    norm = LayerNormConfig(eps=1e-5, bias=False)
    mixer = AttentionConfig(n_heads=12, position=RotaryConfig(base=160_000.0), visibility=BidirectionalConfig())
    wide = BlockConfig(mixer=mixer, ffn=GluConfig(hidden=1152, activation="gelu"), norm=norm)
    window = LongformerConfig(window=128, globals=0, causal=False)
    near = wide.replace(mixer=mixer.replace(position=RotaryConfig(base=10_000.0), visibility=window))
    return ModelConfig(
        vocab_size=50368,
        d_model=768,
        context=8192,
        embedding=EmbeddingConfig(norm=norm),
        stack=(
            Stage(blocks=(wide.replace(residual=PreConfig(mixer_normed=False)),)),
            Stage(repeat=7, blocks=(near, near, wide)),
        ),
        final_norm=norm,
        head=HeadConfig(tied=True, bias=True, transform=TransformConfig(bias=False, norm=norm)),
    )
