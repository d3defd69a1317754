"""DeepSeek-V2-Lite (2405.04434) and DeepSeek-V3 (2412.19437): keys and values from a latent; dense layers first, then
layers of many small experts and one or two shared ones for every token."""

from __future__ import annotations

import math

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import LatentAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import YarnScalingConfig


def deepseek(
    n_layers: int,
    dense: int,
    d_model: int,
    n_heads: int,
    hidden: int,
    experts: ExpertsConfig,
    q_rank: int,
    vocab_size: int,
    share: float,
) -> ModelConfig:
    """Returns a model of `dense` layers with an FFN of width `hidden`, then layers of experts, `n_layers` in all.
    Attention scores are scaled by m^2 with YaRN's magnitude m = 1 + 0.1 share ln 40, and cos and sin are not scaled.
    `share`: `mscale_all_dim` of the published config.json."""
    scaling = YarnScalingConfig(factor=40.0, original_context=4096, attention_factor=1.0)
    mixer = LatentAttentionConfig(
        n_heads=n_heads,
        kv_rank=512,
        q_rank=q_rank,
        head_dim=128,
        rope_dim=64,
        value_dim=128,
        position=RotaryConfig(base=1e4, pairing="interleaved", scaling=scaling),
        scale=192**-0.5 * (0.1 * share * math.log(40.0) + 1.0) ** 2,
    )
    one, many = (
        BlockConfig(mixer=mixer, ffn=network, norm=RMSNormConfig(eps=1e-6))
        for network in (GluConfig(hidden=hidden, activation="silu"), experts)
    )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        context=163840,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=dense, blocks=(one,)), Stage(repeat=n_layers - dense, blocks=(many,))),
        final_norm=RMSNormConfig(eps=1e-6),
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )


def deepseek_v2_lite() -> ModelConfig:
    experts = ExpertsConfig(n_experts=64, top_k=6, hidden=1408, n_shared=2, normalised=False)
    return deepseek(27, 1, 2048, 16, 10944, experts, q_rank=0, vocab_size=102400, share=0.707)


def deepseek_v3() -> ModelConfig:
    experts = ExpertsConfig(
        n_experts=256, top_k=8, hidden=2048, n_shared=1, score="sigmoid", scale=2.5, n_groups=8, top_groups=4,
        group_best=2, balance_loss=1e-4, balance_rate=1e-3,
    )  # fmt: skip
    return deepseek(61, 3, 7168, 128, 18432, experts, q_rank=1536, vocab_size=129280, share=1.0)
