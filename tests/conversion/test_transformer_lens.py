"""TransformerLens opens the folders that `save` writes for a published class, and sees what our own capture sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.naming import preset
from glassformer.text import BPETokenizer

pytest.importorskip("transformer_lens", reason="transformer-lens is not installed")


@pytest.mark.parametrize("expression", ["llama@1m+gqa:1", "gpt2@1m"])
def test_a_folder_of_ours_opens_in_transformer_lens(expression: str, tmp_path: Path):
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = BPETokenizer.train(["the cat sat on the mat. " * 9], 270)
    size = f"layers=2+d_model=16+heads=2+context=40+vocab_size={tokenizer.vocab_size}"
    model = preset(f"{expression}+{size}").build(seed=0).eval()
    gf.save(model, tokenizer, tmp_path)
    tokens = torch.arange(12)[None]
    names = {
        "layers.0.resid_pre": "blocks.0.hook_resid_pre",
        "layers.1.resid_mid": "blocks.1.hook_resid_mid",
        "layers.1.resid_post": "blocks.1.hook_resid_post",
        "layers.1.mixer.out": "blocks.1.hook_attn_out",
    }
    logits, theirs = TransformerBridge.boot_transformers(str(tmp_path), device="cpu").run_with_cache(tokens)
    seen = gf.capture(model, tokens, [*names, "logits"])
    torch.testing.assert_close(logits, seen["logits"], rtol=0, atol=1e-6)
    for ours, other in names.items():
        torch.testing.assert_close(theirs[other], seen[ours], rtol=0, atol=1e-6)
