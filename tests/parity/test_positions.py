"""Rotary scalings and ALiBi slopes against transformers, and what the papers say of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from glassformer.parts.core.base import BuildContext
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position import AlibiConfig, Rotary, RotaryConfig
from glassformer.parts.position.relative import bucket
from glassformer.parts.position.scaling import (
    DynamicNtkScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    NtkScalingConfig,
    YarnScalingConfig,
)

CONTEXT = 128  # what the model was trained for
LENGTH = 400  # what it reads


def named(kind: str, factor: float, context: int | None = None, **more: Any) -> dict[str, Any]:
    original = {"original_max_position_embeddings": context} if context else {}
    return {"rope_type": kind, "factor": factor, **original, **more}


SHAPES = [(64, 1e4, 1.0), (128, 5e5, 1.0), (16, 1e4, 1.0), (64, 1e6, 0.5), (80, 1e4, 0.4), (96, 1e4, 0.25)]
SCALINGS = {
    "default": (None, {}),
    "linear-4": (LinearScalingConfig(factor=4), named("linear", 4.0)),
    "linear-1.5": (LinearScalingConfig(factor=1.5), named("linear", 1.5)),
    "dynamic-2": (DynamicNtkScalingConfig(factor=2), named("dynamic", 2.0)),
    "dynamic-8": (DynamicNtkScalingConfig(factor=8), named("dynamic", 8.0)),
    "yarn-8": (YarnScalingConfig(factor=8, original_context=4096), named("yarn", 8.0, 4096)),
    "yarn-16-betas": (
        YarnScalingConfig(factor=16, original_context=2048, beta_fast=16, beta_slow=2, attention_factor=1.5),
        named("yarn", 16.0, 2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
    ),
    "yarn-4-fractions": (
        YarnScalingConfig(factor=4, original_context=32768, whole_pairs=False),
        named("yarn", 4.0, 32768, truncate=False),
    ),
    "yarn-model-context": (YarnScalingConfig(factor=3), named("yarn", 3.0, CONTEXT)),
    "llama3-8": (
        Llama3ScalingConfig(factor=8, original_context=8192),
        named("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama3-32": (
        Llama3ScalingConfig(factor=32, original_context=1024, low_freq_factor=2, high_freq_factor=8),
        named("llama3", 32.0, 1024, low_freq_factor=2.0, high_freq_factor=8.0),
    ),
    "llama3-model-context": (
        Llama3ScalingConfig(factor=4),
        named("llama3", 4.0, CONTEXT, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
}
"""ours, and what transformers calls it"""


def rotary(config: RotaryConfig, head_dim: int, context: int = CONTEXT) -> Rotary:
    return config.build(BuildContext(4 * head_dim, 97, context, 2, n_heads=4, head_dim=head_dim))


def theta(part: Rotary, t: int = LENGTH) -> Tensor:
    return part.scaling.frequencies(torch.arange(0, part.dim, 2) / part.dim, part.base, part.dim, t)


@pytest.mark.parametrize(("head_dim", "base", "fraction"), SHAPES)
@pytest.mark.parametrize("name", SCALINGS)
def test_scaling(name: str, head_dim: int, base: float, fraction: float) -> None:
    """Frequencies and magnitude, then the queries and keys that are turned by them."""
    scaling, fields = SCALINGS[name]
    part = rotary(RotaryConfig(base=base, fraction=fraction, scaling=scaling), head_dim)
    plain = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters=plain | fields,
    )
    if fields:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, seq_len=LENGTH)
    else:
        frequencies, magnitude = GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    torch.testing.assert_close(theta(part), frequencies, rtol=1e-6, atol=0)
    assert part.scaling.magnitude == pytest.approx(magnitude, rel=1e-6)

    q, k = torch.randn(1, LENGTH, 4, head_dim), torch.randn(1, LENGTH, 2, head_dim)
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, torch.arange(LENGTH)[None])
    turned = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for mine, other in zip(part(q, k, Pass.of(q[:, :, 0])), turned, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-4)  # fp32 angles up to 400 times values up to 5


@pytest.mark.parametrize("more", [{"factor": 4.0}, {"factor": 1.0}, {"factor": 4.0, "attention_factor": 1.7}], ids=str)
@pytest.mark.parametrize(("head_dim", "base", "fraction"), SHAPES)
def test_longrope(head_dim: int, base: float, fraction: float, more: dict[str, float]) -> None:
    """One set of factors up to the trained context, another beyond it; the same magnitude for both."""
    pairs = int(head_dim * fraction) // 2
    short, long = (torch.linspace(1.0, top, pairs).tolist() for top in (1.5, 40.0))
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={
            "rope_theta": base,
            "partial_rotary_factor": fraction,
            **named("longrope", context=CONTEXT, short_factor=short, long_factor=long, **more),
        },
    )
    scaling = LongRopeScalingConfig(original_context=CONTEXT, short=tuple(short), long=tuple(long), **more)
    part = rotary(RotaryConfig(base=base, fraction=fraction, scaling=scaling), head_dim, LENGTH)
    for t in (1, CONTEXT, CONTEXT + 1, LENGTH):
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=t)
        torch.testing.assert_close(theta(part, t), frequencies, rtol=1e-6, atol=0)
        assert part.scaling.magnitude == pytest.approx(magnitude, rel=1e-6)
    assert not torch.allclose(theta(part, CONTEXT), theta(part, CONTEXT + 1))


@pytest.mark.parametrize(("head_dim", "base", "fraction"), SHAPES)
def test_within_its_context_dynamic_is_plain(head_dim: int, base: float, fraction: float) -> None:
    plain = rotary(RotaryConfig(base=base, fraction=fraction), head_dim)
    part = rotary(RotaryConfig(base=base, fraction=fraction, scaling=DynamicNtkScalingConfig(factor=4)), head_dim)
    for t in (1, CONTEXT // 2, CONTEXT):
        assert torch.equal(theta(part, t), theta(plain))
    assert not torch.allclose(theta(part, CONTEXT + 1), theta(plain), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("head_dim", "base", "fraction"), SHAPES)
def test_ntk_turns_its_slowest_pair_factor_times_slower(head_dim: int, base: float, fraction: float) -> None:
    plain = rotary(RotaryConfig(base=base, fraction=fraction), head_dim)
    part = rotary(RotaryConfig(base=base, fraction=fraction, scaling=NtkScalingConfig(factor=6)), head_dim)
    ratio = theta(plain) / theta(part)
    torch.testing.assert_close(ratio[[0, -1]], torch.tensor([1.0, 6.0]), rtol=1e-5, atol=0)
    assert bool((ratio.diff() > 0).all())


@pytest.mark.parametrize(("head_dim", "base", "fraction"), SHAPES)
def test_yarn_by_one_is_plain(head_dim: int, base: float, fraction: float) -> None:
    plain = rotary(RotaryConfig(base=base, fraction=fraction), head_dim)
    scaling = YarnScalingConfig(factor=1, original_context=4096)
    part = rotary(RotaryConfig(base=base, fraction=fraction, scaling=scaling), head_dim)
    torch.testing.assert_close(theta(part), theta(plain), rtol=2e-7, atol=0)
    assert part.scaling.magnitude == 1.0


def test_yarn_sharpens() -> None:
    """sqrt(1/t) = 0.1 ln s + 1 multiplies cos and sin: scores grow by its square; many copies shrink them."""
    part = rotary(RotaryConfig(scaling=YarnScalingConfig(factor=8)), 64)
    assert part.scaling.magnitude == pytest.approx(1.20794, abs=5e-6)
    q = torch.randn(1, 3, 1, 64)
    turned, _ = part(q, q, Pass.of(q))
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1) * (0.1 * math.log(8) + 1))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_pairings(fraction: float) -> None:
    """Interleaved is the paper's complex product; half is it after a permutation of the head's values."""
    h, s = 32, 50
    q, k = torch.randn(2, 1, s, 3, h, dtype=torch.float64)
    interleaved = rotary(RotaryConfig(fraction=fraction, pairing="interleaved"), h)
    r = interleaved.dim
    positions = Pass.of(q)

    angle = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(0, r, 2) / r)  # (s, r/2)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    paper = torch.view_as_real(torch.view_as_complex(q[..., :r].unflatten(-1, (-1, 2))) * turn).flatten(-2)
    paper = torch.cat([paper, q[..., r:]], -1)
    mine_q, mine_k = interleaved(q, k, positions)
    torch.testing.assert_close(mine_q, paper, rtol=0, atol=2e-5)

    order = torch.cat([torch.arange(0, r, 2), torch.arange(1, r, 2), torch.arange(r, h)])
    half_q, half_k = rotary(RotaryConfig(fraction=fraction), h)(q[..., order], k[..., order], positions)
    torch.testing.assert_close(half_q, mine_q[..., order], rtol=0, atol=0)
    scores = [torch.einsum("bsnh,btnh->bnst", a, b) for a, b in ((mine_q, mine_k), (half_q, half_k))]
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize("n", range(1, 25))
def test_alibi(n: int) -> None:
    """Theirs adds m_n k; ours m_n (k - q): equal up to a constant per row, which softmax does not see."""
    t = 9
    bloom = build_alibi_tensor(torch.ones(1, t, dtype=torch.long), n, torch.float32).view(1, n, 1, t)
    query, key = torch.arange(t).view(1, 1, t, 1), torch.arange(t).view(1, 1, 1, t)
    for max_bias in (8, 4):
        part = AlibiConfig(max_bias=max_bias).build(BuildContext(16 * n, 97, 64, 2, n_heads=n, head_dim=16))
        bias = part.bias(Pass.of(torch.zeros(1, t, 1)))
        mine = bias(
            torch.zeros(1, n, t, t),
            torch.zeros(1, 1, 1, 1).long(),
            torch.arange(n).view(1, n, 1, 1),
            query,
            key,
        )
        # -m |q - k| is what is meant; below the diagonal that is m (k - q)
        seen = (key <= query).expand_as(mine)
        mpt = build_mpt_alibi_tensor(n, t, alibi_bias_max=max_bias).view(1, n, 1, t)
        for other in (mpt, bloom) if max_bias == 8 else (mpt,):
            shifted = other - other.expand_as(mine).diagonal(dim1=-2, dim2=-1)[..., None]
            torch.testing.assert_close(mine[seen], shifted[seen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("both_sides", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 20), (8, 300)])
def test_distances_fall_into_the_buckets_of_t5(both_sides: bool, buckets: int, furthest: int):
    distance = torch.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(distance, both_sides, buckets, furthest)
    assert torch.equal(bucket(distance, buckets, furthest, both_sides), theirs)
