"""gpt-oss (2508.10925): a window in every other layer, a sink in each head, experts with biases, bounded gates."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import Clamp, ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import YarnScalingConfig
from glassformer.parts.visibility import SlidingWindowConfig


def gpt_oss(n_layers: int, n_experts: int) -> ModelConfig:
    scaling = YarnScalingConfig(factor=32.0, original_context=4096, whole_pairs=False)
    far = AttentionConfig(
        n_heads=64, n_kv_heads=8, head_dim=64, bias=True, sinks=True, position=RotaryConfig(base=1.5e5, scaling=scaling)
    )
    experts = ExpertsConfig(
        n_experts=n_experts, top_k=4, hidden=2880, bias=True, router_bias=True, clamp=Clamp(), balance_loss=0.001
    )
    near, far_block = (
        BlockConfig(mixer=mixer, ffn=experts, norm=RMSNormConfig(eps=1e-5))
        for mixer in (far.replace(visibility=SlidingWindowConfig(window=128)), far)
    )
    return ModelConfig(
        vocab_size=201088,
        d_model=2880,
        context=131072,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=n_layers // 2, blocks=(near, far_block)),),
        final_norm=RMSNormConfig(eps=1e-5),
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )


def gpt_oss_20b() -> ModelConfig:
    return gpt_oss(24, 32)


def gpt_oss_120b() -> ModelConfig:
    return gpt_oss(36, 128)
