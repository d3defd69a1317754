"""Qwen 3 Next: three layers of the gated delta rule to one of attention, and 512 experts, 10 for each token."""

from __future__ import annotations

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import Gpt2InitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import ExpertsConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, GatedDeltaNetConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig


def qwen3_next_80b() -> ModelConfig:
    norm = RMSNormConfig(eps=1e-6, unit_offset=True)
    attention = AttentionConfig(
        n_heads=16, n_kv_heads=2, head_dim=256, position=RotaryConfig(base=1e7, fraction=0.25),
        qk_norm=QKNormConfig(norm=norm), gated=True,
    )  # fmt: skip
    delta = GatedDeltaNetConfig(n_heads=16, head_dim=128, n_v_heads=32, v_head_dim=128)
    experts = ExpertsConfig(
        hidden=512, n_experts=512, top_k=10, n_shared=1, shared_hidden=512, shared_gate=True, balance_loss=0.001
    )
    blocks = tuple(
        BlockConfig(mixer=attention if i == 3 else delta, ffn=experts, norm=norm, residual=PreConfig())
        for i in range(4)
    )
    return ModelConfig(
        vocab_size=151936,
        d_model=2048,
        context=262144,
        embedding=EmbeddingConfig(),
        stack=(Stage(repeat=12, blocks=blocks),),
        final_norm=norm,
        head=HeadConfig(tied=False),
        init=Gpt2InitConfig(),
    )
