"""Long recurrences in 16 bits: what is summed up over thousands of tokens is summed in fp32."""

from __future__ import annotations

import copy

import pytest
import torch

import glassformer as gf

MIXERS = (
    "linear_attention", "performer:16", "retention", "lightning", "retention+mixer.decays=[.9,.9999999,.001,1e-30]",
    "s4", "mamba", "mamba2", "gated_deltanet", "rglru", "lstm", "gru", "conv",
)  # fmt: skip
TOKENS = 2048


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("change", MIXERS)
def test_long_sums_stay_in_range(change: str, dtype: torch.dtype) -> None:
    """Large inputs of one sign give the result of fp64 with equally rounded weights: sums exceed the 65,504 of fp16 and
    the 256 equal steps that bf16 counts."""
    name = f"llama@1m+layers=1+d_model=32+heads=4+vocab_size=32+context={TOKENS}+{change}"
    mixer = gf.preset(name).build(seed=0).layers[0].mixer.to(dtype)
    draw = torch.Generator().manual_seed(0)
    x = (20 * torch.randn(1, TOKENS, 32, generator=draw) + 40 * torch.randn(32, generator=draw)).to(dtype)
    with torch.no_grad():
        y, wanted = mixer(x).double(), copy.deepcopy(mixer).double()(x.double())
    assert y.isfinite().all()
    assert float((y - wanted).norm() / wanted.norm()) < (0.01 if dtype == torch.float16 else 0.08)
