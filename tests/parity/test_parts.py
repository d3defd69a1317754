"""Parts that no preset uses: Gemma 2's norm and capped attention, OLMo 2's norm over all heads at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Olmo2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, eager_attention_forward
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

from glassformer.parts.core.base import BuildContext
from glassformer.parts.kernel import AttentionCall, Banded, Naive, softcap
from glassformer.parts.mixer import AttentionConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.visibility import Causal

from .families import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [True, False])
def test_rms_norm(offset: bool, dtype: torch.dtype) -> None:
    """y, dx and dw. In bf16 Gemma multiplies by 1 + w before it rounds: ours may differ by one rounding."""
    mine = RMSNormConfig(eps=1e-3, unit_offset=offset).build(BuildContext(24, 97, 64, 2))
    other = Gemma2RMSNorm(24, eps=1e-3) if offset else LlamaRMSNorm(24, eps=1e-3)
    weight = torch.randn(24) * 0.3 + (not offset)
    for norm in (mine, other):
        norm.to(dtype).weight.data.copy_(weight)
    x = (torch.randn(5, 7, 24) * 0.05).to(dtype)
    results = []
    for norm in (mine, other):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        assert y.dtype == dtype
        results.append((y, *torch.autograd.grad((y.float() * torch.linspace(-1, 1, 24)).sum(), (leaf, norm.weight))))
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kernel", [Naive(), Banded()], ids=["naive", "banded"])
def test_capped_attention(kernel: Naive | Banded) -> None:
    """softmax(cap tanh(q k^T scale / cap)) v, and its gradients."""
    n, g, h, s, scale = 4, 2, 8, 11, 0.4
    module = nn.Module()
    module.head_dim, module.num_key_value_groups = h, n // g
    module.config = Gemma2Config()
    q, k, v = torch.randn(2, s, n, h), torch.randn(2, s, g, h), torch.randn(2, s, g, h)
    mask = torch.full((s, s), float("-inf")).triu(1)

    def capped(q, k, v):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return eager_attention_forward(module, *heads, mask, scaling=scale, softcap=1.5)[0]

    def ours(q, k, v):
        return kernel(AttentionCall(q, k, v, Causal(), softcap(1.5), scale))

    results = []
    for attend in (ours, capped):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        z = attend(*leaves)
        results.append((z, *torch.autograd.grad((z * torch.linspace(-1, 1, h)).sum(), leaves)))
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_qk_norm_over_all_heads() -> None:
    """OLMo 2 normalises n h values of q and g h of k before it splits heads and turns them."""
    d, n, g, s = 32, 4, 2, 11
    config = Olmo2Config(
        hidden_size=d,
        num_attention_heads=n,
        num_key_value_heads=g,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
    )
    other = Olmo2Attention(config, layer_idx=0)
    for weight in other.parameters():
        weight.data = torch.randn(weight.shape) * 0.3 + (weight.dim() == 1)
    mine = AttentionConfig(
        n_heads=n,
        n_kv_heads=g,
        position=RotaryConfig(),
        qk_norm=QKNormConfig(norm=RMSNormConfig(eps=1e-4), over="full"),
    ).build(BuildContext(d, 97, 64, 2))
    weights = {
        "qkv.weight": torch.cat([other.q_proj.weight, other.k_proj.weight, other.v_proj.weight]),
        "output.weight": other.o_proj.weight,
        "qk_norm.q_norm.weight": other.q_norm.weight,
        "qk_norm.k_norm.weight": other.k_norm.weight,
    }
    mine.load_state_dict(weights, strict=True)
    x, mask = torch.randn(2, s, d), torch.full((s, s), float("-inf")).triu(1)
    results = []
    for attend in (mine, lambda x: other(x, Olmo2RotaryEmbedding(config)(x, torch.arange(s)[None]), mask)[0]):
        leaf = x.clone().requires_grad_()
        out = attend(leaf)
        results.append((out, *torch.autograd.grad((out * torch.linspace(-1, 1, d)).sum(), leaf)))
    for a, b in zip(*results, strict=True):
        close(a, b)
